"""Training that resumes from a checkpoint is the training that was interrupted."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from mtb_core import ConfigError, Job, Prepared, RunInfo, StepRecord, TrainConfig, hookimpl
from mtb_core.measure.result import Result
from mtb_core.ranks import signals
from mtb_core.running import run
from mtb_kit.drills import SignalAt
from mtb_kit.recording import RankRecord, run_recorded

COMMON: dict[str, Any] = {
    "seq_length": 8,
    "d_model": 16,
    "n_heads": 2,
    "n_layers": 1,
    "vocab_size": 64,
    "global_batch_size": 12,
    "dropout": 0.2,
    "max_grad_norm": 0.5,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 3,
    "lr_decay_steps": 12,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "device": "cpu",
}
CASES: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "single-bf16-accumulate": {"strategy": "single", "precision": "bf16", "grad_accum_steps": 3},
    "ddp-2": {"strategy": "ddp", "nproc": 2},
    "ddp-3-every-accumulate": {"strategy": "ddp", "nproc": 3, "grad_accum_steps": 2, "gradient_sync_mode": "every"},
    "ddp-2-bf16-sgd": {"strategy": "ddp", "nproc": 2, "precision": "bf16", "optimizer": "sgd", "momentum": 0.9},
    "ddp-3-zero1": {"strategy": "ddp", "nproc": 3, "strategy_opt": {"zero1": True}},
}


def settings(tmp_path: Path, case: str, **more: Any) -> dict[str, Any]:
    """Training on an epoch of 41 samples, so that four steps of 12 make one, the last one ragged."""
    data = tmp_path / "text"
    if not data.exists():
        data.write_bytes(bytes(random.Random(1).choices(range(64), k=8 * 41 + 1)))
    return {**COMMON, **CASES[case], "data": str(data), "vocab_size": 256, **more}


def losses(ranks: list[RankRecord]) -> list[list[float]]:
    return [rank.losses for rank in ranks]


def same_end(left: list[RankRecord], right: list[RankRecord]) -> bool:
    return all(
        a.final.keys() == b.final.keys() and all(torch.equal(a.final[k], b.final[k]) for k in a.final)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("case", CASES)
def test_resume_is_bitwise(case: str, tmp_path: Path) -> None:
    """Stopped at 3 (in an epoch), 4 (at its end) and 5, and resumed each time: losses, rates, weights to the bit."""
    whole, reference = run_recorded(TrainConfig(**settings(tmp_path, case, until_step=8)), tmp_path / "whole")
    assert whole.exit_reason == "done", whole.failure
    saving = {"checkpoint_dir": str(tmp_path / "checkpoints"), "save_every": 1}
    parts: list[list[RankRecord]] = []
    for index, (resume, until) in enumerate([(None, 3), ("latest", 4), ("auto", 5), ("latest", 8)]):
        config = TrainConfig(**settings(tmp_path, case, until_step=until, resume=resume, **saving))
        result, ranks = run_recorded(config, tmp_path / f"part{index}")
        assert result.exit_reason == "done", result.failure
        assert result.global_step == until
        assert result.runtime["scheduler_completed_steps"] == until
        if resume is not None:
            assert result.runtime["resume_deterministic"] is True, result.runtime
        parts.append(ranks)
    for rank, expected in enumerate(reference):
        records = [record for part in parts for record in part[rank].records]
        for name in ("global_step", "loss", "grad_norm", "learning_rate", "samples_seen", "tokens_seen"):
            assert [getattr(r, name) for r in records] == [getattr(r, name) for r in expected.records], name
    assert same_end(parts[-1], reference)


@pytest.mark.parametrize(
    ("case", "other"),
    [
        ("ddp-2", {"nproc": 3}),
        ("ddp-2", {"nproc": 1, "strategy": "single"}),
        ("single", {"nproc": 2, "strategy": "ddp"}),
        ("ddp-3-zero1", {"nproc": 2}),
        ("ddp-3-zero1", {"nproc": 2, "strategy_opt": {}}),
    ],
)
def test_another_world_size(case: str, other: dict[str, Any], tmp_path: Path) -> None:
    """Model, optimizer and data go on exactly; that random streams do not is said. Without dropout losses agree."""
    base = settings(tmp_path, case, dropout=0.0)
    whole, reference = run_recorded(TrainConfig(**{**base, "until_step": 7}), tmp_path / "whole")
    saving = {"checkpoint_dir": str(tmp_path / "checkpoints"), "save_every": 4}
    run_recorded(TrainConfig(**{**base, **saving, "until_step": 4}), tmp_path / "first")
    config = TrainConfig(**{**base, **other, **saving, "until_step": 7, "resume": "latest"})
    result, ranks = run_recorded(config, tmp_path / "second")
    assert result.exit_reason == "done", result.failure
    assert result.runtime["resume_deterministic"] is False
    assert result.runtime["resume_determinism_reason"]
    assert ranks[0].losses == pytest.approx(reference[0].losses[4:], rel=1e-5)
    assert [r.learning_rate for r in ranks[0].records] == [r.learning_rate for r in reference[0].records[4:]]
    assert [r.samples_seen for r in ranks[0].records] == [r.samples_seen for r in reference[0].records[4:]]
    assert whole.global_step == result.global_step == 7


class Draws:
    """Draws from every random stream each step, one more on rank 1, and adds what it drew to the loss's record."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._drawn: list[list[float]] = []
        self._rank = 0

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        self._rank = info.ctx.rank

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        for _ in range(1 + self._rank):
            drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        self._drawn.append(drawn)

    @hookimpl
    def mtb_run_finished(self, exit_reason: str) -> None:
        (self._folder / f"draws{self._rank}.json").write_text(json.dumps(self._drawn))


