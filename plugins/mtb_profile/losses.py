"""``--mfu``: from the ideal step to the measured one in seven losses, each in milliseconds and in points of MFU.

The ideal step does the model's FLOPs at the device's peak and nothing else. The measured step is the window divided by
its steps, the mean over ranks. What lies between is split by the breakdown, whose parts are disjoint, so the losses sum
by construction; what cannot be told apart is said to be unknown, and stays in the residual, kernel efficiency.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Literal

import attrs

from mtb_core import ConfigError

from .analysis import Analysis, RankAnalysis

Repair = Literal["configuration", "hardware", "pipeline", "structure"]
#: In this order repairs are worth trying: the cheap and safe ones first.
REPAIR_ORDER: tuple[Repair, ...] = ("configuration", "hardware", "pipeline", "structure")


@attrs.frozen
class Work:
    """What a step has to do, and how fast a device could.

    Attributes:
        flops_per_step: model FLOPs of the global batch; None: unknown.
        peak_flops: FLOP/s of one device; None: unknown.
        devices: how many share the work; None: as many as there are ranks.
        recomputes: whether activations are recomputed in backward; None: unknown.
    """

    flops_per_step: float | None = None
    peak_flops: float | None = None
    devices: int | None = None
    recomputes: bool | None = None

    def ideal_ms(self, ranks: int) -> float | None:
        """The ideal step, of a job of so many ranks."""
        if self.flops_per_step is None or self.peak_flops is None:
            return None
        return self.flops_per_step / (self.devices or ranks) / self.peak_flops * 1e3


@attrs.frozen
class Loss:
    """One loss.

    Attributes:
        ms: of the mean step; None: not known, and then contained in kernel efficiency.
        points: the same in percentage points of MFU.
        normal: what is normal, in words.
        unusual: whether it is outside that; None: not known.
    """

    name: str
    ms: float | None
    points: float | None
    normal: str
    unusual: bool | None
    repair: Repair
    note: str = ""


@attrs.frozen
class Losses:
    """``ideal_ms + sum of ms == measured_ms``; without a known ideal, ideal and kernel efficiency are one figure."""

    measured_ms: float
    ideal_ms: float | None
    mfu: float | None
    losses: list[Loss]
    notes: list[str]

    def in_order_of_repair(self) -> list[Loss]:
        """The unusual ones: by what is to be repaired, the largest first within each."""
        unusual = [loss for loss in self.losses if loss.unusual and loss.ms]
        return sorted(unusual, key=lambda x: (REPAIR_ORDER.index(x.repair), -(x.ms or 0.0)))


def find_losses(analysis: Analysis, work: Work) -> Losses:
    """The seven losses of the mean step.

    Raises:
        ConfigError: there are no steps to divide the time by, or nothing takes time in them.
    """
    counts = {len(r.view.steps.steps) for r in analysis.ranks}
    if counts == {0} or len(counts) > 1 or any(r.view.window == "trace" for r in analysis.ranks):
        raise ConfigError(
            "--mfu needs steps, the same number on every rank, to divide the time by, and the traces have "
            f"{sorted(counts)}. Valid: traces with ProfilerStep marks (call profiler.step() each step) and --window steps "
            "or steps-but-last."
        )
    steps = counts.pop()

    def mean(part: Callable[[RankAnalysis], float]) -> float:
        return fmean(part(r) for r in analysis.ranks) / steps / 1e6

    moved = _straggling(analysis)
    measured = mean(lambda r: r.times.span)
    if not measured > 0:
        raise ConfigError(
            "--mfu splits the time of a step, and nothing in the steps of these traces takes any. Valid: traces whose steps "
            "hold kernels or CPU operators; or leave --mfu out."
        )
    computing = mean(lambda r: r.times.compute + r.times.memory) - moved.computing
    forward = mean(lambda r: r.forward_compute)
    recompute = None if work.recomputes is None else forward if work.recomputes else 0.0
    ideal = work.ideal_ms(analysis.world_size or len(analysis.ranks))
    efficiency = None if ideal is None else computing - ideal - (recompute or 0.0)
    parts: dict[str, float | None] = {
        "pipeline_bubble": mean(lambda r: r.point_to_point),
        "exposed_communication": mean(lambda r: r.times.exposed - r.waiting - r.point_to_point),
        "recomputation": recompute,
        "data_wait": mean(lambda r: r.idle_by_phase.get("data", 0)) - moved.data,
        "kernel_efficiency": efficiency,
        "cpu_launch": mean(lambda r: r.times.idle - r.idle_by_phase.get("data", 0)) - moved.idle,
        "straggler": mean(lambda r: r.waiting) + moved.computing + moved.data + moved.idle,
    }
    rows = [_loss(name, ms, measured, ideal) for name, ms in parts.items()]
    return Losses(
        measured, ideal, None if ideal is None else ideal / measured, rows, _notes(analysis, work, computing, ideal)
    )


@attrs.frozen
class _Straggling:
    """What stragglers do too much themselves, ms of the mean step and rank, by where it would be counted otherwise."""

    computing: float = 0.0
    data: float = 0.0
    idle: float = 0.0


def _straggling(analysis: Analysis) -> _Straggling:
    """The others' waiting is one half of what a straggler costs; its own excess is the other."""
    by_rank = {r.rank: r for r in analysis.ranks}
    computing = data = idle = 0.0
    for s in analysis.stragglers:
        rank = by_rank[s.rank]
        idling = rank.times.idle / len(rank.view.steps.steps)
        in_data = rank.idle_by_phase.get("data", 0) / len(rank.view.steps.steps)
        more = min(max(s.compute_excess, 0.0), s.excess)
        rest = s.excess - more
        computing += more
        if s.phase == "data":
            data += min(rest, in_data)
        else:
            idle += min(rest, idling - in_data)
    ranks = len(analysis.ranks) * 1e6
    return _Straggling(computing / ranks, data / ranks, idle / ranks)


