"""Plots as SVG that lives inside a page: drawn by matplotlib, coloured by the page, each series can be hidden.

Matplotlib writes colours as numbers. The ones it is given here stand for roles (ink, grid, first series, …) and are
replaced by the page's CSS variables, so that one drawing serves light and dark.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from .blocks import Plot, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours of series are used in this order, and again from the start where there are more.
PALETTE = 8

_ROLES = {"#010203": "ink", "#010204": "muted", "#010205": "grid"} | {
    f"#0203{n:02x}": f"series-{n}" for n in range(PALETTE)
}
_INK, _MUTED, _GRID = "#010203", "#010204", "#010205"
# Inches; the page scales the drawing to its column, so that these set the size of the text in it.
_WIDTH, _HEIGHT = 5.4, 3.0
_BARS_WIDTH, _BAR = 9.0, 0.26
#: Nothing that is measured is larger, and matplotlib's arithmetic ends not far beyond.
_FAR = 1e100
#: Points that are closer than this share of the axes have one label.
_TOO_CLOSE = 0.05
#: Characters of a label inside a drawing.
_LONGEST = 64
_MARKERS = "osD^vPX*"
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: searchable, in the page's font, small
    "text.parse_math": False,  # a dollar in a name is a dollar
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _MUTED,
    "axes.edgecolor": _GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "lines.linewidth": 2.0,
    "lines.markersize": 6.0,
    "path.simplify": True,
}


def color_of(index: int) -> str:
    """The CSS variable of the `index`-th series, for legends."""
    return f"var(--series-{index % PALETTE})"


def svg(plot: Plot, name: str) -> str:
    """The drawing as an ``<svg>`` element.

    Args:
        plot: what to draw; series without points are left out of the drawing.
        name: unique in the page; identifiers inside the drawing start with it.
    """
    import matplotlib as mpl  # noqa: PLC0415  (half a second that only reports with plots need)
    from matplotlib.figure import Figure  # noqa: PLC0415

    plot = _drawable(plot)
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=_size(plot), layout="constrained")
        axes = figure.add_subplot()
        {"lines": _lines, "points": _points, "bars": _bars}[plot.kind](axes, plot)
        _dress(axes, plot)
        return _embed(_rendered(figure), name)


def _drawable(plot: Plot) -> Plot:
    """`plot` with a gap where a point has no place: not finite, or not positive on a logarithmic axis.

    Axes on which nothing is left are linear.
    """
    series = [_with_gaps(one, plot) for one in plot.series]
    if any(not math.isnan(value) for one in series for value in one.y):
        return attrs.evolve(plot, series=series)
    return attrs.evolve(plot, series=series, x_scale="linear", y_scale="linear")


def _with_gaps(series: Series, plot: Plot) -> Series:
    def fits(value: float, scale: str) -> bool:
        return (-_FAR if scale == "linear" else 1 / _FAR) < value < _FAR

    def gapped(values: Sequence[float] | None) -> list[float] | None:
        if values is None:
            return None
        return [v if here and fits(v, plot.y_scale) else math.nan for v, here in zip(values, places, strict=True)]

    x = series.x if plot.kind != "bars" else [1.0] * len(series.y)
    places = [fits(a, plot.x_scale) and fits(b, plot.y_scale) for a, b in zip(x, series.y, strict=True)]
    return attrs.evolve(
        series,
        x=[a if here else math.nan for a, here in zip(x, places, strict=True)],
        y=gapped(series.y) or [],
        low=gapped(series.low),
        high=gapped(series.high),
    )


def _short(label: str) -> str:
    """Both ends of a label that would leave no room for the drawing; the page's tables have it whole."""
    half = _LONGEST // 2
    return label if len(label) <= _LONGEST else f"{label[:half]}…{label[1 - half :]}"


def _size(plot: Plot) -> tuple[float, float]:
    return (_WIDTH, _HEIGHT) if plot.kind != "bars" else (_BARS_WIDTH, 0.8 + _BAR * len(plot.labels))


def _color(index: int) -> str:
    return f"#0203{index % PALETTE:02x}"


def _lines(axes: Axes, plot: Plot) -> None:
    for index, series in enumerate(plot.series):
        marker = _MARKERS[index % len(_MARKERS)] if len(series.x) <= 60 else None
        (line,) = axes.plot(series.x, series.y, color=_color(index), marker=marker)
        line.set_gid(f"series_{index}_0")
        _error_bars(axes, series, index)


def _points(axes: Axes, plot: Plot) -> None:
    for index, series in enumerate(plot.series):
        marker = _MARKERS[index % len(_MARKERS)]
        (line,) = axes.plot(series.x, series.y, linestyle="none", color=_color(index), marker=marker, markersize=7)
        line.set_gid(f"series_{index}_0")
    axes.margins(x=0.12, y=0.15)
    _label_points(axes, plot)