def test_every_rank_gets_its_own_random_streams_back(tmp_path: Path) -> None:
    """Python's, numpy's and torch's streams go on where they were, on each rank its own."""
    config = TrainConfig(**settings(tmp_path, "ddp-2"), until_step=5)

    def draws(config: TrainConfig, name: str) -> list[list[list[float]]]:
        folder = tmp_path / name
        folder.mkdir()
        run(attrs.evolve(config, run_dir=str(folder / "run")), quiet=True, plugins={"draws": partial(Draws, folder)})
        return [json.loads((folder / f"draws{rank}.json").read_text()) for rank in (0, 1)]

    whole = draws(config, "whole")
    saving = attrs.evolve(config, checkpoint_dir=str(tmp_path / "checkpoints"), save_every=2)
    draws(attrs.evolve(saving, until_step=2), "first")
    rest = draws(attrs.evolve(saving, resume="latest"), "second")
    assert whole[0] != whole[1]
    for rank in (0, 1):
        assert rest[rank] == whole[rank][2:]
    states = [json.loads(p.read_text()) for p in sorted((tmp_path / "checkpoints/step_00000002/rng").iterdir())]
    assert states[0]["torch_cpu"] != states[1]["torch_cpu"]


def test_changed_configuration_is_refused(tmp_path: Path) -> None:
    """What changes the training is refused before any rank starts, with a table; a change let through is recorded."""
    saving = {"checkpoint_dir": str(tmp_path / "checkpoints"), "save_every": 2}
    run_recorded(TrainConfig(**settings(tmp_path, "single", until_step=2, **saving)), tmp_path / "first")
    changed = settings(tmp_path, "single", until_step=4, resume="latest", **saving, weight_decay=0.2, max_grad_norm=1.0)
    with pytest.raises(ConfigError, match=r"--max-grad-norm +saved 0.5, now 1.0\n +--weight-decay +saved 0.1, now 0.2"):
        run(TrainConfig(**changed), quiet=True)
    allowed = {**changed, "allow_config_change": ["weight-decay", "max_grad_norm"]}
    result, _ = run_recorded(TrainConfig(**allowed), tmp_path / "second")
    assert result.exit_reason == "done", result.failure
    manifest = json.loads((tmp_path / "checkpoints/step_00000004/manifest.json").read_text())
    assert manifest["config_changes"]["weight_decay"] == {"saved": 0.1, "now": 0.2}
    assert result.runtime["resume_deterministic"] is False


