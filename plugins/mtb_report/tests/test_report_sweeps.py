"""The section of sweeps: every cell is there, with its outcome, and says why a figure is missing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from mtb_report.report.blocks import Report, Table
from mtb_report.report.build import build
from mtb_report.report.markdown import markdown
from mtb_report.results import Found, find_records, record_of

SAMPLE = Path(__file__).parent / "test_report_samples" / "newer" / "sweep" / "sweep.json"


def report(*changes: dict[str, Any]) -> Report:
    """Of the sample, its cells changed one by one."""
    raw = copy.deepcopy(dict(find_records([SAMPLE]).records[0].raw))
    for cell, change in zip(raw["cells"], changes, strict=False):
        cell.update(change)
    return build(Found([record_of(raw, path=Path("x/sweep.json"), digest="0" * 64)], []), "x")


def column(made: Report, caption: str, title: str) -> list[str]:
    (section,) = [s for s in made.sections if s.name == "sweeps"]
    (table,) = [b for b in section.blocks if isinstance(b, Table) and b.caption == caption]
    index = [c.title for c in table.columns].index(title)
    return [row[index].text for row in table.rows]


def test_cells_are_all_there() -> None:
    """Cells that ran out of memory or were not tried are kept, and counted; invalid figures are dashes."""
    made = report()
    assert column(made, "Cells of weak", "Status") == ["success", "success", "oom", "not run"]
    assert column(made, "Cells of weak", "Tokens/s") == ["1,000", "-", "unknown", "unknown"]
    assert column(made, "Cells of weak", "Efficiency") == ["100.0%", "-", "unknown", "unknown"]
    text = markdown(made)
    assert "weak: Weak scaling on two cores. 4 cells: 2 success, 1 oom, 1 not run." in text
    assert "tokens a second and rank over those on one rank" in text
    assert "the largest that fits is 4; 64 does not" in text
    assert "888" not in text


def test_figures_have_their_interval() -> None:
    """Where a cell has several trials, its mean is known to ± something."""
    made = report({"summary": {"tokens_per_sec": {"ci95": [990.0, 1010.0], "n": 3}}})
    assert column(made, "Cells of weak", "Tokens/s")[0] == "1,000 ± 10"
    assert column(made, "Cells of weak", "Step ms")[0] == "64.00"


def test_outcomes_have_kind_reason_and_exit_code() -> None:
    """A cell that failed has all three; what was not run has none, which is not the same as unknown."""
    made = report({}, {"status": "failed", "failure_type": "NonFinite", "reason": "the loss is nan", "exit_code": 3})
    caption = "Outcomes of weak"
    assert column(made, caption, "Failure") == ["none", "NonFinite", "cuda_oom", "none"]
    assert column(made, caption, "Reason") == [
        "none",
        "the loss is nan",
        "out of memory",
        "not tried: batch_size = 64 ran out of memory",
    ]
    assert column(made, caption, "Exit code") == ["0", "3", "3", "none"]
    assert column(made, caption, "Command")[3] == "none"


def test_why_there_is_no_efficiency_is_said() -> None:
    """The reason stands in the place of the figure; a row that is not valid has its dash."""
    reason = {"efficiency": None, "efficiency_reason": "the global batch is 8, but 4 on 1 rank"}
    made = report({}, {**reason, "performance_valid": True}, {**reason, "performance_valid": False})
    assert column(made, "Cells of weak", "Efficiency")[:3] == ["100.0%", reason["efficiency_reason"], "-"]


def test_a_training_that_diverged_shows_how_often() -> None:
    """No error is shown where steps were not finite; also where no cell has one at all."""
    bad = {"loss_error": None, "loss_nonfinite_steps": 8, "error_steps": 2}
    made = report(bad, {**bad, "loss_nonfinite_steps": 1}, {"loss_error": None}, {"loss_error": None})
    assert column(made, "Cells of weak", "Loss error") == [
        "not finite: 8 steps",
        "not finite: 1 step",
        "unknown",
        "unknown",
    ]
    assert column(made, "Cells of weak", "Steps compared") == ["2", "2", "unknown", "unknown"]


def test_what_failed_is_no_limit() -> None:
    """Of values that failed otherwise it is not known whether they fit."""
    raw = dict(find_records([SAMPLE]).records[0].raw)
    fit = {"labels": {}, "axis": "batch_size", "largest": 4, "first_that_does_not": None, "failed": {"8": "timeout"}}
    found = record_of({**raw, "largest_that_fits": [fit]}, path=Path("x"), digest="0" * 64)
    text = markdown(build(Found([found], []), "x"))
    assert "the largest that fits is 4; none that was tried is too large; 8: timeout, not known whether it fits" in text