def _label_points(axes: Axes, plot: Plot) -> None:
    """Write the labels, one where several points lie on one another."""
    left, right = axes.get_xlim()
    low, high = axes.get_ylim()
    labelled: list[tuple[float, float]] = []
    for index, series in enumerate(plot.series):
        for number, (x, y, label) in enumerate(zip(series.x, series.y, series.labels, strict=False), 1):
            place = ((x - left) / (right - left), (y - low) / (high - low))
            if math.isnan(x + y) or any(math.dist(place, other) < _TOO_CLOSE for other in labelled):
                continue
            labelled.append(place)
            written = axes.annotate(
                _short(label), (x, y), xytext=(6, 5), textcoords="offset points", fontsize=8, color=_MUTED
            )
            written.set_gid(f"series_{index}_{number}")


def _error_bars(axes: Axes, series: Series, index: int) -> None:
    if series.low is None or series.high is None:
        return
    bars = axes.vlines(series.x, series.low, series.high, color=_color(index), linewidth=1.2)
    bars.set_gid(f"series_{index}_1")


def _bars(axes: Axes, plot: Plot) -> None:
    places = list(range(len(plot.labels)))
    starts = [0.0] * len(plot.labels)
    for index, series in enumerate(plot.series):
        drawn = axes.barh(places, series.y, left=starts, height=0.68, color=_color(index))
        for number, patch in enumerate(drawn.patches):
            patch.set_gid(f"series_{index}_{number}")
        starts = [start + width for start, width in zip(starts, series.y, strict=True)]
    axes.set_yticks(places, labels=[_short(label) for label in plot.labels])
    axes.set_ylim(len(plot.labels) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(_with_commas())


def _dress(axes: Axes, plot: Plot) -> None:
    from matplotlib.ticker import NullFormatter  # noqa: PLC0415

    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    if plot.x_scale == "log":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(_bytes_formatter())
    if plot.x_scale == "ranks":
        _rank_axis(axes, plot.series)
    if plot.y_scale == "log":
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_with_commas())
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif plot.kind != "bars":
        axes.yaxis.set_major_formatter(_with_commas())
    if plot.y_from_zero:
        axes.set_ylim(bottom=0)
    if plot.reference is not None:
        height, label = plot.reference
        axes.axhline(height, color=_MUTED, linewidth=1.0, linestyle="--")
        axes.annotate(
            label,
            (1.0, height),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=_MUTED,
        )
    axes.tick_params(which="both", length=0)


def _rank_axis(axes: Axes, series: Sequence[Series]) -> None:
    """One tick for each number of ranks that occurs, at equal ratios."""
    ranks = sorted({x for one in series for x in one.x if not math.isnan(x)})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, labels=[f"{n:g}" for n in ranks])
    axes.minorticks_off()


def _with_commas() -> Any:
    from matplotlib.ticker import FuncFormatter  # noqa: PLC0415

    return FuncFormatter(lambda value, _position: f"{value:,.10g}")


def _bytes_formatter() -> Any:
    from matplotlib.ticker import FuncFormatter  # noqa: PLC0415

    return FuncFormatter(lambda value, _position: size_text(value))


def size_text(size: float) -> str:
    """``64K``, ``1M``: powers of 1024, as on the command line."""
    for unit, letter in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if size >= unit:
            return f"{size / unit:.4g}{letter}"
    return f"{size:.4g}"


def _rendered(figure: Figure) -> str:
    out = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the page's fonts draw the text
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return out.getvalue()


def _embed(drawing: str, name: str) -> str:
    """Fit for a page: no prologue, own identifiers, roles for colours, series that can be found."""
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<(metadata|style)\b.*?</\1>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r"<svg [^>]*>", _root, drawing, count=1)
    return re.sub(r"<[^>]+>", lambda tag: _tag(tag[0], name), drawing)  # tags alone: what is written stays as it is


def _root(tag: re.Match[str]) -> str:
    sizeless = re.sub(r' (?:width|height)="[^"]*"', "", tag[0])
    return sizeless.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)


def _tag(tag: str, name: str) -> str:
    # A series is several artists at times, and identifiers are unique: what it belongs to becomes an attribute.
    tag = re.sub(r'\bid="series_(\d+)_\d+"', r'data-series="\1"', tag)
    tag = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', tag)
    tag = re.sub(r'(xlink:href="|url\()#', rf"\1#{name}-", tag)
    tag = re.sub(r"font-family: [^;\"]*(; )?", "", tag)
    return re.sub(r"#01020[345]|#0203[0-9a-f]{2}", lambda number: f"var(--{_ROLES[number[0]]})", tag)
