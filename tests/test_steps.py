"""What a step does with its batch: normalisation, accumulation over a ragged end, evaluation, timing, stopping."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mtb_core import StepRecord, TrainConfig, hookimpl
from mtb_core.running import run
from mtb_kit.drills import SignalAt
from mtb_kit.recording import run_recorded

MODELS = Path(__file__).parent / "models" / "faulty.py"
TINY = {"seq_length": 1, "device": "cpu", "warmup_steps": 0, "sink": ["jsonl"]}


def config(model: str, data: Path, **settings: Any) -> TrainConfig:
    return TrainConfig(**{**TINY, "model": f"{MODELS}:{model}", "data": str(data), **settings})


@pytest.mark.parametrize("evaluate", [False, True])
def test_ragged_last_window_of_an_epoch(evaluate: bool, tmp_path: Path) -> None:
    """20 samples, global batch 8: three updates of gradient exactly 1 an epoch, evaluation or not (ragged last one)."""
    data = tmp_path / "text"
    data.write_bytes(bytes(range(21)))
    settings: dict[str, Any] = {"eval_data": str(data), "eval_every": 1} if evaluate else {}
    _, ranks = run_recorded(
        config(
            "UnitGradient",
            data,
            strategy="ddp",
            nproc=2,
            batch_size=1,
            grad_accum_steps=4,
            steps=3,
            optimizer="sgd",
            learning_rate=1.0,
            weight_decay=0.0,
            **settings,
        ),
        tmp_path / "out",
    )
    for rank in ranks:
        assert [r.grad_norm for r in rank.records] == [1.0, 1.0, 1.0]
        assert [r.samples_seen for r in rank.records] == [8, 16, 20]
        assert rank.final["model/weight"].item() == -3.0


@pytest.mark.parametrize(("nproc", "batch"), [(1, 5), (2, 5), (2, 2), (4, 2)])
def test_evaluation_weights_every_sample_once(nproc: int, batch: int, tmp_path: Path) -> None:
    """The mean over 9 samples of values 0 to 8 is exactly 4 at every world size, uneven last batches included."""
    data = tmp_path / "text"
    data.write_bytes(bytes(range(10)))
    result, _ = run_recorded(
        config("FirstTokenLoss", data, strategy="ddp", nproc=nproc, batch_size=batch, steps=1, eval_data=str(data)),
        tmp_path / "out",
    )
    assert result.eval_loss == 4.0
    assert result.eval_samples == 9


class SlowObserver:
    """Sleeps where reporting happens, to show that it is not in the step's time."""

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        time.sleep(0.2)


class SlowStep:
    """Sleeps in the optimizer step number `step`."""

    def __init__(self, step: int) -> None:
        self._left = step

    @hookimpl(wrapper=True)
    def mtb_optimizer_step(self) -> Iterator[None]:
        self._left -= 1
        if self._left == 0:
            time.sleep(0.5)
        return (yield)  # type: ignore[return-value]


def test_warm_up_and_reporting_are_not_measured(tmp_path: Path) -> None:
    """A slow first step is not in the averages, nor is what observers do; the numbers of steps are as asked."""
    values = TrainConfig(steps=7, warmup_steps=2, seq_length=8, d_model=16, device="cpu", sink=("jsonl",))
    plugins = {"slow": SlowObserver, "first": partial(SlowStep, 1)}
    folder = tmp_path / "run"
    import attrs

    result = run(attrs.evolve(values, run_dir=str(folder)), quiet=True, plugins=plugins)
    lines = [json.loads(line) for line in (folder / "metrics" / "rank_00000.jsonl").read_text().splitlines()]
    assert [line["warmup"] for line in lines] == [True] * 2 + [False] * 7
    assert (result.steps, result.warmup_steps) == (7, 2)
    assert lines[0]["optimizer_step_ms"] >= 500
    measured = [line["step_time_ms"] for line in lines[2:]]
    assert result.step_time_ms == pytest.approx(sum(measured) / 7)
    for line in lines:
        parts = line["data_time_ms"] + line["forward_backward_ms"] + line["optimizer_step_ms"]
        assert parts == pytest.approx(line["step_time_ms"])


@pytest.mark.parametrize(
    ("number", "reason", "code"),
    [(signal.SIGTERM, "stopped", 4), (signal.SIGUSR1, "stopped", 4), (signal.SIGINT, "interrupted", 130)],
)
def test_a_signal_on_one_rank_stops_all_at_one_step(number: int, reason: str, code: int, tmp_path: Path) -> None:
    """All ranks leave after the same step, with the contract's exit code."""
    values = TrainConfig(
        strategy="ddp",
        nproc=2,
        steps=1000,
        seq_length=8,
        d_model=16,
        device="cpu",
        sink=("jsonl",),
        run_dir=str(tmp_path / "run"),
    )
    result = run(values, quiet=True, plugins={"signal": partial(SignalAt, 1, 3, number)})
    assert (result.exit_reason, result.exit_code) == (reason, code)
    lengths = {
        len((tmp_path / "run" / "metrics" / f"rank_{rank:05d}.jsonl").read_text().splitlines()) for rank in (0, 1)
    }
    assert lengths == {4}


def test_repeats_are_independent_trials(tmp_path: Path) -> None:
    """Every trial starts anew: the same losses, one row each, and the spread of their times."""
    values = TrainConfig(
        steps=3, repeat=3, seq_length=8, d_model=16, dropout=0.1, device="cpu", run_dir=str(tmp_path / "run")
    )
    result = run(values, quiet=True)
    assert result.repeat_count == 3
    assert result.trial_protocol == "independent_reinitialize"
    assert len({row["loss"] for row in result.repeats}) == 1
    assert result.summary["step_time_ms"]["n"] == 3
    assert result.summary["step_time_ms"]["std"] is not None
    assert (tmp_path / "run" / "metrics" / "trial_002" / "rank_00000.jsonl").is_file()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_written_configuration_repeats_the_run(precision: str, tmp_path: Path) -> None:
    """config.toml of a run, used as --config, gives bitwise the same losses."""
    from mtb_core import load_config

    first = TrainConfig(
        strategy="ddp", nproc=2, global_batch_size=8, steps=4, seq_length=8, d_model=16, dropout=0.2, device="cpu",
        precision=precision, lr_scheduler="cosine", lr_warmup_steps=2, max_grad_norm=0.5,
    )  # fmt: skip
    _, ranks = run_recorded(first, tmp_path / "first")
    again = load_config(file=tmp_path / "first" / "run" / "config.toml")
    _, others = run_recorded(again, tmp_path / "again")
    assert [r.losses for r in ranks] == [r.losses for r in others]
    assert len(ranks[0].losses) == 9
