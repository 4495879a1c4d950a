"""From a temporary folder to a published checkpoint: the steps that rank 0 takes, in an order that survives a crash.

``manifest.json``, ``READY`` (each fsynced, then the folder), rename into place, fsync of the parent,
``latest`` replaced, old checkpoints pruned. A step that exists already is exchanged as a whole. Whatever fails before
``latest`` is replaced is undone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from . import files
from .catalog import is_ready, list_steps, read_latest, sequence_of
from .layout import LATEST, MANIFEST, READY, TEMPORARY, DamagedCheckpoint, is_temporary, step_name
from .manifest import FileEntry, Manifest, read_manifest, ready_text

log = logging.getLogger("mtb.checkpoint")

FaultPoint = Callable[[str], None]

#: The named instants of a save, in order; on ranks, then on rank 0. For fault drills: a fault point is called with
#: each of them, and everything before it has been done.
RANK_POINTS = ("staged", "writing", "tensors-written", "tensors-synced", "rank-synced", "agreed")
PUBLISH_POINTS = (
    "manifest-synced",
    "ready-written",
    "ready-synced",
    "renamed",
    "parent-synced",
    "latest-written",
    "latest-replaced",
    "latest-synced",
    "replaced-removed",
    "pruned",
)


class Workspace:
    """The temporary folder of one save; locked by every living rank that writes into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @classmethod
    def create(cls, folder: Path, step: int) -> Workspace:
        """Make and lock a fresh one (rank 0)."""
        while True:
            workspace = cls(folder / f"{TEMPORARY}{step_name(step)}-{secrets.token_hex(8)}")
            files.make_folder(workspace.path)
            # Between the two calls another run's clean-up may take the empty folder for a dead one.
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                workspace.enter()
                if workspace.path.exists():
                    return workspace
            workspace.leave()

    def enter(self) -> None:
        """Lock it, on another rank than 0."""
        self._lock = files.lock_shared(self.path)

    def leave(self) -> None:
        """Give the lock back; the folder, if it is still there, is a leftover from now on."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Remove the folder with what is in it, as far as that is possible."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.leave()


def publish(workspace: Workspace, folder: Path, manifest: Manifest, fault_point: FaultPoint) -> Path:
    """Turn a workspace whose files are written and fsynced into the published checkpoint of its step.

    Returns:
        Its path. ``latest`` names it and both are durable.

    Raises:
        OSError: nothing was published, and what was there before is there still.
    """
    final = folder / step_name(manifest.step)
    text = manifest.to_bytes()
    files.write_durably(workspace.path / MANIFEST, [text])
    files.sync_folder(workspace.path)
    fault_point("manifest-synced")
    files.write_durably(
        workspace.path / READY,
        [ready_text(files.digest_bytes(text))],
        before_sync=lambda: fault_point("ready-written"),
    )
    files.sync_folder(workspace.path)
    fault_point("ready-synced")
    replaced = os.path.lexists(final)
    _into_place(workspace.path, final, replaced=replaced)
    try:
        fault_point("renamed")
        files.sync_folder(folder)
        fault_point("parent-synced")
        write_latest(folder, final.name, fault_point)
    except BaseException:
        with contextlib.suppress(OSError):
            (files.exchange if replaced else files.rename)(final, workspace.path)
            files.sync_folder(folder)
        raise
    fault_point("latest-replaced")
    try:  # the checkpoint is complete and durable: what fails from here on is worth a warning, not a failed save
        files.sync_folder(folder)
        fault_point("latest-synced")
        if replaced:
            _put_aside(workspace.path)
            fault_point("replaced-removed")
    except OSError as error:
        log.warning("%s is complete, but tidying up after it failed: %s: %s.", final, error.filename, error.strerror)
    return final


def write_latest(folder: Path, name: str, fault_point: FaultPoint = lambda _: None) -> None:
    """Replace the pointer ``latest`` by one to `name`; the caller fsyncs `folder`."""
    temporary = folder / f"{TEMPORARY}latest-{secrets.token_hex(8)}"
    with files.in_use(folder):  # keeps the clean-up of another run away from the temporary file
        try:
            files.write_durably(temporary, [f"{name}\n".encode()])
            fault_point("latest-written")
            files.rename(temporary, folder / LATEST)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def probe(folder: Path, name: str) -> None:
    """Write, fsync and keep a small file in `folder`: whether checkpoints can be written there.

    Raises:
        OSError: they cannot.
    """
    files.write_durably(folder / name, [b"probe\n"])
    files.sync_folder(folder)


def next_sequence(folder: Path) -> int:
    """One more than the highest sequence number of the READY checkpoints in `folder`."""
    return 1 + max((sequence_of(found.path) for found in list_steps(folder) if found.ready), default=0)


def prune(folder: Path, *, keep_last: int, keep_every: int, dry_run: bool = False) -> list[Path]:
    """Remove READY checkpoints except the `keep_last` highest steps (0 keeps all) and multiples of `keep_every`.

    The one that ``latest`` names is never removed, nor is anything that is not a READY checkpoint. Each is renamed
    before it is emptied, so that no half-removed one is ever found. Returns what was removed.
    """
    ready = [found for found in list_steps(folder) if found.ready]
    if not keep_last or not ready:
        return []
    latest = read_latest(folder)
    spared = {found.path for found in ready[-keep_last:]} | {latest}
    gone = [
        found.path for found in ready if found.path not in spared and not (keep_every and found.step % keep_every == 0)
    ]
    return gone if dry_run else [path for path in gone if _remove(path)]


def put_aside_after(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints of steps above `step`, and let ``latest`` name that of `step`, if it is here.

    A crash half-way is like one before the run went back: a resume may find a later checkpoint. Nothing is lost.

    Returns:
        The new paths, ``rolled_back_step_…``, by step.

    Raises:
        OSError: some may have been renamed.
    """
    target = folder / step_name(step)
    here = is_ready(target)
    if here:
        write_latest(folder, target.name)
    aside = []
    for found in list_steps(folder):
        if found.step > step:
            kept = found.path.with_name(f"rolled_back_{found.path.name}-{secrets.token_hex(4)}")
            files.rename(found.path, kept)
            aside.append(kept)
    if not here:  # the run went back to a checkpoint elsewhere, and nothing is left that the pointer could name
        (folder / LATEST).unlink(missing_ok=True)
    files.sync_folder(folder)
    return aside


