"""The entry of every rank: set up a point, check it, run it, and make a row of the results of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from mtb_comm.kept import Kept
from mtb_core import RankContext, Worker, gather_objects, same_on_all
from mtb_evidence import Sample, environment, gather_uses

from .check import TOLERANCE, Inputs, compare, differentiate, failures
from .clock import Clock
from .distributions import preference
from .exchange import Exchange
from .layer import TORCH_DTYPES, MoELayer, Passed
from .learned import learn
from .rows import RankRecord, row
from .seeds import generator
from .settings import RouteSettings


@attrs.frozen
class Work:
    """Input of the ranks.

    Attributes:
        points: measured one after the other.
        rows: file to which rank 0 appends the environment and each finished row, one a line, so that no row is lost
            if a later point fails; None: none is kept.
    """

    points: tuple[RouteSettings, ...]
    rows: Path | None = None


def measure_points(work: Work, ctx: RankContext, worker: Worker) -> dict[str, Any]:
    """Measure all points. Returns the environment, ``rows`` in the order of the points, and ``uses``.

    Called on every rank. ``uses`` is the value of `mtb_evidence.gather_uses`. If a rank is asked to stop, all stop
    together, with the rows that are finished.
    """
    start = Sample.take()
    same_on_all(ctx, "what to measure", work.points)
    kept = Kept(work.rows if ctx.rank == 0 else None, worker.progress)
    head = {
        "world_size": ctx.world_size,
        "device": ctx.device.partition(":")[0],
        "backend": ctx.backend,
        "environment": environment(ctx.device),
    }
    kept.write(head)
    rows: list[dict[str, Any]] = []
    for number, settings in enumerate(work.points):
        if ctx.rank == 0:
            worker.progress({"point": number + 1, "points": len(work.points)})
        try:
            done = Point(settings, ctx, worker).measure()
        except Stopped:
            break
        rows.append(done)
        kept.write(done)
    return {**head, "rows": rows, "uses": gather_uses(ctx, start)}


class Stopped(Exception):
    """All ranks have agreed to stop; the point at hand is given up."""


class Point:
    """One point on one rank."""

    def __init__(self, settings: RouteSettings, ctx: RankContext, worker: Worker) -> None:
        self.settings, self.ctx, self.worker = settings, ctx, worker
        self.clock = Clock(ctx.device)
        self.exchange = Exchange(self.clock.lap)
        self.layer = MoELayer(settings, self.exchange, ctx.device)
        self.learned = learn(settings, ctx, self._together) if settings.distribution == "learned" else None
        if self.learned is not None:
            self.layer.load_state_dict(self.learned.weights)
        self.inputs = self._make_inputs()

    def _make_inputs(self) -> Inputs:
        settings, ctx = self.settings, self.ctx
        dtype, shape = TORCH_DTYPES[settings.dtype], (settings.tokens_per_rank, settings.hidden_size)
        random = generator(settings.seed, "tokens", ctx.rank)
        x = torch.randn(shape, generator=random) if self.learned is None else self.learned.activations
        wanted = preference(settings, ctx.rank, ctx.world_size)
        return Inputs(
            x=x.to(ctx.device, dtype, copy=True).requires_grad_(),
            preference=None if wanted is None else wanted.to(ctx.device),
            cotangent=torch.randn(shape, generator=random).to(ctx.device, dtype),
        )

    def measure(self) -> dict[str, Any]:
        """The row.

        Raises:
            Stopped: on all ranks, where one was asked to stop before it was done.
        """
        checked = self._check() if self.settings.check else None
        for _ in range(self.settings.warmup):
            self._together()
            self._iterate()
        phases = []
        for _ in range(self.settings.iters):
            self._together()
            passed = self._iterate()
            phases.append(self.clock.phases())
        losses = torch.stack([passed.load_balancing.detach(), passed.z_loss.detach()])
        dist.all_reduce(losses)
        record = RankRecord(passed.traffic(), tuple(phases), self.exchange.count_bytes)
        out = row(self.settings, gather_objects(self.ctx, record))
        balance, out["z_loss"] = losses.tolist()
        # Where experts choose, all have the same load.
        out["load_balance_loss"] = None if self.settings.routing == "expert" else balance
        out["router_loss_first"] = None if self.learned is None else self.learned.loss_first
        out["router_loss_last"] = None if self.learned is None else self.learned.loss_last
        return out | _checked(checked, self.settings)

    def _together(self) -> None:
        """Ranks begin an iteration together, so that no phase holds the lag of the one before, or stop together."""
        if self.ctx.device.startswith("cuda"):
            torch.cuda.synchronize()
        stop = torch.tensor(int(self.worker.stop.requested is not None))
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        if stop.item():
            raise Stopped

    def _iterate(self) -> Passed:
        self.layer.zero_grad(set_to_none=True)
        self.inputs.x.grad = None
        self.exchange.count_bytes = 0
        self.clock.start()
        passed: Passed = self.layer(
            self.inputs.x, self.inputs.preference, total=self.settings.tokens_per_rank * self.ctx.world_size
        )
        differentiate(passed, self.inputs.cotangent, self.layer)
        self.clock.lap("backward")
        return passed

    def _check(self) -> dict[str, float]:
        passed = self._iterate()
        return compare(self.ctx, self.layer, self.inputs, passed)


def _checked(errors: dict[str, float] | None, settings: RouteSettings) -> dict[str, Any]:
    if errors is None:
        return {"check": None, "status": "ok"}
    failed: Sequence[str] = failures(errors, settings.dtype)
    check = {"errors": errors, "tolerance": TOLERANCE[settings.dtype], "failed": failed}
    return {"check": check, "status": "failed" if failed else "ok"}
