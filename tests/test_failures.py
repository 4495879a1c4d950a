"""What can fail on one rank ends on all, with the first cause named, and nothing half-done."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mtb_core import ConfigError, TrainConfig
from mtb_core.measure.result import Result
from mtb_core.ranks import signals
from mtb_core.running import run

MODELS = Path(__file__).parent / "models" / "faulty.py"


def train(model: str, folder: Path, **settings: Any) -> Result:
    """A short run on two ddp ranks, in a quiet console."""
    values = {
        "strategy": "ddp",
        "nproc": 2,
        "steps": 4,
        "warmup_steps": 1,
        "seq_length": 8,
        "device": "cpu",
        "sink": ["jsonl"],
    }
    config = TrainConfig(**{**values, **settings, "model": f"{MODELS}:{model}", "run_dir": str(folder / "run")})
    return run(config, quiet=True)


@pytest.mark.parametrize(
    ("model", "step", "expected"),
    [
        ("NaNLoss", 3, "step 3 on rank 1: the loss is nan"),
        ("InfiniteGradient", 3, "step 3 on rank 1: every loss is finite, but its gradient of 'embedding.weight'"),
    ],
)
def test_nonfinite_stops_all_ranks(model: str, step: int, expected: str, tmp_path: Path) -> None:
    """A non-finite loss or gradient on one rank stops all before that optimizer step, naming rank and step."""
    result = train(model, tmp_path)
    assert result.exit_code == 3
    assert result.failure is not None
    assert (result.failure["rank"], result.failure["step"]) == (1, step)
    assert expected in result.failure["message"]
    assert result.global_step == step - 1
    for rank in (0, 1):
        lines = (tmp_path / "run" / "metrics" / f"rank_{rank:05d}.jsonl").read_text().splitlines()
        assert len(lines) == step - 1


def test_skip_leaves_the_update_out(tmp_path: Path) -> None:
    """With --on-nonfinite skip the step is visible as non-finite, all files are strict JSON, and training goes on."""
    result = train("NaNOnce", tmp_path, strategy="single", nproc=1, on_nonfinite="skip")
    assert result.exit_reason == "done"
    assert result.skipped_steps == 1

    def refuse(text: str) -> None:
        raise AssertionError(text)

    lines = (tmp_path / "run" / "metrics" / "rank_00000.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    json.loads((tmp_path / "run" / "result.json").read_text(), parse_constant=refuse)
    assert [r["nonfinite"] for r in records] == [False, False, True, False, False]
    assert records[2]["loss"] is None
    assert records[2]["skipped"] is True
    assert all(isinstance(r["loss"], float) for r in records[3:])


def test_unused_on_all_ranks(tmp_path: Path) -> None:
    """A parameter without gradient on all ranks stops the run before the first optimizer step, named, by agreement."""
    result = train("UnusedEverywhere", tmp_path)
    assert result.exit_code == 3
    assert result.global_step == 0
    assert result.failure is not None
    assert "step 1 on all ranks for 'extra.weight', 'extra.bias'" in result.failure["message"]


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_unused_can_be_allowed(option: str, tmp_path: Path) -> None:
    """Both of ddp's options that cope with unused parameters do."""
    result = train("UnusedEverywhere", tmp_path, strategy_opt={option: True})
    assert result.exit_reason == "done", result.failure


def test_unused_on_one_rank(tmp_path: Path) -> None:
    """A parameter that only one rank does not use ends the run, naming that rank, though the other waits for it."""
    result = train("UnusedOnOne", tmp_path)
    assert result.exit_code == 3
    assert result.failure is not None
    assert result.failure["rank"] == 1
    assert "step 3 on rank 1 (other ranks have it) for 'extra.weight'" in result.failure["message"]


def test_unused_on_one_rank_with_search(tmp_path: Path) -> None:
    """With find_unused_parameters the same model trains."""
    result = train("UnusedOnOne", tmp_path, strategy_opt={"find_unused_parameters": True})
    assert result.exit_reason == "done", result.failure


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("Raises", "Rank 1 failed: ValueError: boom-r1"),
        ("LeavesByExit", "Rank 1 left with exit code 3"),
        ("LeavesAtOnce", "Rank 1 left with exit code 5"),
    ],
)
def test_first_cause_is_shown(model: str, text: str, tmp_path: Path) -> None:
    """Whatever way a rank leaves, the result names that rank and not those that lost it."""
    result = train(model, tmp_path)
    assert result.exit_code == 3
    assert result.failure is not None
    assert result.failure["text"].startswith(text)
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored["exit_reason"] == "failed"
    assert stored["global_step"] == 2


def test_a_second_sigterm_ends_a_run_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank hangs, the other waits for it in a collective: the result tells where each of them was."""
    monkeypatch.setattr(signals, "SAME_REQUEST_S", 0.0)
    result = train("Hangs", tmp_path)
    assert result.exit_code == 3
    assert result.failure is not None
    assert "rank 1: trouble (faulty.py:" in result.failure["message"]
    assert re.search(r"rank 0: \w+ \(\w+\.py:\d+\) in", result.failure["message"])
    assert result.global_step == 2
    for rank in (0, 1):
        assert "(most recent call first)" in (tmp_path / "run" / "logs" / f"rank_{rank:05d}.log").read_text()


def test_a_loss_that_cannot_ignore_is_found_before_the_first_step(tmp_path: Path) -> None:
    """A model whose own loss has another ignore label fails at the start, not at the ragged end of an epoch."""
    result = train("OtherIgnoreLabel", tmp_path, strategy="single", nproc=1)
    assert result.exit_code == 3
    assert result.global_step == 0
    assert result.failure is not None
    assert "cannot ignore targets" in result.failure["message"]


@pytest.mark.parametrize("nproc", [1, 2])
def test_leaving_early_is_a_failure_also_with_code_0(nproc: int, tmp_path: Path) -> None:
    """sys.exit(0) in the middle of a training is not its end."""
    result = train("LeavesQuietly", tmp_path, strategy="single" if nproc == 1 else "ddp", nproc=nproc)
    assert result.exit_code == 3
    assert result.failure is not None
    assert "exit code 0" in result.failure["text"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"eval_data": "TEXT", "vocab_size": 64}, "--eval-data .* has a vocabulary of 256, the model one of 64"),
        ({"strategy_opt": {"static_graph": True}, "gradient_sync_mode": "last"}, "valid: auto, every"),
        ({"checkpoint_dir": "TEXT", "save_every": 1}, "is a file; name a folder"),
        ({"run_dir": "x" * 300}, "cannot be written: File name too long"),
        ({"output": "/proc/none/x.json"}, "--output /proc/none/x.json cannot be written"),
        ({"checkpoint_dir": "", "save_every": 1}, "it must be a path"),
    ],
)
def test_refused_before_any_rank(
    settings: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can be known beforehand is an error of the configuration, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    Path("TEXT").write_text("some text that is long enough")
    with pytest.raises(ConfigError, match=text):
        run(TrainConfig(**{"strategy": "ddp", "nproc": 2, "seq_length": 8, **settings}), quiet=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["TEXT"]
