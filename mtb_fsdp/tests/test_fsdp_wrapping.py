"""`wrap_fsdp`: when it communicates, and modules that hold a part of a model, over some axes of a mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mtb_core import CountCollectives, Layout, MicroBatch, RankContext, TrainConfig, run_ranks
from mtb_fsdp import wrap_fsdp
from mtb_kit.launches import run_launches

from .whole import TINY

LARGE: dict[str, Any] = {**TINY, "strategy": "fsdp", "nproc": 2, "n_layers": 6, "steps": 2, "warmup_steps": 0}


@pytest.mark.parametrize("mode", ["auto", "last"])
def test_gradients_are_reduced_while_backward_runs(mode: str, tmp_path: Path) -> None:
    """In each backward that synchronises, a unit's gradients are on their way before backward is in the next unit.

    So the first reduce-scatter is launched while 60% of the parameters have no gradient yet. `auto` synchronises each
    micro-batch, `last` only the last.
    """
    config = TrainConfig(**{**LARGE, "grad_accum_steps": 2, "gradient_sync_mode": mode})
    result, ranks = run_launches(config, tmp_path)
    assert result.exit_reason == "done", result.failure
    for backwards in ranks:
        assert len(backwards) == 4
        for index, backward in enumerate(backwards):
            ahead = [launch.ahead for launch in backward if launch.kind == "reduce_scatter"]
            if mode == "last" and index % 2 == 0:
                assert ahead == []
                continue
            assert len(ahead) == 7
            assert ahead[0] >= 0.6
            assert len(set(ahead[:6])) == 6


class Part(nn.Module):
    """A stage's part of a model: stages have other blocks, other parameters and other buffers."""

    def __init__(self, stage: int, rank: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({f"block{stage}{i}": nn.Linear(4, 4, bias=False) for i in range(2)})
        self.head = nn.Linear(4, 5 + stage)
        self.scale = nn.Parameter(torch.empty(()))
        self.register_buffer("noted", torch.full((2 + stage,), float(rank)))
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.25)

    def forward(self, x: torch.Tensor, skip: str = "") -> torch.Tensor:
        for name, block in self.blocks.items():
            if name != skip:
                x = block(x)
        return self.head(x) * self.scale


def _loss(module: nn.Module, rank: int, index: int) -> torch.Tensor:
    return module(torch.full((1, 4), 1.0 + rank + 10 * index)).float().sum()


def _part_on_rank(dtype: str, ctx: RankContext, _worker: Any) -> float:
    """The largest error, relative, of the sums of two micro-batches."""
    assert ctx.mesh is not None
    stage = ctx.mesh["stage"].get_local_rank()
    copies = 2 if ctx.layout.role("copies") == "data" and "copies" in dict(ctx.layout.axes) else 1
    mesh = ctx.mesh["copies", "dp"] if copies == 2 else ctx.mesh["dp"]
    module = Part(stage, ctx.rank)
    blocks = [f"blocks.{name}" for name in module.blocks]
    sharded = wrap_fsdp(module, mesh, ctx, blocks=blocks, param_dtype=dtype)
    assert (sharded.ranks, sharded.loss_factor) == (mesh.size(), 1)
    peers = mesh.mesh.flatten().tolist()
    for index in range(2):
        with sharded.micro_batch(MicroBatch(index, 2, sync=index == 1)), CountCollectives() as counted:
            _loss(sharded.module, ctx.rank, index).backward()
        assert counted.calls.get("reduce_scatter", 0) == 3 * index
        assert all(set(c.ranks or ()) <= set(peers) for c in counted.seen)
    shards, whole = sharded.gradients(module.parameters(), copies=3)
    assert (shards.copies, whole.copies) == (3 * copies, 3 * mesh.size())
    assert (len(shards.tensors), len(whole.tensors)) == (4, 1)
    plain = Part(stage, ctx.rank)
    for rank in peers:
        for index in range(2):
            _loss(plain, rank, index).backward()
    errors = [0.0]
    for parameter, other in zip(module.parameters(), plain.parameters(), strict=True):
        found: Any = parameter.grad
        full = found.full_tensor() if parameter.dim() else found
        errors.append(float((full - other.grad).norm() / other.grad.norm()))
    sharded.settle()
    noted: Any = module.noted
    assert noted.tolist() == [float(peers[0])] * (2 + stage), "those of the first rank of the mesh"
    return max(errors)


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-6), ("bf16", 2e-2)])
def test_parts_of_a_model_over_one_axis(dtype: str, tolerance: float) -> None:
    """Each stage is sharded over its own axis and communicates with nobody else; scalars are summed over it too."""
    layout = Layout((("stage", 2), ("dp", 2)), {"dp": "data"})
    outcome = run_ranks(_part_on_rank, dtype, nproc=4, layout=layout, device="cpu")
    assert outcome.exit_reason == "done", outcome.failure
    assert outcome.value <= tolerance


