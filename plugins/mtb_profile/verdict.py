"""What bounds a run, in words: by evidence that is shown, and undetermined where there is too little."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import Literal

import attrs

from mtb_core import percentile

from .analysis import Analysis
from .stragglers import CONSTANCY, Straggler

Bound = Literal["compute-bound", "communication-bound", "data-bound", "host-bound", "straggler-bound", "undetermined"]

#: The largest loss bounds a run if it is at least this share of the time; with smaller ones it computes.
LOSS_SHARE = 0.15
#: Without such a loss, this much must be computation.
COMPUTE_SHARE = 0.6
#: What is normal, for comparison.
NORMAL_WAIT, NORMAL_JITTER, NORMAL_TAIL = 0.02, 0.02, 1.2

_ADVICE: dict[Bound, tuple[str, ...]] = {
    "compute-bound": (
        "Make the work itself faster: --precision bf16, --compile, a larger --batch-size if memory allows.",
        "If activations are recomputed, see whether the memory that it saves is still needed.",
    ),
    "communication-bound": (
        "Communicate less often: more --grad-accum-steps with --gradient-sync-mode last, a larger --batch-size.",
        "Let it overlap with backward: bucket size (--strategy-opt bucket_cap_mb), prefetching of the sharded strategies.",
        "Send fewer bytes: a communication hook in bf16; measure the link itself with `mtb comm`.",
    ),
    "data-bound": (
        "Prepare the data once (`mtb data prepare`), keep it on a local disk, do less work for each sample.",
        "See whether other processes use the CPU cores that loading needs.",
    ),
    "host-bound": (
        "Give the device more work at a time: a larger --batch-size, --compile, fewer small operators.",
        "Look for synchronisation in the training code (.item(), printing of tensors) and for Python work between operators.",
    ),
    "straggler-bound": (
        "Compare the slow rank's machine with the others: other processes, clocks and temperature, cores that it may use.",
        "If it is slow in data or forward only, compare what it is given: longer samples, a slower disk, a larger shard.",
        "Place the ranks otherwise: a slowness that stays with the machine is its own, one that moves is the work's.",
    ),
    "undetermined": (
        "Record more steps (--profile-active), all ranks, and named phases; `mtb profile` does all three.",
    ),
}  # fmt: skip


@attrs.frozen
class Shares:
    """Mean over ranks of where the window's time goes; they sum to 1.

    Attributes:
        transfer: exposed communication, without waiting.
        waiting: exposed communication while another rank had not come.
        data: idle in the data phase.
        host: idle otherwise.
    """

    compute: float
    transfer: float
    waiting: float
    memory: float
    data: float
    host: float


@attrs.frozen
class Verdict:
    """What bounds the run, why that is said, and what to try."""

    bound: Bound
    text: str
    evidence: list[str]
    advice: list[str]


def shares(analysis: Analysis) -> Shares | None:
    """Where the time goes; None where there is none."""
    ranks = [r for r in analysis.ranks if r.times.span > 0]
    if not ranks:
        return None
    rows = []
    for r in ranks:
        t = r.times
        data = r.idle_by_phase.get("data", 0)
        rows.append([v / t.span for v in (t.compute, t.exposed - r.waiting, r.waiting, t.memory, data, t.idle - data)])
    return Shares(*(fmean(column) for column in zip(*rows, strict=True)))


def judge(analysis: Analysis) -> Verdict:
    """The verdict."""
    found = shares(analysis)
    if found is None or found.compute == 0:
        return _verdict("undetermined", "No computation is seen in the window, so nothing can be said.", [])
    evidence = [*_share_evidence(found, analysis), *_rank_evidence(analysis)]
    worst = analysis.stragglers[0] if analysis.stragglers else None
    losses: dict[Bound, float] = {
        "communication-bound": found.transfer + (0.0 if worst else found.waiting),
        "data-bound": found.data,
        "host-bound": found.host,
    }
    if worst is not None:
        # What the slow rank loses looks like idling on itself; counted as the straggler's, it is not counted twice.
        losses["straggler-bound"] = worst.share
        own = "data-bound" if worst.phase == "data" else "host-bound"
        idle = max(0.0, worst.share - worst.compute_excess / worst.excess * worst.share) / len(analysis.ranks)
        losses[own] = max(0.0, losses[own] - idle)  # type: ignore[index]
    bound = max(losses, key=lambda name: losses[name])
    if losses[bound] < LOSS_SHARE:
        if found.compute >= COMPUTE_SHARE:
            return _verdict("compute-bound", f"Computation fills {found.compute:.0%} of the time.", evidence)
        text = f"Nothing stands out: computation fills {found.compute:.0%} of the time, and no single loss {LOSS_SHARE:.0%}."
        return _verdict("undetermined", text, evidence)
    return _verdict(bound, _sentence(bound, losses[bound], analysis), [*evidence, *_caveats(bound, analysis)])


def _verdict(bound: Bound, text: str, evidence: list[str]) -> Verdict:
    return Verdict(bound, text, evidence, list(_ADVICE[bound]))


def _sentence(bound: Bound, share: float, analysis: Analysis) -> str:
    if bound == "straggler-bound":
        s = analysis.stragglers[0]
        return (
            f"Rank {s.rank} holds the others up: by itself it needs {s.excess / 1e6:.1f} ms a step more than they do "
            f"({s.share:.0%} of the step), most of it in {_phase(s.phase)}."
        )
    return {
        "communication-bound": f"Communication that no computation hides takes {share:.0%} of the time.",
        "data-bound": f"Waiting for data takes {share:.0%} of the time.",
        "host-bound": f"For {share:.0%} of the time nothing computes or communicates: work comes too slowly from the host.",
    }[bound]


def _phase(name: str) -> str:
    return "time that no phase is named for" if name == "other" else f"'{name}'"


def _share_evidence(s: Shares, analysis: Analysis) -> list[str]:
    waiting = f"{s.waiting:.1%} waiting in communication for other ranks, "
    if not analysis.waiting_is_known:
        waiting = "in which waiting for other ranks may be, "
    text = (
        f"Of the time, {s.compute:.1%} is computation, {s.transfer:.1%} exposed communication, {waiting}{s.memory:.1%} copying, {s.data:.1%} waiting for data, {s.host:.1%} idle otherwise "
        "(means over ranks)."
    )
    out = [text]
    communication = sum(r.times.communication for r in analysis.ranks)
    if communication:
        hidden = sum(r.times.overlapped for r in analysis.ranks) / communication
        out.append(f"Computation hides {hidden:.0%} of the communication.")
    if s.waiting > NORMAL_WAIT and not analysis.stragglers:
        out.append(
            f"Ranks wait for each other for {s.waiting:.1%} of the time (normal: below {NORMAL_WAIT:.0%}), but none is slower "
            f"than the others in {CONSTANCY:.0%} of the steps: they are disturbed in turn, by other programs perhaps."
        )
    return out


def _rank_evidence(analysis: Analysis) -> list[str]:
    out = []
    times = list(analysis.step_times.values())
    if len(times) >= 3:
        jitter, tail = pstdev(times) / fmean(times), percentile(times, 95) / percentile(times, 50)
        out.append(
            f"Over {len(times)} steps, step time varies by {jitter:.1%} (normal: 1 to {NORMAL_JITTER:.0%}); its 95th "
            f"percentile is {tail:.2f} times the median (above {NORMAL_TAIL} is unusual)."
        )
    out += [_straggler_evidence(s) for s in analysis.stragglers]
    late = max(analysis.arrivals, key=lambda a: a.last, default=None)
    if late is not None and late.last:
        where = max(late.phases, key=lambda name: late.phases[name])
        out.append(
            f"Rank {late.rank} came last to {late.last} of {late.collectives} collectives, {late.lateness / 1e6:.2f} ms "
            f"late in the mean, most often in {_phase(where)}."
        )
    return out


def _straggler_evidence(s: Straggler) -> str:
    return (
        f"Rank {s.rank} was slower than the median of the others in {s.slower} of {s.steps} steps, by "
        f"{s.excess / 1e6:.1f} ms in the median; {s.phase_excess / 1e6:.1f} ms of it in {_phase(s.phase)}, and "
        f"{max(s.compute_excess, 0.0) / 1e6:.1f} ms of it computing."
    )


def _caveats(bound: Bound, analysis: Analysis) -> list[str]:
    out = []
    known = {name for r in analysis.ranks for name in r.phases.names}
    if bound == "host-bound" and "data" not in known:
        out.append("The trace names no data phase: waiting for data would look the same.")
    if bound == "communication-bound" and len(analysis.ranks) == 1 and (analysis.world_size or 2) > 1:
        out.append(
            "With one rank's trace, waiting for a slow rank looks like communication: analyse all ranks' traces."
        )
    return out
