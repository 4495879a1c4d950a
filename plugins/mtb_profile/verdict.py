"""What bounds a run, in words: by evidence that is shown, and undetermined where there is too little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Literal

import attrs

from mtb_core import percentile, summarize

from .analysis import Analysis, Parts
from .setting import Setting
from .stragglers import CONSTANCY, Straggler

Bound = Literal["compute-bound", "communication-bound", "data-bound", "host-bound", "straggler-bound", "undetermined"]

#: What could be won: `waiting` for ranks that are slow in turn, `suspect` for one that chance may explain.
Loss = Literal["communication", "data", "host", "waiting", "straggler", "suspect"]
_BOUNDS: dict[Loss, Bound] = {
    "communication": "communication-bound",
    "data": "data-bound",
    "host": "host-bound",
    "straggler": "straggler-bound",
}
_WHAT: dict[Loss, str] = {
    "communication": "communication that no computation hides",
    "data": "waiting for data",
    "host": "other idling",
    "waiting": "waiting for other ranks",
    "straggler": "a straggler's excess",
    "suspect": "the excess of a rank that seems slow",
}

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
        "Profile while nothing else uses the machine: what other programs take varies from step to step.",
    ),
}  # fmt: skip
#: In place of the first advice about stragglers.
_ON_ONE_MACHINE = (
    "All ranks share one machine: see which cores the slow rank may use and shares with others, on GPUs which clocks and "
    "link its device has; stop other programs, and profile again to see whether it is the same rank."
)


@attrs.frozen
class Shares:
    """Mean over ranks of where the time goes, by the names of `mtb_profile.analysis.Parts`; they sum to 1."""

    compute: float
    transfer: float
    waiting: float
    memory: float
    data: float
    host: float


@attrs.frozen
class Verdict:
    """What bounds the run, why that is said, what makes it uncertain, and what to try."""

    bound: Bound
    text: str
    evidence: list[str]
    uncertain_because: list[str]
    advice: list[str]


def shares(analysis: Analysis) -> Shares | None:
    """Where the window's time goes; None where there is none."""
    return _mean_shares([r.parts for r in analysis.ranks])


def _mean_shares(parts: Sequence[Parts]) -> Shares | None:
    rows = [[v / p.total for v in attrs.astuple(p)] for p in parts if p.total > 0]
    return Shares(*(fmean(column) for column in zip(*rows, strict=True))) if rows else None


def _shares_by_step(analysis: Analysis) -> list[Shares]:
    """The same for each step that all ranks have."""
    ranks = [r.step_parts for r in analysis.ranks]
    steps = sorted(set.intersection(*map(set, ranks)))
    found = (_mean_shares([parts[step] for parts in ranks]) for step in steps)
    return [one for one in found if one is not None]


def judge(analysis: Analysis, setting: Setting | None = None) -> Verdict:
    """The verdict; `setting` tells what traces do not."""
    setting = setting or Setting()
    found = shares(analysis)
    if found is None or found.compute == 0:
        return _verdict("undetermined", "No computation is seen in the window, so nothing can be said.", [], setting)
    evidence = [*_share_evidence(found, analysis), *_rank_evidence(analysis)]
    losses = _losses(found, analysis)
    steps = [(each, _losses(each, analysis)) for each in _shares_by_step(analysis)]
    largest = max(losses, key=lambda name: losses[name])
    if losses[largest] < LOSS_SHARE:
        if found.compute < COMPUTE_SHARE:
            text = f"Nothing stands out: computation fills {found.compute:.0%} of the time, and no single loss {LOSS_SHARE:.0%}."
            return _verdict("undetermined", text, evidence, setting)
        perhaps = [name for name in losses if not _exceeds([LOSS_SHARE - step[name] for _, step in steps])]
        if perhaps:
            name = max(perhaps, key=lambda name: losses[name])
            return _verdict("undetermined", _either(name, losses[name], None, steps), evidence, setting)
        if not _exceeds([each.compute - COMPUTE_SHARE for each, _ in steps]):
            text = f"Computation fills {found.compute:.0%} of the time, but not surely {COMPUTE_SHARE:.0%}: steps differ too much."
            return _verdict("undetermined", text, evidence, setting)
        return _verdict("compute-bound", f"Computation fills {found.compute:.0%} of the time.", evidence, setting)
    if not _exceeds([step[largest] - LOSS_SHARE for _, step in steps]):
        return _verdict("undetermined", _either(largest, losses[largest], None, steps), evidence, setting)
    rivals = [name for name in losses if name != largest and not _exceeds([s[largest] - s[name] for _, s in steps])]
    if rivals:
        rival = max(rivals, key=lambda name: losses[name])
        text = _either(largest, losses[largest], (rival, losses[rival]), steps)
        return _verdict("undetermined", text, evidence, setting)
    if largest in ("waiting", "suspect"):
        return _verdict("undetermined", _sentence(largest, losses[largest], analysis), evidence, setting)
    text = _sentence(largest, losses[largest], analysis)
    return _verdict(_BOUNDS[largest], text, [*evidence, *_caveats(largest, analysis)], setting)


