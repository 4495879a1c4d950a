"""Contents of a path, as ``mtb data info`` shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from mtb_core import ConfigError
from mtb_core.data.text import BYTE_VOCAB_SIZE, map_text_file, read_text_folder
from mtb_core.data.tokenfile import find_token_file, open_token_file

from .digest import digest_of


def describe_path(path: Path) -> dict[str, Any]:
    """Contents of `path`, as ``mtb data info`` shows them; reads all of a token file to check its digest.

    Raises:
        ConfigError: there is nothing, or it cannot be used as data.
    """
    if not path.exists():
        msg = f"There is no file or folder {path}; name a token file or its folder, a text file, or a folder of texts."
        raise ConfigError(msg)
    if file := find_token_file(path):
        header, tokens = open_token_file(file)
        return {
            "path": str(file),
            "kind": "token_file",
            **attrs.asdict(header),
            "size_bytes": file.stat().st_size,
            "digest_ok": digest_of(tokens) == header.digest,
        }
    content, documents = read_text_folder(path) if path.is_dir() else (map_text_file(path), 1)
    return {
        "path": str(path),
        "kind": "text_folder" if path.is_dir() else "text_file",
        "dtype": "uint8",
        "vocab_size": BYTE_VOCAB_SIZE,
        "tokens": len(content),
        "documents": documents,
        "tokenizer": "bytes",
        "size_bytes": len(content),
    }
