"""Finds in what is written who ran it and where: names of hosts, GPUs' UUIDs, proxies, credentials, homes.

The last line of defence: what is recorded has been cleaned before (`mtb_core.redact`); this finds what slipped through.
"""

from __future__ import annotations

import gzip
import ipaddress
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from mtb_core.measure.redaction import HOMES, hide_host

_WINDOW = 1 << 20
_OVERLAP = 1 << 12
#: Of a file, as it is unpacked, so much is searched.
LIMIT_BYTES = 64 << 20

#: Bytes of text; where NULs are among them, a text of two bytes a character is meant, or of many zeros.
_TEXT = bytes({9, 10, 12, 13, 27, *range(32, 127)})
#: What is left of a part with NULs, beside these and `_TEXT`, may be this share of a text.
_TEXT_REST = 0.1

_SECRET_NAME = re.compile(r"token|secret|passw|credential|api_?key|private_?key", re.IGNORECASE)
HOME_FOLDER = "a home folder"
HOST = "this host's name"
ADDRESS = "a network address"
#: The value of a secret: neither empty, nor hidden, nor a name of a variable that holds it.
_VALUE = r"[\"']?\s*[=:]\s*[\"']?(?![<$*{]|(?:null|none|true|false)\b)[^\s\"',;<>]"
_PERHAPS_ADDRESS = re.compile(
    r"(?<![\w.:=-])(?:\d{1,3}\.){3}\d{1,3}(?![\w-]|\.\d)|(?<![\w.:])[0-9a-f]{4}:[0-9a-f:]*:[0-9a-f]+(?![\w.:])",
    re.IGNORECASE,
)
_VERSION_BEFORE = re.compile(r"(?:version|release|driver|cudnn|nccl|cuda)\W{0,4}$", re.IGNORECASE)
_V6_ABROAD = tuple(ipaddress.ip_network(text) for text in ("2000::/3", "fc00::/7", "fe80::/10"))
_PATTERNS = (
    ("a GPU's UUID", re.compile(r"(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f]{4}-", re.IGNORECASE)),
    ("a proxy", re.compile(r"\b(?:https?|all|ftp|no)_proxy[\"']?\s*[=:]\s*[\"']?[^\s\"',}]", re.IGNORECASE)),
    ("a credential in a URL", re.compile(r"://[^/@\s\"'<>:]+:[^/@\s\"'<>]+@")),
    (
        "a credential",
        re.compile(
            r"\bhf_[A-Za-z0-9]{30,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
            r"|\bsk-[A-Za-z0-9_-]{20,}|\bxox[abprs]-[A-Za-z0-9-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY-----"
            r"|\bBearer\s+[A-Za-z0-9._~+/-]{16,}|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"
            r"|(?i:\bAuthorization[\"']?\s*[=:]\s*[\"']?Basic\s+[\w+/=-]{6,})"
            rf"|(?i:(?:password|passwd|passphrase|(?<![a-z])pwd){_VALUE}{{3,}})"
            rf"|(?i:(?:secret|api_?key|access_?key|private_?key)\w*{_VALUE}{{6,}})"
            rf"|\b[A-Z][A-Z0-9_]*_KEY{_VALUE}{{6,}}"
        ),
    ),
    (HOME_FOLDER, HOMES),
)


def private_details(text: str, environ: Mapping[str, str] | None = None) -> list[str]:
    """Private details in `text` that must not be recorded, by kind; empty if there are none.

    The found text itself is not returned: messages are recorded too. `environ` are the variables whose secrets count, by
    default this process's.
    """
    found = [kind for kind, pattern in _PATTERNS if pattern.search(text)]
    if HOME_FOLDER not in found and _home_in(text):
        found.append(HOME_FOLDER)
    if _host_in(text):
        found.append(HOST)
    if _address_in(text):
        found.append(ADDRESS)
    for name, value in (os.environ if environ is None else environ).items():
        if len(value) < 8 or value not in text:
            continue
        if name.lower().endswith("_proxy") and "a proxy" not in found:
            found.append("a proxy")
        elif _SECRET_NAME.search(name) and not value.isdigit() and not Path(value).exists():
            found.append(f"the value of the variable {name}")
    return found