def _losses(found: Shares, analysis: Analysis) -> dict[Loss, float]:
    """Shares of the time that could be won, each named once: what a slow rank loses looks like idling on itself."""
    losses: dict[Loss, float] = {"communication": found.transfer, "data": found.data, "host": found.host}
    slow = [*analysis.stragglers, *analysis.suspects]
    if not slow:
        return {**losses, "waiting": found.waiting}
    worst = slow[0]
    own: Loss = "data" if worst.phase == "data" else "host"
    idle = max(0.0, worst.share - worst.compute_excess / worst.excess * worst.share) / len(analysis.ranks)
    losses[own] = max(0.0, losses[own] - idle)
    return {**losses, "straggler" if worst.certain else "suspect": worst.share}


def _exceeds(margins: Sequence[float]) -> bool:
    """Whether the mean of `margins`, one a step, is above 0 by more than the steps' spread explains (95%).

    Of fewer than two steps no spread is known; then it is taken to be.
    """
    found = summarize(margins)
    return found is None or found["ci95"] is None or found["ci95"][0] > 0


def _either(
    name: Loss, share: float, rival: tuple[Loss, float] | None, steps: Sequence[tuple[Shares, Mapping[Loss, float]]]
) -> str:
    """Why it may be `name` and may be its rival, or, without one, no loss that bounds a run."""
    takes = f"{_WHAT[name][0].upper()}{_WHAT[name][1:]} takes {share:.0%} of the time"
    few = f"{len(steps)} steps that differ as these do cannot tell"
    if rival is None:
        return f"{takes}, and from {LOSS_SHARE:.0%} on it would bound the run: {few} on which side of that it is."
    return f"{takes}, {_WHAT[rival[0]]} {rival[1]:.0%}: {few} which is more."


def _verdict(bound: Bound, text: str, evidence: list[str], setting: Setting) -> Verdict:
    advice = list(_ADVICE[bound])
    if bound == "straggler-bound" and setting.one_machine is not None:
        advice[0] = _ON_ONE_MACHINE if setting.one_machine else advice[0]
    return Verdict(bound, text, evidence, list(setting.disturbances), advice)


def _sentence(loss: Loss, share: float, analysis: Analysis) -> str:
    if loss == "straggler":
        s = analysis.stragglers[0]
        return (
            f"Rank {s.rank} holds the others up: by itself it needs {s.excess / 1e6:.1f} ms a step more than they do "
            f"({s.share:.0%} of the step), most of it in {_phase(s.phase)}."
        )
    return {
        "communication": f"Communication that no computation hides takes {share:.0%} of the time.",
        "data": f"Waiting for data takes {share:.0%} of the time.",
        "host": f"For {share:.0%} of the time nothing computes or communicates: work comes too slowly from the host.",
        "waiting": f"Ranks wait for each other for {share:.0%} of the time, but none of them is slower than the others throughout.",
        "suspect": "A rank seems to hold the others up, but so few steps, or steps that differ so much, do not prove it.",
    }[loss]


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
    if s.waiting > NORMAL_WAIT and not analysis.stragglers and not analysis.suspects:
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
    out += [f"{_straggler_evidence(s)} Chance may show as much (p up to {s.chance:.0%})." for s in analysis.suspects]
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


def _caveats(loss: Loss, analysis: Analysis) -> list[str]:
    out = []
    known = {name for r in analysis.ranks for name in r.phases.names}
    if loss == "host" and "data" not in known:
        out.append("The trace names no data phase: waiting for data would look the same.")
    if loss == "communication" and len(analysis.ranks) == 1 and (analysis.world_size or 2) > 1:
        out.append(
            "With one rank's trace, waiting for a slow rank looks like communication: analyse all ranks' traces."
        )
    return out
