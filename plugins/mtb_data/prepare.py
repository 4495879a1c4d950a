"""Making a token file from texts."""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from mtb_core import ConfigError, RunFailed
from mtb_core.data.text import BYTE_VOCAB_SIZE, SEPARATOR, TOKEN_FILE_PREFIX, text_files, unreadable
from mtb_core.data.tokenfile import DTYPES, FILE_NAME, HEADER_BYTES, Header, find_token_file

from .digest import digest_text, new_digest

#: ``progress(done, total)``, in bytes of input.
Progress = Callable[[int, int], None]

_PIECE = 1 << 20  # bytes, or characters for a tokenizer, that are in memory at once
#: How tokenizers in the wild name the token that ends a text.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")


def prepare(
    files: Sequence[Path | str],
    output: Path | str,
    tokenizer: Path | str | None = None,
    *,
    progress: Progress = lambda _done, _total: None,
) -> Header:
    """Write the texts `files` as one token file into the folder `output`, and return its header.

    Text is read a piece at a time. The file appears complete or not at all; one that was there before is replaced.

    Args:
        files: text files, in this order; of a folder, all text files below it, as `--data FOLDER` takes them.
        output: the folder; made where it is missing.
        tokenizer: a ``tokenizer.json`` of Hugging Face's `tokenizers`; None: every byte is a token.
        progress: called now and then.

    Raises:
        ConfigError: nothing to read, not readable, not text, or `output` can't be written.
        RunFailed: writing failed on the way (disk full).
    """
    folder = Path(output)
    paths = _documents([Path(file) for file in files])
    encoding = _Bytes() if tokenizer is None else _Tokenizer(Path(tokenizer))
    done, total = 0, sum(path.stat().st_size for path in paths)

    def pieces() -> Iterator[Any]:
        nonlocal done
        for number, path in enumerate(paths):
            if number and encoding.separator is not None:
                yield np.array([encoding.separator], encoding.dtype)
            for size, tokens in encoding.encode(path):
                yield tokens
                done += size
                progress(done, total)

    with _published(folder / FILE_NAME) as stream:
        stream.write(bytes(HEADER_BYTES))
        digest, count = new_digest(), 0
        for tokens in pieces():
            stream.write(tokens.data)
            digest.update(tokens.data)
            count += len(tokens)
        header = Header(
            dtype=smallest_dtype(encoding.vocab_size),
            vocab_size=encoding.vocab_size,
            tokens=count,
            documents=len(paths),
            separator=encoding.separator,
            tokenizer=encoding.name,
            digest=digest_text(digest),
        )
        stream.seek(0)
        stream.write(header.encode())
    return header


def smallest_dtype(vocab_size: int) -> str:
    """The smallest type that holds every token of a vocabulary."""
    return next(name for name in DTYPES if vocab_size - 1 <= np.iinfo(name).max)


class _Bytes:
    """Every byte is a token."""

    name, vocab_size, separator, dtype = "bytes", BYTE_VOCAB_SIZE, SEPARATOR, "<u1"

    def encode(self, path: Path) -> Iterator[tuple[int, Any]]:
        """Pairs (bytes read, tokens)."""
        with _reading(path), path.open("rb") as stream:
            for piece in iter(partial(stream.read, _PIECE), b""):
                yield len(piece), np.frombuffer(piece, np.uint8)