def test_latest_never_starts_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a checkpoint `latest` is an error before any rank starts; `auto` starts anew."""
    values = settings(tmp_path, "single", until_step=2, checkpoint_dir=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="found no complete checkpoint"):
        run(TrainConfig(**values, resume="latest"), quiet=True)
    result = run(TrainConfig(**values, resume="auto", run_dir=str(tmp_path / "out")))
    assert "starting anew" in capsys.readouterr().err
    assert result.global_step == 2
    assert result.runtime["resumed"] is False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_saves_once_and_the_run_goes_on_later(number: int, tmp_path: Path) -> None:
    """A signal (twice) on one rank: all save the same step and leave; resuming it gives the uninterrupted training."""
    whole, reference = run_recorded(TrainConfig(**settings(tmp_path, "ddp-2", until_step=6)), tmp_path / "whole")
    values = settings(tmp_path, "ddp-2", checkpoint_dir=str(tmp_path / "checkpoints"), run_dir=str(tmp_path / "run"))
    config = TrainConfig(**values, until_step=6)
    result = run(config, quiet=True, plugins={"signal": partial(SignalAt, 1, 2, number, 2)})
    assert result.exit_code == (130 if number == signal.SIGINT else 4)
    assert result.runtime["ready_checkpoints"] == [3]
    assert result.global_step == 3
    resumed = attrs.evolve(config, run_dir=None, resume="latest")
    after, ranks = run_recorded(resumed, tmp_path / "after")
    assert after.exit_reason == whole.exit_reason == "done"
    assert losses(ranks) == [rank.losses[3:] for rank in reference]


class FailsAt:
    """Raises in the fault point `name` on rank 1, from the `count`-th time on."""

    def __init__(self, name: str, count: int) -> None:
        self._name, self._left, self._rank = name, count, -1

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Iterator[None]:
        self._rank = job.ctx.rank
        return (yield)  # type: ignore[return-value]

    @hookimpl
    def mtb_fault_point(self, name: str) -> None:
        if name == self._name and self._rank == 1:
            self._left -= 1
            if self._left <= 0:
                raise OSError(28, os.strerror(28), "shard")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failed_save_ends_the_run_and_harms_nothing(asynchronous: bool, tmp_path: Path) -> None:
    """An error in one rank's writer ends all ranks with errno and rank; the checkpoint before stays the newest."""
    values = settings(
        tmp_path,
        "ddp-2",
        until_step=30,
        checkpoint_dir=str(tmp_path / "checkpoints"),
        save_every=2,
        async_save=asynchronous,
        run_dir=str(tmp_path / "run"),
    )
    result: Result = run(TrainConfig(**values), quiet=True, plugins={"fault": partial(FailsAt, "tensors-written", 2)})
    assert result.exit_code == 3
    assert result.failure is not None
    assert "No space left on device" in result.failure["message"]
    assert "ank 1" in result.failure["text"]
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step_00000002"
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step_*")) == ["step_00000002"]
    assert result.global_step < 30


class Counter:
    """A run plugin with state of its own: how many steps it has seen since the training began."""

    def __init__(self, folder: Path) -> None:
        self._path, self._seen = folder / "seen", 0

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        self._seen += 1

    @hookimpl
    def mtb_plugin_state(self) -> Mapping[str, Any]:
        return {"seen": self._seen}

    @hookimpl
    def mtb_plugin_state_loaded(self, state: Mapping[str, Any]) -> None:
        self._seen = state["seen"]

    @hookimpl
    def mtb_checkpoint_published(self, path: Path, step: int) -> None:
        assert (path / "READY").is_file()
        with self._path.with_name("published").open("a") as file:
            file.write(f"{step}\n")

    @hookimpl
    def mtb_run_finished(self, exit_reason: str) -> None:
        self._path.write_text(str(self._seen))


def test_plugins_keep_their_state(tmp_path: Path) -> None:
    """What a plugin gives to a checkpoint it gets back on resume; it learns of published checkpoints."""
    saving = {"checkpoint_dir": str(tmp_path / "checkpoints"), "save_every": 2}
    first = TrainConfig(**settings(tmp_path, "single", until_step=4, run_dir=str(tmp_path / "a"), **saving))
    run(first, quiet=True, plugins={"counter": partial(Counter, tmp_path)})
    second = attrs.evolve(first, until_step=6, resume="latest", run_dir=str(tmp_path / "b"))
    run(second, quiet=True, plugins={"counter": partial(Counter, tmp_path)})
    assert (tmp_path / "seen").read_text() == "6"
    assert (tmp_path / "published").read_text().split() == ["2", "4", "6"]


