"""`wrap_ddp` for strategies that hold a part of the model themselves."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mtb_core import gather_objects, run_ranks
from mtb_ddp import wrap_ddp


def own_and_common(_work: Any, ctx: Any, _worker: Any) -> Any:
    core = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    for parameter in core.parameters():
        nn.init.constant_(parameter, ctx.rank + 1.0)
    assert dist.group.WORLD is not None
    replicas = wrap_ddp(core, dist.group.WORLD, ignored=["1.weight"])
    (replicas.module(torch.full((1, 2), ctx.rank + 1.0)).sum() * replicas.loss_factor).backward()
    mine = [(p.detach().flatten().tolist(), p.grad.flatten().tolist()) for p in core.parameters() if p.grad is not None]
    return list(gather_objects(ctx, mine))


def test_ignored_parameters_stay_each_ranks_own() -> None:
    """Neither their values nor their gradients are made equal; those of all others are, and gradients are sums."""
    outcome = run_ranks(own_and_common, None, nproc=2, device="cpu")
    assert outcome.exit_reason == "done", outcome.failure
    (common, own), (other_common, other_own) = outcome.value
    assert common == other_common == ([1.0] * 4, [1.0 * 1 + 2.0 * 2] * 4)
    # Weights 1 and 2; the hidden values are 2 and 4, and the loss counts twice, once for each rank.
    assert own == ([1.0] * 2, [2.0 * 2] * 2)
    assert other_own == ([2.0] * 2, [2.0 * 4] * 2)
