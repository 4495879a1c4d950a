"""Run plugins act on their run: by the vote of one rank, at one step on all ranks, and to the bit where they go back."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from acting import Acts, Ask, Forgets, Gives, Journal, LeavesOut, Mirror, SlowSave, die, journal, terminate

from mtb_core import Control, TrainConfig, hookimpl
from mtb_core.measure.result import Result
from mtb_core.ranks import signals
from mtb_core.running import run
from mtb_core.train import checkpointing
from mtb_core.train.trainer import Progress
from mtb_kit.recording import RankRecord, Recorder

COMMON: dict[str, Any] = {
    "seq_length": 8,
    "d_model": 16,
    "n_heads": 2,
    "n_layers": 1,
    "global_batch_size": 12,
    "dropout": 0.2,
    "max_grad_norm": 0.5,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 3,
    "lr_decay_steps": 12,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "device": "cpu",
    "sink": ("jsonl",),
}
RANKS: dict[int, dict[str, Any]] = {
    1: {"strategy": "single"},
    2: {"strategy": "ddp", "nproc": 2},
    3: {"strategy": "ddp", "nproc": 3, "grad_accum_steps": 2},
}
FSDP = {"strategy": "fsdp", "nproc": 2}


class Runs:
    """Trains in a folder of a test: an epoch is 41 samples, so four steps of 12, the last one ragged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "text"
        self.data.write_bytes(bytes(random.Random(1).choices(range(64), k=8 * 41 + 1)))
        self.checkpoints = folder / "checkpoints"

    def __call__(
        self,
        name: str,
        ranks: int | dict[str, Any],
        *asks: Ask,
        plugins: dict[str, Callable[[], object]] | None = None,
        **settings: Any,
    ) -> tuple[Result, list[RankRecord]]:
        """Run with one plugin that asks, those of `plugins`, a journal and a recorder, in the folder `name`."""
        place = self.folder / name
        place.mkdir()
        strategy = RANKS[ranks] if isinstance(ranks, int) else ranks
        values = {**COMMON, **strategy, "data": str(self.data), "vocab_size": 256, **settings}
        config = TrainConfig(**values, run_dir=str(place / "run"))
        own = {"acts": partial(Acts, *asks), "journal": partial(Journal, place), "recorder": partial(Recorder, place)}
        result = run(config, quiet=True, plugins={**own, **(plugins or {})})
        paths = sorted(place.glob("*.pickle"), key=lambda p: int(p.stem))
        import pickle

        return result, [pickle.loads(path.read_bytes()) for path in paths]

    def saving(self, every: int, **more: Any) -> dict[str, Any]:
        return {"checkpoint_dir": str(self.checkpoints), "save_every": every, "keep_last": 0, **more}

    def steps(self, name: str, rank: int = 0) -> list[list[Any]]:
        return journal(self.folder / name, rank, "step")

    def lines(self, name: str, rank: int = 0) -> list[dict[str, Any]]:
        path = self.folder / name / "run" / "metrics" / f"rank_{rank:05d}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def same(left: list[RankRecord], right: list[RankRecord]) -> bool:
    """Whether the runs ended with the same weights, to the bit."""
    return all(
        a.final.keys() == b.final.keys() and all(torch.equal(a.final[k], b.final[k]) for k in a.final)
        for a, b in zip(left, right, strict=True)
    )


def back(reason: str = "spike", **arguments: Any) -> Callable[[Control], None]:
    return lambda control: control.roll_back(reason, **arguments)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_finish(ranks: int, runs: Runs) -> None:
    """Asked by the last rank alone, all ranks end after the next step: done, exit code 0, with the reason."""
    ask = Ask("recorded", 3, lambda control: control.finish("good enough"), rank=ranks - 1)
    evaluation = {"eval_data": str(runs.data)}
    result, records = runs("run", ranks, ask, until_step=9, **runs.saving(0), **evaluation)
    assert (result.exit_reason, result.exit_code, result.stop_reason) == ("done", 0, "good enough")
    assert [len(record.records) for record in records] == [4] * ranks
    assert result.eval_loss is not None  # at the end, as in any run that is done
    assert result.runtime["ready_checkpoints"] == [4]
    stored = json.loads((runs.folder / "run" / "run" / "result.json").read_text())
    assert stored["stop_reason"] == "good enough"
    assert stored["plugin_results"] == {"journal": {"rank": 0}}


