"""System calls that checkpoints are made of: durable writes, safe opens, locks, exchange of two folders."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import xxhash

ALGORITHM = "xxh3_128"

#: Bytes that are hashed and written at a time: small enough for the second of the two to find them in the cache.
CHUNK_BYTES = 1 << 20

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def write_durably(
    path: Path, parts: Iterable[bytes | memoryview], before_sync: Callable[[], None] = lambda: None
) -> tuple[int, str]:
    """Create `path` with the bytes of `parts` (byte-sized elements), fsync it, and return their number and digest.

    `before_sync` is called between the writing and the fsync.

    Raises:
        OSError: with `path` as its file name; also if the file exists.
    """
    digest, size = xxhash.xxh3_128(), 0
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            for part in parts:
                view = memoryview(part)
                size += len(view)
                for start in range(0, len(view), CHUNK_BYTES):
                    chunk = view[start : start + CHUNK_BYTES]
                    digest.update(chunk)
                    _write_all(descriptor, chunk)
            before_sync()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise named(error, path) from error
    return size, digest.hexdigest()


def copy_durably(source: Path, size: int, path: Path) -> tuple[int, str]:
    """`write_durably` of the first `size` bytes of `source`."""

    def parts() -> Iterator[bytes]:
        with source.open("rb") as file:
            left = size
            while left and (chunk := file.read(min(left, CHUNK_BYTES))):
                left -= len(chunk)
                yield chunk

    return write_durably(path, parts())


def make_folder(path: Path) -> None:
    """Create one folder; fine if it exists."""
    try:
        os.mkdir(path)  # noqa: PTH102  (one call, so that it can be seen and made to fail)
    except FileExistsError:
        if not path.is_dir():
            raise
    except OSError as error:
        raise named(error, path) from error


def sync_folder(path: Path) -> None:
    """Fsync a folder, so that the names in it survive a power failure."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise named(error, path) from error


def rename(source: Path, target: Path) -> None:
    """Rename; `target` must not be a folder with something in it."""
    try:
        os.rename(source, target)  # noqa: PTH104  (one call, so that it can be seen and made to fail)
    except OSError as error:
        raise named(error, target) from error


def exchange(left: Path, right: Path) -> None:
    """Swap two names in one step (``RENAME_EXCHANGE``): at every instant both exist.

    Raises:
        OSError: ENOSYS or EINVAL where kernel or file system cannot do it.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(right))
    if function(_AT_FDCWD, os.fsencode(left), _AT_FDCWD, os.fsencode(right), ctypes.c_uint(_RENAME_EXCHANGE)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(right))


def lock_shared(path: Path, *, wait: bool = False) -> int | None:
    """Mark a file or folder as in use by this process, until the returned descriptor is closed.

    None where the file system has no locks; `lock_if_free` then yields False, so nothing is cleaned there.

    Raises:
        BlockingIOError: unless `wait`: somebody is about to remove it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def in_use(path: Path) -> Iterator[None]:
    """Hold the shared lock of `path`, waiting for it."""
    descriptor = lock_shared(path, wait=True)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def lock_if_free(path: Path) -> Iterator[bool]:
    """Hold `path` for oneself; yields False if a living process holds it or that cannot be known."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def open_inside(folder: Path, relative: str) -> int:
    """Open a regular file of a checkpoint for reading; no symbolic link below `folder` is followed.

    Raises:
        ValueError: `relative` is not the plain relative path of a regular file.
        OSError: it cannot be opened.
    """
    parts = safe_parts(relative)
    for depth in range(1, len(parts) + 1):
        if (folder.joinpath(*parts[:depth])).is_symlink():
            raise ValueError("it is a symbolic link")
    descriptor = os.open(folder.joinpath(*parts), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is not a regular file")
    return descriptor


def safe_parts(relative: str) -> tuple[str, ...]:
    """The components of a relative path that stays where it is.

    Raises:
        ValueError: absolute, empty, or with ``..``, ``.`` or a NUL in it.
    """
    parts = PurePosixPath(relative).parts
    if not parts or relative != "/".join(parts) or "\0" in relative or any(p in {"..", ".", "/"} for p in parts):
        raise ValueError(f"{relative!r} is not a plain path inside the checkpoint")
    return parts


def read_small(folder: Path, relative: str, limit: int) -> bytes:
    """The content of a small file of a checkpoint.

    Raises:
        ValueError: longer than `limit` bytes, or see `open_inside`.
        OSError: it cannot be read.
    """
    descriptor = open_inside(folder, relative)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise ValueError(f"it has {size} bytes; at most {limit} are expected")
        return file.read(size)  # not the limit: a buffer of that size would be allocated


def digest_bytes(data: bytes) -> str:
    """xxh3_128 of `data`, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_file(descriptor: int) -> str:
    """xxh3_128 of an open file from its start, hexadecimal, in one small buffer."""
    digest, buffer, offset = xxhash.xxh3_128(), bytearray(CHUNK_BYTES), 0
    view = memoryview(buffer)
    while count := os.preadv(descriptor, [buffer], offset):
        digest.update(view[:count])
        offset += count
    return digest.hexdigest()


def named(error: OSError, path: Path) -> OSError:
    """`error` with the file it is about; writing and fsyncing a descriptor do not know it."""
    if error.filename is not None or error.errno is None:
        return error
    return OSError(error.errno, error.strerror or os.strerror(error.errno), str(path))


def _write_all(descriptor: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += os.write(descriptor, view[done:])
