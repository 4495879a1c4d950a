"""`mtb sweep`: the right cells, every outcome recorded, interrupted ones resumed, published whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from mtb_core import ConfigError
from mtb_report.results import Record, find_records, read_record, record_of
from mtb_report.sweep import runner
from mtb_report.sweep.analysis import add_efficiency, add_errors, largest_that_fits
from mtb_report.sweep.command import sweep
from mtb_report.sweep.plan import SweepPlan, read_plan
from mtb_report.training import Attempt, outcome

TINY = "[base]\nsteps = 2\nwarmup_steps = 0\nd_model = 8\nn_heads = 1\nn_layers = 1\nseq_length = 8\nbatch_size = 2\n"
RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))


def plan(tmp_path: Path, text: str, size: str | None = None) -> SweepPlan:
    file = tmp_path / "s.toml"
    file.write_text(text)
    return read_plan(file, size)


# --- the file ---


@pytest.mark.parametrize("size", ["small", "full"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid(recipe: Path, size: str) -> None:
    """Every recipe has both sizes, valid settings in all cells, and can be shown without running."""
    assert read_plan(recipe, size).name == recipe.stem
    done = CliRunner().invoke(sweep, [str(recipe), "--size", size, "--dry-run"], standalone_mode=False)
    assert done.exception is None
    assert f"{len(read_plan(recipe, size).cells)} cells" in done.stdout


def test_all_recipes_are_there() -> None:
    """The named ones."""
    assert [path.stem for path in RECIPES] == [
        "bucket-size", "determinism", "gradient-sync", "largest-micro-batch", "memory-pressure", "micro-batch",
        "precision", "sharding-frontier", "stability", "strong-scaling", "weak-scaling",
    ]  # fmt: skip


def test_a_matrix_is_a_product(tmp_path: Path) -> None:
    """Axes are settings, options of the strategy, or sets of settings; [[exclude]] takes combinations out."""
    got = plan(
        tmp_path,
        f"""{TINY}
