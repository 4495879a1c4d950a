"""What a rank of a sharded strategy allocates to save and to load: its own share once more, and never the whole model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mtb_core import TrainConfig, run
from mtb_core.train.checkpointing import RunCheckpoints
from mtb_kit.live import LiveBytes

SIZE: dict[str, Any] = {"d_model": 96, "n_heads": 2, "n_layers": 8, "vocab_size": 65, "seq_length": 8, "batch_size": 1}
#: Bytes of the largest parameter of it.
LARGEST = 4 * 4 * 96 * 96
STAGE_3 = {"stage": 3, "param_persistence_threshold": 0}


def weighed(method: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """`method` of `RunCheckpoints`; notes by how much the bytes of tensors of its rank grew in it, at the most."""

    def call(self: RunCheckpoints, *args: Any) -> Any:
        self._hooks.state(self._prepared)  # moments are made when they are first asked for, and stay
        live = LiveBytes()
        before = live.adopt()
        with live:
            result = method(self, *args)
        note = folder / f"{method.__name__}{self._job.ctx.rank}"
        note.write_text(json.dumps(live.peak - before))
        return result

    return call


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("fsdp", {}),
        ("fsdp1", {}),
        ("deepspeed", {"stage": 1}),
        ("deepspeed", {"stage": 2}),
        ("deepspeed", STAGE_3),
    ],
    ids=["fsdp", "fsdp1", "stage 1", "stage 2", "stage 3"],
)
def test_a_share_and_one_parameter(
    strategy: str, options: dict[str, Any], precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 2 ranks at most 1.2 shares of weights and moments, and one parameter: the image of the rank's file is one."""
    for name in ("start", "save"):
        monkeypatch.setattr(RunCheckpoints, name, weighed(getattr(RunCheckpoints, name), tmp_path))
    common = {
        **SIZE,
        "strategy": strategy,
        "strategy_opt": options,
        "precision": precision,
        "nproc": 2,
        "warmup_steps": 0,
        "steps": None,
        "device": "cpu",
        "start_method": "fork",  # the ranks have the methods that were replaced here
        "sink": ("jsonl",),
        "checkpoint_dir": str(tmp_path / "checkpoints"),
    }
    for until, resume in ((1, {}), (2, {"resume": "latest"})):
        config = TrainConfig(**common, **resume, until_step=until, save_every=1, run_dir=str(tmp_path / f"run{until}"))
        result = run(config, quiet=True).check()
        share = 3 * 4 * result.parameters / 2
        for rank in (0, 1):
            start, save = (json.loads((tmp_path / f"{name}{rank}").read_text()) for name in ("start", "save"))
            print(f"{strategy} {options} {precision}: {start / share:.3f} and {save / share:.3f} shares")
            assert 0.9 * share < start <= 1.2 * share + LARGEST  # it makes the image
            assert save <= 1.2 * share + LARGEST
