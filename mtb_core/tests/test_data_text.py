"""Text as tokens."""

import numpy as np
import pytest

from mtb_core import ConfigError
from mtb_core.data.text import map_text_file, read_text_folder


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_folder(tmp_path):
    """Documents are joined in the order of their paths, a zero byte between two."""
    write(tmp_path / "b.txt", b"second")
    write(tmp_path / "a" / "z.txt", b"first")
    write(tmp_path / "c" / "d" / "e", b"third")
    tokens, documents = read_text_folder(tmp_path)

    assert bytes(tokens) == b"first\0second\0third"
    assert documents == 3


def test_left_out(tmp_path):
    """Hidden, empty and binary files, caches and broken links are left out."""
    write(tmp_path / "kept", b"kept")
    for name in (".hidden", ".git/config", "__pycache__/module.py", "cache/file", "cache/below/file"):
        write(tmp_path / name, b"no")
    write(tmp_path / "cache" / "CACHEDIR.TAG", b"Signature: 8a477f597d28d172789f06886806bc55")
    write(tmp_path / "binary", b"text" * 5000 + b"\0")
    write(tmp_path / "empty", b"")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path)

    assert bytes(read_text_folder(tmp_path)[0]) == b"kept"


def test_folder_without_text(tmp_path):
    """A folder that holds no text is refused, saying what is left out."""
    write(tmp_path / "binary", b"\0")
    with pytest.raises(ConfigError, match=r"holds no text: hidden files.*left out"):
        read_text_folder(tmp_path)


def test_file(tmp_path):
    """A file's bytes are its tokens, whatever they are; an empty file has none."""
    write(tmp_path / "any", bytes(range(256)))
    write(tmp_path / "empty", b"")
    tokens = map_text_file(tmp_path / "any")

    assert isinstance(tokens, np.memmap)
    assert tokens.tolist() == list(range(256))
    assert map_text_file(tmp_path / "empty").size == 0


def test_unreadable(tmp_path):
    """What the operating system refuses is an error that names the path."""
    with pytest.raises(ConfigError, match=r"Cannot read .*gone: No such file"):
        map_text_file(tmp_path / "gone")
