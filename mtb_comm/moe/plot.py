"""The sweep as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtb_core import ConfigError

FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Refuse a file that could not be drawn, before anything is measured.

    Raises:
        ConfigError: unknown kind of file.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot {path} has the ending {path.suffix!r}; valid: {', '.join(FORMATS)}.")


def plot_sweep(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Time of an iteration and drop rate over the capacity factor, a line for each skew. Needs a row at least.

    Folders on the way are made.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  (no display, and only when drawn)
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    time_axes, drop_axes = figure.subplots(1, 2)
    for skew in sorted({row["zipf_s"] for row in rows}):
        line = sorted((r for r in rows if r["zipf_s"] == skew), key=lambda r: r["capacity_factor"])
        factors = [r["capacity_factor"] for r in line]
        times = [r["time_ms"]["iteration"] for r in line]
        middle = [t["p50"] for t in times]
        below = [t["p50"] - t["min"] for t in times]
        above = [t["p95"] - t["p50"] for t in times]
        time_axes.errorbar(factors, middle, [below, above], marker="o", capsize=3, label=f"Zipf s = {skew:g}")
        drop_axes.plot(factors, [100 * r["drop_rate"] for r in line], marker="o", label=f"Zipf s = {skew:g}")
    time_axes.set(ylabel="ms", ylim=(0, None), title="iteration: median, minimum to 95th percentile")
    drop_axes.set(ylabel="%", ylim=(0, None), title="dropped slots")
    for axes in (time_axes, drop_axes):
        axes.set_xlabel("capacity factor")
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
