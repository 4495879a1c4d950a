"""Tests of mtb_core.ckpt.files."""

import errno
import os

import pytest
import xxhash

from mtb_core.ckpt import files


def test_write_returns_size_and_digest(tmp_path):
    """What is written is all parts in order, and the digest is of exactly that."""
    data = [os.urandom(3 << 20), b"", b"end"]
    size, digest = files.write_durably(tmp_path / "f", data)
    assert (tmp_path / "f").read_bytes() == b"".join(data)
    assert (size, digest) == (3 * (1 << 20) + 3, xxhash.xxh3_128_hexdigest(b"".join(data)))


def test_write_never_replaces(tmp_path):
    """A file that exists is not overwritten."""
    (tmp_path / "f").write_text("old")
    with pytest.raises(FileExistsError):
        files.write_durably(tmp_path / "f", [b"new"])
    assert (tmp_path / "f").read_text() == "old"


def test_errors_name_the_file(tmp_path, monkeypatch):
    """An error of a descriptor's call carries the path."""
    monkeypatch.setattr(os, "fsync", _failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output") as caught:
        files.write_durably(tmp_path / "f", [b"x"])
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "f"))


def test_short_writes_are_continued(tmp_path, monkeypatch):
    """A write that takes only a part is followed by the rest."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    files.write_durably(tmp_path / "f", [b"0123456789" * 5])
    assert (tmp_path / "f").read_bytes() == b"0123456789" * 5


def test_copy_takes_what_was_there(tmp_path):
    """Only the given number of bytes is copied, though the source has grown."""
    (tmp_path / "source").write_bytes(b"one\ntwo\n")
    files.copy_durably(tmp_path / "source", 4, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"one\n"


def test_digest_of_a_file(tmp_path):
    """The digest is that of the whole file, wherever it was read to before."""
    data = os.urandom((2 << 20) + 17)
    (tmp_path / "f").write_bytes(data)
    with (tmp_path / "f").open("rb") as file:
        file.read(5)
        assert files.digest_file(file.fileno()) == files.digest_bytes(data)


def test_exchange(tmp_path):
    """Two folders with something in them change places."""
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    files.exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "b").exists()
    assert (tmp_path / "b" / "a").exists()
    with pytest.raises(FileNotFoundError):
        files.exchange(tmp_path / "a", tmp_path / "missing")


def test_locks(tmp_path):
    """A folder that anybody holds is not free; several may hold it; closing frees it."""
    first, second = files.lock_shared(tmp_path), files.lock_shared(tmp_path)
    for descriptor in (first, second):
        with files.lock_if_free(tmp_path) as free:
            assert not free
        os.close(descriptor)
    with files.lock_if_free(tmp_path) as free:
        assert free
        with pytest.raises(BlockingIOError):
            files.lock_shared(tmp_path)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../b", "a//b", "./a", "a/", "a\0b", "."])
def test_unsafe_paths(name):
    """A path that could leave the checkpoint, or has another spelling, is refused."""
    with pytest.raises(ValueError, match="not a plain path"):
        files.safe_parts(name)


def test_open_inside_follows_no_link(tmp_path):
    """Neither a file that is a link nor a file in a linked folder is opened."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "f").write_text("secret")
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "folder").symlink_to(tmp_path / "out")
    (inside / "file").symlink_to(tmp_path / "out" / "f")
    for name in ("folder/f", "file"):
        with pytest.raises(ValueError, match="symbolic link"):
            files.open_inside(inside, name)


def test_open_inside_wants_a_regular_file(tmp_path):
    """A pipe does not make it wait, and a folder is no file."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(ValueError, match="not a regular file"):
            files.open_inside(tmp_path, name)


def test_small_files_have_a_limit(tmp_path):
    """A file that is too long is refused before it is read."""
    (tmp_path / "f").write_bytes(b"x" * 11)
    assert files.read_small(tmp_path, "f", 11) == b"x" * 11
    with pytest.raises(ValueError, match="11 bytes; at most 10"):
        files.read_small(tmp_path, "f", 10)


def _failing(number):
    def call(*_):
        raise OSError(number, os.strerror(number))

    return call
