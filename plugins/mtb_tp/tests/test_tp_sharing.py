"""What tensor-parallel ranks hold in common stays equal: values, buffers; and which norm feeds the output layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from tp_states import TINY, trained, whole

from mtb_core import TrainConfig, run

MODELS = Path(__file__).parent / "tp_models.py"


@pytest.mark.parametrize("saving", [False, True], ids=["end", "save"])
def test_values_that_part_late_end_the_run(saving: bool, tmp_path: Path) -> None:
    """Where gradients agree and values part nevertheless, the next save fails, or the end of a run without saves."""
    values: dict[str, Any] = {**TINY, "model": f"{MODELS}:late", "until_step": 4, "run_dir": str(tmp_path / "run")}
    if saving:
        values |= {"checkpoint_dir": str(tmp_path / "checkpoints"), "save_every": 3, "until_step": 100}
    result = run(TrainConfig(strategy="tp", nproc=2, **values), quiet=True)
    assert result.exit_reason == "failed"
    assert result.failure is not None
    assert "'stem.weight' in common, but ranks 0 and 1 of the group have come to different" in result.failure["message"]
    assert not list(tmp_path.rglob("READY")), "what has parted was saved"


def test_a_resumed_run_compares_at_its_own_end(tmp_path: Path) -> None:
    """The last step is that of the whole training, also where the run begins later; without saving."""
    values: dict[str, Any] = {**TINY, "model": f"{MODELS}:late", "checkpoint_dir": str(tmp_path / "checkpoints")}
    first = TrainConfig(strategy="tp", nproc=2, **values, save_every=2, until_step=2, run_dir=str(tmp_path / "first"))
    assert run(first, quiet=True).exit_reason == "done"
    later = attrs.evolve(first, resume="latest", save_every=0, until_step=6, run_dir=str(tmp_path / "later"))
    result = run(later, quiet=True)
    assert result.failure is not None
    assert "have come to different values of it" in result.failure["message"]


@pytest.mark.parametrize("data_parallel", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_saving_does_not_change_buffers(data_parallel: str, tmp_path: Path) -> None:
    """With buffers that follow each rank's samples, a run that saves in each step takes the steps of one that does not."""
    settings: dict[str, Any] = {
        "strategy": "tp",
        "nproc": 2,
        "strategy_opt": {"tp": 1, "data_parallel": data_parallel},
        "model": f"{MODELS}:average",
        "until_step": 5,
        "grad_accum_steps": 2,
    }
    _, plain = trained(tmp_path / "plain", **settings)
    _, saving = trained(tmp_path / "saving", **settings, save_every=1)
    assert saving[0].losses == plain[0].losses


@pytest.mark.parametrize("vocabulary", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_last_norm_may_be_defined_first(vocabulary: bool, tmp_path: Path) -> None:
    """With the sequence cut, the output layer takes what a norm gives it, wherever the model defines that norm."""
    common = {"model": f"{MODELS}:norm_first", "optimizer": "sgd", "learning_rate": 0.1, "until_step": 3}
    _, expected = trained(tmp_path / "single", strategy="single", **common)
    options = {"sequence_parallel": True, "vocab_parallel_loss": vocabulary}
    _, seen = trained(tmp_path / "tp", strategy="tp", nproc=2, strategy_opt=options, **common)
    wanted, found = whole([expected[0].ended]), whole([s.ended for s in seen])
    for key, tensor in wanted.items():
        assert (found[key] - tensor).norm() <= 1e-5 * tensor.norm().clamp(min=1e-3), key
