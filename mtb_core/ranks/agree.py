"""Agreement of all ranks on small host objects; every function here is called by all ranks, in the same order.

With one rank they work without a process group. Objects travel over the group's CPU backend, so no device is waited
for.
"""

from __future__ import annotations

from typing import Any, TypeVar

from mtb_core.api.errors import RunFailed
from mtb_core.api.values import RankContext

T = TypeVar("T")


def gather_objects(ctx: RankContext, value: T) -> list[T]:
    """Every rank's `value` (picklable), in rank order, on every rank."""
    if ctx.backend is None:
        return [value]
    import torch.distributed as dist  # noqa: PLC0415  (torch is imported when it is used)

    out: list[Any] = [None] * ctx.world_size
    dist.all_gather_object(out, value)
    return out


def from_rank_zero(ctx: RankContext, value: T) -> T:
    """Rank 0's `value` (picklable), on every rank; what others pass is ignored."""
    if ctx.backend is None:
        return value
    import torch.distributed as dist  # noqa: PLC0415

    box = [value if ctx.rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]


def same_on_all(ctx: RankContext, label: str, value: Any) -> None:
    """Refuse to go on unless `value` is equal on all ranks.

    Raises:
        RunFailed: on all ranks, naming the first rank that differs from rank 0 and both values.
    """
    values = gather_objects(ctx, value)
    for rank, other in enumerate(values):
        if other != values[0]:
            msg = (
                f"The ranks do not agree on {label}: rank 0 has {values[0]!r}, rank {rank} has {other!r}. "
                "All ranks need the same installation, configuration and command; make them equal and start again."
            )
            raise RunFailed(msg, rank=rank)
