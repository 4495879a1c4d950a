"""What a report consists of, before anyone decides how it looks: sections of text, tables and plots.

Sections are made of records by pure functions; each of the three renderers (HTML, Markdown, terminal) shows the same
blocks, so that none of them can say what another does not.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Literal

import attrs

Tone = Literal["", "good", "bad", "warn", "muted"]


def printable(text: str) -> str:
    """`text` on one line, control characters replaced: results come from anywhere, and a terminal obeys some of them."""
    return "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in " ".join(text.split()))


def _all_printable(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(printable, texts))


def _sortable(key: float | str | None) -> float | str | None:
    return printable(key) if isinstance(key, str) else key


@attrs.frozen
class Cell:
    """A cell of a table.

    Attributes:
        text: what is shown.
        sort: by what the column is sorted; None sorts behind everything else, in either direction.
        tone: how it is meant; it is never the only carrier of the meaning.
        code: it is a command, a path or a digest.
    """

    text: str = attrs.field(converter=printable)
    sort: float | str | None = attrs.field(default=None, converter=_sortable)
    tone: Tone = ""
    code: bool = False


@attrs.frozen
class Column:
    """The head of a column; `numeric` ones are aligned to the right."""

    title: str = attrs.field(converter=printable)
    numeric: bool = False


@attrs.frozen
class Table:
    """Rows of cells; each row has as many cells as there are columns, and its first cell names it.

    Attributes:
        notes: what a reader must know to read the numbers, shown below.
    """

    caption: str = attrs.field(converter=printable)
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = attrs.field(default=(), converter=_all_printable)

    def __attrs_post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                msg = f"table '{self.caption}': a row has {len(row)} cells, but there are {len(self.columns)} columns"
                raise ValueError(msg)


@attrs.frozen
class Series:
    """Points that belong together in a plot, in one colour.

    Attributes:
        low: lower ends of error bars, None where there are none.
        high: upper ends.
        labels: of the points, for plots that write them.
    """

    name: str = attrs.field(converter=printable)
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    labels: Sequence[str] = attrs.field(default=(), converter=_all_printable)


@attrs.frozen
class Plot:
    """A plot: ``lines`` over x, ``points``, or ``bars`` (horizontal and stacked: one bar a label, one series a part).

    Attributes:
        text: what it shows, in words, for those who cannot see it.
        labels: of bars; `Series.x` is then not used.
        reference: a horizontal line that means something, and its name.
    """

    title: str = attrs.field(converter=printable)
    text: str = attrs.field(converter=printable)
    kind: Literal["lines", "points", "bars"]
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_scale: Literal["linear", "log", "ranks"] = "linear"
    y_scale: Literal["linear", "log"] = "linear"
    y_from_zero: bool = False
    labels: Sequence[str] = attrs.field(default=(), converter=_all_printable)
    reference: tuple[float, str] | None = None


@attrs.frozen
class Text:
    """A paragraph."""

    text: str = attrs.field(converter=printable)


@attrs.frozen
class Listing:
    """A list of short statements."""

    items: Sequence[str] = attrs.field(converter=_all_printable)


Block = Table | Plot | Text | Listing


@attrs.frozen
class Section:
    """Part of a report; `name` is unique in it and serves as the address."""

    name: str
    title: str
    blocks: Sequence[Block]


@attrs.frozen
class Fact:
    """A number that stands at the top of a report."""

    value: str = attrs.field(converter=printable)
    label: str = attrs.field(converter=printable)
    tone: Tone = ""


@attrs.frozen
class Report:
    """All of it, in the order in which it is read."""

    title: str = attrs.field(converter=printable)
    facts: Sequence[Fact]
    sections: Sequence[Section]
