"""Medians with their spread, as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import attrs
from rich.console import Console
from rich.markup import escape
from rich.table import Table


@attrs.frozen
class Spread:
    """Median and quartiles of repeated measurements."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}–{self.high:.2f}]"


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratios(values: Sequence[float], base: Sequence[float]) -> Spread:
    """Of values to those of the same round of another contender: what slows a whole round cancels out."""
    return spread([value / reference for value, reference in zip(values, base, strict=True)])


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is text, the others are numbers."""
    table = Table(title=escape(title), title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(escape(column), justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=160).print(table)
