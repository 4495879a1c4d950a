"""`wrap_ddp`: its buckets, and modules that hold a part of a model, over one axis of a mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mtb_core import Layout, MicroBatch, RankContext, TrainConfig, run_ranks
from mtb_core.model.gpt import gpt_spec
from mtb_ddp import ReplicatedModule, wrap_ddp


def gpt(**settings: Any) -> nn.Module:
    """Six blocks, gradients of 5 MiB."""
    module = gpt_spec(TrainConfig(vocab_size=512, d_model=128, n_layers=6, n_heads=4, seq_length=8, **settings)).build()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return module


def buckets(module: DistributedDataParallel, backwards: int) -> list[list[str]]:
    """Names of the parameters in each bucket of the last of so many backwards, in the order of the reductions."""
    names = {id(p): name.removeprefix("module.") for name, p in module.named_parameters()}
    found: list[list[str]] = []

    def note(_: Any, bucket: Any) -> Any:
        found.append([names[id(p)] for p in bucket.parameters()])
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    module.register_comm_hook(None, lambda state, bucket: note(state, bucket))  # noqa: PLW0108  (without annotations)
    for _ in range(backwards):
        found.clear()
        module(torch.randint(512, (2, 8))).sum().backward()
    return found


@pytest.mark.parametrize("settings", [{}, {"tie_embeddings": True}], ids=["plain", "tied"])
def test_buckets_are_those_that_torch_comes_to(settings: dict[str, Any]) -> None:
    """The first backward has the buckets that torch has after its first: without a size, 1 MiB and the rest."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        ours: Any = wrap_ddp(gpt(**settings), dist.group.WORLD).module
        theirs = DistributedDataParallel(gpt(**settings), gradient_as_bucket_view=True)
        expected = buckets(theirs, 2)
        assert buckets(ours, 1) == expected
        assert len(expected) == 2
        ours = wrap_ddp(gpt(**settings), dist.group.WORLD, bucket_cap_mb=2).module
        expected = buckets(DistributedDataParallel(gpt(**settings), bucket_cap_mb=2), 2)
        assert buckets(ours, 1) == expected
        assert len(expected) == 3
    finally:
        del ours, theirs
        dist.destroy_process_group()


