"""Probes for checks of checkpoints: random draws, a writer that is held up, a rank that is killed, a watched folder."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import ClassVar

import attrs
import numpy as np
import torch

from mtb_core.api.hooks import hookimpl
from mtb_core.api.records import RunInfo, StepRecord
from mtb_core.api.values import RankContext
from mtb_core.ckpt.layout import READY, DamagedCheckpoint
from mtb_core.ckpt.manifest import read_manifest
from mtb_core.ckpt.opened import file_problem, storage_of, unlisted
from mtb_core.ranks.failures import exit_failure, record_failure

from .episodes import Probe
from .stage import Stage


@attrs.frozen
class Draws(Probe):
    """After each step draws a number of torch, numpy and python; notes them by step under ``draws``."""

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _Draws(stage)


class _Draws:
    def __init__(self, stage: Stage) -> None:
        self._seen: dict[int, dict[str, float]] = stage.trace.notes.setdefault("draws", {})

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        self._seen[record.global_step] = {
            "torch": float(torch.rand((), dtype=torch.float64)),
            "numpy": float(np.random.rand()),  # noqa: NPY002  (the global stream is what checkpoints hold)
            "python": random.random(),  # noqa: S311
        }


#: How long a writer is held up at most; a run that fails meanwhile is ended sooner by its launcher.
_PATIENCE_S = 30.0


@attrs.frozen
class HoldWriter(Probe):
    """Keeps the first save from writing its first byte until `step` was recorded.

    Notes under ``released`` the last step that had been recorded when writing began.
    """

    step: int

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _HoldWriter(stage, self.step)


class _HoldWriter:
    def __init__(self, stage: Stage, step: int) -> None:
        self._notes, self._step, self._last = stage.trace.notes, step, 0
        self._go = threading.Event()

    @hookimpl
    def mtb_fault_point(self, name: str) -> None:
        if name == "writing" and "released" not in self._notes:
            self._go.wait(_PATIENCE_S)
            self._notes["released"] = self._last

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        self._last = record.global_step
        if record.global_step == self._step:
            self._go.set()


@attrs.frozen
class KillInSave(Probe):
    """Kills `rank` when a save reaches `point`; each rank first leaves in the run's folder where it started from."""

    fresh: ClassVar[bool] = True

    rank: int
    point: str

    def observer(self, stage: Stage) -> object:  # noqa: ARG002  (as every probe)
        """See the class."""
        return _KillInSave(self)


class _KillInSave:
    def __init__(self, drill: KillInSave) -> None:
        self._drill = drill
        self._ctx: RankContext | None = None

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        self._ctx = info.ctx
        start_note(info.folder, info.ctx.rank).write_text(str(info.first_step - 1))

    @hookimpl
    def mtb_fault_point(self, name: str) -> None:
        ctx = self._ctx
        if ctx is not None and (ctx.rank, name) == (self._drill.rank, self._drill.point):
            # The others would look for the cause for a second, which is not what these drills are about.
            record_failure(ctx.store, exit_failure(ctx.rank, -signal.SIGKILL))
            os.kill(os.getpid(), signal.SIGKILL)


def start_note(folder: Path, rank: int) -> Path:
    """File in which `KillInSave` notes the step that `rank` started from; a killed rank can leave nothing else."""
    return folder / f"kit-started-{rank}"


@attrs.frozen
class WatchFolder(Probe):
    """At every fault point on rank 0, looks at what has a READY mark; notes under ``publishing`` how often and what."""

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _WatchFolder(stage)


class _WatchFolder:
    def __init__(self, stage: Stage) -> None:
        self._seen: list[tuple[str, str, str]] = stage.trace.notes.setdefault("publishing", [])
        self._rank, self._folder = stage.trace.rank, Path()

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        assert info.config.checkpoint_dir is not None
        self._folder = Path(info.config.checkpoint_dir)

    @hookimpl
    def mtb_fault_point(self, name: str) -> None:
        if self._rank == 0:
            for path in sorted(p for p in self._folder.iterdir() if (p / READY).exists()):
                self._seen.append((name, path.name, incompleteness(path)))


def incompleteness(path: Path) -> str:
    """Reason why a folder with a READY mark should have none; empty if all is well. Its name does not matter."""
    try:
        manifest = read_manifest(path)
    except DamagedCheckpoint as error:
        return f"{error.file}: {error.problem}"
    missing = unlisted(manifest, storage_of(manifest))
    if missing:
        return f"the manifest does not list {', '.join(missing)}"
    for name in manifest.files:
        problem = file_problem(path, name, manifest)
        if problem is not None:
            return f"{name}: {problem}"
    return ""
