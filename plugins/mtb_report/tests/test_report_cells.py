"""Cells of a report: nothing unknown looks like a number, nothing not finite disappears, nothing obeys the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtb_report.report import cells
from mtb_report.report.blocks import Cell, Column, Table, printable
from mtb_report.results import record_of


def record(**values: Any) -> Any:
    return record_of({"schema_version": 1, "benchmark": "training", **values}, path=Path("x/result.json"), digest="")


@pytest.mark.parametrize("value", [None, ""])
def test_what_is_not_known_says_so(value: Any) -> None:
    """A missing value is the word, and sorts behind everything."""
    for cell in (
        cells.text(value),
        cells.code(value),
        cells.of({"x": None}, "x"),
        cells.of({}, "x"),
        cells.status(None),
    ):
        assert (cell.text, cell.sort) == ("unknown", None)


def test_zero_is_no_unknown() -> None:
    """A measured zero is shown as a number."""
    assert cells.of({"x": 0}, "x").text == "0"
    assert cells.of({"x": 0.0}, "x", ".2f") == Cell("0.00", 0.0)
    assert cells.yes_no(False).text == "no"


@pytest.mark.parametrize("what", ["nan", "inf", "-inf"])
def test_a_number_that_was_not_finite_stays_visible(what: str) -> None:
    """The flag beside a null is what is shown, marked, behind all numbers."""
    assert cells.of({"loss": None, "loss_nonfinite": what}, "loss", ".4f") == Cell(what, None, "bad")
    assert cells.number(float(what)) == Cell(what, None, "bad")


def test_only_what_is_known_to_be_invalid_is_hidden() -> None:
    """A dash stands for a figure of a measurement that is not valid, not for one of which that is unknown."""
    shown = {
        valid: cells.measured(record(performance_valid=valid), lambda: Cell("5")).text for valid in (True, None, False)
    }
    assert shown == {True: "5", None: "5", False: "-"}


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (5.9e-6, "sig", "5.9e-06"),
        (0.1234, "sig", "0.123"),
        (123456.7, "sig", "123,457"),
        (2.0, ",d", "2"),
        (2.5, ",d", "2.5"),
        (1234, ",d", "1,234"),
        (0.5, ".1%", "50.0%"),
    ],
)
def test_formats(value: float, form: str, text: str) -> None:
    """Small numbers keep their digits, counts that JSON made floats are counts, and a half count is no whole one."""
    assert cells.number(value, form).text == text


def test_text_cannot_steer_a_terminal_or_turn_around() -> None:
    """Control characters, and those that change the direction of writing, are replaced; lines are joined."""
    assert printable("a\x1b[31mb\nc\u202ed") == "a\ufffd[31mb c\ufffdd"
    assert cells.text("x\x00").text == "x\ufffd"


def test_a_row_has_a_cell_for_each_column() -> None:
    """A table with a row of another length is refused by name."""
    with pytest.raises(ValueError, match="table 'T': a row has 1 cells, but there are 2"):
        Table("T", [Column("a"), Column("b")], [[Cell("1")]])