class Part(nn.Module):
    """A stage's part of a model: stages have other parameters and other buffers."""

    def __init__(self, stage: int, rank: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3 + stage, bias=False), nn.Linear(3 + stage, 1, bias=False)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.5)
        self.register_buffer("noted", torch.full((2 + stage,), float(rank)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def _part_on_rank(hook: str, ctx: RankContext, _worker: Any) -> float:
    """The largest error, relative, of the sums of two micro-batches."""
    assert ctx.mesh is not None
    stage = ctx.mesh["stage"].get_local_rank()
    replicas = wrap_ddp(Part(stage, ctx.rank), ctx.mesh["dp"], comm_hook=hook)
    assert (replicas.ranks, replicas.loss_factor) == (2, 2)
    peers = [2 * stage, 2 * stage + 1]

    def loss(module: nn.Module, rank: int, index: int) -> torch.Tensor:
        return module(torch.full((1, 4), 1.0 + rank + 10 * index)).sum()

    for step in range(3):  # powersgd compresses from its third on
        for index in range(2):
            with replicas.micro_batch(MicroBatch(index, 2, sync=index == 1)):
                (loss(replicas.module, ctx.rank, index) * replicas.loss_factor).backward()
        (shards,) = replicas.gradients(replicas.module.parameters(), copies=3)
        assert shards.copies == 6
        plain = Part(stage, ctx.rank)
        for rank in peers:
            for index in range(2):
                loss(plain, rank, index).backward()
        errors = [(a - p.grad).norm() / p.grad.norm() for a, p in zip(shards.tensors, plain.parameters(), strict=True)]
        if step < 2:
            replicas.module.zero_grad()
    replicas.settle()
    noted: Any = next(replicas.module.buffers())
    assert noted.tolist() == [2.0 * stage] * (2 + stage), "those of the first rank of the axis"
    return float(max(errors))


@pytest.mark.parametrize(("hook", "tolerance"), [("none", 0.0), ("bf16", 1e-2), ("powersgd", 1e-5)])
def test_parts_of_a_model_over_one_axis(hook: str, tolerance: float) -> None:
    """Each stage sums its own gradients over its own replicas, and shares buffers with them only."""
    layout = Layout((("stage", 2), ("dp", 2)), {"dp": "data"})
    outcome = run_ranks(_part_on_rank, hook, nproc=4, layout=layout, device="cpu")
    assert outcome.exit_reason == "done", outcome.failure
    assert outcome.value <= tolerance


def _buffers_of_all(_payload: None, ctx: RankContext, _worker: Any) -> list[float]:
    """What the buffer is at a forward, after a micro-batch that did not synchronise, and after one that did."""
    assert ctx.mesh is not None
    core = Part(0, ctx.rank)
    replicas = wrap_ddp(core, ctx.mesh["dp"], buffers=dist.group.WORLD)
    seen = []
    for sync in (False, True, True):
        core.noted.fill_(ctx.rank)
        with replicas.micro_batch(MicroBatch(0, 1, sync)):
            replicas.module(torch.ones(1, 4)).sum().backward()
        seen.append(float(core.noted[0]))
    core.noted.fill_(ctx.rank)
    replicas.settle()
    values = torch.tensor([*seen, float(core.noted[0])])
    dist.reduce(values, 0, op=dist.ReduceOp.MAX)
    found: list[float] = values.tolist()
    return found


def test_buffers_of_more_ranks_than_replicas() -> None:
    """They are shared when DDP would: at the first forward, and after a synchronised micro-batch only."""
    layout = Layout((("dp", 2), ("same", 2)))
    outcome = run_ranks(_buffers_of_all, nproc=4, layout=layout, device="cpu")
    assert outcome.exit_reason == "done", outcome.failure
    assert outcome.value == [0.0, 3.0, 0.0, 0.0]


def _ignored(_payload: None, ctx: RankContext, _worker: Any) -> list[float]:
    """Gradients of a parameter that is shared, and of one that is each rank's own, which begins as 2 + rank."""
    assert ctx.mesh is not None
    core = Part(0, ctx.rank)
    nn.init.constant_(core.second.weight, 2.0 + ctx.rank)
    replicas = wrap_ddp(core, ctx.mesh, ignored=[core.second.weight])
    replicas.module(torch.ones(1, 4)).sum().backward()
    assert core.first.weight.grad is not None
    assert core.second.weight.grad is not None
    values = torch.tensor([float(core.first.weight.grad[0, 0]), float(core.second.weight.grad[0, 0])])
    own = core.second.weight.detach()
    assert bool((own == 2.0 + ctx.rank).all())
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    found: list[float] = values.tolist()
    return found


def test_ignored_parameters_are_left_alone() -> None:
    """They stay what they are on each rank, and their gradients too."""
    outcome = run_ranks(_ignored, nproc=2, layout=Layout((("dp", 2),)), device="cpu")
    assert outcome.exit_reason == "done", outcome.failure
    assert outcome.value == [2.5, 2.0], "the mean of 2 and 3; 4 times 0.5"


class Branches(nn.Module):
    """The number of the micro-batch chooses one of two branches; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 1, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return (self.a, self.b)[index](x)


def _branches(payload: tuple[bool, bool], ctx: RankContext, _worker: Any) -> list[float]:
    """Gradients of both branches, rank r giving 1 + r to each; `payload`: every, find_unused_parameters."""
    every, find_unused = payload
    assert ctx.mesh is not None
    core = Branches()
    replicas = wrap_ddp(core, ctx.mesh, find_unused_parameters=find_unused)
    for index in range(2):
        with replicas.micro_batch(MicroBatch(index, 2, sync=every or index == 1)):
            (replicas.module(torch.full((1, 2), 1.0 + ctx.rank), index).sum() * replicas.loss_factor).backward()
    assert core.a.weight.grad is not None
    assert core.b.weight.grad is not None
    return [float(core.a.weight.grad[0, 0]), float(core.b.weight.grad[0, 0])]


@pytest.mark.parametrize(
    ("every", "unused"),
    [
        (False, "Micro-batch 2 of 2 did not use 'a.weight' "),
        (True, "Micro-batch 1 of 2 did not use 'b.weight', 'c.weight' "),
    ],
    ids=["last", "every"],
)
def test_gradients_that_are_not_reduced_are_named(every: bool, unused: str) -> None:
    """A gradient of an unsynchronised micro-batch alone keeps its bucket from being summed: no update may follow."""
    outcome = run_ranks(_branches, (every, False), nproc=2, layout=Layout((("dp", 2),)), device="cpu")
    assert outcome.failure is not None
    assert outcome.failure.kind == "MissingGradient", outcome.failure
    assert unused in outcome.failure.message


def test_unused_branches_are_summed_when_asked_for() -> None:
    """DDP looks for unused parameters: what an earlier micro-batch left is summed over the ranks, 1 + 2."""
    outcome = run_ranks(_branches, (False, True), nproc=2, layout=Layout((("dp", 2),)), device="cpu")
    assert outcome.value == [3.0, 3.0], outcome.failure


def _several_axes(_payload: None, ctx: RankContext, _worker: Any) -> str:
    assert ctx.mesh is not None
    with pytest.raises(ValueError, match="make a group of these ranks") as raised:
        wrap_ddp(Part(0, 0), ctx.mesh["dp", "more"])
    return str(raised.value)


def test_some_ranks_over_several_axes_need_a_group() -> None:
    """A mesh has no group for them; the message says how many ranks it has."""
    layout = Layout((("dp", 2), ("more", 1), ("stage", 2)))
    outcome = run_ranks(_several_axes, nproc=4, layout=layout, device="cpu")
    assert outcome.exit_reason == "done", outcome.failure
    assert "2 of 4 ranks" in outcome.value


def test_one_rank_needs_no_wrapping() -> None:
    """A bare module has the same methods; nothing is scaled or sent."""
    core = Part(0, 0)
    bare = ReplicatedModule(core)
    with bare.micro_batch(MicroBatch(0, 2, sync=False)):
        (bare.module(torch.ones(1, 4)).sum() * bare.loss_factor).backward()
    bare.settle()
    assert (bare.module, bare.loss_factor) == (core, 1)
    assert [(len(s.tensors), s.copies) for s in bare.gradients(core.parameters())] == [(2, 1)]
