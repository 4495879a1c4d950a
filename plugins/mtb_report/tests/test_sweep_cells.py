"""Running a sweep's cells: every outcome is recorded, what was interrupted goes on, nothing is run twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtb_core import ConfigError
from mtb_report.results import Record, find_records, read_record, record_of
from mtb_report.sweep import runner
from mtb_report.sweep.plan import SweepPlan, read_plan
from mtb_report.sweep.show import show
from mtb_report.training import Attempt, outcome

TINY = "[base]\nsteps = 2\nwarmup_steps = 0\nd_model = 8\nn_heads = 1\nn_layers = 1\nseq_length = 8\nbatch_size = 2\n"


def plan(tmp_path: Path, text: str) -> SweepPlan:
    file = tmp_path / "s.toml"
    file.write_text(text)
    return read_plan(file)


def result_of(**more: Any) -> Record:
    raw = {
        "schema_version": 1,
        "benchmark": "training",
        "exit_reason": "done",
        "repeats": [{"step_time_ms": 1.0, "steps": 2}],
        "execution_complete": True,
        **more,
    }
    return record_of(raw, path=Path("result.json"), digest="0" * 64)


@pytest.mark.parametrize(
    ("exit_code", "result", "log", "more", "expected"),
    [
        (0, result_of(), "", {}, ("success", None)),
        (0, None, "", {}, ("failed_parse", "no_result")),
        (0, result_of(), "", {"trials": 3}, ("partial", "incomplete")),
        (4, result_of(exit_reason="stopped", execution_complete=False), "", {}, ("partial", "stopped")),
        (3, None, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", {}, ("oom", "cuda_oom")),
        (3, None, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", {}, ("oom", "host_oom")),
        (3, None, "Rank 1 died by SIGKILL", {"killed_for_memory": True}, ("oom", "host_oom")),
        (3, None, "Rank 1 died by SIGKILL", {}, ("failed", "run_failed")),
        (3, result_of(failure={"kind": "NonFinite", "text": "x"}, repeats=[]), "", {}, ("failed", "NonFinite")),
        (2, None, "mtb: error: wrong", {}, ("failed", "configuration")),
        (-9, None, "", {}, ("failed", "killed")),
        (-15, result_of(), "", {"timeout_s": 5.0}, ("timeout", "timeout")),
    ],
)
def test_outcomes(exit_code: int, result: Any, log: str, more: dict[str, Any], expected: tuple[str, str]) -> None:
    """Status and failure type follow from exit code, result and log; exit 0 alone is no success."""
    assert outcome(exit_code, result, log, **more)[:2] == expected


@pytest.mark.parametrize(
    ("code", "log", "reason"),
    [
        (-9, "", "it was ended by SIGKILL"),
        (-11, "step 3\n", "it was ended by SIGSEGV; its last words: step 3"),
        (-99, "", "it was ended by signal 99"),
    ],
)
def test_a_training_that_a_signal_ended_says_by_which(code: int, log: str, reason: str) -> None:
    """It could say nothing itself."""
    assert outcome(code, None, log)[2] == reason


def test_the_reason_is_the_error_that_was_printed() -> None:
    """Not the last line of whatever follows it."""
    assert outcome(2, None, "mtb: error: the cause.\nmore\n")[2] == "mtb: error: the cause."


# --- running, with trainings that are only said to have happened ---


def attempt_of(folder: Path, settings: dict[str, Any], status: str = "success") -> Attempt:
    record = None
    if status == "success":
        file = folder / "run" / "result.json"
        file.parent.mkdir(parents=True)
        time_ms = 10.0 / int(settings.get("nproc", 1))
        row = {"step_time_ms": time_ms, "tokens_per_sec": 1000 / time_ms}
        file.write_text(
            json.dumps({"schema_version": 1, "benchmark": "training", "exit_reason": "done", **row, "repeats": [row]})
        )
        record = read_record(file)
    kind = None if status == "success" else f"cuda_{status}"
    return Attempt(
        status=status, failure_type=kind, reason=None, exit_code=0, command="c", log_digest="d", seconds=1.0, result=record
    )  # fmt: skip


class Trainings:
    """In place of `train`: what is asked for, and how it ends."""

    def __init__(self, ends: dict[Any, str] | None = None, axis: str = "seed") -> None:
        self.asked: list[Any] = []
        self.ends = ends or {}
        self.axis = axis

    def __call__(self, folder: Path, settings: dict[str, Any], *, timeout_s: float | None = None) -> Attempt:
        value = settings[self.axis]
        self.asked.append(value)
        end = self.ends.get(value, "success")
        if end == "interrupt":
            raise KeyboardInterrupt
        return attempt_of(folder, settings, end)


SEEDS = f"name = 'x'\n{TINY}[matrix]\nseed = [0, 1, 2, 3]\n"


def run(tmp_path: Path, text: str, trainings: Any, monkeypatch: pytest.MonkeyPatch, **more: Any) -> dict[str, Any]:
    monkeypatch.setattr(runner, "train", trainings)
    return runner.run_sweep(plan(tmp_path, text), tmp_path / "out", argv=["mtb", "sweep"], **more)


def test_one_failure_does_not_stop_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell has its status; the counts and the file in the folder agree."""
    got = run(tmp_path, SEEDS, Trainings({1: "oom", 2: "failed"}), monkeypatch)
    assert [row["status"] for row in got["cells"]] == ["success", "oom", "failed", "success"]
    assert got["counts"] == {"success": 2, "oom": 1, "failed": 1}
    assert got["status"] == "partial"
    assert json.loads((tmp_path / "out" / "sweep.json").read_text()) == got
    assert got["cells"][1]["figures"] == {}
    found = find_records([tmp_path / "out"])
    assert [r.kind for r in found.records] == ["training", "training", "sweep"]


