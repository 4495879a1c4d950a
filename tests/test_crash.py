"""A run killed at any named instant of saving goes on from a complete checkpoint, to the same end, to the bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mtb_core import Job, Prepared, TrainConfig, hookimpl, run
from mtb_core.ckpt.publish import PUBLISH_POINTS, RANK_POINTS
from mtb_kit.recording import RankRecord, run_recorded

SETTINGS: dict[str, Any] = {
    "strategy": "ddp",
    "nproc": 2,
    "seq_length": 8,
    "vocab_size": 64,
    "d_model": 16,
    "n_heads": 2,
    "n_layers": 1,
    "batch_size": 2,
    "dropout": 0.2,
    "warmup_steps": 0,
    "until_step": 6,
    "device": "cpu",
}
#: Only rank 0 publishes; a save of a step that does not exist yet replaces nothing.
CASES = [(point, victims) for point in RANK_POINTS for victims in ((0,), (1,), (0, 1))] + [
    (point, (0,)) for point in PUBLISH_POINTS if point != "replaced-removed"
]


class KilledAt:
    """Kills the ranks `victims` when the second save reaches `point`."""

    def __init__(self, point: str, victims: tuple[int, ...]) -> None:
        self._point, self._victims, self._rank, self._saves = point, victims, -1, 0

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Generator[None, Prepared, Prepared]:
        self._rank = job.ctx.rank
        return (yield)

    @hookimpl
    def mtb_fault_point(self, name: str) -> None:
        self._saves += name == "staged"
        if self._saves == 2 and name == self._point and self._rank in self._victims:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> RankRecord:
    """The uninterrupted run."""
    return run_recorded(TrainConfig(**SETTINGS), tmp_path_factory.mktemp("whole"))[1][0]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_crash_matrix(
    asynchronous: bool, reference: RankRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every rank and both, at every point: the restart resumes, and losses and weights are the uninterrupted run's."""
    for number, (point, victims) in enumerate(CASES):
        folder = tmp_path / str(number)
        saving = {"checkpoint_dir": str(folder / "saved"), "save_every": 2, "async_save": asynchronous, "keep_last": 2}
        config = TrainConfig(**SETTINGS, **saving, run_dir=str(folder / "killed"), sink=("jsonl",))
        killed = run(config, quiet=True, plugins={"kill": partial(KilledAt, point, victims)})
        assert killed.exit_code == 3, (point, victims)
        again = TrainConfig(**SETTINGS, **saving, resume="auto")
        result, ranks = run_recorded(again, folder / "again")
        assert result.exit_reason == "done", (point, victims, result.failure)
        assert result.runtime["resumed"], (point, victims)
        assert result.runtime["resume_deterministic"], (point, victims)
        start = 6 - len(ranks[0].records)
        assert start in {2, 4}, (point, victims)
        assert ranks[0].losses == reference.losses[start:], (point, victims)
        for name, weight in reference.final.items():
            assert torch.equal(ranks[0].final[name], weight), (point, victims, name)
        leftovers = [p.name for p in (folder / "saved").iterdir() if p.name.startswith(".tmp")]
        assert leftovers == [], (point, victims)
    with capsys.disabled():
        print(f" {len(CASES)} cases of {'asynchronous' if asynchronous else 'synchronous'} saving", end="")
