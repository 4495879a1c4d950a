"""Agreement of all ranks on small host objects; every function here is called by all ranks, in the same order.

With one rank they work without a process group. Objects travel over the group's CPU backend, so no device is waited
for. Nobody raises alone: where one rank has an error, all raise.
"""

from __future__ import annotations

from typing import Any, TypeVar

import attrs

from mtb_core.api.errors import ConfigError, RunFailed
from mtb_core.api.values import RankContext

T = TypeVar("T")


@attrs.frozen
class _Problem:
    """An error in a form that survives the way to other ranks."""

    rank: int
    step: int | None
    kind: str
    message: str
    config: bool


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


def all_ok(ctx: RankContext, error: BaseException | None = None) -> None:
    """Go on only if every rank is well.

    Raises:
        BaseException: `error` itself, on the first rank that has one.
        ConfigError, RunFailed: on all other ranks, naming that rank and its error.
    """
    problems = gather_objects(ctx, None if error is None else _problem(ctx, error))
    first = next(((rank, p) for rank, p in enumerate(problems) if p is not None), None)
    if first is None:
        return
    rank, problem = first
    if error is not None and rank == ctx.rank:
        raise error
    if problem.config:
        raise ConfigError(problem.message)
    raise RunFailed(problem.message, rank=problem.rank, step=problem.step)


def _problem(ctx: RankContext, error: BaseException) -> _Problem:
    if isinstance(error, ConfigError):
        return _Problem(ctx.rank, None, type(error).__name__, str(error), config=True)
    if isinstance(error, RunFailed):
        rank = ctx.rank if error.rank is None else error.rank
        return _Problem(rank, error.step, type(error).__name__, str(error), config=False)
    return _Problem(ctx.rank, None, type(error).__name__, f"{type(error).__name__}: {error}", config=False)