# Name -> (what is normal in words, the largest normal share of the step, repair). Waiting in communication and jitter
# have a figure from practice (below 2 %); the others are rules of thumb.
_NORMAL: dict[str, tuple[str, float, Repair]] = {
    "data_wait": ("below 1%: loading is hidden", 0.01, "configuration"),
    "cpu_launch": ("below 5%", 0.05, "configuration"),
    "recomputation": ("0% without activation checkpointing; with it, up to a quarter", 0.25, "configuration"),
    "straggler": ("below 2% waiting, jitter of steps 1 to 2%", 0.02, "hardware"),
    "pipeline_bubble": ("(stages - 1) / (micro-batches + stages - 1), below 10%", 0.10, "pipeline"),
    "exposed_communication": ("below 10%", 0.10, "structure"),
    "kernel_efficiency": ("30 to 50% of a step with large matrix products", 0.50, "structure"),
}


def _loss(name: str, ms: float | None, measured: float, ideal: float | None) -> Loss:
    normal, most, repair = _NORMAL[name]
    share = None if ms is None else ms / measured
    note = ""
    if name == "recomputation" and ms:
        note = "estimated: as long as forward computes"
    if name == "kernel_efficiency":
        note = (
            "not told from the ideal step: FLOPs or peak unknown"
            if ideal is None
            else "the residual: computing and copying beyond the ideal"
        )
    unusual = None if share is None else share > most
    return Loss(name, ms, None if share is None else share * 100, normal, unusual, repair, note)


def _notes(analysis: Analysis, work: Work, computing: float, ideal: float | None) -> list[str]:
    notes = []
    if ideal is None:
        known = {
            "FLOPs of a step (--flops-per-step)": work.flops_per_step,
            "peak of a device (--peak-tflops)": work.peak_flops,
        }
        missing = " and the ".join(name for name, value in known.items() if value is None)
        notes.append(
            f"Not known: the {missing}. Ideal step and kernel efficiency are therefore one figure, {computing:.3f} ms."
        )
    elif ideal > computing:
        notes.append(
            f"The ideal step, {ideal:.3f} ms, is longer than the device computed, {computing:.3f} ms: FLOPs or peak are wrong."
        )
    if work.recomputes is None:
        notes.append("Whether activations are recomputed is not known; if so, that is inside kernel efficiency.")
    if not any(c.operation in ("send", "recv", "send_recv") for r in analysis.ranks for c in r.collectives):
        notes.append("No point-to-point communication is seen, so there is no pipeline and no bubble.")
    if len(analysis.ranks) == 1 and (analysis.world_size or 1) > 1:
        notes.append("With one rank's trace, waiting for slow ranks is inside exposed communication.")
    return notes
