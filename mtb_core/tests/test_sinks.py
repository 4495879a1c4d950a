from __future__ import annotations

import ast
import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtb_core import NoOptions, StepRecord
from mtb_core.builtin import sinks
from mtb_core.builtin.sinks import ConsoleSink, JsonlSink, metrics_line
from mtb_kit.examples import example_record as record
from mtb_kit.examples import example_run as run_info

CONTRACT_KEYS = [
    "global_step",
    "loss",
    "grad_norm",
    "param_norm",
    "learning_rate",
    "clipped",
    "skipped",
    "nonfinite",
    "samples_seen",
    "tokens_seen",
    "valid_tokens",
    "data_time_ms",
    "forward_backward_ms",
    "optimizer_step_ms",
    "step_time_ms",
    "checkpoint_time_ms",
    "memory_mib",
    "time",
    "metrics",
]


def strict(text):
    """What a strict parser reads."""

    def refuse(constant):
        raise AssertionError(f"not JSON: {constant}")

    return json.loads(text, parse_constant=refuse)


def write(info, records):
    sink = JsonlSink(NoOptions())
    sink.mtb_run_started(info)
    for each in records:
        sink.mtb_step_recorded(each)
    sink.mtb_run_finished()


def lines(path):
    return [strict(line) for line in path.read_text().splitlines()]


def test_a_line_has_the_contract_keys_and_the_record_values():
    """Exactly the keys of the contract and `warmup`; every value as in the record."""
    made = record(3, param_norm=2 / 7, clipped=True, loss=1 / 3)
    read = strict(metrics_line(made))
    assert set(read) == {*CONTRACT_KEYS, "warmup"}
    assert read == attrs.asdict(made)
    assert list(read) == [field.name for field in attrs.fields(StepRecord)]


def test_a_line_holds_further_metrics():
    """By name, with the same bits; one that is not finite is null and says nothing about the step."""
    read = strict(metrics_line(record(3, metrics={"z": 1 / 3, "a": float("nan")})))
    assert read["metrics"] == {"z": 1 / 3, "a": None}
    assert read["nonfinite"] is False


def test_the_console_gets_further_metrics():
    """By name; one that is not finite is null."""
    told = []
    sink = ConsoleSink(NoOptions())
    sink.mtb_run_started(run_info(Path(), progress=told.append))
    sink.mtb_step_recorded(record(1, metrics={"aux": 0.5, "odd": float("inf")}))
    assert told[-1]["metrics"] == {"aux": 0.5, "odd": None}


FLOATS = [f.name for f in attrs.fields(StepRecord) if f.type in ("float", "float | None")]


@given(st.fixed_dictionaries(dict.fromkeys(FLOATS, st.floats())), st.booleans(), st.booleans(), st.booleans())
def test_any_record_makes_a_strict_line_that_reads_back(values, clipped, skipped, warmup):
    """Finite floats keep their bits; the others are null and make `nonfinite` true, and nothing else does."""
    made = record(7, **values, clipped=clipped, skipped=skipped, warmup=warmup)
    line = metrics_line(made)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    read = strict(line)
    for name, value in values.items():
        assert read[name] == (value if math.isfinite(value) else None)
    assert read["nonfinite"] is (not all(map(math.isfinite, values.values())))
    assert [read["clipped"], read["skipped"], read["warmup"]] == [clipped, skipped, warmup]


def test_a_nan_step_is_visible_and_others_are_unchanged(tmp_path):
    """NaN at step 3 of 5: its line says null and nonfinite; the four others are as without it."""
    steps = [record(step) for step in range(1, 6)]
    steps[2] = record(3, loss=math.nan, grad_norm=math.inf, nonfinite=True)
    write(run_info(tmp_path), steps)
    read = lines(tmp_path / "metrics" / "rank_00000.jsonl")
    assert [line["loss"] for line in read] == [4.875, 4.75, None, 4.5, 4.375]
    assert [line["nonfinite"] for line in read] == [False, False, True, False, False]
    assert read[2]["grad_norm"] is None


