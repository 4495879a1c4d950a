"""A report as one HTML page that needs nothing else: styles, script and plots are inside, and it may load nothing."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources

import attrs
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from mtb_core import __version__

from .blocks import Block, Cell, Column, Plot, Report, Section
from .plots import color_of, svg

#: From so many characters on, a cell gets a wide column.
_LONG = 60


@attrs.frozen
class _Drawn:
    name: str
    plot: Plot
    svg: Markup


@attrs.frozen
class _Group:
    """One block that is not a plot, or all plots that follow one another and share a row."""

    kind: str
    name: str
    block: Block | None = None
    plots: tuple[_Drawn, ...] = ()


def html(report: Report, *, refresh_s: int | None = None) -> str:
    """The page.

    All text of `report` is escaped; the page's own policy (Content-Security-Policy) forbids it to load anything.

    Args:
        report: what to show.
        refresh_s: the page reads its own file again after so many seconds.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_resource("report.html.j2")).render(
        report=report,
        refresh_s=refresh_s,
        groups=_groups,
        attributes=_attributes,
        color_of=color_of,
        css=Markup(_resource("report.css")),  # noqa: S704  (ours)
        js=Markup(_resource("report.js")),  # noqa: S704
        version=__version__,
    )


def _resource(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")


def _groups(section: Section) -> Iterator[_Group]:
    waiting: list[_Drawn] = []
    for number, block in enumerate(section.blocks):
        name = f"{section.name}-{number}"
        if isinstance(block, Plot):
            # Safe: matplotlib escapes what it writes, and no text of the report reaches an attribute.
            waiting.append(_Drawn(name, block, Markup(svg(block, name))))  # noqa: S704
            continue
        if waiting:
            yield _Group("plots", f"{name}-plots", plots=tuple(waiting))
            waiting = []
        yield _Group(type(block).__name__, name, block)
    if waiting:
        yield _Group("plots", f"{section.name}-plots", plots=tuple(waiting))


def _attributes(cell: Cell, column: Column) -> Markup:
    classes = [*(["number"] if column.numeric else []), *(["long"] if len(cell.text) > _LONG else [])]
    classes += [cell.tone] if cell.tone else []
    out = Markup(' class="{}"').format(" ".join(classes)) if classes else Markup()
    return out if cell.sort is None else out + Markup(' data-sort="{}"').format(escape(str(cell.sort)))