def test_restart_after_a_failure_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    """With --max-restarts, ranks that are started again resume from what was saved, and losses are as without."""
    whole, reference = run_recorded(TrainConfig(**settings(tmp_path, "ddp-2", until_step=6)), tmp_path / "whole")
    values = settings(
        tmp_path,
        "ddp-2",
        until_step=6,
        checkpoint_dir=str(tmp_path / "checkpoints"),
        save_every=2,
        async_save=False,
        max_restarts=1,
    )
    folder = tmp_path / "restarted"
    folder.mkdir()
    config = TrainConfig(**values, run_dir=str(folder / "run"))
    result = run(config, quiet=True, plugins={"die": partial(DiesOnce, folder, 5)})
    assert result.exit_reason == "done", result.failure
    assert result.runtime["restarts"] == 1
    lines = [json.loads(x) for x in (folder / "run/metrics/rank_00000.jsonl").read_text().splitlines()]
    last = {line["global_step"]: line["loss"] for line in lines}
    assert [last[step] for step in range(1, 7)] == reference[0].losses
    assert whole.global_step == 6


class InsistsInASave:
    """SIGTERM, twice, while a checkpoint is written."""

    @hookimpl
    def mtb_fault_point(self, name: str) -> None:
        if name == "writing":
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)


def test_a_second_sigterm_cuts_no_save_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the save in which the first one came, nor the last one, of the step at which the run stops."""
    monkeypatch.setattr(signals, "SAME_REQUEST_S", 0.0)
    values = settings(tmp_path, "single", until_step=5, save_every=2, checkpoint_dir=str(tmp_path / "checkpoints"))
    config = TrainConfig(**values, async_save=False, run_dir=str(tmp_path / "run"))
    result = run(config, quiet=True, plugins={"insists": InsistsInASave})
    assert (result.exit_reason, result.failure) == ("stopped", None)
    assert result.runtime["ready_checkpoints"] == [2, 3]


class DiesOnce:
    """Kills rank 1 without a word at step `step`, if it has not done so before."""

    def __init__(self, folder: Path, step: int) -> None:
        self._marker, self._step, self._rank = folder / "died", step, -1

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Iterator[Prepared]:
        self._rank = job.ctx.rank
        return (yield)  # type: ignore[misc,return-value]

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        if self._rank == 1 and record.global_step == self._step and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_requeue_after_the_end_keeps_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command once more has nothing left to do, says so, and leaves what was measured alone."""
    values = settings(tmp_path, "single", until_step=3, save_every=2, resume="auto")
    kept = [tmp_path / "run" / "result.json", tmp_path / "out.json"]
    places = {"run_dir": str(kept[0].parent), "output": str(kept[1])}
    config = TrainConfig(**values, **places, checkpoint_dir=str(tmp_path / "checkpoints"))
    first = run(config, quiet=True)
    before = [path.read_bytes() for path in kept]
    again = run(config)
    assert (again.exit_code, again.steps, again.run_dir) == (0, 0, first.run_dir)
    assert (again.global_step, again.samples_seen, again.tokens_seen) == (3, first.samples_seen, first.tokens_seen)
    assert (again.execution_complete, again.performance_valid) == (True, False)
    assert "step_00000003 is at step 3, and --until-step is 3" in again.performance_invalid_reasons[0]
    assert "Nothing left to do" in capsys.readouterr().err
    assert [path.read_bytes() for path in kept] == before