def test_a_step_that_ranks_agreed_to_be_bad_is_flagged_with_finite_numbers():
    """`nonfinite` of the record is kept, also if this rank's numbers are finite."""
    assert strict(metrics_line(record(1, nonfinite=True)))["nonfinite"] is True


def test_every_rank_and_trial_writes_its_own_file(tmp_path):
    """Rank and trial decide the file."""
    for info in (run_info(tmp_path, 0), run_info(tmp_path, 1), run_info(tmp_path, 1, trial=1)):
        write(info, [record(1)])
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*") if path.is_file()}
    assert found == {
        "metrics/rank_00000.jsonl",
        "metrics/rank_00001.jsonl",
        "metrics/trial_001/rank_00001.jsonl",
        "heartbeat/rank_00000.json",
        "heartbeat/rank_00001.json",
    }


@pytest.mark.parametrize("torn", ["", '{"global_step": 3, "lo', "x" * 10_000])
def test_a_resumed_run_goes_on_after_the_last_whole_line(tmp_path, torn):
    """The lines of before stay; a line that a crash of the machine left unfinished is cut off."""
    path = tmp_path / "metrics" / "rank_00000.jsonl"
    write(run_info(tmp_path), [record(1), record(2)])
    with path.open("a") as file:
        file.write(torn)
    write(run_info(tmp_path, first=3), [record(3)])
    assert [line["global_step"] for line in lines(path)] == [1, 2, 3]


def test_a_file_that_holds_nothing_but_a_torn_line_starts_anew(tmp_path):
    """There may be no whole line at all."""
    (tmp_path / "metrics").mkdir()
    path = tmp_path / "metrics" / "rank_00000.jsonl"
    path.write_text("x" * 5000)
    write(run_info(tmp_path), [record(1)])
    assert [line["global_step"] for line in lines(path)] == [1]


KILLED = """
import os, signal, sys
from pathlib import Path
from mtb_core import NoOptions
from mtb_core.builtin.sinks import JsonlSink
sys.path.insert(0, {here!r})
from test_sinks import record, run_info
sink = JsonlSink(NoOptions())
sink.mtb_run_started(run_info(Path({folder!r})))
for step in range(1, 101):
    sink.mtb_step_recorded(record(step))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_loses_no_line(tmp_path):
    """After SIGKILL, every step that was recorded is in the file, whole."""
    program = KILLED.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=240)
    assert done.returncode == -signal.SIGKILL
    read = lines(tmp_path / "metrics" / "rank_00000.jsonl")
    assert [line["global_step"] for line in read] == list(range(1, 101))


def heartbeat(folder, rank=0):
    return strict((folder / "heartbeat" / f"rank_{rank:05d}.json").read_text())


def test_the_heartbeat_tells_step_and_phase(tmp_path, monkeypatch):
    """It exists from the start, is refreshed at most once a second, and says at the end that the run has finished."""
    now = 1000.0
    monkeypatch.setattr(sinks.time, "monotonic", lambda: now)
    sink = JsonlSink(NoOptions())
    sink.mtb_run_started(run_info(tmp_path, first=5))
    assert set(heartbeat(tmp_path)) == {"global_step", "time", "phase"}
    seen = [heartbeat(tmp_path)["global_step"]]
    for step in (5, 6, 7, 8):
        now += 0.6
        sink.mtb_step_recorded(record(step))
        seen.append(heartbeat(tmp_path)["global_step"])
    assert seen == [4, 4, 6, 6, 8]
    assert heartbeat(tmp_path)["phase"] == "training"
    sink.mtb_run_finished()
    assert heartbeat(tmp_path)["phase"] == "finished"
    assert [path.name for path in (tmp_path / "heartbeat").iterdir()] == ["rank_00000.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_and_the_end_still_works(tmp_path):
    """The sink tells core, which switches it off; closing it afterwards does not fail."""
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "rank_00000.jsonl").symlink_to("/dev/full")
    sink = JsonlSink(NoOptions())
    sink.mtb_run_started(run_info(tmp_path))
    with pytest.raises(OSError, match="No space left"):
        sink.mtb_step_recorded(record(1))
    sink.mtb_run_finished()


@pytest.mark.parametrize("sink", [JsonlSink, ConsoleSink])
def test_finishing_without_having_started_does_nothing(sink):
    """Core tells every sink of the end, also one whose start failed."""
    made = sink(NoOptions())
    made.mtb_step_recorded(record(1))
    if sink is JsonlSink:
        made.mtb_run_finished()
    else:
        made.mtb_run_finished("failed")


class Clock:
    """A monotonic clock that goes on only when told."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(sinks.time, "monotonic", lambda: self.now)