[sets.kind.a]
strategy = "ddp"
strategy_opt = {{ static_graph = true }}
[sets.kind.b]
strategy = "fsdp"
[matrix]
nproc = [1, 2]
kind = ["a", "b"]
"strategy_opt.x" = [1, 5]
[[exclude]]
kind = "b"
nproc = 2
""",
    )
    assert len(got.cells) == 6
    first = got.cells[0]
    assert first.labels == {"nproc": 1, "kind": "a", "strategy_opt.x": 1}
    assert first.settings["strategy_opt"] == {"static_graph": True, "x": 1}
    assert first.settings["strategy"] == "ddp"
    assert len({cell.id for cell in got.cells}) == 6


def test_the_order_is_random_and_the_same_again(tmp_path: Path) -> None:
    """By the seed alone."""
    text = TINY + "[matrix]\nseed = [0, 1, 2, 3, 4, 5, 6, 7]\n"
    orders = [[c.id for c in plan(tmp_path, f"seed = {s}\n{text}").in_order()] for s in (1, 1, 2)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
    assert orders[0] != [c.id for c in plan(tmp_path, text).cells]


def test_other_settings_are_other_cells(tmp_path: Path) -> None:
    """A cell's folder changes with any of its settings, so that an old result is never taken for it."""
    text = TINY + "[matrix]\nseed = [0]\n"
    assert plan(tmp_path, text).cells[0].id != plan(tmp_path, text.replace("steps = 2", "steps = 3")).cells[0].id


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = [", "TOML"),
        (TINY, "no cell"),
        ("matrx = 1", "matrix"),
        ("[matrix]\nseed = []", "not empty"),
        ("[matrix]\nseed = 1", "list"),
        ("[matrix]\nsteps = ['a']", "cell steps=a"),
        ("[matrix]\nstepps = [1]", "steps"),
        ("scaling = 'strong'\n[matrix]\nsteps = [1]", "nproc"),
        ("scaling = 'odd'\n[matrix]\nsteps = [1]", "strong, weak"),
        ("largest = 'x'\n[matrix]\nsteps = [1]", "no axis"),
        ("[matrix]\nrun_dir = ['x']", "decides"),
        ("timeout_s = 0\n[matrix]\nsteps = [1]", "above 0"),
        ("[sets.k.a]\n[matrix]\nk = ['b']", "sets.k.b"),
        ("[sizes.small.bse]\n[matrix]\nsteps = [1]", "bse"),
        ("[matrix]\nseed = [2020-01-01]", "each value must be"),
        ("[matrix]\nseed = [nan]", "each value must be"),
        ("[matrix]\nk = [['a']]\n[sets.k.a]\nsteps = 1", "each value must be"),
        ("[matrix]\nk = ['a']\n[sets.k]\na = 3", r"\[sets.k.a\] is 3"),
        ("[matrix]\nk = ['a']\n[sets]\nk = 3", r"\[sets.k\] is 3"),
        ("[matrix]\nsteps = [1]\n[sizes]\nsmall = 3", r"\[sizes.small\] is 3"),
        ("[matrix]\nsteps = [1]\n[sizes.small]\nbase = 3", r"\[sizes.small.base\] is 3"),
        ("[base]\nstrategy_opt = 3\n[matrix]\nsteps = [1]", "strategy_opt is 3"),
        ("exclude = [1]\n[matrix]\nsteps = [1]", r"\[\[exclude\]\] is 1"),
        ("name = 'a/../../b'\n[matrix]\nsteps = [1]", "names a folder"),
        ("name = '..'\n[matrix]\nsteps = [1]", "names a folder"),
        ("[sizes.'a/b'.base]\n[matrix]\nsteps = [1]", "names a folder"),
        ("timeout_s = nan\n[matrix]\nsteps = [1]", "finite"),
        ("timeout_s = inf\n[matrix]\nsteps = [1]", "finite"),
        ("[[exclude]]\nstep = 1\n[matrix]\nsteps = [1, 2]", "no axis"),
        ("[[exclude]]\nsteps = 3\n[matrix]\nsteps = [1, 2]", "values of that axis"),
        ("[error_against]\nprecision = 'fp23'\n[matrix]\nprecision = ['fp32', 'bf16']", "values of that axis"),
        ("largest = 'steps'\n[matrix]\nsteps = [4, 2]", "small to large"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path: Path, text: str, words: str) -> None:
    """Before anything runs, with what would be valid."""
    with pytest.raises(ConfigError, match=words):
        plan(tmp_path, text)


# --- outcomes ---


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


# --- what follows from the cells ---


def row(name: str, status: str = "success", figures: dict[str, Any] | None = None, **labels: Any) -> dict[str, Any]:
    return {"id": name, "labels": labels, "status": status, "figures": figures or {}}


def test_strong_efficiency() -> None:
    """T1 / (n Tn), each strategy against its own run on one rank; without that, nothing."""
    rows = [
        row("a", figures={"step_time_ms": 100.0}, nproc=1, strategy="ddp"),
        row("b", figures={"step_time_ms": 40.0}, nproc=4, strategy="ddp"),
        row("c", figures={"step_time_ms": 50.0}, nproc=4, strategy="fsdp"),
        row("d", "oom", nproc=1, strategy="fsdp"),
    ]
    add_efficiency(rows, "strong")
    assert [r["efficiency"] for r in rows] == [1.0, 0.625, None, None]


@pytest.mark.parametrize(
    ("scaling", "batches", "words"),
    [("strong", (4, 8), "global batch is 8, but 4"), ("weak", (4, 4), "batch of a rank is 2, but 4")],
)
def test_no_efficiency_of_unlike_work(scaling: str, batches: tuple[int, int], words: str) -> None:
    """Where the batch that must be equal is not, there is a reason and no figure, and people see it."""
    rows = [
        row(str(n), figures={"step_time_ms": 1.0, "tokens_per_sec": 2.0, "global_batch_size": batch}, nproc=n)
        for n, batch in zip((1, 2), batches, strict=True)
    ]
    add_efficiency(rows, scaling)
    assert [r["efficiency"] for r in rows] == [1.0, None]
    assert words in rows[1]["efficiency_reason"]
    assert rows[0]["efficiency_reason"] is None


def test_no_efficiency_without_a_time() -> None:
    """The reason says whether it is the cell or its base that has none."""
    rows = [row("a", "oom", nproc=1), row("b", figures={"step_time_ms": 1.0}, nproc=2)]
    add_efficiency(rows, "strong")
    assert [r["efficiency_reason"] for r in rows] == [
        "the cell has no time",
        "the cell on 1 ranks, the base, has no time",
    ]


def test_weak_efficiency_from_two_ranks() -> None:
    """Tokens a second and rank over those of the fewest ranks, which are named."""
    rows = [
        row("a", figures={"step_time_ms": 1.0, "tokens_per_sec": 200.0}, nproc=2),
        row("b", figures={"step_time_ms": 1.0, "tokens_per_sec": 360.0}, nproc=4),
    ]
    add_efficiency(rows, "weak")
    assert rows[1]["efficiency"] == pytest.approx(0.9)
    assert rows[1]["efficiency_base_ranks"] == 2


def test_errors_against_a_reference() -> None:
    """The largest relative deviation over common steps, against the reference of the same other labels."""
    rows = [row(f"{s}{p}", strategy=s, precision=p) for s in "xy" for p in ("fp32", "bf16")]
    line = {"global_step": 1, "loss": 2.0, "grad_norm": 4.0}
    metrics = {
        "xfp32": [line, {**line, "global_step": 2, "loss": 1.0}],
        "xbf16": [
            {**line, "loss": 2.1},
            {**line, "global_step": 2, "loss": 1.2, "grad_norm": None},
            {**line, "global_step": 3},
        ],
        "yfp32": [],
    }
    add_errors(rows, {"precision": "fp32"}, metrics)
    found = {r["id"]: r for r in rows}
    assert found["xfp32"]["loss_error"] == 0.0
    assert found["xbf16"]["loss_error"] == pytest.approx(0.2)
    assert found["xbf16"]["grad_norm_error"] == 0.0
    assert found["xbf16"]["error_steps"] == 2
    assert found["ybf16"]["reference"] == "yfp32"
    assert found["ybf16"]["loss_error"] is None


@pytest.mark.parametrize("bad", ["a", "b"])
def test_a_training_that_diverged_has_no_error(bad: str) -> None:
    """Steps that are not finite, in the cell or its reference, are counted, and no small number stands in their place."""
    rows = [row(name, precision=name) for name in "ab"]
    good = [{"global_step": n, "loss": 1.0, "grad_norm": 1.0} for n in range(10)]
    broken = {"loss": None, "loss_nonfinite": "nan", "grad_norm": None, "grad_norm_nonfinite": "inf"}
    metrics = dict.fromkeys("ab", good)
    metrics[bad] = good[:2] + [{**line, **broken} for line in good[2:]]
    add_errors(rows, {"precision": "a"}, metrics)
    assert (rows[1]["loss_error"], rows[1]["grad_norm_error"]) == (None, None)
    assert (rows[1]["error_steps"], rows[1]["loss_nonfinite_steps"], rows[1]["grad_norm_nonfinite_steps"]) == (2, 8, 8)


def test_nothing_that_fits() -> None:
    """Where even the smallest is too large, no size is named."""
    assert largest_that_fits([row("a", "oom", batch_size=1)], "batch_size")[0]["largest"] is None


# --- real trainings ---


def mtb(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mtb_core", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(240)
def test_a_real_sweep(tmp_path: Path) -> None:
    """A cell that trains and one that cannot: both recorded with command, exit code and digest; exit code 3; resumed."""
    (tmp_path / "s.toml").write_text(f"name = 's'\n{TINY}[matrix]\nstrategy = ['single', 'nosuch']\n")
    done = mtb(tmp_path, "sweep", "s.toml", "--run-dir", "out", "--json")
    assert done.returncode == 3, done.stderr
    good, bad = json.loads(done.stdout)["cells"]
    assert (good["status"], bad["status"], bad["failure_type"], bad["exit_code"]) == (
        "success",
        "failed",
        "configuration",
        2,
    )
    assert "nosuch" in bad["reason"]
    assert good["figures"]["step_time_ms"] > 0
    assert len(good["log_digest"]) == 64
    assert f"out/cells/{good['id']}/settings.toml" in good["command"]
    assert "[2/2]" in done.stderr
    again = mtb(tmp_path, "sweep", "s.toml", "--run-dir", "out")
    assert again.returncode == 3
    assert "[1/2]" not in again.stderr


@pytest.mark.timeout(240)
def test_a_cell_without_enough_memory(tmp_path: Path) -> None:
    """A model larger than any address space is recorded as out of memory; that is an answer: exit code 0."""
    text = f"name = 's'\n{TINY}[matrix]\nvocab_size = [{2**40}]\n".replace("d_model = 8", "d_model = 64")
    (tmp_path / "s.toml").write_text(text)
    done = mtb(tmp_path, "sweep", "s.toml", "--run-dir", "out", "--json")
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(done.stdout)["cells"]
    assert (cell["status"], cell["failure_type"], cell["exit_code"]) == ("oom", "host_oom", 3)
    assert cell["figures"]["step_time_ms"] is None


@pytest.mark.timeout(240)
def test_a_cell_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    """It and its ranks are ended, and recorded as a timeout."""
    text = f"name = 's'\n{TINY}[matrix]\nsteps = [100000000]\nnproc = [2]\nstrategy = ['ddp']\n".replace(
        "steps = 2\n", ""
    )
    (tmp_path / "s.toml").write_text(text)
    done = mtb(tmp_path, "sweep", "s.toml", "--run-dir", "out", "--json", "--timeout-s", "8")
    assert done.returncode == 3, done.stderr
    (cell,) = json.loads(done.stdout)["cells"]
    assert (cell["status"], cell["failure_type"]) == ("timeout", "timeout")
    assert not _processes_with(str(cell["id"]))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 4)])