def keep_checkpoint(checkpoint: Path, folder: Path) -> Path:
    """Keep a complete checkpoint in `folder` too, as the only one there, whatever becomes of the original.

    Its files there are hard links, or copies where the file system has no links. It appears whole or not at all, and
    what was kept before goes only after that. Called by one process at a time.

    Args:
        folder: made if it is missing; ``latest`` in it names what it holds.

    Returns:
        Its path in `folder`.

    Raises:
        DamagedCheckpoint: it is not complete, or what was copied is not what was published.
        OSError: nothing has changed in `folder`.
    """
    manifest = read_manifest(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    clean_leftovers(folder)
    final, workspace = folder / step_name(manifest.step), Workspace.create(folder, manifest.step)
    replaced = os.path.lexists(final)
    try:
        for name in (*manifest.files, MANIFEST, READY):
            _link_or_copy(checkpoint, name, workspace.path, manifest.files.get(name))
        for place in sorted({p.parent for p in workspace.path.rglob("*")}, reverse=True):
            files.sync_folder(place)
        _into_place(workspace.path, final, replaced=replaced)
        files.sync_folder(folder)
        write_latest(folder, final.name)
        files.sync_folder(folder)
    finally:
        if workspace.path.exists():  # unfinished, or what it has replaced
            workspace.discard()
        workspace.leave()
    for found in list_steps(folder):
        if found.path != final:
            _remove(found.path)
    return final


def clean_leftovers(folder: Path) -> list[Path]:
    """Remove what dead saves left in `folder`; that of a living one is locked and stays. Returns what was removed."""
    leftovers = sorted(p for p in folder.iterdir() if is_temporary(p.name) and not p.is_symlink())
    gone = []
    for path in leftovers:
        try:
            # A workspace carries its own lock; single files are protected by that of the folder.
            with files.lock_if_free(path if path.is_dir() else folder) as free:
                if free:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                    gone.append(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("The leftover %s of an interrupted save could not be removed: %s.", path, error.strerror)
    return gone


def _into_place(temporary: Path, final: Path, *, replaced: bool) -> None:
    if not replaced:
        files.rename(temporary, final)
        return
    try:
        files.exchange(temporary, final)
    except OSError as error:
        if error.errno not in {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}:
            raise
        raise OSError(
            errno.EEXIST, "it exists, and this file system cannot exchange folders, so it is left as it is", str(final)
        ) from error


#: Errors of a hard link that a copy does not have.
_NO_LINKS = {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP}


def _link_or_copy(source: Path, name: str, target: Path, entry: FileEntry | None) -> None:
    parts = files.safe_parts(name)
    for depth in range(1, len(parts)):
        files.make_folder(target.joinpath(*parts[:depth]))
    try:
        os.link(source.joinpath(*parts), target.joinpath(*parts), follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        place = source.joinpath(*parts)
        copied = FileEntry(*files.copy_durably(place, place.stat().st_size, target.joinpath(*parts)))
        if entry is not None and copied != entry:
            raise DamagedCheckpoint(source, name, "its content is not what was published") from error


def _put_aside(path: Path) -> None:
    """Remove the checkpoint that was replaced; what stood in its place without being one is kept under another name."""
    if is_ready(path):
        shutil.rmtree(path, ignore_errors=True)
        return
    kept = path.with_name(f"incomplete{path.name.removeprefix('.tmp')}")
    files.rename(path, kept)
    log.warning("What stood in place of the new checkpoint was not a complete one; it is kept as %s.", kept)


def _remove(path: Path) -> bool:
    """True if it is gone; a warning says why not, or why parts of it are left."""
    hidden = path.with_name(f"{TEMPORARY}{path.name}-{secrets.token_hex(8)}")
    try:
        files.rename(path, hidden)
        shutil.rmtree(hidden)
    except OSError as error:
        log.warning("The old checkpoint %s could not be removed: %s.", path, error.strerror)
    return not os.path.lexists(path)
