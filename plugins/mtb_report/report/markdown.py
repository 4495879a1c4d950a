"""A report as Markdown for READMEs: tables of GitHub's flavour; plots are named, for they are in the page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from .blocks import Block, Cell, Listing, Plot, Report, Table, Text

#: Characters that would begin markup, or end a cell.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~#$])")


def markdown(report: Report) -> str:
    """The report; text from results is escaped, so that it is shown as it is."""
    lines = [f"# {_escaped(report.title)}", ""]
    if report.facts:
        lines += [" · ".join(f"**{_escaped(f.value)}** {_escaped(f.label)}" for f in report.facts), ""]
    for section in report.sections:
        lines += [f"## {_escaped(section.title)}", ""]
        for block in section.blocks:
            lines += [*_block(block)]
    return "\n".join(lines).rstrip() + "\n"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Text):
        yield from (_escaped(block.text), "")
    elif isinstance(block, Listing):
        yield from (*(f"- {_escaped(item)}" for item in block.items), "")
    elif isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Plot):
        return  # what it draws is in the tables


def _table(table: Table) -> Iterator[str]:
    yield from (f"**{_escaped(table.caption)}**", "")
    yield _row([_escaped(column.title) for column in table.columns])
    yield _row(["---:" if column.numeric else "---" for column in table.columns])
    for row in table.rows:
        yield _row([_cell(cell) for cell in row])
    yield ""
    for note in table.notes:
        yield from (f"_{_escaped(note)}_", "")


def _row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _cell(cell: Cell) -> str:
    if not cell.code:
        return _escaped(cell.text)
    fence = "``" if "`" in cell.text else "`"
    inner = cell.text.replace("|", "\\|")  # GitHub splits cells before it reads code
    return f"{fence} {inner} {fence}" if len(fence) > 1 else f"`{inner}`"


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)
