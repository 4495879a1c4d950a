"""Rows through the experts of the ranks of one group: what strategies of other plugins use of `mtb moe`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist

from mtb_comm import Exchange, Splits, through_experts
from mtb_core import gather_objects, run_ranks

#: Rows that each of 4 ranks sends to each of the 4 experts of its group of two.
COUNTS = torch.tensor([[2, 0, 3, 1], [0, 0, 4, 0], [1, 1, 1, 1], [5, 0, 0, 0]])


def passage(ctx: Any) -> dict[str, bool]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    exchange = Exchange(group=groups[ctx.rank // 2])
    mine, first = COUNTS[ctx.rank], ctx.rank // 2 * 2
    received = exchange.swap_counts(mine, (2, 2))
    splits = Splits(mine.view(2, 2).sum(1).tolist(), received.sum(1).tolist(), received.sum(0).tolist())
    rows = torch.arange(float(mine.sum())).add(100 * ctx.rank).view(-1, 1).repeat(1, 3).requires_grad_()

    def experts(given: torch.Tensor, own: Any) -> torch.Tensor:
        number = torch.arange(2).add(2 * exchange.rank).repeat_interleave(torch.tensor(own))
        return given * 10 ** number[:, None]

    out = through_experts(rows, received, splits, exchange, experts)
    (out * 2).sum().backward()
    factor = 10 ** torch.arange(4).repeat_interleave(mine)[:, None]
    assert rows.grad is not None
    sent = int(mine.view(2, 2).sum(1)[1 - exchange.rank])
    back = int(COUNTS[first + 1 - exchange.rank].view(2, 2).sum(1)[exchange.rank])
    return {
        "out": torch.equal(out, rows * factor),
        "grad": torch.equal(rows.grad, (2.0 * factor).expand_as(rows)),
        "bytes": exchange.row_bytes == 2 * (sent + back) * 3 * 4,
    }


def passages(_work: Any, ctx: Any, _worker: Any) -> list[dict[str, bool]]:
    return list(gather_objects(ctx, passage(ctx)))


def test_groups_exchange_apart_from_each_other() -> None:
    """Every row meets its own expert of its own group and comes back in its place; gradients go the same way."""
    outcome = run_ranks(passages, None, nproc=4, device="cpu")
    assert outcome.exit_reason == "done", outcome.failure
    assert outcome.value == [{"out": True, "grad": True, "bytes": True}] * 4


def test_public_names_load_no_torch_before_they_are_used() -> None:
    """The package is imported by every `mtb` process, so the names that need torch load it when they are touched."""
    code = """
import sys, mtb_comm
assert "torch" not in sys.modules
assert all(hasattr(mtb_comm, name) for name in mtb_comm.__all__)
assert not hasattr(mtb_comm, "Exchang")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
