"""Making a token file from texts."""

import errno
import os
import sys

import numpy as np
import pytest

from mtb_core import ConfigError, RunFailed
from mtb_core.data.text import read_text_folder
from mtb_core.data.tokenfile import open_token_file
from mtb_data import prepare as module
from mtb_data.digest import digest_of
from mtb_data.prepare import prepare, smallest_dtype


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes("naïve\r\n".encode())
    (folder / "b.txt").write_bytes(b"two\n\nlines")
    (folder / "binary").write_bytes(b"a\0b")
    return folder


def test_bytes(texts, tmp_path):
    """By default every byte is a token, and documents are separated by a zero."""
    header = prepare([texts / "b.txt", texts / "a.txt"], tmp_path / "out")
    read, tokens = open_token_file(tmp_path / "out" / "tokens.mtb")

    assert bytes(tokens) == b"two\n\nlines\0na\xc3\xafve\r\n"
    assert read == header
    assert (header.dtype, header.vocab_size, header.documents, header.separator) == ("uint8", 256, 2, 0)
    assert digest_of(tokens) == header.digest


def test_folder_as_given_to_train(texts, tmp_path):
    """Preparing a folder gives the tokens that training on the folder itself sees."""
    prepare([texts], tmp_path / "out")

    assert bytes(open_token_file(tmp_path / "out" / "tokens.mtb")[1]) == bytes(read_text_folder(texts)[0])


def test_what_was_made_is_no_text(tmp_path):
    """A folder that holds its own token file, one document without a zero byte, gives the same tokens again."""
    (tmp_path / "a.txt").write_bytes(b"one text")
    first = prepare([tmp_path], tmp_path)
    assert prepare([tmp_path], tmp_path) == first
    (tmp_path / "tokens.mtb").rename(tmp_path / "renamed")
    assert prepare([tmp_path], tmp_path / "out") == first
    tokens, documents = read_text_folder(tmp_path)
    assert (bytes(tokens), documents) == (b"one text", 1)


def test_in_pieces(texts, tmp_path, monkeypatch):
    """Text is read in pieces, with progress over all of it; the pieces do not show in the result."""
    monkeypatch.setattr(module, "_PIECE", 3)
    seen = []
    prepare([texts], tmp_path / "out", progress=lambda done, total: seen.append((done, total)))

    assert bytes(open_token_file(tmp_path / "out" / "tokens.mtb")[1]) == bytes(read_text_folder(texts)[0])
    assert seen == [(3, 18), (6, 18), (8, 18), (11, 18), (14, 18), (17, 18), (18, 18)]


def test_failure_leaves_the_old_file(texts, tmp_path, monkeypatch):
    """When writing fails, the run failed, what was there before is untouched, and nothing else is left."""
    prepare([texts], tmp_path / "out")
    before = (tmp_path / "out" / "tokens.mtb").read_bytes()

    def full(_handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(RunFailed, match=r"tokens\.mtb failed: No space left on device"):
        prepare([texts / "a.txt"], tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokens.mtb"]
    assert (tmp_path / "out" / "tokens.mtb").read_bytes() == before


def test_replaced(texts, tmp_path):
    """A second preparation replaces the first, readable as any file that this user makes."""
    prepare([texts], tmp_path / "out")
    prepare([texts / "a.txt"], tmp_path / "out")
    file, plain = tmp_path / "out" / "tokens.mtb", tmp_path / "plain"
    plain.touch()

    assert open_token_file(file)[0].documents == 1
    assert file.stat().st_mode == plain.stat().st_mode


def test_refused(texts, tmp_path):
    """Missing files, no text at all, token files, and an output that is a file are refused by name."""
    (tmp_path / "empty").touch()
    prepare([texts], tmp_path / "out")
    token_file = tmp_path / "out" / "tokens.mtb"

    with pytest.raises(ConfigError, match=r"There is no file .*gone"):
        prepare([tmp_path / "gone"], tmp_path / "new")
    with pytest.raises(ConfigError, match=r"There is no text in .*empty"):
        prepare([tmp_path / "empty"], tmp_path / "new")
    with pytest.raises(ConfigError, match=r"tokens\.mtb is a token file already"):
        prepare([token_file], tmp_path / "new")
    with pytest.raises(ConfigError, match=r"Cannot write to the folder .*File exists"):
        prepare([texts], texts / "a.txt")
    assert not (tmp_path / "new").exists()


def test_tokenizer_package_missing(texts, tmp_path, monkeypatch):
    """Without the package `tokenizers`, --tokenizer says how to get it."""
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(ConfigError, match=r"needs the package `tokenizers`.*pip install 'mtb-data\[tokenizers\]'"):
        prepare([texts], tmp_path / "out", tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"There is no tokenizer file .*gone\.json"):
        prepare([texts], tmp_path / "out", tmp_path / "gone.json")


@pytest.fixture
def tokenizer(tmp_path):
    library = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "two": 1, "lines": 2, "</s>": 700}
    made = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.enable_truncation(1)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_tokenizer(texts, tmp_path, tokenizer):
    """A tokenizer file's tokens are written in the smallest type, its end-of-text token between documents."""
    header = prepare([texts], tmp_path / "out", tokenizer)
    _, tokens = open_token_file(tmp_path / "out" / "tokens.mtb")

    assert tokens.tolist() == [0, 700, 1, 2]
    assert (header.dtype, header.vocab_size, header.separator) == ("uint16", 701, 700)
    assert header.tokenizer == "tokenizer.json"


def test_tokenizer_in_pieces(tmp_path, tokenizer, monkeypatch):
    """Pieces of a long text give the tokens of the whole."""
    text = tmp_path / "long.txt"
    text.write_text("two lines\n\n  two\nlines two\n" * 50)
    prepare([text], tmp_path / "whole", tokenizer)
    monkeypatch.setattr(module, "_PIECE", 16)
    prepare([text], tmp_path / "pieces", tokenizer)
    whole, pieces = (open_token_file(tmp_path / name / "tokens.mtb")[1] for name in ("whole", "pieces"))

    assert np.array_equal(whole, pieces)
    assert len(whole) == 250


def test_not_for_a_tokenizer(texts, tmp_path, tokenizer):
    """Text that is not UTF-8, and a tokenizer file that is none, are refused by name."""
    (texts / "latin").write_bytes(b"\xe4")
    with pytest.raises(ConfigError, match=r"latin is not UTF-8 text \(byte 0xe4"):
        prepare([texts], tmp_path / "out", tokenizer)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"bad\.json is not a tokenizer file"):
        prepare([texts], tmp_path / "out", tmp_path / "bad.json")


def test_text_pieces_cut_before_words(monkeypatch):
    """A text is cut only where a line begins with something other than white space, or where a line has no end."""
    import io

    monkeypatch.setattr(module, "_PIECE", 4)
    text = "ab\ncd\n  ef\n\ngh\nij" + "x" * 200
    pieces = list(module._text_pieces(io.StringIO(text)))

    assert "".join(pieces) == text
    assert pieces[:2] == ["ab\ncd\n  ef\n\n", "gh\nij"[:3] + "ij" + "x" * (len(pieces[1]) - 5)]
    assert max(map(len, pieces)) <= 17 * 4


def test_smallest_dtype():
    """The type is as small as the vocabulary allows."""
    assert [smallest_dtype(n) for n in (2, 256, 257, 65536, 65537)] == ["uint8", "uint8", "uint16", "uint16", "uint32"]