def test_home_folders_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training gets the path as it is; sweep.json has it shortened."""
    text = SEEDS.replace("[matrix]", "data = '/home/alice/text'\n[matrix]")
    trainings = Trainings(axis="data")
    run(tmp_path, text, trainings, monkeypatch)
    assert set(trainings.asked) == {"/home/alice/text"}
    assert "alice" not in (tmp_path / "out" / "sweep.json").read_text()


def test_an_interrupted_sweep_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was run before Ctrl-C is kept, the cell it hit and the rest are run, nothing twice."""
    order = [cell.labels["seed"] for cell in plan(tmp_path, SEEDS).in_order()]
    first = Trainings({order[2]: "interrupt"})
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, SEEDS, first, monkeypatch)
    second = Trainings()
    got = run(tmp_path, SEEDS, second, monkeypatch)
    assert first.asked == order[:3]
    assert second.asked == order[2:]
    assert got["execution_complete"] is True
    assert got["counts"] == {"success": 4}


def test_a_sweep_that_was_interrupted_in_its_first_cell_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that cell left does not make the folder a stranger's."""

    def first(folder: Path, _settings: dict[str, Any], **_more: Any) -> Attempt:
        folder.mkdir(parents=True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, SEEDS, first, monkeypatch)
    assert run(tmp_path, SEEDS, Trainings(), monkeypatch)["counts"] == {"success": 4}


def test_only_a_retry_runs_failures_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it an outcome stands; with it only what did not succeed is run."""
    run(tmp_path, SEEDS, Trainings({1: "failed"}), monkeypatch)
    again = Trainings()
    run(tmp_path, SEEDS, again, monkeypatch)
    assert again.asked == []
    got = run(tmp_path, SEEDS, again, monkeypatch, retry=True)
    assert again.asked == [1]
    assert got["counts"] == {"success": 4}


def test_a_result_that_was_changed_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row holds only while its result is there with the same digest."""
    got = run(tmp_path, SEEDS, Trainings(), monkeypatch)
    (tmp_path / "out" / got["cells"][0]["result"]).write_text("{}")
    (tmp_path / "out" / got["cells"][1]["result"]).unlink()
    again = Trainings()
    run(tmp_path, SEEDS, again, monkeypatch)
    assert sorted(again.asked) == [0, 1]


def test_another_sweep_in_the_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another name, or no sweep at all."""
    run(tmp_path, SEEDS, Trainings(), monkeypatch)
    with pytest.raises(ConfigError, match="'x'"):
        run(tmp_path, SEEDS.replace("'x'", "'y'"), Trainings(), monkeypatch)
    (tmp_path / "out" / "sweep.json").unlink()
    with pytest.raises(ConfigError, match="not empty"):
        run(tmp_path, SEEDS, Trainings(), monkeypatch)


def test_the_largest_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are tried from below in each group, none above the first that does not fit."""
    text = f"largest = 'seed'\n{TINY}[matrix]\nweight_decay = [0.0, 0.1]\nseed = [1, 2, 4, 8]\n"
    trainings = Trainings({4: "oom"})
    got = run(tmp_path, text, trainings, monkeypatch)
    assert trainings.asked == [1, 2, 4, 1, 2, 4]
    assert [(f["largest"], f["first_that_does_not"]) for f in got["largest_that_fits"]] == [(2, 4), (2, 4)]
    skipped = [row for row in got["cells"] if row["status"] is None]
    assert [row["labels"]["seed"] for row in skipped] == [8, 8]
    assert "seed = 4 ran out of memory" in skipped[0]["reason"]
    assert got["counts"] == {"success": 4, "oom": 2, "not_run": 2}


def test_the_files_order_says_what_is_larger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names too are tried as listed; one that failed otherwise is named, and is no limit."""
    sets = "".join(f"[sets.kind.{name}]\nseed = {seed}\n" for seed, name in enumerate(("small", "big", "most", "all")))
    text = f"largest = 'kind'\n{TINY}[matrix]\nkind = ['small', 'big', 'most', 'all']\n{sets}"
    trainings = Trainings({1: "failed", 2: "oom"})
    got = run(tmp_path, text, trainings, monkeypatch)
    assert trainings.asked == [0, 1, 2]
    (found,) = got["largest_that_fits"]
    assert (found["largest"], found["first_that_does_not"], found["failed"]) == ("small", "most", {"big": "failed"})


def test_progress_knows_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is told before one cell was run; then the median's share of the rest."""
    told: list[Any] = []
    run(tmp_path, SEEDS, Trainings(), monkeypatch, on_progress=told.append)
    assert [p.left_s for p in told] == [None, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0, 0.0]
    assert [p.number for p in told] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_figures_that_are_not_valid_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No throughput, time or memory of an invalid cell is in the table; `mtb report` does the same."""
    document = run(tmp_path, SEEDS, Trainings(), monkeypatch)
    figures = {"tokens_per_sec": 1234.0, "step_time_ms": 56.78, "max_memory_mib": 910.0}
    for row in document["cells"]:
        row.update(figures=figures, performance_valid=row["labels"]["seed"] != 0)
    show(document, tmp_path)
    shown = capsys.readouterr().out
    assert [shown.count(text) for text in ("1,234", "56.78", "910")] == [3, 3, 3]


def test_where_nothing_fits_none_is_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In words, not as Python says it."""
    document = run(tmp_path, SEEDS.replace("name", "largest = 'seed'\nname"), Trainings({0: "oom"}), monkeypatch)
    show(document, tmp_path)
    assert "Largest seed that fits: none (0 is too large)" in " ".join(capsys.readouterr().out.split())
