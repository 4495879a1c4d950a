"""Validity of measured times for comparison: disturbances of the machine, and uncertainty of the times.

Each rank takes a `Sample` when it starts and, by `gather_uses`, when it ends. All that a document says,
`performance_fields`, follows from these by pure functions.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from mtb_core import RankContext, gather_objects
from mtb_core.ranks.worker import available_cores

from .machine import CPU, cpu_quota, nvidia_smi, read
from .origin import same_revision

#: Fewer measured steps of a trial, or calls at a point, than this say little.
LEAST_STEPS = 10
#: p95 / p50 of step times above this is not stable: a mean of few such steps says little. Ordinary is below 1.2.
STABLE_RATIO = 1.5
#: Waiting and running processes per core, at the start, above which a machine counts as loaded.
BUSY_LOAD = 1.5
#: Share of the machine's cores that others may use.
OTHERS_SHARE = 0.10
#: Share of the time that a hypervisor may take away.
STEAL_SHARE = 0.01
#: Less time of all cores together does not tell such shares: the system counts in hundredths of a second.
LEAST_CORE_S = 1.0

_DEBUG_FLAGS = {
    "CUDA_LAUNCH_BLOCKING": ("0", ""),
    "TORCH_DISTRIBUTED_DEBUG": ("OFF", ""),
    "NCCL_DEBUG": ("", "VERSION", "WARN", "INFO"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("0", ""),
    "PYTHONDEVMODE": ("",),
    "PYTHONMALLOC": ("", "pymalloc", "malloc"),
    "TORCH_SHOW_DISPATCH_TRACE": ("0", ""),
    "MALLOC_CHECK_": ("", "0"),
    "CUBLAS_LOGINFO_DBG": ("", "0"),
    "CUDNN_LOGLEVEL_DBG": ("", "0"),
    "PYTHONASYNCIODEBUG": ("",),
    "PYTHONTRACEMALLOC": ("", "0"),
    "PYTORCH_JIT_LOG_LEVEL": ("",),
    "TORCH_COMPILE_DEBUG": ("", "0"),
    "TORCH_CPP_LOG_LEVEL": ("", "WARNING", "ERROR", "FATAL"),
    "TORCH_NCCL_BLOCKING_WAIT": ("", "0"),
    "TORCH_USE_CUDA_DSA": ("", "0"),
}
#: Libraries that watch every access to memory.
_SANITIZERS = ("libasan", "libtsan", "libubsan", "libmsan", "valgrind")
_THROTTLE = "clocks_throttle_reasons"
_THROTTLED = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown")


@attrs.frozen
class Sample:
    """Counters of the machine and this process so far; plain numbers, None if the system does not tell.

    Attributes:
        at_s: a monotonic clock.
        load_average: running and waiting processes, mean of the last minute.
        busy_s, total_s, steal_s: CPU time of all cores since the machine started.
        own_s: CPU time of this process and its ended children.
        throttled: how often cores were slowed because of heat.
    """

    at_s: float
    load_average: float | None
    busy_s: float | None
    total_s: float | None
    steal_s: float | None
    own_s: float
    throttled: int | None

    @classmethod
    def take(cls) -> Sample:
        """As it is now."""
        busy, total, steal = cpu_times(read("/proc/stat") or "")
        counts = [
            int(text) for path in CPU.glob("cpu[0-9]*/thermal_throttle/core_throttle_count") if (text := read(path))
        ]
        times = os.times()
        return cls(
            time.monotonic(),
            _load(),
            busy,
            total,
            steal,
            times.user + times.system + times.children_user + times.children_system,
            sum(counts) if counts else None,
        )


@attrs.frozen
class RankUse:
    """One rank's counters at its start and end, and facts about its machine.

    Attributes:
        cores, machine_cores: those that it may use, by affinity and a container's quota, and all.
        threads: with which torch computes on it.
        notes: what disturbs it, in words, debug flags above all.
    """

    local_rank: int
    start: Sample
    end: Sample
    cores: int
    machine_cores: int
    threads: int
    notes: tuple[str, ...] = ()


@attrs.frozen
class Timed:
    """Number and spread of the timings behind one row.

    Attributes:
        count: how many measured steps, calls or iterations.
        p50_ms, p95_ms: of their times; None where their spread is none of steps, and so no reason.
    """

    count: int
    p50_ms: float | None = None
    p95_ms: float | None = None


def performance_fields(
    uses: Sequence[RankUse],
    timed: Sequence[Timed],
    *,
    device: str | None,
    reasons: Sequence[str] = (),
    each: str = "step",
    row: str = "trial",
) -> dict[str, Any]:
    """The keys that tell in every kind of document whether its times may be compared with others; strict JSON.

    These are ``conditions``, ``performance_valid`` and ``performance_invalid_reasons``.

    Args:
        uses: of all ranks, as `gather_uses` gives them; empty where a rank did not come to its end. Then nothing is
            known of the machine, and the times are not valid.
        timed: one for each row that was measured.
        device: that of the ranks, "cpu" or "cuda"; None where there is none.
        reasons: why the times are not valid for all that the caller knows.
        each: what was timed, in the singular, for the reasons: "step", "call".
        row: what a row stands for: "trial", "point".
    """
    found = conditions(uses) if uses else {}
    unknown = [] if uses else ["what the machine was like is not known, since not every rank came to its end"]
    disturbed = [*_disturbances(found), *_settings(uses, device)] if uses else unknown
    why = [*reasons, *disturbed, *_uncertainty(timed, each, row)]
    return {"conditions": found, "performance_valid": not why, "performance_invalid_reasons": why}


def conditions(ranks: Sequence[RankUse]) -> dict[str, Any]:
    """Conditions of the machines while the ranks ran: the worst of the nodes; strict JSON.

    `ranks` are in order, one at least; a new node begins with each local rank 0.
    """
    nodes = [_node(group) for group in _by_node(ranks)]
    return {name: _worst([node[name] for node in nodes]) for name in nodes[0]}


def _disturbances(found: Mapping[str, Any]) -> list[str]:
    out = []
    cores = found["cores"]
    load = found["load_average_start"]
    if load is not None and load > BUSY_LOAD * cores:
        out.append(f"the machine was loaded before: load average {load:.1f} on {cores} cores")
    load = found["load_average_end"]
    if load is not None and load > (BUSY_LOAD + 1) * cores:  # our own ranks fill the cores once at most
        out.append(f"the machine was loaded at the end: load average {load:.1f} on {cores} cores")
    others = found["other_cpu_share"]
    if others is not None and others > OTHERS_SHARE:
        out.append(f"other processes used {others:.0%} of the machine's cores meanwhile")
    steal = found["steal_share"]
    if steal is not None and steal > STEAL_SHARE:
        out.append(f"the hypervisor took {steal:.0%} of the CPU time")
    if found["throttle_events"]:
        out.append(f"cores were slowed because of heat {found['throttle_events']} times")
    return out


def _settings(ranks: Sequence[RankUse], device: str | None) -> list[str]:
    out = list(dict.fromkeys(note for rank in ranks for note in rank.notes))
    for group in _by_node(ranks):
        threads = sum(rank.threads for rank in group) if device == "cpu" else len(group)
        if threads > group[0].cores:
            what = "threads of ranks" if device == "cpu" else "ranks"
            out.append(f"{threads} {what} share {group[0].cores} cores")
            break
    return out


def _uncertainty(timed: Sequence[Timed], each: str, row: str) -> list[str]:
    out = []
    fewest = min((one.count for one in timed), default=0)
    if not any(one.count for one in timed):
        out.append(f"no {each} was measured")
    elif fewest == 0:
        out.append(f"a {row} has no measured {each}")
    elif fewest < LEAST_STEPS:
        out.append(f"only {fewest} measured {each}{'' if fewest == 1 else 's'} in a {row}, fewer than {LEAST_STEPS}")
    ratios = [one.p95_ms / one.p50_ms for one in timed if one.p50_ms and one.p95_ms is not None]
    if ratios and max(ratios) > STABLE_RATIO:
        out.append(f"{each} times are not stable: p95 is {max(ratios):.2f} times p50, more than {STABLE_RATIO}")
    return out


def debug_flags(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Texts for debugging aids of this process that slow it down."""
    out = [
        f"{name}={environ[name]} is set"
        for name, harmless in _DEBUG_FLAGS.items()
        if name in environ and environ[name].upper() not in {value.upper() for value in harmless}
    ]
    out += [f"{word} is loaded by LD_PRELOAD" for word in _SANITIZERS if word in environ.get("LD_PRELOAD", "")]
    logs = re.split(r"[,\s]+", environ.get("TORCH_LOGS", ""))
    if any(word.startswith("+") for word in logs):
        out.append(f"TORCH_LOGS={','.join(logs)} is set")
    torch = sys.modules.get("torch")
    if torch is not None and torch.is_anomaly_enabled():
        out.append("torch's anomaly detection is on")
    if sys.gettrace() is not None or sys.getprofile() is not None:
        out.append("a debugger, coverage or Python profiler is on")
    return out