class InsistsInTheEvaluation:
    """SIGTERM, twice, when an evaluation has ended."""

    @hookimpl
    def mtb_evaluated(self) -> None:
        for _ in range(2):
            terminate(Control())


def test_a_finished_run_can_be_ended(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second SIGTERM ends its last evaluation, as that of any run: it has agreed to end, not to stop."""
    monkeypatch.setattr(signals, "SAME_REQUEST_S", 0.0)
    ask = Ask("phase", 1, lambda control: control.finish("enough"))
    insists = {"insists": InsistsInTheEvaluation}
    result, _ = runs("run", 1, ask, plugins=insists, until_step=9, eval_data=str(runs.data))
    assert result.exit_reason == "failed"
    assert result.failure is not None
    assert "a second SIGTERM" in result.failure["message"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_stop_and_resume(ranks: int, runs: Runs) -> None:
    """Asked by one rank before the first step: a checkpoint, exit code 4, and the rest of the training later, to the bit."""
    _, whole = runs("whole", ranks, until_step=4)
    ask = Ask("run_started", 0, lambda control: control.stop("time is over"), rank=ranks - 1)
    result, first = runs("first", ranks, ask, until_step=4, **runs.saving(0))
    assert (result.exit_reason, result.exit_code, result.stop_reason) == ("stopped", 4, "time is over")
    assert result.runtime["ready_checkpoints"] == [1]
    assert result.eval_loss is None
    resumed, rest = runs("rest", ranks, until_step=4, resume="latest", **runs.saving(0))
    assert (resumed.exit_reason, resumed.stop_reason) == ("done", None)
    for rank in range(ranks):
        assert first[rank].losses + rest[rank].losses == whole[rank].losses
    assert same(rest, whole)


@pytest.mark.parametrize("ranks", [1, 2, 3, FSDP], ids=["1", "2", "3", "fsdp"])
def test_skip(ranks: int | dict[str, Any], runs: Runs) -> None:
    """The update of the step that the request reaches is left out on all ranks: weights stay, the batch is consumed."""
    last = ranks - 1 if isinstance(ranks, int) else 1
    ask = Ask("phase", 3, lambda control: control.skip("odd batch"), rank=last)
    result, _ = runs("run", ranks, ask, plugins={"leaves": partial(LeavesOut, 5)}, until_step=6)
    assert result.skipped_steps == 2
    assert result.runtime["actions"] == [
        {"step": 3, "action": "skip", "reason": "odd batch"},
        {"step": 5, "action": "skip", "reason": "step 5"},
    ]
    for rank in range(last + 1):
        steps = runs.steps("run", rank)
        assert [skipped for _, _, skipped, _, _ in steps] == [False, False, True, False, True, False]
        assert [samples for *_, samples, _ in steps] == [12, 24, 36, 41, 53, 65]
        weights = [digest for *_, digest in steps]
        assert [a == b for a, b in itertools.pairwise(weights)] == [False, True, False, True, False]


def test_a_skipped_update_leaves_no_trace(runs: Runs) -> None:
    """Also the optimizer's state is that of a training without the step, whose schedule and data alone have gone on."""
    ask = Ask("phase", 1, lambda control: control.skip("no"), rank=1)
    flat = {"dropout": 0.0, "lr_scheduler": "constant", "lr_warmup_steps": 0, "lr_decay_steps": None}
    _, skipped = runs("skipped", 2, ask, until_step=3, **flat)
    runs.data.write_bytes(runs.data.read_bytes())
    moved = pytest.MonkeyPatch()
    with moved.context() as patch:
        patch.setattr(checkpointing, "Progress", lambda: Progress(0, 12, 0))  # where a run without checkpoint begins
        _, without = runs("without", 2, until_step=2, **flat)
    assert skipped[0].losses[1:] == without[0].losses
    assert same(skipped, without)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("leave_out", [0, 1, None])
def test_going_back_is_bitwise(ranks: int, leave_out: int | None, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is the training that goes on from that checkpoint with the data that follow what was left out."""
    ask = Ask("recorded", 4, back(before=4, leave_out=leave_out), rank=ranks - 1)
    result, records = runs("run", ranks, ask, until_step=7, **runs.saving(2))
    # After step 5 the run goes back to step 2, at 24 of 41 samples; then come 12, 5 (the end of the epoch), 12, …
    left_out = {0: 0, 1: 12, None: 29}[leave_out]
    assert [r.global_step for r in records[0].records] == [1, 2, 3, 4, 5, 3, 4, 5, 6, 7]
    (action,) = result.runtime["actions"]
    (aside,) = action.pop("put_aside")
    assert aside.startswith("rolled_back_step_00000004-")
    assert action == {
        "step": 5, "action": "roll_back", "reason": "spike", "to": 2, "samples_left_out": left_out,
    }  # fmt: skip
    assert result.runtime["ready_checkpoints"] == [2, 4, 6, 7]
    assert (runs.checkpoints / aside / "READY").is_file()
    assert result.runtime["resume_deterministic"] is False
    assert "spike" in result.runtime["resume_determinism_reason"]

    found = checkpointing._progress

    def moved(checkpoint: Any) -> Progress:
        progress = found(checkpoint)
        return attrs.evolve(progress, samples_seen=progress.samples_seen + left_out)

    monkeypatch.setattr(checkpointing, "_progress", moved)
    _, reference = runs("reference", ranks, until_step=7, resume=str(runs.checkpoints / "step_00000002"))
    for rank in range(ranks):
        for name in ("global_step", "loss", "grad_norm", "learning_rate", "samples_seen", "tokens_seen"):
            got = [getattr(record, name) for record in records[rank].records[5:]]
            assert got == [getattr(record, name) for record in reference[rank].records], name
    assert same(records, reference)


def test_a_crash_after_going_back(runs: Runs) -> None:
    """The restart goes on from the checkpoint that was gone back to, not from one that was put aside."""
    _, whole = runs("whole", 2, until_step=6)
    went, died = runs.folder / "went", runs.folder / "died"
    asks = [
        Ask("recorded", 4, back(before=4), rank=0, marker=went),
        Ask("phase", 4, die, rank=1, marker=died, after=went),
    ]
    saving = runs.saving(2, async_save=False)
    result, _ = runs("run", 2, *asks, until_step=6, max_restarts=1, **saving)
    assert (result.exit_reason, result.runtime["restarts"]) == ("done", 1), result.failure
    steps = [line["global_step"] for line in runs.lines("run")]
    assert steps[:5] == [1, 2, 3, 4, 5]
    assert steps[5] == 3
    assert steps[-4:] == [3, 4, 5, 6]
    assert [line["loss"] for line in runs.lines("run")][-4:] == whole[0].losses[2:]
    assert result.runtime["ready_checkpoints"] == [2, 4, 6]
    started = journal(runs.folder / "run", 0, "run_started")
    assert [first for first, _ in started] == [1, 3]
    assert len({time for _, time in started}) == 1  # a restart does not begin the run's wall time anew


def test_going_back_while_a_save_is_written(runs: Runs) -> None:
    """It is waited for, published, and put aside, for it is of a later step."""
    ask = Ask("phase", 5, back(before=4), rank=1)
    slow = {"slow": partial(SlowSave, 2)}
    result, _ = runs("run", 2, ask, plugins=slow, until_step=6, **runs.saving(2))
    assert result.exit_reason == "done", result.failure
    (action,) = result.runtime["actions"]
    assert [name.rpartition("-")[0] for name in action["put_aside"]] == ["rolled_back_step_00000004"]
    assert result.runtime["ready_checkpoints"] == [2, 4, 6]


@pytest.mark.parametrize("saves", [False, True])
def test_going_back_without_a_checkpoint(saves: bool, runs: Runs) -> None:
    """All ranks fail together, with what was missing and what to do."""
    ask = Ask("recorded", 2, back(before=2), rank=1)
    result, _ = runs("run", 2, ask, until_step=6, **(runs.saving(2) if saves else {}))
    assert result.exit_code == 3
    assert result.failure is not None
    assert result.failure["rank"] is None
    expected = "no complete checkpoint of a step below 2; save more often" if saves else "give --checkpoint-dir"
    assert expected in result.failure["message"]
    assert "spike: the run was to go back from step 3" in result.failure["message"]


def test_going_back_stays_in_the_same_training(runs: Runs) -> None:
    """Steps of another continuation in the same folder are no place to go back to; what was resumed from is."""
    runs("first", 1, until_step=4, **runs.saving(1))
    ask = Ask("recorded", 3, back(before=4), rank=0)
    resume = {"resume": str(runs.checkpoints / "step_00000002")}
    result, _ = runs("second", 1, ask, until_step=5, **runs.saving(0), **resume)
    assert [a["to"] for a in result.runtime["actions"]] == [2]
    assert (runs.checkpoints / "latest").read_text().strip() == "step_00000002"
    elsewhere = {"checkpoint_dir": str(runs.folder / "other"), **resume}
    result, _ = runs("third", 1, ask, until_step=5, **elsewhere)
    assert [a["to"] for a in result.runtime["actions"]] == [2]


def test_saving_on_request(runs: Runs) -> None:
    """One rank's request saves after that step, once, also where --save-every is due; without a folder it does nothing."""
    asks = [Ask("phase", step, Control.save, rank=1) for step in (3, 4)]
    result, _ = runs("run", 2, *asks, until_step=5, **runs.saving(4))
    assert result.runtime["ready_checkpoints"] == [3, 4, 5]
    assert result.runtime["actions"] == [{"step": 3, "action": "save"}]
    nowhere, _ = runs("nowhere", 1, *[attrs.evolve(ask, rank=0) for ask in asks], until_step=5)
    assert nowhere.runtime["actions"] == []
    assert ["save"] not in [p[:1] for p in journal(runs.folder / "nowhere", 0, "phase")]


def test_several_requests_at_once(runs: Runs) -> None:
    """Stop goes before going back, and that before finish and save; of two reasons that of the lowest rank counts."""
    at = partial(Ask, "phase", 3)
    both = [at(lambda c: c.stop("stop"), rank=1), at(back(before=3), rank=0), at(lambda c: c.finish("finish"), rank=0)]
    result, _ = runs("stop", 2, *both, until_step=5, **runs.saving(1))
    assert (result.exit_code, result.stop_reason, result.global_step) == (4, "stop", 3)
    assert result.runtime["actions"] == []
    assert result.runtime["ready_checkpoints"] == [1, 2, 3]

    runs.checkpoints = runs.folder / "others"
    asks = [
        at(back("first", before=3, leave_out=0), rank=0),
        at(back("second", before=2, leave_out=1), rank=1),
        at(lambda c: c.finish("finish"), rank=0),
        at(Control.save, rank=1),
    ]
    result, _ = runs("back", 2, *asks, until_step=4, **runs.saving(1))
    assert (result.exit_reason, result.stop_reason, result.global_step) == ("done", None, 4)
    (action,) = result.runtime["actions"]
    assert (action["reason"], action["to"], action["samples_left_out"]) == ("first", 1, 12)


def test_a_signal_goes_first(runs: Runs) -> None:
    """The run stops by the signal: it neither goes back nor is called done."""
    at = partial(Ask, "phase", 3)
    asks = [at(lambda c: c.finish("finish"), rank=0), at(back(before=3), rank=0), at(terminate, rank=1)]
    result, _ = runs("run", 2, *asks, until_step=9, **runs.saving(1))
    assert (result.exit_reason, result.exit_code, result.stop_reason) == ("stopped", 4, None)
    assert result.runtime["actions"] == []
    assert result.runtime["ready_checkpoints"] == [1, 2, 3]


def test_going_back_evaluates_anew(runs: Runs) -> None:
    """A step that is taken again is evaluated again; phases are announced in order."""
    ask = Ask("phase", 3, back(before=2), rank=0)
    more = {"eval_data": str(runs.data), "eval_every": 2}
    runs("run", 1, ask, until_step=4, **runs.saving(1), **more)
    lines = journal(runs.folder / "run")
    assert lines[0] == ["worker_started", True]
    assert [step for step, _ in journal(runs.folder / "run", 0, "evaluated")] == [2, 2, 4]
    expected = [
        ["prepare", 0], ["step", 1], ["save", 1], ["step", 2], ["save", 2], ["evaluate", 2], ["step", 3], ["load", 3],
        ["step", 2], ["save", 2], ["evaluate", 2], ["step", 3], ["save", 3], ["step", 4], ["save", 4], ["evaluate", 4],
        ["close", 4],
    ]  # fmt: skip
    assert journal(runs.folder / "run", 0, "phase") == expected


@pytest.mark.parametrize("strategy", [RANKS[2], FSDP], ids=["ddp", "fsdp"])
def test_metrics_of_plugins(strategy: dict[str, Any], runs: Runs) -> None:
    """They are in every line of every rank, as the mean over the ranks, and in the result."""
    gives = partial(Gives, lambda rank, step: {"rank": rank, "step": 10.0 * step + rank})
    result, _ = runs("run", strategy, plugins={"gives": gives}, until_step=3)
    for rank in (0, 1):
        metrics = [line["metrics"] for line in runs.lines("run", rank)]
        assert metrics == [{"rank": 0.5, "step": 10.0 * step + 0.5} for step in (1, 2, 3)]
    assert result.metrics == {"rank": 0.5, "step": 30.5}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda rank, step: {f"rank{rank}": 1.0}, "do not agree on the step metrics of run plugins"),
        (lambda rank, step: {"a" if step < 2 else "b": 1.0}, "gave the step metrics b, but before the first step a"),
    ],
)
def test_metrics_keep_their_names(make: Callable[[int, int], dict[str, float]], text: str, runs: Runs) -> None:
    """Names that differ between ranks, or change, end the run with the names instead of mixing up figures."""
    result, _ = runs("run", 2, plugins={"gives": partial(Gives, make)}, until_step=3)
    assert result.exit_code == 3
    assert result.failure is not None
    assert text in result.failure["message"]


