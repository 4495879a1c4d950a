"""Whether something that is written tells who ran it and where: names of hosts, GPUs' UUIDs, proxies, credentials, homes.

The last line of defence: what is recorded has been cleaned before (see `environment`); this finds what slipped through.
"""

from __future__ import annotations

import functools
import gzip
import os
import re
import socket
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

_WINDOW = 1 << 20
_OVERLAP = 1 << 12
#: Of a file, as it is unpacked, so much is searched.
LIMIT_BYTES = 64 << 20

_SECRET_NAME = re.compile(r"token|secret|passw|credential|api_?key|private_?key", re.IGNORECASE)
HOME_FOLDER = "a home folder"
HOST = "this host's name"
_PATTERNS = (
    ("a GPU's UUID", re.compile(r"(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f]{4}-", re.IGNORECASE)),
    ("a proxy", re.compile(r"\b(?:https?|all|ftp|no)_proxy[\"']?\s*[=:]\s*[\"']?[^\s\"',}]", re.IGNORECASE)),
    ("a credential in a URL", re.compile(r"://[^/@\s\"'<>:]+:[^/@\s\"'<>]+@")),
    (
        "a credential",
        re.compile(
            r"\bhf_[A-Za-z0-9]{30,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
            r"|\bsk-[A-Za-z0-9_-]{20,}|\bxox[abprs]-[A-Za-z0-9-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
            r"|\bBearer\s+[A-Za-z0-9._~+/-]{16,}"
        ),
    ),
    (HOME_FOLDER, re.compile(r"(?<![\w.~-])/(?:root/|(?:home|Users)/(?!<)[^/\s:'\"\\]+)")),
)


def private_details(text: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """What `text` tells that must not be recorded, by kind; empty where it tells nothing.

    The found text itself is not returned: messages are recorded too.
    """
    found = [kind for kind, pattern in _PATTERNS if pattern.search(text)]
    if HOME_FOLDER not in found and _home_in(text):
        found.append(HOME_FOLDER)
    if _host_in(text):
        found.append(HOST)
    for name, value in environ.items():
        if len(value) < 8 or value not in text:
            continue
        if name.lower().endswith("_proxy") and "a proxy" not in found:
            found.append("a proxy")
        elif _SECRET_NAME.search(name) and not value.isdigit() and not Path(value).exists():
            found.append(f"the value of the variable {name}")
    return found


def audit_folder(folder: str | Path, *, skip: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """What the text files below `folder` tell that must not be recorded: by file, relative to it, the kinds.

    Compressed files (``.gz``) are unpacked; binary ones, links, and folders named in `skip` are passed over.
    """
    root = Path(folder)
    found: dict[str, list[str]] = {}
    for file in sorted(root.rglob("*")):
        relative = file.relative_to(root)
        if file.is_symlink() or not file.is_file() or set(relative.parts) & set(skip):
            continue
        kinds = dict.fromkeys(kind for text in _windows(file) for kind in private_details(text))
        if kinds:
            found[str(relative)] = list(kinds)
    return found


def _windows(file: Path) -> Iterator[str]:
    """The text of a file in overlapping parts; nothing of a binary one, or of one that cannot be read."""
    before = b""
    read = 0
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            while read < LIMIT_BYTES and (chunk := stream.read(_WINDOW)):
                if b"\0" in chunk:
                    return
                yield (before + chunk).decode("utf-8", "replace")
                before = chunk[-_OVERLAP:]
                read += len(chunk)
    except (OSError, EOFError, zlib.error):
        return


def _home_in(text: str) -> bool:
    home = str(Path("~").expanduser())
    return home.count("/") > 1 and re.search(rf"(?<![\w.~-]){re.escape(home)}(?=/|$|[\s:'\"])", text) is not None


def hide_host(text: str) -> str:
    """`text` without this host's name, long or short; see `_host_patterns` for what counts as it."""
    for pattern in _host_patterns(socket.gethostname()):
        text = pattern.sub("<host>", text)
    return text


def _host_in(text: str) -> bool:
    return any(pattern.search(text) for pattern in _host_patterns(socket.gethostname()))


@functools.lru_cache(maxsize=4)
def _host_patterns(whole: str) -> tuple[re.Pattern[str], ...]:
    """What finds the host's name as a word; a name that is an ordinary word only where nothing but a host can stand.

    Otherwise on a host that is named "ddp", every result would tell its name.
    """
    out = []
    for name in (whole, whole.partition(".")[0]):  # the long form first
        word = re.escape(name)
        if name in ("", "localhost"):
            continue
        if name.isalpha() or len(name) < 4:
            out.append(re.compile(rf"(?<=@){word}\b|(?<=://){word}\b|\b{word}(?=:\d{{2,5}}\b)"))
        else:
            out.append(re.compile(rf"(?<![\w-]){word}(?![\w-])"))
    return tuple(out)