def gpu_disturbances(own_ranks: int) -> list[str]:
    """Other processes on this machine's GPUs, and GPUs that are slowed down now; `own_ranks` processes are ours."""
    out = []
    listed = nvidia_smi("--query-compute-apps=pid", "--format=csv,noheader")
    if listed is not None:
        others = len(set(re.findall(r"\d+", listed))) - own_ranks
        if others > 0:
            out.append(f"{others} other processes compute on this machine's GPUs")
    slowed = nvidia_smi(
        f"--query-gpu={','.join(f'{_THROTTLE}.{name}' for name in _THROTTLED)}", "--format=csv,noheader"
    )
    if slowed is not None:
        out += throttle_notes(slowed)
    return out


def formal_obstacles(origin: Mapping[str, Any]) -> list[str]:
    """Reasons why a measurement made here and now could not be published: the code's `origin` and the machine.

    `origin` is what ``provenance`` returns. Without obstacles the tree is clean and at a known revision, the image, if
    any, was built from it, and nothing else uses the machine or its GPUs.
    """
    out = []
    revision, built = origin["git_revision"], origin["build_revision"]
    if revision is None:
        out.append("the revision of the code is not known; work in a git checkout or set MTB_GIT_REVISION")
    elif origin["git_dirty"] is None:
        out.append(
            f"whether tracked files differ from {revision} is not known; work in a checkout of that revision, and set "
            "MTB_GIT_REVISION to no other"
        )
    if origin["git_dirty"]:
        out.append("tracked files differ from the revision; commit or undo the changes")
    if built is not None and revision is not None and not same_revision(built, revision):
        out.append(f"the image was built from {built}, but the revision is {revision}; build it anew")
    load, cores = _load(), os.cpu_count() or 1
    if load is not None and load > BUSY_LOAD * cores:
        out.append(f"the machine is busy: load average {load:.1f} on {cores} cores")
    out += gpu_disturbances(0)
    return out