def audit_folder(
    folder: str | Path, *, skip: tuple[str, ...] = (), passed_over: dict[str, str] | None = None
) -> dict[str, list[str]]:
    """Kinds of private details in the text files below `folder`, by file, relative to it.

    Compressed files (``.gz``) are unpacked; NULs in texts (UTF-16) are left out. Folders named in `skip` are not
    searched.

    Args:
        passed_over: if given, gets the other files that were not searched as a whole, with the reason: one of
            `NOT_SEARCHED` or, of a file that cannot be read, `UNREADABLE` and why.
    """
    root = Path(folder)
    found: dict[str, list[str]] = {}
    missed: dict[str, str] = {} if passed_over is None else passed_over
    for file in _files(root, skip, missed):
        relative = str(file.relative_to(root))
        if file.is_symlink() or not file.is_file():
            missed[relative] = LINK if file.is_symlink() else SPECIAL
            continue
        kinds: dict[str, None] = {}
        try:
            for text in _windows(file):
                kinds.update(dict.fromkeys(private_details(text)))
        except _PassedOver as reason:
            missed[relative] = str(reason)
        except (OSError, EOFError, zlib.error) as error:
            missed[relative] = f"{UNREADABLE}: {error}"
        if kinds:
            found[relative] = list(kinds)
    return found


BINARY, LINK, SPECIAL = "it is binary", "it is a link", "it is no regular file"
TRUNCATED = f"only its first {LIMIT_BYTES >> 20} MiB were searched"
#: Why a file that can be read may not have been searched, or not to its end.
NOT_SEARCHED = (BINARY, LINK, SPECIAL, TRUNCATED)
UNREADABLE = "it cannot be read"


class _PassedOver(Exception):
    """The rest of a file is not searched; the message is one of `NOT_SEARCHED`."""


def _files(root: Path, skip: tuple[str, ...], missed: dict[str, str]) -> Iterator[Path]:
    """Everything below `root` but folders, in order; folders that cannot be listed are put into `missed`."""

    def not_listed(error: OSError) -> None:
        missed[str(Path(error.filename).relative_to(root))] = f"{UNREADABLE}: {error.strerror}"

    for place, folders, files in os.walk(root, onerror=not_listed):
        folders[:] = sorted(name for name in folders if name not in skip)
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        yield from (Path(place) / name for name in sorted([*files, *links]) if name not in skip)


def _windows(file: Path) -> Iterator[str]:
    """The text of a file in overlapping parts.

    Raises:
        _PassedOver: what follows is binary, or beyond the limit.
        OSError, EOFError, zlib.error: it cannot be read, or unpacked, from here on.
    """
    before = b""
    read = 0
    with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
        while chunk := stream.read(_WINDOW):
            if read >= LIMIT_BYTES:
                raise _PassedOver(TRUNCATED)
            read += len(chunk)
            if b"\0" in chunk:
                chunk = chunk.replace(b"\0", b"")
                if len(chunk.translate(None, _TEXT)) > _TEXT_REST * len(chunk):
                    raise _PassedOver(BINARY)
            yield (before + chunk).decode("utf-8", "replace")
            before = chunk[-_OVERLAP:]


def _address_in(text: str) -> bool:
    """True if a number is an address of another machine, and no version (four numbers too)."""
    for found in _PERHAPS_ADDRESS.finditer(text):
        try:
            address = ipaddress.ip_address(found[0])
        except ValueError:
            continue
        if address.version == 6:
            if any(address in network for network in _V6_ABROAD):
                return True
        elif not (address.is_loopback or address.is_unspecified or _VERSION_BEFORE.search(text[: found.start()][-40:])):
            return True
    return False


def _home_in(text: str) -> bool:
    home = str(Path("~").expanduser())
    return home.count("/") > 1 and re.search(rf"(?<![\w.~-]){re.escape(home)}(?=/|$|[\s:'\"])", text) is not None


def _host_in(text: str) -> bool:
    return hide_host(text) != text
