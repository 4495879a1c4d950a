"""Takes what is private out of what a run writes: results, checkpoints, commands, messages. Torch-free.

It is in core, and does not need ``mtb-evidence``: what core itself writes must be clean without that plugin, too.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import shlex
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Homes of people as file systems have them, also below the usual places of shared ones, and Windows' (in JSON too).
HOMES = re.compile(
    r"(?<![\w.~-])(?:/root(?![\w-]|\.\w)|(?:/(?:nfs|mnt|export|gpfs|lustre|beegfs|net|shared|usr|var)[\w-]*)?"
    r"/(?:home|Users)/(?!<)[^/\s:'\"\\]+)|\b[A-Za-z]:\\{1,2}Users\\{1,2}(?!<)[^\\\s:'\"]+"
)
_HIDDEN = "<hidden>"
_SECRET_WORD = re.compile(
    r"token(?!iz|s)|secret|passw|credential|api[-_]?key|auth(?!or)|proxy|rdzv[-_]endpoint", re.IGNORECASE
)
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
_PERHAPS_ADDRESS = re.compile(r"(?<![\w.:])(?:(?:\d{1,3}\.){3}\d{1,3}|[0-9a-fA-F:]*:[0-9a-fA-F:]*)(?![\w.])")
_GPU_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-fA-F][0-9a-fA-F/-]*")


def redact(text: str) -> str:
    """`text` without credentials in URLs, addresses, this host's name, GPU UUIDs and home folders."""
    text = hide_host(text)
    text = _URL_CREDENTIALS.sub(f"{_HIDDEN}@", text)
    text = _GPU_UUID.sub("<gpu>", text)
    text = _PERHAPS_ADDRESS.sub(lambda found: "<address>" if _is_address(found[0]) else found[0], text)
    home = str(Path("~").expanduser())
    if len(home) > 1:
        text = re.sub(rf"(?<![\w.~-]){re.escape(home)}(?=/|$|[\s:'\"])", "~", text)
    return HOMES.sub("~", text)


def redact_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with every text in it free of home folders, credentials and addresses; those of secret names hidden."""
    return {k: _redacted(k, v) for k, v in values.items()}


def _redacted(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return _HIDDEN if value and _SECRET_WORD.search(name) else redact(value)
    if isinstance(value, Mapping):
        return redact_values(value)
    if isinstance(value, list | tuple):
        return [redact(v) if isinstance(v, str) else v for v in value]
    return value


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def redact_command(argv: Sequence[str]) -> str:
    """The command as it could be typed again, with values of secret options, this host's name and the like hidden."""
    out: list[str] = []
    hide_next = False
    for position, word in enumerate(argv):
        if position == 0:
            shown = Path(word).name
        elif hide_next and not word.startswith("--"):
            shown = _HIDDEN
        else:
            shown = _hide_assigned(word)
            if position > 1:  # the command's own name is never a host's
                shown = _hide_host(shown)
        hide_next = word.startswith("-") and "=" not in word and bool(_SECRET_WORD.search(word))
        out.append(redact(shown))
    return " ".join(map(_quoted, out))


def _quoted(word: str) -> str:
    if word == _HIDDEN:
        return word
    return "~/" + shlex.quote(word[2:]) if word.startswith("~/") else shlex.quote(word)


def _hide_assigned(word: str) -> str:
    """``--hub-token=x``, and ``KEY=VALUE`` options where the key is a secret's."""
    name, assigned, _ = word.partition("=")
    return f"{name}={_HIDDEN}" if assigned and _SECRET_WORD.search(name) else word


def _hide_host(word: str) -> str:
    name = socket.gethostname()
    for host in (name, name.partition(".")[0]):  # the long form first
        if host in {"", "localhost"}:
            continue
        word = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "<host>", word, flags=re.IGNORECASE)
    return word


def hide_host(text: str) -> str:
    """`text` without this host's name, long or short; see `_host_patterns` for what counts as it."""
    for pattern in _host_patterns(socket.gethostname()):
        text = pattern.sub("<host>", text)
    return text


@functools.lru_cache(maxsize=4)
def _host_patterns(whole: str) -> tuple[re.Pattern[str], ...]:
    """Pattern of the host's name as a word; an ordinary word only matches in a place for hosts.

    Otherwise on a host that is named "ddp", every result would tell its name.
    """
    out = []
    for name in (whole, whole.partition(".")[0]):  # the long form first
        word = re.escape(name)
        if name in ("", "localhost"):
            continue
        if name.isalpha() or len(name) < 4:
            out.append(re.compile(rf"(?<=@){word}\b|(?<=://){word}\b|\b{word}(?=:\d{{2,5}}\b)", re.IGNORECASE))
        else:
            out.append(re.compile(rf"(?<![\w-]){word}(?![\w-])", re.IGNORECASE))
    return tuple(out)
