"""Training loops without a framework: the one people write by hand, and one with MiniTrainBench's guards."""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .gate import Gate
from .workload import LEARNING_RATE, build_model, get_batch, mean_loss


def _start() -> tuple[int, int]:
    """Rank and world size; with more than one rank, the process group."""
    if "RANK" not in os.environ:
        torch.manual_seed(1)
        return 0, 1
    dist.init_process_group("gloo")
    torch.manual_seed(1 + dist.get_rank())
    return dist.get_rank(), dist.get_world_size()


def bare(fused: bool | None = None) -> None:
    """The loop people write by hand: no guards, AdamW's defaults (`fused` None), DDP's defaults."""
    rank, world = _start()
    model = build_model()
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)
    gate = Gate(rank)
    for _ in range(gate.total_steps):
        x, y = get_batch()
        loss = mean_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        gate.step_done()
    _end(world)


def bare_guarded() -> None:
    """The same guards as MiniTrainBench's, by hand.

    Fused AdamW without decay of 1-D parameters; in every step the loss as mean over the tokens of all ranks, the
    global gradient norm, and a check of both by agreement.
    """
    rank, world = _start()
    model = build_model()
    if world > 1:
        model = DistributedDataParallel(model)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
    gate = Gate(rank)
    for step in range(gate.total_steps):
        x, y = get_batch()
        loss = mean_loss(model(x), y)
        loss.backward()
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))  # noqa: SLF001
        if world > 1:
            # Every rank holds the same gradients; loss and tokens are summed, and the sum keeps any rank's NaN.
            agreed = torch.stack([loss.detach() * y.numel(), norm, torch.tensor(float(y.numel()))])
            dist.all_reduce(agreed)
            total, norms, count = agreed.tolist()
            mean, size = total / count, norms / world
        else:
            mean, size = loss.item(), norm.item()
        if not math.isfinite(mean + size):
            raise SystemExit(f"rank {rank}, step {step}: loss {mean}, gradient norm {size}")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        gate.step_done()
    _end(world)


def _end(world: int) -> None:
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
