"""Run plugin ``best``: keeps the checkpoint with the lowest evaluation loss. Torch-free."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from mtb_core import MtbError, Phase, RunFailed, RunInfo, hookimpl, keep_checkpoint, write_json

from .options import BestOptions

_LOGGER = logging.getLogger("mtb")


@attrs.frozen
class Kept:
    """The checkpoint that is kept, and its evaluation loss."""

    path: Path
    step: int
    eval_loss: float


class Best:
    """Has each evaluated step saved, and keeps the best of these checkpoints apart from the others.

    Rank 0 does it alone; its request to save is enough for all ranks. The truth is on disk, not in checkpoints, which are
    saved before they are evaluated: the folder holds one checkpoint, and ``losses.json`` the losses of those that it
    may be, by the content of their ``READY``, which no two publications share. It is written before the checkpoint
    is exchanged.
    """

    def __init__(self, options: BestOptions) -> None:
        self._options = options
        self._info: RunInfo | None = None
        self._folder = Path()
        self._kept: Kept | None = None
        self._losses: dict[int, float] = {}
        self._published: dict[int, Path] = {}
        self._failed: str | None = None

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        """See what is kept already."""
        if info.ctx.rank:
            return
        assert info.config.checkpoint_dir is not None
        self._info, self._folder = info, Path(info.config.checkpoint_dir) / self._options.folder
        self._kept = self._find()
        if self._kept is not None and info.first_step == 1:
            raise RunFailed(
                f"{self._folder} holds the best checkpoint of another run, for this one begins anew. Remove it, or set "
                "best.folder.",
                rank=0,
            )

    @hookimpl
    def mtb_phase(self, phase: Phase, step: int) -> None:
        """Ask for a checkpoint of a step that will be evaluated; forget what is undone."""
        if self._info is None:
            return
        if phase == "load":
            self._losses.clear()
            self._published.clear()
        config, control = self._info.config, self._info.control
        every = config.eval_every
        if phase == "step" and control is not None and (step == self._info.last_step or (every and step % every == 0)):
            control.save()

    @hookimpl
    def mtb_evaluated(self, global_step: int, loss: float) -> None:
        """The checkpoint of the step may be complete already, or become so."""
        if self._info is not None and math.isfinite(loss):
            self._losses[global_step] = loss
            self._consider(global_step)

    @hookimpl
    def mtb_checkpoint_published(self, path: Path, step: int) -> None:
        """The step may be evaluated already, or will be before the next checkpoint removes this one."""
        if self._info is not None:
            self._published = {step: path}
            self._consider(step)

    @hookimpl
    def mtb_result(self) -> Mapping[str, Any] | None:
        """Name of the kept checkpoint, for the result."""
        if self._info is None or (self._kept is None and self._failed is None):
            return None
        found: dict[str, Any] = {} if self._failed is None else {"failed": self._failed}
        if self._kept is not None:
            checkpoint = f"{self._options.folder}/{self._kept.path.name}"
            found |= {"checkpoint": checkpoint, "step": self._kept.step, "eval_loss": self._kept.eval_loss}
        return found

    def _consider(self, step: int) -> None:
        """Keep the checkpoint of `step` if it is there, evaluated, and better than what is kept."""
        if step not in self._losses or step not in self._published:
            return
        loss, path = self._losses.pop(step), self._published[step]
        if self._kept is not None and not loss < self._kept.eval_loss - self._options.min_delta:
            return
        try:
            self._keep(path, step, loss)
        except (OSError, MtbError) as error:  # the training is worth more than a copy of it
            self._failed = f"step {step} could not be kept: {error}"
            _LOGGER.warning("Run plugin 'best': %s", self._failed)

    def _keep(self, path: Path, step: int, loss: float) -> None:
        self._folder.mkdir(exist_ok=True)
        candidates = [Kept(path, step, loss), *([] if self._kept is None else [self._kept])]
        losses = {_mark(each.path): {"step": each.step, "eval_loss": each.eval_loss} for each in candidates}
        write_json(self._folder / "losses.json", losses)
        self._kept = Kept(keep_checkpoint(path, self._folder), step, loss)

    def _find(self) -> Kept | None:
        """Checkpoint that an earlier invocation of this training has kept; the best one, if it ended between two."""
        file = self._folder / "losses.json"
        if not file.is_file():
            return None
        losses = json.loads(file.read_text(encoding="utf-8"))
        complete = [path for path in self._folder.glob("step_*") if (path / "READY").is_file()]
        known = [(path, losses.get(_mark(path))) for path in complete]
        found = [Kept(path, loss["step"], loss["eval_loss"]) for path, loss in known if loss is not None]
        return min(found, key=lambda kept: kept.eval_loss, default=None)


def _mark(path: Path) -> str:
    return (path / "READY").read_text(encoding="utf-8").strip()
