"""A report for the terminal, by rich: every table in full; one that is too wide is shown in pieces."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from .blocks import Block, Cell, Listing, Report, Table, Text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text as RichText

#: Width where stdout is no terminal and ``COLUMNS`` does not say.
PIPE_WIDTH = 160
#: Texts longer than this are folded rather than given a wider column.
_FOLDED = 44
#: Characters that rich puts around the text of a column.
_PADDING = 3
_STYLES = {"": "", "good": "green", "bad": "bold red", "warn": "yellow", "muted": "dim"}


def terminal(report: Report, width: int | None = None, *, color: bool = False) -> str:
    """The report as text; `width` in characters, by default that of the terminal."""
    from rich.console import Console  # noqa: PLC0415
    from rich.text import Text as RichText  # noqa: PLC0415

    if width is None and not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        width = PIPE_WIDTH
    console = Console(width=width, highlight=False, markup=False, emoji=False, force_terminal=color, no_color=not color)
    with console.capture() as captured:
        console.print(RichText(report.title, style="bold"))
        console.print(RichText("  ·  ".join(f"{fact.value} {fact.label}" for fact in report.facts), style="dim"))
        for section in report.sections:
            console.print()
            console.rule(RichText(section.title, style="bold"), align="left")
            for block in section.blocks:
                _print(console, block)
    return captured.get()


def _print(console: Console, block: Block) -> None:
    from rich.padding import Padding  # noqa: PLC0415
    from rich.text import Text as RichText  # noqa: PLC0415

    if isinstance(block, Text):
        console.print(RichText(block.text))
    elif isinstance(block, Listing):
        for item in block.items:
            console.print(RichText(f"• {item}"))
    elif isinstance(block, Table):
        for piece in _pieces(block, console.width):
            console.print(_table(piece))
        for note in block.notes:
            console.print(Padding(RichText(note, style="dim italic"), (0, 2, 0, 2)))


def _pieces(table: Table, width: int) -> Iterator[Table]:
    """`table` in pieces that are no wider than `width`, each with the first column, so that no word is broken.

    A column counts with its longest text, up to `_FOLDED` characters, at which longer ones are folded.
    """
    sizes = [
        max(len(text) for text in (column.title, *(row[index].text[:_FOLDED] for row in table.rows)))
        for index, column in enumerate(table.columns)
    ]
    chosen: list[list[int]] = [[0]]
    for index in range(1, len(sizes)):
        taken = sum(sizes[i] + _PADDING for i in (*chosen[-1], index))
        if taken > width and len(chosen[-1]) > 1:
            chosen.append([0])
        chosen[-1].append(index)
    for number, indices in enumerate(chosen):
        yield attrs.evolve(
            table,
            caption=table.caption if number == 0 else f"{table.caption} (continued)",
            columns=[table.columns[i] for i in indices],
            rows=[[row[i] for i in indices] for row in table.rows],
        )


def _table(table: Table) -> RichTable:
    from rich import box  # noqa: PLC0415
    from rich.table import Table as RichTable  # noqa: PLC0415
    from rich.text import Text as RichText  # noqa: PLC0415

    out = RichTable(
        title=RichText(table.caption, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for column in table.columns:
        out.add_column(RichText(column.title), justify="right" if column.numeric else "left", overflow="fold")
    for row in table.rows:
        out.add_row(*(_cell(cell) for cell in row))
    return out


def _cell(cell: Cell) -> RichText:
    from rich.text import Text as RichText  # noqa: PLC0415

    return RichText(cell.text, style=_STYLES[cell.tone])