def test_a_signal_ends_the_training_too(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """The contract's exit code, no rank is left, and the interrupted cell is not recorded."""
    text = f"name = 's'\n{TINY}[matrix]\nsteps = [100000000]\n".replace("steps = 2\n", "")
    (tmp_path / "s.toml").write_text(text)
    words = [sys.executable, "-m", "mtb_core", "sweep", "s.toml", "--run-dir", "out"]
    process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("out/cells/*/run/metrics/*.jsonl")):
        assert process.poll() is None
        os.sched_yield()
        time.sleep(0.05)
    (cell,) = (tmp_path / "out" / "cells").iterdir()
    assert _processes_with(cell.name)
    process.send_signal(number)
    assert process.wait() == code
    assert json.loads((tmp_path / "out" / "sweep.json").read_text())["counts"] == {"not_run": 1}
    assert not _processes_with(cell.name)


@pytest.mark.timeout(240)
def test_a_sweep_that_is_killed_leaves_no_training(tmp_path: Path) -> None:
    """SIGKILL leaves it no time to stop anything; the training and its ranks end all the same."""
    text = f"name = 's'\n{TINY}[matrix]\nsteps = [100000000]\nnproc = [2]\nstrategy = ['ddp']\n"
    (tmp_path / "s.toml").write_text(text.replace("steps = 2\n", ""))
    words = [sys.executable, "-m", "mtb_core", "sweep", "s.toml", "--run-dir", "out"]
    process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob("out/cells/*/run/metrics/*.jsonl")):
        assert process.poll() is None
        os.sched_yield()
        time.sleep(0.05)
    (cell,) = (tmp_path / "out" / "cells").iterdir()
    assert _processes_with(cell.name)
    process.kill()
    process.wait()
    while _processes_with(cell.name):  # the test's time limit ends it where they stay
        time.sleep(0.05)


def _processes_with(word: str) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = file.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if word in text:
            found.append(text)
    return found
