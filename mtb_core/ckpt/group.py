"""The saver's own process group: what ranks tell each other about a save never meets the training's collectives."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any, TypeVar

from mtb_core.api.errors import MtbError, RunFailed
from mtb_core.api.layout import Layout, World
from mtb_core.api.values import RankContext

from .layout import DamagedCheckpoint

T = TypeVar("T")


def text_of(error: BaseException) -> str:
    """Error text for other ranks; it spells out path and errno of an `OSError`."""
    if isinstance(error, DamagedCheckpoint):
        return f"{error.file}: {error.problem}"
    if isinstance(error, MtbError):
        return str(error).removesuffix(".")
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror} (errno {error.errno})"
    return f"{type(error).__name__}: {error}"


class SaverGroup:
    """All ranks, over gloo. Made by all ranks at the same time; with one rank it needs no process group."""

    def __init__(self, ctx: RankContext, timeout_s: float) -> None:
        self.rank, self.size = ctx.rank, ctx.world_size
        self._group: Any = None
        if self.size > 1:
            import torch.distributed as dist  # noqa: PLC0415  (torch is imported when it is used)

            self._group = dist.new_group(backend="gloo", timeout=dt.timedelta(seconds=timeout_s))

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order."""
        if self._group is None:
            return [value]
        import torch.distributed as dist  # noqa: PLC0415

        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self._group)
        return out

    def together(self, what: str, action: Callable[[], T], *, advice: str = "") -> list[T]:
        """Do `action` on every rank, and return every rank's result, picklable, on every rank.

        Raises:
            RunFailed: on all ranks if it failed on any: `what` happened, the first such rank and why, and `advice`.
        """
        result: T | None = None
        trouble: str | None = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001  (raised on all ranks below)
            trouble = text_of(error)
        everyone = self.gather((result, trouble))
        for rank, (_, text) in enumerate(everyone):
            if text is not None:
                raise RunFailed(f"{what}: rank {rank}: {text}. {advice}".rstrip(), rank=rank)
        return [r for r, _ in everyone]  # type: ignore[misc]

    def agreed(self, what: str, action: Callable[[], T], *, advice: str = "") -> T:
        """`together`, where only this rank's result is wanted, which may be anything."""
        results: list[T] = []
        self.together(what, lambda: results.append(action()), advice=advice)
        return results[0]

    def from_rank_zero(self, value: T) -> T:
        """Rank 0's `value`."""
        return self.gather(value if self.rank == 0 else None)[0]  # type: ignore[return-value]


def surrounding_context() -> RankContext:
    """The context of a loop that is not ours: from ``torch.distributed`` if it is initialised, else one rank."""
    import torch.distributed as dist  # noqa: PLC0415

    ready = dist.is_available() and dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if ready else (0, 1)
    return RankContext(
        rank=rank,
        local_rank=rank,
        world=World(size, size),
        device="cpu",
        backend=dist.get_backend() if ready else None,
        layout=Layout((("dp", size),)),
    )
