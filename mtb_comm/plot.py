"""Latency and busbw over size, with the fit: a picture for a report. matplotlib is imported only here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtb_core import ConfigError

from .definitions import DEFINITION, bus_factor
from .fit import SERIES

SUFFIXES = (".png", ".svg")
_STEPS = 100


def check_plot(path: str) -> None:
    """Refuse a file that cannot become a plot, before anything is measured.

    Raises:
        ConfigError: another ending than those of `SUFFIXES`.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot is {path!r}; its ending must say the format. Valid: {', '.join(SUFFIXES)}.")


def draw(document: Mapping[str, Any], path: str | Path) -> None:
    """Write the plot of a communication document; the format follows the ending of `path`.

    Points are measured (median, with a line up to p95), thin lines are fits; log axes.
    """
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    # A figure of its own, without pyplot: no display is looked for, and nothing global changes.
    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    latency, bandwidth = figure.subplots(1, 2)
    for index, (name, rows, fit) in enumerate(_curves(document)):
        color = mpl.color_sequences["tab20"][index % 20]
        sizes = [row["size_bytes"] for row in rows]
        medians = [row["time_ms"]["p50"] for row in rows]
        above = [row["time_ms"]["p95"] - row["time_ms"]["p50"] for row in rows]
        latency.errorbar(
            sizes, medians, yerr=[[0.0] * len(rows), above], fmt="o", markersize=4, color=color, label=name
        )
        rates = [row["busbw_gb_per_sec"] for row in rows]
        if any(rates):
            bandwidth.plot(sizes, rates, "o", markersize=4, color=color)
        if fit is not None:
            _draw_fit(latency, bandwidth, fit, color)
    _label(latency, "time, ms (median to p95)")
    _label(bandwidth, "busbw, GB/s (of the mean time)")
    if latency.get_legend_handles_labels()[0]:
        latency.legend(fontsize="x-small")
    where = f"{document['world_size']} ranks, {document['backend']} on {document['device']}"
    figure.suptitle(f"{where}\n{DEFINITION}; lines: t = alpha + S/beta", fontsize="small")
    figure.savefig(path, dpi=150)


def _curves(document: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]], Mapping[str, Any] | None]]:
    curves: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in document["results"]:
        if row["time_ms"] is not None and row["size_bytes"]:
            curves.setdefault(tuple(row[name] for name in SERIES), []).append(row)
    fits = {tuple(fit[name] for name in SERIES): fit for fit in document["fits"]}
    return [(_name(rows[0]), rows, fits.get(key)) for key, rows in curves.items()]


def _name(row: Mapping[str, Any]) -> str:
    words = (row["operation"], row["dtype"], row["reduction"], "uneven" if row["split"] == "uneven" else None)
    placed = {True: "in place", False: "out of place"}[row["in_place"]]
    return " ".join(word for word in (*words, placed) if word)


def _draw_fit(latency: Any, bandwidth: Any, fit: Mapping[str, Any], color: Any) -> None:
    low, high = fit["size_bytes_min"], fit["size_bytes_max"]
    sizes = [low * (high / low) ** (step / _STEPS) for step in range(_STEPS + 1)]
    seconds = [fit["alpha_s"] + size / (fit["beta_gb_per_sec"] * 1e9) for size in sizes]
    latency.plot(sizes, [1e3 * t for t in seconds], linewidth=0.8, color=color)
    factor = bus_factor(fit["operation"], fit["world_size"])
    if factor and fit["split"] != "uneven":
        bandwidth.plot(
            sizes, [factor * s / t / 1e9 for s, t in zip(sizes, seconds, strict=True)], linewidth=0.8, color=color
        )


def _label(axes: Any, quantity: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("S, bytes")
    axes.set_ylabel(quantity)
    axes.grid(visible=True, which="major", linewidth=0.3)
