"""The prepared token file: a header of 4096 bytes, then the tokens.

The header is one line of JSON, padded with spaces and ended by a newline, so ``head -1`` shows it::

    {"magic": "mtb-tokens", "version": 1, "dtype": "uint16", "vocab_size": 32000, "tokens": 1000, "documents": 3,
     "separator": 2, "tokenizer": "tokenizer.json", "digest": "xxh3_128:…"}

The tokens follow, little-endian. The digest is that of their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from mtb_core.api.errors import ConfigError

from .text import TOKEN_FILE_PREFIX, unreadable

#: Name of the file within the folder that ``mtb data prepare`` makes.
FILE_NAME = "tokens.mtb"
HEADER_BYTES = 4096
VERSION = 1
_MAGIC = "mtb-tokens"
#: Types of a token, the smallest first.
DTYPES = ("uint8", "uint16", "uint32")


@attrs.frozen
class Header:
    """Header of a token file.

    Attributes:
        dtype: of a token: ``"uint8"``, ``"uint16"`` or ``"uint32"``.
        tokens: how many.
        documents: how many texts were joined.
        separator: the token between two documents; None: there is none.
        tokenizer: ``"bytes"``, or the name of the tokenizer's file.
        digest: ``"xxh3_128:"`` and 32 hexadecimal digits.
    """

    dtype: str
    vocab_size: int
    tokens: int
    documents: int
    separator: int | None
    tokenizer: str
    digest: str

    @property
    def token_bytes(self) -> int:
        """Size of the tokens."""
        return self.tokens * np.dtype(self.dtype).itemsize

    def encode(self) -> bytes:
        """The first `HEADER_BYTES` of the file."""
        values = {"magic": _MAGIC, "version": VERSION, **attrs.asdict(self)}
        return json.dumps(values).encode().ljust(HEADER_BYTES - 1) + b"\n"


def find_token_file(path: Path) -> Path | None:
    """The token file that `path` is, or that the folder `path` holds; None: it is something else."""
    file = path / FILE_NAME if path.is_dir() else path
    if file != path:
        return file if file.is_file() else None
    if not path.is_file():
        msg = f"{path} is neither a file nor a folder, so it can't be read as data. Name a file or a folder."
        raise ConfigError(msg)
    try:
        with path.open("rb") as stream:
            return path if stream.read(len(TOKEN_FILE_PREFIX)) == TOKEN_FILE_PREFIX else None
    except OSError as error:
        raise unreadable(path, error) from error


def open_token_file(file: Path) -> tuple[Header, NDArray[np.unsignedinteger]]:
    """Header and tokens (memory-mapped) of a token file.

    Raises:
        ConfigError: not readable, damaged, cut short, or of a newer version.
    """
    try:
        with file.open("rb") as stream:
            raw = stream.read(HEADER_BYTES)
            size = file.stat().st_size
    except OSError as error:
        raise unreadable(file, error) from error
    header = _decode(raw, file)
    expected = HEADER_BYTES + header.token_bytes
    if size != expected:
        msg = (
            f"The token file {file} is damaged: its header promises {header.tokens} tokens of type {header.dtype}, "
            f"which makes a file of {expected} bytes, but it has {size}. Copy it again, or prepare it anew with "
            "`mtb data prepare`."
        )
        raise ConfigError(msg)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    if not header.tokens:
        return header, np.empty(0, dtype)
    try:
        return header, np.memmap(file, dtype, mode="r", offset=HEADER_BYTES, shape=(header.tokens,))
    except OSError as error:
        raise unreadable(file, error) from error


def _decode(raw: bytes, file: Path) -> Header:
    if not raw.startswith(TOKEN_FILE_PREFIX):
        raise _damaged(file, f"it begins with {raw[:12]!r} and not with {TOKEN_FILE_PREFIX.decode()!r}")
    if len(raw) < HEADER_BYTES:
        raise _damaged(file, f"it ends after {len(raw)} of the header's {HEADER_BYTES} bytes")
    try:
        values = json.loads(raw)
    except ValueError as error:
        raise _damaged(file, f"its header is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise _damaged(file, "its header is not a JSON object")
    version = values.pop("version", None)
    values.pop("magic", None)
    if type(version) is int and version > VERSION:
        msg = (
            f"The token file {file} has format version {version}, but this version of MiniTrainBench reads up to "
            f"{VERSION}. Update MiniTrainBench, or prepare the file anew with `mtb data prepare`."
        )
        raise ConfigError(msg)
    if version != VERSION:
        raise _damaged(file, f"its format version is {version!r} and not {VERSION}")
    for name, valid in _VALID.items():
        if name not in values or not valid(values[name]):
            raise _damaged(file, f"its header's {name!r} is {values.get(name)!r}")
    return Header(**{name: values[name] for name in _VALID})


def _is_count(value: Any, minimum: int = 0) -> bool:
    return type(value) is int and minimum <= value < 2**62


_VALID: dict[str, Callable[[Any], bool]] = {
    "dtype": lambda value: value in DTYPES,
    "vocab_size": lambda value: _is_count(value, 1),
    "tokens": _is_count,
    "documents": _is_count,
    "separator": lambda value: value is None or _is_count(value),
    "tokenizer": lambda value: isinstance(value, str),
    "digest": lambda value: isinstance(value, str),
}


def _damaged(file: Path, what: str) -> ConfigError:
    return ConfigError(
        f"The token file {file} is damaged: {what}. Copy it again, or prepare it anew with `mtb data prepare`."
    )
