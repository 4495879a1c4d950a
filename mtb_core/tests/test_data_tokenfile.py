"""The prepared token file."""

import json

import numpy as np
import pytest

from mtb_core import ConfigError
from mtb_core.data.tokenfile import HEADER_BYTES, Header, find_token_file, open_token_file

TOKENS = np.array([1, 500, 3, 40000, 5], "<u2")
HEADER = Header(
    dtype="uint16",
    vocab_size=50000,
    tokens=5,
    documents=1,
    separator=None,
    tokenizer="some.json",
    digest="xxh3_128:00",
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tokens.mtb"
    path.write_bytes(HEADER.encode() + TOKENS.tobytes())
    return path


def changed(**values):
    fields = {**json.loads(HEADER.encode()), **values}
    return json.dumps({k: v for k, v in fields.items() if v != "drop"}).encode().ljust(HEADER_BYTES)


def test_round_trip(file):
    """What was written is read back, memory-mapped."""
    header, tokens = open_token_file(file)

    assert header == HEADER
    assert tokens.tolist() == TOKENS.tolist()
    assert isinstance(tokens, np.memmap)


def test_header_is_one_line(file):
    """The header can be read by people and programs without this library."""
    first = file.read_bytes().split(b"\n")[0]

    assert len(first) == HEADER_BYTES - 1
    assert json.loads(first)["vocab_size"] == 50000


def test_found(file, tmp_path):
    """A token file is found by its path, whatever it is called, and by its folder; other things are not one."""
    renamed = tmp_path / "elsewhere.bin"
    renamed.write_bytes(file.read_bytes())
    text = tmp_path / "text"
    text.write_text("{}")

    assert find_token_file(renamed) == renamed
    assert find_token_file(tmp_path) == file
    assert find_token_file(text) is None


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"", "begins with b''"),
        (b"some text that is no header", "begins with b'some text th'"),
        (HEADER.encode()[:100], "ends after 100 of the header's 4096 bytes"),
        (HEADER.encode()[:100].ljust(HEADER_BYTES, b"\xff"), "header is not JSON"),
        (changed(version=0), "format version is 0 and not 1"),
        (changed(version="drop"), "format version is None"),
        (changed(dtype="float32"), "'dtype' is 'float32'"),
        (changed(tokens=-1), "'tokens' is -1"),
        (changed(tokens=True), "'tokens' is True"),
        (changed(vocab_size=2**80), "'vocab_size' is 1208925819614629174706176"),
        (changed(digest="drop"), "'digest' is None"),
        (changed(tokens=6), "promises 6 tokens of type uint16.*4108 bytes, but it has 4106"),
        (changed(tokens=4), "promises 4 tokens"),
        (changed(dtype="uint32"), "promises 5 tokens of type uint32"),
        (changed(version=2), "has format version 2, but .* reads up to 1"),
    ],
)
def test_damaged(file, header, reason):
    """A damaged, truncated or newer file is refused, with its path, the reason, and what to do."""
    file.write_bytes(header + (TOKENS.tobytes() if len(header) == HEADER_BYTES else b""))
    with pytest.raises(ConfigError, match=rf"tokens\.mtb (is damaged: )?.*{reason}.*mtb data prepare"):
        open_token_file(file)


@pytest.mark.parametrize("size", [HEADER_BYTES + 9, HEADER_BYTES + 11, HEADER_BYTES])
def test_wrong_length(file, size):
    """A file that is shorter or longer than its header says is refused."""
    file.write_bytes(file.read_bytes().ljust(size, b"x")[:size])
    with pytest.raises(ConfigError, match=rf"but it has {size}"):
        open_token_file(file)