def test_copies_of_a_part() -> None:
    """Two axes of a larger mesh: copies of shards, within each stage."""
    layout = Layout((("stage", 2), ("copies", 2), ("dp", 2)), {"copies": "data", "dp": "data"})
    outcome = run_ranks(_part_on_rank, "fp32", nproc=8, layout=layout, device="cpu")
    assert outcome.exit_reason == "done", outcome.failure
    assert outcome.value <= 1e-6


def _ignored(_payload: None, ctx: RankContext, _worker: Any) -> list[float]:
    """Gradient of the scalar, and of a parameter and a scalar of each rank's own."""
    assert ctx.mesh is not None
    module = Part(0, 0)
    module.own, module.own_scale = nn.Parameter(torch.full((3,), 1.0 + ctx.rank)), nn.Parameter(torch.tensor(2.0))
    own = [module.own, module.own_scale]
    sharded = wrap_fsdp(module, ctx.mesh, ctx, blocks=["blocks.block00"], ignored=own)
    with sharded.micro_batch(MicroBatch(0, 1, sync=True)):
        (_loss(module, 0, 0) + module.own.sum() * module.own_scale).backward()
    assert module.own.shape == (3,)
    found = [parameter.grad for parameter in (module.scale, module.own, module.own_scale)]
    assert all(gradient is not None for gradient in found)
    values = torch.stack([gradient.reshape(-1)[0] for gradient in found if gradient is not None])
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    largest: list[float] = values.tolist()
    return largest


def test_ignored_parameters_are_left_alone() -> None:
    """They are not sharded, and their gradients, those of scalars too, are each rank's own."""
    outcome = run_ranks(_ignored, nproc=2, layout=Layout((("dp", 2),)), device="cpu")
    assert outcome.exit_reason == "done", outcome.failure
    plain = Part(0, 0)
    _loss(plain, 0, 0).backward()
    assert plain.scale.grad is not None
    assert outcome.value == [2 * float(plain.scale.grad), 2.0, 6.0]


def _left_out(skipped: tuple[bool, ...], ctx: RankContext, _worker: Any) -> str:
    """What happens on each rank where those of `skipped` leave out their second block; joined over ranks."""
    assert ctx.mesh is not None
    stage = ctx.mesh["stage"].get_local_rank()
    module = Part(stage, ctx.rank)
    names = list(module.blocks)
    sharded = wrap_fsdp(module, ctx.mesh["dp"], ctx, blocks=[f"blocks.{n}" for n in names], unused_parameters=True)
    with sharded.micro_batch(MicroBatch(0, 1, sync=True)):
        module(torch.ones(1, 4), skip=names[1] if skipped[ctx.rank] else "").sum().backward()
    dist.barrier()
    return "went on"


def test_a_unit_that_all_ranks_of_a_mesh_leave_out() -> None:
    """Only ranks that hold the unit are asked: the other stage, which runs all it has, does not stand in the way."""
    layout = Layout((("stage", 2), ("dp", 2)), {"dp": "data"})
    outcome = run_ranks(_left_out, (True, True, False, False), nproc=4, layout=layout, device="cpu")
    assert (outcome.exit_reason, outcome.value) == ("done", "went on"), outcome.failure
    outcome = run_ranks(_left_out, (False, False, False, True), nproc=4, layout=layout, device="cpu")
    assert outcome.failure is not None
    assert "Module 'blocks.block11' did not run on rank 3 (other ranks have it)" in outcome.failure.message


class _Broken(Exception):
    pass


def _unfinished(kind: str, ctx: RankContext, _worker: Any) -> float:
    """The largest difference between the gradients of a step after one that did not end, and without that one."""
    assert ctx.mesh is not None
    found = []
    for broken in (True, False):
        module = Part(0, 0)
        sharded = wrap_fsdp(module, ctx.mesh, ctx, blocks=[f"blocks.{name}" for name in module.blocks])
        if broken:
            try:
                with sharded.micro_batch(MicroBatch(0, 2, sync=False)):
                    _loss(module, ctx.rank, 7).backward()
                    if kind == "exception":
                        raise _Broken
            except _Broken:
                pass
            module.zero_grad()
        for index in range(2):
            with sharded.micro_batch(MicroBatch(index, 2, sync=index == 1)):
                _loss(module, ctx.rank, index).backward()
        shards, whole = sharded.gradients(module.parameters())
        found.append([t.clone() for t in (*shards.tensors, *whole.tensors)])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["exception", "end"])
def test_a_step_that_does_not_end_leaves_nothing_behind(kind: str) -> None:
    """Gradients that waited for a synchronisation are not added to those of the next step."""
    outcome = run_ranks(_unfinished, kind, nproc=2, layout=Layout((("dp", 2),)), device="cpu")
    assert outcome.exit_reason == "done", outcome.failure
    assert outcome.value == 0.0