def throttle_notes(csv: str) -> list[str]:
    """Texts for GPUs that are slowed down, from a line for each GPU with "Active" or "Not Active" by reason."""
    found = {
        name
        for line in csv.splitlines()
        for name, state in zip(_THROTTLED, line.split(","), strict=False)
        if state.strip() == "Active"
    }
    return [f"a GPU is slowed down: {name}" for name in _THROTTLED if name in found]


def cpu_times(stat: str) -> tuple[float | None, float | None, float | None]:
    """(busy, total, stolen) seconds of all cores from the text of ``/proc/stat`` (proc(5)).

    Guest time is in user time already; waiting for a disk is idle.
    """
    found = re.match(r"cpu\s+((?:\d+\s+){7}\d+)", stat)
    if found is None:
        return None, None, None
    user, nice, system, idle, wait, irq, softirq, steal = (int(n) / os.sysconf("SC_CLK_TCK") for n in found[1].split())
    busy = user + nice + system + irq + softirq
    return busy, busy + idle + wait + steal, steal


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _by_node(ranks: Sequence[RankUse]) -> list[list[RankUse]]:
    groups: list[list[RankUse]] = []
    for rank in ranks:
        if rank.local_rank == 0 or not groups:
            groups.append([])
        groups[-1].append(rank)
    return groups


def _node(ranks: Sequence[RankUse]) -> dict[str, Any]:
    first, last = ranks[0].start, ranks[0].end
    others = steal = None
    if first.total_s is not None and last.total_s is not None and last.total_s - first.total_s >= LEAST_CORE_S:
        assert first.busy_s is not None and last.busy_s is not None  # noqa: PT018  (they come together)
        assert first.steal_s is not None and last.steal_s is not None  # noqa: PT018
        total = last.total_s - first.total_s
        own = sum(rank.end.own_s - rank.start.own_s for rank in ranks)
        others = max(0.0, last.busy_s - first.busy_s - own) / total
        steal = (last.steal_s - first.steal_s) / total
    counted = first.throttled is not None and last.throttled is not None
    return {
        "cores": ranks[0].machine_cores,
        "load_average_start": first.load_average,
        "load_average_end": last.load_average,
        "other_cpu_share": others,
        "steal_share": steal,
        "throttle_events": (last.throttled or 0) - (first.throttled or 0) if counted else None,
        "duration_s": last.at_s - first.at_s,
    }


def _worst(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def usable_cores(allowed: int, quota: float | None) -> int:
    """Whole cores that may be used all the time: of those `allowed`, as many as a `quota` of CPU time pays for."""
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def gather_uses(ctx: RankContext, start: Sample) -> list[RankUse]:
    """Counters of all ranks, each since its own `start`, in rank order on every rank. Called by all ranks."""
    return gather_objects(ctx, own_use(ctx, start))


def own_use(ctx: RankContext, start: Sample) -> RankUse:
    """Counters of this rank, taken now."""
    import torch  # noqa: PLC0415  (a run has it loaded already)

    notes = debug_flags()
    if ctx.device.startswith("cuda") and ctx.local_rank == 0:
        notes += gpu_disturbances(ctx.world.local_size)
    return RankUse(
        ctx.local_rank,
        start,
        Sample.take(),
        usable_cores(available_cores(), cpu_quota()),
        os.cpu_count() or 1,
        torch.get_num_threads(),
        tuple(notes),
    )