def test_the_console_tells_the_start_the_steps_and_the_end(tmp_path, monkeypatch):
    """At 40 ms a step, every third is told; first and last always; rates are those since the message before."""
    clock, told = Clock(monkeypatch), []
    sink = ConsoleSink(NoOptions())
    sink.mtb_run_started(run_info(tmp_path, first=1, last=9, progress=told.append))
    for step in range(1, 10):
        sink.mtb_step_recorded(record(step, valid_tokens=1990, step_time_ms=10.0))
        clock.now += 0.04
    sink.mtb_evaluated(9, math.inf)
    sink.mtb_run_finished("done")
    assert told[0] == {"event": "start", "first_step": 1, "last_step": 9, "trial": 0}
    steps = [fields for fields in told if fields["event"] == "step"]
    assert [fields["step"] for fields in steps] == [1, 4, 7, 9]
    assert [fields["tokens_per_sec"] for fields in steps] == [pytest.approx(199_000.0)] * 4
    assert [fields["warmup"] for fields in steps] == [True, False, False, False]
    assert told[-2:] == [{"event": "eval", "step": 9, "eval_loss": None}, {"event": "finish", "exit_reason": "done"}]
    for fields in told:
        json.dumps(fields, allow_nan=False)


def test_a_run_that_stops_early_still_tells_its_last_step(tmp_path, monkeypatch):
    """The step that was held back comes before the end; a step that is not finite is never held back."""
    Clock(monkeypatch)
    told = []
    sink = ConsoleSink(NoOptions())
    sink.mtb_run_started(run_info(tmp_path, progress=told.append))
    sink.mtb_step_recorded(record(1))
    sink.mtb_step_recorded(record(2, loss=math.nan, nonfinite=True))
    sink.mtb_step_recorded(record(3))
    sink.mtb_step_recorded(record(4))
    sink.mtb_run_finished("stopped")
    steps = [(fields["step"], fields["loss"]) for fields in told if fields["event"] == "step"]
    assert steps == [(1, 4.875), (2, None), (4, 4.5)]


def test_only_rank_0_speaks(tmp_path):
    """Losses are equal on all ranks; one voice is enough."""
    told = []
    sink = ConsoleSink(NoOptions())
    sink.mtb_run_started(run_info(tmp_path, 1, progress=told.append))
    sink.mtb_step_recorded(record(1))
    sink.mtb_evaluated(1, 2.0)
    sink.mtb_run_finished("done")
    assert told == []


def test_the_sinks_import_nothing_but_public_names():
    """Built-in sinks have no privileges, and loading them loads no torch."""
    program = "import sys, mtb_core.builtin.sinks; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=240)
    loaded = set(done.stdout.split())
    assert not {"torch", "numpy", "rich"} & {name.partition(".")[0] for name in loaded}
    tree = ast.parse(Path(sinks.__file__).read_text())
    sources = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert {module for module in sources if module.startswith("mtb")} == {"mtb_core"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
