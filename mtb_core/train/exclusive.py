"""One live run for each folder of checkpoints and each run folder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtb_core.api.errors import ConfigError

#: Name of the file that is locked.
LOCK = ".lock"
#: A run that is ending may hold its folders so long, seconds.
WAIT_S = 5.0


@contextmanager
def exclusive(folder: Path, option: str) -> Iterator[None]:
    """Hold `folder`, which is made if it is missing, until the block and the ranks forked in it have ended.

    The lock is the system's (``flock``), so it goes however the run dies. It is on a file of its own, `LOCK`, which
    stays: the folder itself is locked by saves. A file system without such locks gives none; then nothing is checked.

    Raises:
        ConfigError: another live run holds it; `option` is named.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # whatever writes there says more
        yield
        return
    try:
        if not _locked(descriptor):
            raise ConfigError(
                f"{option} {folder}: another run uses this folder just now, and the two would overwrite each other's "
                "files. Wait until it has ended, or name another folder."
            )
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        except OSError:
            return True
        else:
            return True
