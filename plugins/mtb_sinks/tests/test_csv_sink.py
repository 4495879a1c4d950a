from __future__ import annotations

import csv
import math

from mtb_core import NoOptions
from mtb_sinks.csv_sink import COLUMNS, CsvSink


def _run(info, records, exit_reason="done"):
    sink = CsvSink(NoOptions())
    sink.mtb_run_started(info)
    for record in records:
        sink.mtb_step_recorded(record)
    sink.mtb_run_finished()


def _rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, strict=True))


def test_every_field_is_read_back_with_the_same_bits(info, record):
    """A row holds every field of its record; floats survive the round trip exactly."""
    run, step = info(), record(3, loss=1 / 3, learning_rate=1e-7, param_norm=2 / 7, clipped=True)
    _run(run, [step])
    (row,) = _rows(run.folder / "metrics" / "rank_00000.csv")
    assert list(COLUMNS) == list(row)
    assert [
        row["global_step"],
        *(float(row[name]) for name in ("loss", "learning_rate", "param_norm")),
    ] == ["3", 1 / 3, 1e-7, 2 / 7]
    assert [row["clipped"], row["skipped"], row["warmup"]] == ["true", "false", "false"]
    assert step.time == row["time"]


def test_a_value_that_is_not_finite_stays_visible_and_one_not_measured_is_empty(info, record):
    """NaN and infinity are neither dropped nor replaced; None is an empty cell; other rows are unchanged."""
    run = info()
    _run(run, [record(1), record(2, loss=math.nan, grad_norm=math.inf, nonfinite=True), record(3)])
    rows = _rows(run.folder / "metrics" / "rank_00000.csv")
    assert [row["loss"] for row in rows] == ["4.875", "nan", "4.625"]
    assert [row["grad_norm"] for row in rows] == ["1.25", "inf", "1.25"]
    assert [row["nonfinite"] for row in rows] == ["false", "true", "false"]
    assert {""} == {row["param_norm"] for row in rows}


def test_a_resumed_run_goes_on_in_the_same_file_with_one_header(info, record):
    """Opening the file again appends, and writes no second header."""
    run = info()
    _run(run, [record(1), record(2)])
    _run(info(first=3), [record(3)])
    assert [row["global_step"] for row in _rows(run.folder / "metrics" / "rank_00000.csv")] == ["1", "2", "3"]


def test_ranks_and_trials_have_files_of_their_own(info, record):
    """Rank and trial decide the file."""
    for run in (info(1, size=2), info(0, size=2, trial=1)):
        _run(run, [record(1)])
    metrics = info().folder / "metrics"
    assert {"rank_00001.csv", "trial_001/rank_00000.csv"} == {
        str(path.relative_to(metrics)) for path in metrics.rglob("*.csv")
    }


def test_a_row_is_in_the_file_before_the_run_ends(info, record):
    """A killed process loses no row."""
    run, sink = info(), CsvSink(NoOptions())
    sink.mtb_run_started(run)
    sink.mtb_step_recorded(record(1))
    assert len(_rows(run.folder / "metrics" / "rank_00000.csv")) == 1
    sink.mtb_run_finished()


def test_finishing_without_having_started_does_nothing():
    """Core tells every sink of the end, also one whose start failed."""
    CsvSink(NoOptions()).mtb_run_finished()