class _Tokenizer:
    """The tokens of a Hugging Face tokenizer file."""

    def __init__(self, file: Path) -> None:
        if not file.is_file():
            msg = f"There is no tokenizer file {file}; --tokenizer takes a tokenizer.json of Hugging Face's tokenizers."
            raise ConfigError(msg)
        try:
            library = importlib.import_module("tokenizers")
        except ImportError as error:
            msg = (
                f"--tokenizer {file} needs the package `tokenizers`, which is not installed here ({error}). Install it "
                "with `pip install 'mtb-data[tokenizers]'`, or leave --tokenizer out to take every byte as a token."
            )
            raise ConfigError(msg) from error
        try:
            self._tokenizer = library.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            msg = f"{file} is not a tokenizer file of Hugging Face's tokenizers: {error}."
            raise ConfigError(msg) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = file.name
        self.vocab_size = max(ids.values(), default=-1) + 1  # ids may have gaps, so it isn't their number
        self.separator: int | None = next((ids[name] for name in _END_OF_TEXT if name in ids), None)
        if self.vocab_size < 2:
            msg = f"The tokenizer file {file} has a vocabulary of {self.vocab_size} tokens; at least 2 are needed."
            raise ConfigError(msg)
        self.dtype = np.dtype(smallest_dtype(self.vocab_size)).newbyteorder("<")

    def encode(self, path: Path) -> Iterator[tuple[int, Any]]:
        """Pairs (bytes read, tokens)."""
        with _reading(path), path.open(encoding="utf-8", newline="") as stream:
            for text in _text_pieces(stream):
                ids = self._tokenizer.encode(text, add_special_tokens=False).ids
                yield len(text.encode()), np.array(ids, self.dtype)


def _text_pieces(stream: IO[str]) -> Iterator[str]:
    """Pieces of about `_PIECE` characters that begin with a line, and not with white space.

    Tokenizers that split text into words first do so at such places anyway, so the tokens are those of the whole text;
    one that marks the beginning of a text marks that of each piece.
    """
    lines: list[str] = []
    length, starts_line = 0, True
    for line in iter(partial(stream.readline, _PIECE), ""):
        if length >= _PIECE and starts_line and not line[0].isspace():
            yield "".join(lines)
            lines, length = [], 0
        lines.append(line)
        length += len(line)
        starts_line = line.endswith("\n") or length >= 16 * _PIECE  # a text without lines is cut all the same
    if lines:
        yield "".join(lines)


def _documents(files: Sequence[Path]) -> list[Path]:
    """The texts to read: named files as they are, folders by their text files."""
    paths: list[Path] = []
    for file in files:
        if file.is_dir():
            paths += [path for path in text_files(file) if _is_text_file(path)]
        elif not file.exists():
            msg = f"There is no file {file}; `mtb data prepare` takes text files, and folders with text files in them."
            raise ConfigError(msg)
        elif find_token_file(file):
            msg = f"{file} is a token file already; `mtb data prepare` takes text files. Use it as --data {file}."
            raise ConfigError(msg)
        elif file.stat().st_size:
            paths.append(file)
    if not paths:
        msg = (
            f"There is no text in {', '.join(map(str, files)) or 'no file'}: hidden files, caches, empty files and "
            "binary files in folders are left out. Name files with text."
        )
        raise ConfigError(msg)
    return paths


def _is_text_file(path: Path) -> bool:
    """Like core's `is_text`, without holding the file in memory."""
    with _reading(path), path.open("rb") as stream:
        empty = True
        for piece in iter(partial(stream.read, _PIECE), b""):
            if SEPARATOR in piece or (empty and piece.startswith(TOKEN_FILE_PREFIX)):
                return False
            empty = False
    return not empty


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what reading `path` raises into errors for people."""
    try:
        yield
    except UnicodeDecodeError as error:
        msg = (
            f"{path} is not UTF-8 text (byte 0x{error.object[error.start]:02x}: {error.reason}), which a tokenizer "
            "needs. Convert it, or leave --tokenizer out to take every byte as a token."
        )
        raise ConfigError(msg) from error
    except OSError as error:
        raise unreadable(path, error) from error


@contextlib.contextmanager
def _published(file: Path) -> Iterator[IO[bytes]]:
    """A stream whose content becomes `file`, durably, when the block ends without an exception."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    except OSError as error:
        msg = f"Cannot write to the folder {file.parent}: {error.strerror}. Name another --output."
        raise ConfigError(msg) from error
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(handle, 0o666 & ~mask)  # temporary files are private; this one is as any other
            os.fsync(handle)
        temporary.replace(file)
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        msg = f"Writing the token file {file} failed: {error.strerror}. Nothing was left behind; free space and retry."
        raise RunFailed(msg) from error
    finally:
        temporary.unlink(missing_ok=True)
