"""From what all ranks saw to one row: pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from mtb_core import percentile

from .placement import expert_owner_map
from .settings import RouteSettings, as_fields

if TYPE_CHECKING:
    from .layer import Traffic

#: Phases of the forward pass, in the order in which they are shown.
FORWARD = ("gate", "permute", "count_exchange", "dispatch", "expert", "combine", "unpermute")
#: Phases of the backward pass; ``backward`` is all of it that is no communication.
BACKWARD = ("combine_backward", "dispatch_backward", "backward")
COMMUNICATION = ("count_exchange", "dispatch", "combine", "combine_backward", "dispatch_backward")

_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}


@attrs.frozen
class RankRecord:
    """Measurements of one rank.

    Attributes:
        traffic: of the last pass; all passes of a point move the same.
        phases: milliseconds of each phase, one mapping for each iteration.
        count_bytes: bytes that it sent to others in one pass before rows were sent.
    """

    traffic: Traffic
    phases: tuple[Mapping[str, float], ...]
    count_bytes: int


def row(settings: RouteSettings, ranks: Sequence[RankRecord]) -> dict[str, Any]:
    """The point as JSON values; `ranks` in rank order."""
    out = as_fields(settings)
    out["total_tokens"] = sum(rank.traffic.tokens for rank in ranks)
    out.update(_load(settings, [rank.traffic for rank in ranks]))
    out.update(_sent(settings, ranks))
    out.update(_times(ranks))
    out["tokens_per_sec"] = out["total_tokens"] / out["time_ms"]["iteration"]["mean"] * 1e3
    return out


def _load(settings: RouteSettings, ranks: Sequence[Traffic]) -> dict[str, Any]:
    """Load of experts and ranks. A slot is a token's claim on one expert."""
    experts = [sum(counts) for counts in zip(*(rank.per_expert for rank in ranks), strict=True)]
    received = [sum(rank.receive) for rank in ranks]
    requested, capacity = ranks[0].requested, ranks[0].capacity
    overflowed, dropped = (sum(getattr(r, f"{what}_slots") for r in ranks) for what in ("overflowed", "dropped"))
    return {
        "expert_owner_map": list(expert_owner_map(settings.num_experts, len(ranks))),
        "capacity_per_expert": capacity,
        "requested_counts": requested,
        "expert_token_counts": experts,
        "rank_token_counts": received,
        "send_counts": [rank.send for rank in ranks],
        "recv_counts": [rank.receive for rank in ranks],
        "slots": sum(requested),
        "overflowed_slots": overflowed,
        "rerouted_slots": overflowed - dropped,
        "dropped_slots": dropped,
        "drop_rate": dropped / sum(requested),
        "dropped_tokens": sum(rank.dropped_tokens for rank in ranks),
        "requested_imbalance_ratio": imbalance(requested),
        "load_imbalance_ratio": imbalance(experts),
        "rank_imbalance_ratio": imbalance(received),
        "padding_waste": padding_waste(experts, capacity),
        "busiest_rank": max(range(len(ranks)), key=received.__getitem__),
    }


def imbalance(counts: Sequence[int]) -> float:
    """The largest over the mean: 1 where all are equal, the number of counts where one has everything.

    How much longer the fullest one needs than if all were equal, where the time goes with the tokens.
    """
    return max(counts) * len(counts) / sum(counts)


def padding_waste(counts: Sequence[int], capacity: int | None) -> float:
    """The share that would be padding if each expert's batch were padded to its capacity.

    Without a capacity, to the fullest expert. Nothing is padded here, neither on the wire nor in the experts: it is
    what an implementation with fixed shapes (GShard, Switch) would send and compute in vain.
    """
    return 1 - sum(counts) / (len(counts) * (max(counts) if capacity is None else capacity))


def _sent(settings: RouteSettings, ranks: Sequence[RankRecord]) -> dict[str, Any]:
    """Bytes that leave their rank, summed over ranks, by phase; what stays on a rank is in no network's way."""
    row_bytes = settings.hidden_size * _BYTES[settings.dtype]
    moved = sum(sum(rank.traffic.send) - rank.traffic.send[i] for i, rank in enumerate(ranks))
    staying = sum(rank.traffic.send[i] for i, rank in enumerate(ranks))
    sent = {"count_exchange": sum(rank.count_bytes for rank in ranks)}
    sent |= {phase: moved * row_bytes for phase in COMMUNICATION if phase != "count_exchange"}
    return {
        "sent_bytes": sent,
        "communication_bytes": sum(sent.values()),
        "remote_share": moved / (moved + staying),
    }


def _times(ranks: Sequence[RankRecord]) -> dict[str, Any]:
    iterations = range(len(ranks[0].phases))
    names = (*FORWARD, *BACKWARD)

    def slowest(wanted: Sequence[str]) -> list[float]:
        return [max(sum(rank.phases[i].get(n, 0.0) for n in wanted) for rank in ranks) for i in iterations]

    per_rank = [_rank_times(number, rank) for number, rank in enumerate(ranks)]
    whole = [values["compute_ms"] + values["communication_ms"] for values in per_rank]
    return {
        "time_ms": {
            **{name: spread(slowest([name])) for name in names},
            "forward_pass": spread(slowest(FORWARD)),
            "backward_pass": spread(slowest(BACKWARD)),
            "iteration": spread(slowest(names)),
        },
        "communication_share": sum(values["communication_ms"] for values in per_rank) / sum(whole),
        "slowest_rank": max(range(len(ranks)), key=lambda r: per_rank[r]["compute_ms"]),
        "ranks": per_rank,
    }


def _rank_times(number: int, rank: RankRecord) -> dict[str, Any]:
    mean = {name: statistics.fmean(p.get(name, 0.0) for p in rank.phases) for name in (*FORWARD, *BACKWARD)}
    communication = sum(mean[name] for name in COMMUNICATION)
    return {
        "rank": number,
        "tokens_received": sum(rank.traffic.receive),
        "expert_ms": mean["expert"],
        "compute_ms": sum(mean.values()) - communication,
        "communication_ms": communication,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, smallest, median, 95th and 99th percentile and largest of `values`, one for each iteration."""
    return {
        "mean": statistics.fmean(values),
        "min": min(values),
        **{f"p{q}": percentile(values, q) for q in (50, 95, 99)},
        "max": max(values),
    }
