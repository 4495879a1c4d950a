"""One step's collectives of every rank on one axis of time, as text and as SVG, to see who waits for whom."""

from __future__ import annotations

from html import escape

import attrs

from mtb_core import ConfigError

from .across import Matched
from .analysis import Analysis
from .loading import Collective

_LETTERS = {
    "all_reduce": "R",
    "all_gather": "G",
    "reduce_scatter": "S",
    "all_to_all": "A",
    "broadcast": "B",
    "barrier": "|",
    "send": ">",
    "recv": "<",
    "send_recv": "P",
}
_COLOURS = {
    "all_reduce": "#3b6fb6",
    "all_gather": "#2f8f5b",
    "reduce_scatter": "#b0662b",
    "all_to_all": "#8a4fa3",
    "broadcast": "#4d8a99",
}
_OTHER_COLOUR = "#666666"
_WAITING_COLOUR = "#d9d9d9"


@attrs.frozen
class Bar:
    """One collective on one rank; ns from the beginning of the step. Up to `arrived` the rank waits for others."""

    operation: str
    start: int
    arrived: int
    end: int
    message_bytes: int | None


@attrs.frozen
class Timeline:
    """A step's collectives by rank; `length` in ns."""

    step: int | None
    length: int
    bars: dict[int, list[Bar]]
    longest: int


def find_timeline(analysis: Analysis, step: int | None = None) -> Timeline:
    """The timeline of a step; None: the one in the middle; where there are no steps, of the whole trace.

    Raises:
        ConfigError: there is no such step.
    """
    numbers = list(analysis.step_times)
    if step is not None and step not in numbers:
        raise ConfigError(f"--step is {step}; valid are the steps of the traces: {numbers or 'none'}.")
    if step is None and numbers:
        step = numbers[len(numbers) // 2]
    waits: dict[tuple[int, int, int], int] = {}
    for m in analysis.matching.matched:
        for rank, c in m.members.items():
            waits[rank, c.start, c.thread] = _arrived(m, c)
    chosen: dict[int, list[Collective]] = {}
    limits: list[tuple[int, int]] = []
    for each in analysis.ranks:
        view = each.view
        mine = [c for c in view.trace.collectives if step is None or view.step_of(c.start, c.launch) == step]
        chosen[each.rank] = mine
        limits += [(s.start, s.end) for s in view.steps.steps if s.number == step and not view.trace.on_device]
        limits += [(c.start, c.end) for c in mine]
    if not limits:
        return Timeline(step, 0, {rank: [] for rank in chosen}, 0)
    begin, end = min(a for a, _ in limits), max(b for _, b in limits)
    bars = {
        rank: [
            Bar(
                c.operation,
                c.start - begin,
                waits.get((rank, c.start, c.thread), c.start) - begin,
                c.end - begin,
                c.message_bytes,
            )
            for c in collectives
        ]
        for rank, collectives in chosen.items()
    }
    return Timeline(step, end - begin, bars, max((b.end - b.start for row in bars.values() for b in row), default=0))


def _arrived(matched: Matched, own: Collective) -> int:
    return max(own.start, min(matched.arrived, own.end))


def as_text(timeline: Timeline, width: int = 80) -> str:
    """The timeline in letters: one row a rank, ``.`` waiting for others, a letter for the transfer."""
    title = "whole trace" if timeline.step is None else f"step {timeline.step}"
    if not timeline.length:
        return f"Collectives of the {title}: there are none."
    lines = [f"Collectives of the {title}, {timeline.length / 1e6:.3f} ms from left to right:"]
    label = max(len(f"rank {rank}") for rank in timeline.bars)
    for rank, bars in timeline.bars.items():
        cells = [" "] * width
        for bar in sorted(bars, key=lambda b: b.start):
            letter = _LETTERS.get(bar.operation, "?")
            first, last = _cell(bar.start, timeline, width), _cell(bar.end, timeline, width)
            there = _cell(bar.arrived, timeline, width)
            for i in range(first, last + 1):
                cells[i] = "." if i < there else letter
        lines.append(f"{f'rank {rank}':<{label}} |{''.join(cells)}|")
    used = sorted({bar.operation for bars in timeline.bars.values() for bar in bars})
    legend = ", ".join(f"{_LETTERS.get(name, '?')} {name}" for name in used)
    lines.append(f"{'':<{label}}  . waiting for other ranks, {legend}")
    return "\n".join(lines)


def _cell(time: int, timeline: Timeline, width: int) -> int:
    return min(width - 1, time * width // timeline.length)


_ROW, _BAR, _LEFT, _TOP, _WIDE = 34, 22, 80, 46, 900


def as_svg(timeline: Timeline) -> str:
    """The timeline as a self-contained SVG picture; each bar tells what it is when it is pointed at."""
    rows = len(timeline.bars)
    height = _TOP + rows * _ROW + 60
    title = "whole trace" if timeline.step is None else f"step {timeline.step}"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDE + 20} {height}" role="img">',
        "<style>text { font: 13px sans-serif }</style>",
        f"<title>Collectives of each rank in the {title}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="22">Collectives of the {title}: {timeline.length / 1e6:.3f} ms</text>',
    ]
    for row, (rank, bars) in enumerate(timeline.bars.items()):
        y = _TOP + row * _ROW
        out.append(f'<text x="{_LEFT - 10}" y="{y + 16}" text-anchor="end">rank {rank}</text>')
        out.append(f'<line x1="{_LEFT}" x2="{_LEFT + _WIDE}" y1="{y + _BAR}" y2="{y + _BAR}" stroke="#e5e5e5"/>')
        for bar in bars:
            out += _svg_bar(bar, timeline, y)
    out += _svg_axis(timeline, _TOP + rows * _ROW)
    out += _svg_legend(timeline, _TOP + rows * _ROW + 42)
    return "\n".join([*out, "</svg>", ""])


