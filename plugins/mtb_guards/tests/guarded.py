"""Short real runs with guards, and what they leave behind."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from mtb_core import Result, TrainConfig, hookimpl, run
from mtb_core.ckpt.opened import open_checkpoint
from mtb_kit.recording import RankRecord, Recorder

COMMON: dict[str, Any] = {
    "seq_length": 8,
    "d_model": 16,
    "n_heads": 2,
    "n_layers": 1,
    "global_batch_size": 12,
    "vocab_size": 256,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "device": "cpu",
    "sink": ("jsonl",),
}
DDP = {"strategy": "ddp", "nproc": 2}
SPIKING = {"model": f"{Path(__file__).parent / 'guard_models.py'}:Spiking"}


class Evaluations:
    """Notes the loss of each evaluation on rank 0."""

    def __init__(self, place: Path) -> None:
        self._place = place

    @hookimpl
    def mtb_run_started(self, info: Any) -> None:
        self._first = info.ctx.rank == 0

    @hookimpl
    def mtb_evaluated(self, global_step: int, loss: float) -> None:
        if self._first:
            with (self._place / "evaluations").open("a") as file:
                file.write(json.dumps([global_step, loss]) + "\n")


@attrs.frozen
class Guarded:
    """A folder in which a test trains."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def data(self, name: str, low: int = 0, high: int = 64, mark: int | None = None) -> str:
        """41 samples of random bytes from `low` to `high`; in one of them a target is `mark`."""
        content = list(random.Random(low + 1).choices(range(low, high), k=8 * 41 + 1))
        if mark is not None:
            content[8 * 20 + 4] = mark
        (self.folder / name).write_bytes(bytes(content))
        return str(self.folder / name)

    def saving(self, every: int = 1, **more: Any) -> dict[str, Any]:
        return {"checkpoint_dir": str(self.checkpoints), "save_every": every, "keep_last": 0, **more}

    def run(
        self,
        name: str,
        guards: Mapping[str, Any],
        *,
        plugins: Mapping[str, Callable[[], object]] | None = None,
        **settings: Any,
    ) -> tuple[Result, list[RankRecord]]:
        """Train in the folder `name` with the options `guards` of run plugins."""
        place = self.folder / name
        place.mkdir()
        values = {**COMMON, "data": self.data("text"), **settings, "plugin_opt": dict(guards)}
        own = {"recorder": partial(Recorder, place), "evaluations": partial(Evaluations, place)}
        result = run(TrainConfig(**values, run_dir=str(place / "run")), quiet=True, plugins={**own, **(plugins or {})})
        paths = sorted(place.glob("*.pickle"), key=lambda path: int(path.stem))
        return result, [pickle.loads(path.read_bytes()) for path in paths]

    def evaluations(self, name: str) -> list[tuple[int, float]]:
        lines = (self.folder / name / "evaluations").read_text().splitlines()
        return [(step, loss) for step, loss in map(json.loads, lines)]

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"

    def saved_state(self, step: int, plugin: str) -> dict[str, Any]:
        """The JSON values of `plugin` in the checkpoint of `step`."""
        found: dict[str, Any] = json.loads((self.checkpoint(step) / "state.json").read_text())["plugins"][plugin]
        return found


def tensors(path: Path, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose keys begin with `prefix`, without it."""
    opened = open_checkpoint(path)
    with opened.tensors() as stored:
        return {
            key.removeprefix(prefix): torch.from_numpy(
                np.concatenate([block.copy() for _, block in stored.blocks(key)]).reshape(entry.shape)
            )
            for key, entry in opened.entries.items()
            if key.startswith(prefix)
        }
