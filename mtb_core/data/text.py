"""Text as tokens: one byte is one token; documents are separated by one zero byte."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtb_core.api.errors import ConfigError

#: Size of the byte-level vocabulary.
BYTE_VOCAB_SIZE = 256
#: Stands between two documents.
SEPARATOR = 0
#: A prepared token file begins so; it is no text, though it may hold no zero byte.
TOKEN_FILE_PREFIX = b'{"magic": "mtb-tokens",'
#: Marks a folder as a cache, see https://bford.info/cachedir/.
_CACHE_TAG = "CACHEDIR.TAG"


def map_text_file(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file, memory-mapped; empty for an empty file."""
    try:
        if path.stat().st_size == 0:
            return np.empty(0, np.uint8)
        return np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise unreadable(path, error) from error


def read_text_folder(folder: Path) -> tuple[NDArray[np.uint8], int]:
    """The documents below `folder`, joined, and how many there are. Read once, into memory.

    Raises:
        ConfigError: nothing to read, or not readable.
    """
    documents = [content for path in text_files(folder) if is_text(content := read(path))]
    if not documents:
        msg = (
            f"The folder {folder} holds no text: hidden files, caches, empty files and files with a zero byte (binary "
            "ones) are left out. Name a folder with text files in it, or a single file."
        )
        raise ConfigError(msg)
    return np.frombuffer(bytes([SEPARATOR]).join(documents), np.uint8), len(documents)


def text_files(folder: Path) -> Iterator[Path]:
    """Files below `folder` in the order of their paths, without hidden ones and caches; the content is not looked at.

    The order is that of the path's parts, which is the same on every machine. Links to folders are not followed.
    """

    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename or folder), error) from error

    found: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        if _CACHE_TAG in files:
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        found += [path for name in files if not name.startswith(".") and (path := Path(parent, name)).is_file()]
    return iter(sorted(found, key=lambda path: path.parts))


def read(path: Path) -> bytes:
    """The content of a file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def is_text(content: bytes) -> bool:
    """True if a document found in a folder is taken: not empty, free of the separator, and no prepared token file."""
    return bool(content) and SEPARATOR not in content and not content.startswith(TOKEN_FILE_PREFIX)


def unreadable(path: Path, error: OSError) -> ConfigError:
    """The error for a path that the operating system refuses."""
    return ConfigError(f"Cannot read {path}: {error.strerror}. Check the path and its permissions.")
