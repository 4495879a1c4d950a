"""Listing of a folder of checkpoints, and the choice of the one to resume from. Torch-free, one process."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import attrs

from mtb_core.api.errors import ConfigError, RunFailed

from . import files
from .layout import LATEST, MANIFEST, READY, DamagedCheckpoint, is_legacy, step_name, step_of
from .manifest import check_ready, read_manifest

log = logging.getLogger("mtb.checkpoint")

#: A folder that somebody may take for a step's; those of steps have eight digits or more.
_NUMBERED = re.compile(r"step_(\d{1,18})")
#: Longest file that can be a pointer.
_LATEST_BYTES = 64


@attrs.frozen
class Found:
    """A step folder. `ready`: it was published whole, as far as its small files tell."""

    step: int
    path: Path
    ready: bool


def is_ready(path: Path) -> bool:
    """True if `path` is a published checkpoint: its ``READY`` fits its manifest. Data files are not read."""
    try:
        if path.is_symlink() or not path.is_dir():
            return False
        if is_legacy(path):
            return (path / READY).is_file()
        check_ready(path)
    except (DamagedCheckpoint, OSError):
        return False
    return True


def list_steps(folder: Path) -> list[Found]:
    """The step folders in `folder`, by integer step. Empty if there is no such folder."""
    if not folder.is_dir():
        return []
    named = [(step, entry) for entry in folder.iterdir() if (step := step_of(entry.name)) is not None]
    return [Found(step, path, is_ready(path)) for step, path in sorted(named)]


def _lost_steps(folder: Path, above: int) -> dict[str, str]:
    """Steps in `folder`, higher than `above`, that were published and cannot be used: name to the reason.

    A step was published if it has a ``READY`` that is not empty. A save that was killed leaves none, or an empty one.
    """
    lost = {}
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        numbered = _NUMBERED.fullmatch(entry.name)
        if numbered and int(numbered[1]) > above and (reason := _loss(entry)):
            lost[entry.name] = reason
    return lost


def _loss(path: Path) -> str | None:
    try:
        if os.lstat(path / READY).st_size == 0:
            return None
        if step_of(path.name) is None:
            return f"its name must be {step_name(int(path.name.removeprefix('step_')))}"
        if not is_legacy(path):
            check_ready(path)
    except FileNotFoundError:
        return None
    except DamagedCheckpoint as error:
        return f"{error.file}: {error.problem}"
    except OSError as error:
        return f"{READY}: {error.strerror}"
    return None


def followed(path: Path) -> Path:
    """The folder that a person means by `path`: where it is a link, what it leads to.

    Links in a folder of checkpoints are not steps of it, but one may be named.
    """
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def read_latest(folder: Path) -> Path | None:
    """The folder that ``latest`` names; None if there is no pointer or it holds no name of a step folder."""
    try:
        # Not by a plain open, which would wait for ever where the pointer is a FIFO.
        name = files.read_small(folder, LATEST, _LATEST_BYTES).decode("ascii", "replace").strip()
    except (OSError, ValueError):
        return None
    return folder / name if step_of(name) is not None else None


def sequence_of(path: Path) -> int:
    """Number of the publication of a READY checkpoint; 0 for the older formats, which have none."""
    try:
        return read_manifest(path).sequence
    except DamagedCheckpoint:
        return 0


def newest(folder: Path, *, warn: Callable[..., None] = log.warning) -> Path | None:
    """The checkpoint to go on from: the one that ``latest`` names.

    Where the pointer is missing, dangling or names an incomplete checkpoint, the READY one with the highest step,
    with a warning; and a READY one that was published after the pointer was written (the save was killed just before
    it replaced the pointer) goes before it, with a warning too. None if nothing is READY. `warn` says warnings; it is
    called as a logger's methods are.
    """
    ready = [found for found in list_steps(folder) if found.ready]
    if not ready:
        return None
    highest, pointed = ready[-1].path, read_latest(folder)
    if pointed is None:
        warn("%s is missing or unreadable; taking the newest complete checkpoint, %s.", folder / LATEST, highest)
        return highest
    if all(found.path != pointed for found in ready):
        warn(
            "%s names %s, which is missing or incomplete; taking the newest complete checkpoint, %s.",
            folder / LATEST,
            pointed.name,
            highest,
        )
        return highest
    published = max((found.path for found in ready), key=sequence_of)
    if sequence_of(published) > sequence_of(pointed):
        warn("%s names %s, but %s was completed after it; taking the latter.", folder / LATEST, pointed.name, published)
        return published
    return pointed


def find(folder: Path | None, selector: str) -> Path | None:
    """The checkpoint that ``--resume SELECTOR`` means; None only for ``auto`` where nothing was ever published.

    Raises:
        ConfigError: nothing to resume from, or a path that is not a READY checkpoint.
        RunFailed: there were checkpoints, and none of them can be used, or the folder cannot be read.
    """
    if selector in {"latest", "auto"}:
        if folder is None:
            raise ConfigError(f"--resume {selector} needs --checkpoint-dir DIR, the folder to look in.")
        found = _newest_or_none_ever(folder)
        if found is None and selector == "latest":
            msg = (
                f"--resume latest found no complete checkpoint in {folder} ({_contents(folder)}). Give the right "
                "--checkpoint-dir, or use --resume auto to start anew where there is none."
            )
            raise ConfigError(msg)
        return found
    path = followed(Path(selector))
    if is_ready(path):
        return path
    if not path.exists():
        raise ConfigError(f"--resume {selector}: there is no such folder. Valid: latest, auto, or a step's folder.")
    steps = [found.path.name for found in list_steps(path) if found.ready]
    if steps:
        msg = (
            f"--resume {selector} is a folder of checkpoints; name one of them ({', '.join(steps)}), or use "
            f"--checkpoint-dir {selector} --resume latest."
        )
        raise ConfigError(msg)
    msg = (
        f"--resume {selector}: this is no complete checkpoint ({READY} is missing or does not fit {MANIFEST}). "
        "Resume from another step; `mtb checkpoint list` shows those of a folder."
    )
    raise ConfigError(msg)


def _newest_or_none_ever(folder: Path) -> Path | None:
    """The one that `newest` finds. Training must not start anew, and save, over checkpoints that cannot be read just now."""
    try:
        found = newest(folder)
        lost = _lost_steps(folder, above=-1 if found is None else step_of(found.name) or 0)
        if found is None and not lost and os.path.lexists(folder / LATEST):
            lost = {LATEST: "it is there, and no complete checkpoint is"}
    except OSError as error:
        raise RunFailed(
            f"The checkpoints in {folder} cannot be looked at: {error.strerror}. Nothing was changed."
        ) from error
    reasons = "; ".join(f"{name}: {reason}" for name, reason in lost.items())
    if lost and found is None:
        raise RunFailed(
            f"There were checkpoints in {folder}, and none can be used ({reasons}). No training starts anew beside them: "
            "put them right, name another one with --resume PATH, or move them away. Nothing was changed."
        )
    if lost:
        log.warning("In %s some checkpoints cannot be used (%s); taking %s.", folder, reasons, found)
    return found


def _contents(folder: Path) -> str:
    if not folder.is_dir():
        return "the folder does not exist"
    return f"incomplete steps there: {', '.join(f.path.name for f in list_steps(folder)) or 'none'}"