def _x(time: int, timeline: Timeline) -> float:
    return _LEFT + time / max(timeline.length, 1) * _WIDE


def _svg_bar(bar: Bar, timeline: Timeline, y: int) -> list[str]:
    size = "" if bar.message_bytes is None else f", {bar.message_bytes} bytes"
    text = f"{bar.operation}{size}: {(bar.end - bar.start) / 1e6:.3f} ms, {(bar.arrived - bar.start) / 1e6:.3f} ms of it waiting"
    a, b, c = (_x(t, timeline) for t in (bar.start, bar.arrived, bar.end))
    colour = _COLOURS.get(bar.operation, _OTHER_COLOUR)
    return [
        f"<g><title>{escape(text)}</title>",
        f'<rect x="{a:.2f}" y="{y}" width="{max(b - a, 0):.2f}" height="{_BAR}" fill="{_WAITING_COLOUR}"/>',
        f'<rect x="{b:.2f}" y="{y}" width="{max(c - b, 0.8):.2f}" height="{_BAR}" fill="{colour}"/></g>',
    ]


def _svg_axis(timeline: Timeline, y: int) -> list[str]:
    out = []
    for tick in range(6):
        x = _LEFT + _WIDE * tick / 5
        out.append(
            f'<text x="{x:.1f}" y="{y + 14}" text-anchor="middle" fill="#555555">{timeline.length * tick / 5e6:.2f} ms</text>'
        )
    return out


def _svg_legend(timeline: Timeline, y: int) -> list[str]:
    used = sorted({bar.operation for bars in timeline.bars.values() for bar in bars})
    entries = [("waiting for other ranks", _WAITING_COLOUR), *((n, _COLOURS.get(n, _OTHER_COLOUR)) for n in used)]
    out, x = [], float(_LEFT)
    for name, colour in entries:
        out.append(f'<rect x="{x:.0f}" y="{y - 11}" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{x + 17:.0f}" y="{y}">{escape(name)}</text>')
        x += 40 + 7.5 * len(name)
    return out