@pytest.mark.parametrize("launched", [True, False])
def test_requeues_after_the_end_leave_no_folders(
    launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is started and no run folder made; a --run-dir that was asked for and has no result gets one."""
    monkeypatch.chdir(tmp_path)
    values = settings(tmp_path, "single", until_step=3, save_every=3, resume="auto", checkpoint_dir="checkpoints")
    run(TrainConfig(**values), quiet=True)
    if not launched:  # this process is then a rank of torchrun's
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
            monkeypatch.setenv(name, value)
    assert run(TrainConfig(**values), quiet=True).global_step == 3
    assert len(list(Path("runs").iterdir())) == 1
    run(TrainConfig(**values, run_dir="mine", output="out.json"), quiet=True)
    for path in (Path("mine/result.json"), Path("out.json")):
        stored = json.loads(path.read_text())
        assert (stored["exit_reason"], stored["global_step"], stored["steps"]) == ("done", 3, 0)


def test_a_requeue_makes_up_for_the_last_evaluation(tmp_path: Path) -> None:
    """A run that was killed between its last checkpoint and its evaluation has that left to do, once."""
    values = settings(tmp_path, "single", until_step=3, save_every=3, resume="auto")
    config = TrainConfig(**values, checkpoint_dir=str(tmp_path / "checkpoints"), run_dir=str(tmp_path / "first"))
    run(config, quiet=True)
    config = attrs.evolve(config, run_dir=str(tmp_path / "run"), eval_data=config.data)
    assert run(config, quiet=True).eval_loss is not None
    assert run(config, quiet=True).eval_loss is None


def test_a_new_run_does_not_mix_into_the_checkpoints_of_another(tmp_path: Path) -> None:
    """A folder that holds checkpoints is refused without --resume, before any rank starts."""
    values = settings(tmp_path, "single", until_step=2, save_every=1, checkpoint_dir=str(tmp_path / "checkpoints"))
    run_recorded(TrainConfig(**values), tmp_path / "first")
    with pytest.raises(ConfigError, match="holds checkpoints of another run, up to step 2"):
        run(TrainConfig(**values), quiet=True)


def test_a_restart_ends_where_the_run_was_to_end(tmp_path: Path) -> None:
    """With --steps, warm-up and a default cosine decay, a run that was started again takes the steps it was asked for."""
    folder = tmp_path / "restarted"
    folder.mkdir()
    values = {**settings(tmp_path, "ddp-2"), "steps": 6, "warmup_steps": 2, "lr_decay_steps": None}
    config = TrainConfig(
        **values,
        checkpoint_dir=str(tmp_path / "saved"),
        save_every=2,
        async_save=False,
        max_restarts=1,
        run_dir=str(folder / "run"),
    )
    result = run(config, quiet=True, plugins={"die": partial(DiesOnce, folder, 5)})
    assert result.exit_reason == "done", result.failure
    assert result.runtime["restarts"] == 1
    assert result.global_step == 8
    assert result.config["steps"] == 6
    assert result.config["lr_decay_steps"] == 8
    assert "resume" not in (folder / "run" / "config.toml").read_text()


def test_other_data_is_refused_and_moved_data_is_not(tmp_path: Path) -> None:
    """The content of the data decides, not the name of its file."""
    values = settings(tmp_path, "single", save_every=2, checkpoint_dir=str(tmp_path / "saved"))
    run_recorded(TrainConfig(**values, until_step=2), tmp_path / "first")
    moved = tmp_path / "moved"
    Path(values["data"]).rename(moved)
    values["data"] = str(moved)
    result, _ = run_recorded(TrainConfig(**values, until_step=3, resume="latest"), tmp_path / "second")
    assert result.runtime["resume_deterministic"] is True
    moved.write_bytes(bytes(reversed(moved.read_bytes())))
    with pytest.raises(ConfigError, match=r"--data  saved '.*with other content'"):
        run(TrainConfig(**values, until_step=4, resume="latest"), quiet=True)


def test_buffers_are_those_of_rank_0(tmp_path: Path) -> None:
    """A model with running statistics resumes to the bit on two ranks."""
    model = f"{Path(__file__).parent / 'models' / 'faulty.py'}:Normalised"
    values = {**settings(tmp_path, "ddp-2"), "model": model, "lr_decay_steps": None, "lr_scheduler": "constant"}
    values["lr_warmup_steps"] = 0
    _, whole = run_recorded(TrainConfig(**values, until_step=5), tmp_path / "whole")
    saving = {"checkpoint_dir": str(tmp_path / "saved"), "save_every": 2}
    run_recorded(TrainConfig(**values, **saving, until_step=2), tmp_path / "first")
    result, rest = run_recorded(TrainConfig(**values, **saving, until_step=5, resume="latest"), tmp_path / "rest")
    assert result.exit_reason == "done", result.failure
    assert losses(rest) == [rank.losses[2:] for rank in whole]
    assert same_end(rest[:1], whole[:1])


def test_state_that_is_not_saved_is_admitted(tmp_path: Path) -> None:
    """PowerSGD's error feedback is not in a checkpoint, so the continuation is not called deterministic, nor later ones."""
    values = settings(tmp_path, "ddp-2", strategy_opt={"comm_hook": "powersgd"}, save_every=1)
    values["checkpoint_dir"] = str(tmp_path / "saved")
    run_recorded(TrainConfig(**values, until_step=2), tmp_path / "first")
    result, _ = run_recorded(TrainConfig(**values, until_step=3, resume="latest"), tmp_path / "second")
    assert result.runtime["resume_deterministic"] is False
    assert "keeps state" in result.runtime["resume_determinism_reason"]
    manifest = json.loads((tmp_path / "saved" / "step_00000003" / "manifest.json").read_text())
    assert manifest["deterministic"] is False
