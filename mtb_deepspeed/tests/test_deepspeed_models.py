"""Models that are not as regular as the built-in one, and runs that go wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mtb_core import Result, TrainConfig, run

from .recorded import recorded

FILE = Path(__file__).parent / "odd_models.py"
ODD: dict[str, Any] = {"vocab_size": 23, "steps": 5, "learning_rate": 1e-2}
STAGE_3 = {"stage": 3, "param_persistence_threshold": 0}


def failing(model: str, folder: Path, stage: int, *, options: dict[str, Any] | None = None, **settings: Any) -> Result:
    """Two ranks on one of the models that go wrong."""
    config = TrainConfig(
        model=f"{FILE}:{model}",
        strategy="deepspeed",
        strategy_opt={"stage": stage, **(options or {})},
        nproc=2,
        global_batch_size=4,
        seq_length=8,
        vocab_size=23,
        steps=5,
        warmup_steps=0,
        device="cpu",
        run_dir=str(folder / "run"),
        sink=("jsonl",),
        **settings,
    )
    return run(config, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 2}, STAGE_3], ids=str)
def test_odd_tied_frozen(options: dict[str, Any], precision: str, tmp_path: Path) -> None:
    """Odd sizes, a tied and a frozen layer and a scalar train as they do on one rank; the frozen one stays."""
    settings = {**ODD, "model": f"{FILE}:Odd", "precision": precision}
    expected = recorded(tmp_path / "single", strategy="single", **settings)
    found = recorded(tmp_path / "zero", strategy="deepspeed", nproc=3, strategy_opt=options, **settings)
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.result.parameters == expected.result.parameters
    assert found.final.keys() == expected.final.keys()
    for key, value in expected.initial.items():
        assert torch.equal(found.initial[key], value), key
    assert torch.equal(found.final["model/frozen.weight"], expected.final["model/frozen.weight"])
    if precision == "fp32":
        for key, value in expected.final.items():
            assert torch.allclose(found.final[key], value, rtol=1e-3, atol=1e-6), key


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 2}, STAGE_3], ids=str)
def test_buffers_are_one(options: dict[str, Any], tmp_path: Path) -> None:
    """Running statistics are those of rank 0 on every rank, are saved, and resume exactly; others are not saved."""
    settings: dict[str, Any] = {**ODD, "model": f"{FILE}:Normalised", "nproc": 2, "global_batch_size": 8}
    settings |= {"strategy": "deepspeed", "strategy_opt": options, "warmup_steps": 0}
    expected = recorded(tmp_path / "whole", **{**settings, "steps": 6})
    folder = {"checkpoint_dir": str(tmp_path / "checkpoints"), "save_every": 3}
    recorded(tmp_path / "first", **{**settings, **folder, "steps": 3})
    found = recorded(tmp_path / "then", **{**settings, **folder, "steps": 3, "resume": "latest"})
    assert found.losses == expected.losses[3:]
    assert "model/passing" not in found.final
    for key, value in expected.final.items():
        assert torch.equal(found.final[key], value), key
    assert expected.final["model/norm.running_mean"].abs().sum() > 0


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("model", "rank"), [("UnusedOnOne", 1), ("UnusedEverywhere", None)])
def test_unused_parameters_are_refused(model: str, rank: int | None, stage: int, tmp_path: Path) -> None:
    """A parameter without gradient, on one rank or all, ends the run before anything is sent, and is named."""
    result = failing(model, tmp_path, stage)
    assert result.exit_code == 3
    assert result.failure is not None
    assert result.failure["kind"] == "MissingGradient"
    assert "'mix', 'scale'" in result.failure["message"]
    assert rank is None or result.failure["rank"] == rank
    assert result.global_step == (2 if rank else 0)


def test_an_overlapping_reduction_needs_all_in_the_last_micro_batch(tmp_path: Path) -> None:
    """Stage 1 with overlap_comm would forget gradients of what only an earlier micro-batch uses, so it is refused."""
    result = failing("UnusedInTheLast", tmp_path, 1, options={"overlap_comm": True}, grad_accum_steps=2)
    assert result.failure is not None
    assert result.failure["kind"] == "MissingGradient"
    assert "'mix', 'scale' in the last micro-batch of the step" in result.failure["message"]
    assert "set overlap_comm=false" in result.failure["message"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 1}, {"stage": 1, "offload_optimizer": "cpu"}], ids=str)
def test_an_earlier_micro_batch_is_enough(options: dict[str, Any], tmp_path: Path) -> None:
    """Without overlap_comm stages 0 and 1 train with the gradients that an earlier micro-batch has left, as `ddp` does."""
    settings = {**ODD, "model": f"{FILE}:UnusedInTheLast", "nproc": 2, "grad_accum_steps": 2}
    expected = recorded(tmp_path / "ddp", strategy="ddp", strategy_opt={"find_unused_parameters": True}, **settings)
    found = recorded(tmp_path / "zero", strategy="deepspeed", strategy_opt=options, **settings)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("model", "stage", "text"),
    [
        (
            "Reentrant",
            2,
            "'inside.weight', 'inside.bias': the model uses torch.utils.checkpoint with use_reentrant=True",
        ),
        ("Empty", 3, "Parameter 'nothing' has no elements (shape (0, 7))"),
        pytest.param("Double", 1, "Parameter 'factor' is float64", marks=pytest.mark.slow),
    ],
)
def test_what_the_engine_cannot_do_is_named(model: str, stage: int, text: str, tmp_path: Path) -> None:
    """The parameter, the cause, and before anything was trained."""
    result = failing(model, tmp_path, stage)
    assert result.exit_code == 3
    assert result.failure is not None
    assert text in result.failure["message"]
    assert result.global_step == 0


@pytest.mark.parametrize("options", [STAGE_3, pytest.param({"stage": 0}, marks=pytest.mark.slow)], ids=str)
def test_buffers_of_any_layout(options: dict[str, Any], tmp_path: Path) -> None:
    """Buffers that are transposed or expanded are shared without writing behind them."""
    settings = {**ODD, "model": f"{FILE}:Expanded"}
    expected = recorded(tmp_path / "single", strategy="single", **settings)
    found = recorded(tmp_path / "zero", strategy="deepspeed", nproc=2, strategy_opt=options, **settings)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert torch.equal(found.final["model/turned"], expected.final["model/turned"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nonfinite_stops_all_ranks(stage: int, tmp_path: Path) -> None:
    """A NaN on one rank stops all before that optimizer step, naming the rank."""
    result = failing("NaNOnce", tmp_path, stage)
    assert result.exit_code == 3
    assert result.failure is not None
    assert (result.failure["rank"], result.failure["step"]) == (1, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"stage": 0}, {"stage": 1}, {"stage": 2}, STAGE_3, {"stage": 2, "offload_optimizer": "cpu"}],
    ids=str,
)
def test_a_skipped_update_leaves_nothing_behind(options: dict[str, Any], tmp_path: Path) -> None:
    """After a skipped step training goes on as `ddp` does, which simply drops its gradients."""
    settings = {
        **ODD,
        "model": f"{FILE}:NaNOnce",
        "nproc": 2,
        "grad_accum_steps": 2,
        "on_nonfinite": "skip",
        "max_grad_norm": 0.0,
    }
    expected = recorded(tmp_path / "ddp", strategy="ddp", **settings)
    found = recorded(tmp_path / "zero", strategy="deepspeed", strategy_opt=options, **settings)
    assert [record.skipped for record in found.records[0]] == [record.skipped for record in expected.records[0]]
    assert sum(record.skipped for record in found.records[0]) == 1
    for mine, other in zip(found.records[0], expected.records[0], strict=True):
        if not other.skipped:
            assert mine.loss == pytest.approx(other.loss, rel=1e-5)
    for key, value in expected.final.items():
        assert torch.allclose(found.final[key], value, rtol=1e-3, atol=1e-6), key


@pytest.mark.parametrize("stage", [1, 3])
def test_the_first_cause_is_shown(stage: int, tmp_path: Path) -> None:
    """An exception on one rank ends the run, and the result names that rank and not those that lost it."""
    result = failing("Raises", tmp_path, stage)
    assert result.exit_code == 3
    assert result.failure is not None
    assert result.failure["text"].startswith("Rank 1 failed: ValueError: boom-r1")


@pytest.mark.parametrize("nproc", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_stdout_holds_one_document(nproc: str, tmp_path: Path) -> None:
    """With --json nothing of what DeepSpeed prints reaches stdout; in one process or several, trials and all."""
    arguments = ["--zero-stage", "3", "--nproc", nproc, "--steps", "2", "--warmup-steps", "1", "--repeat", "2"]
    arguments += ["--d-model", "8", "--n-heads", "1", "--n-layers", "1", "--vocab-size", "16", "--seq-length", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "mtb_core", "deepspeed", *arguments, "--device", "cpu", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["strategy"], result["strategy_options"]["stage"]) == ("deepspeed", 3)
    assert len(result["repeats"]) == 2
    assert "DeepSpeed" not in done.stderr
    assert "Warning" not in done.stderr