def test_repeats(runs: Runs) -> None:
    """Each trial has plugins of its own; one that is finished early is done, and the next one follows."""
    ask = Ask("recorded", 2, lambda control: control.finish("enough"))
    result, _ = runs("run", 2, ask, steps=6, repeat=2)
    assert (result.exit_reason, result.stop_reason) == ("done", "enough")
    assert [row["global_step"] for row in result.repeats] == [3, 3]
    stop = Ask("recorded", 2, lambda control: control.stop("enough"))
    result, _ = runs("stop", 1, stop, steps=6, repeat=2)
    assert (result.exit_reason, len(result.repeats)) == ("stopped", 1)


def test_an_update_must_be_answered(runs: Runs) -> None:
    """A wrapper of the optimizer's step that returns nothing is an error, not an update that was left out."""
    result, _ = runs("run", 1, plugins={"forgets": Forgets}, until_step=2)
    assert result.exit_code == 3
    assert result.failure is not None
    assert "mtb_optimizer_step returned None" in result.failure["message"]


def test_ranks_that_disagree_on_an_update(runs: Runs) -> None:
    """They are told apart at the next step, before their weights have gone on."""
    result, _ = runs("run", 2, plugins={"leaves": partial(LeavesOut, 2, rank=1)}, until_step=6)
    assert result.exit_code == 3
    assert result.failure is not None
    assert (result.failure["rank"], result.failure["step"]) == (None, 2)
    assert "1 of 2 ranks have left out the last update" in result.failure["message"]


@pytest.mark.parametrize("after", [{"nproc": 2}, {"nproc": 3}, {"strategy": "single", "nproc": 1}], ids=str)
def test_tensors_of_plugins(after: dict[str, Any], runs: Runs) -> None:
    """A plugin's tensors are saved with the shards of the model, and come back on any number of ranks."""
    place = {"mirror": partial(Mirror, runs.folder)}
    runs("first", FSDP, plugins=place, until_step=2, **runs.saving(2))
    result, _ = runs("second", {**FSDP, **after}, plugins=place, until_step=3, resume="latest", **runs.saving(2))
    assert result.exit_reason == "done", result.failure
    for rank in range(after["nproc"]):
        assert json.loads((runs.folder / f"loaded_{rank}").read_text()) == [True, True, {"saved": True}]
