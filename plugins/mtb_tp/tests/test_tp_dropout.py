"""Dropout under strategy `tp`: one mask where ranks hold the same activations, different ones where they do not."""

from __future__ import annotations

import pickle
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from tp_states import TINY, trained, whole

from mtb_core import Job, Prepared, RankContext, TrainConfig, hookimpl, run, run_ranks
from mtb_tp.dropout import share_dropout

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "2x1": (2, {}),
    "1x2": (2, {"tp": 1}),
    "2x2": (4, {"tp": 2}),
    "2x2-fsdp": (4, {"tp": 2, "data_parallel": "fsdp"}),
    "2x1-sequence": (2, {"sequence_parallel": True, "vocab_parallel_loss": True}),
}


class Masks:
    """Keeps, for each training forward, what the dropouts on the residual stream zeroed, and the rank's stream."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._rank = folder, -1
        self._kept: dict[str, list[torch.Tensor]] = {"stream": []}

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Generator[None, Prepared, Prepared]:
        prepared = yield
        self._rank = job.ctx.rank
        for name in ("drop", "blocks.0.drop1", "blocks.1.drop2"):
            self._kept[name] = []
            prepared.core.get_submodule(name).register_forward_hook(partial(self._keep, name))
        return prepared

    def _keep(self, name: str, module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if module.training and torch.is_grad_enabled():
            self._kept[name].append(output.detach() == 0)
            if name == "drop":
                self._kept["stream"].append(torch.get_rng_state())

    @hookimpl
    def mtb_run_finished(self, exit_reason: str) -> None:
        (self._folder / f"masks{self._rank}").write_bytes(pickle.dumps(self._kept))


def masks(folder: Path, nproc: int, options: dict[str, Any], **more: Any) -> list[dict[str, list[torch.Tensor]]]:
    settings = {**TINY, "dropout": 0.5, "steps": 2, "grad_accum_steps": 2, **more}
    config = TrainConfig(strategy="tp", nproc=nproc, strategy_opt=options, run_dir=str(folder / "run"), **settings)
    result = run(config, quiet=True, plugins={"masks": partial(Masks, folder)})
    assert result.exit_reason == "done", result.failure
    return [pickle.loads((folder / f"masks{rank}").read_bytes()) for rank in range(nproc)]


def independent(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two masks differ in about half of their elements. A few may differ by zeros of the activations alone."""
    return 0.3 < float((left != right).float().mean()) < 0.7


@pytest.mark.parametrize("case", CASES)
def test_masks(case: str, tmp_path: Path) -> None:
    """Equal within a tensor-parallel group, unless the stream is cut; never between groups, layers, micro-batches."""
    nproc, options = CASES[case]
    ranks = masks(tmp_path, nproc, options)
    apart = options.get("sequence_parallel", False) or options.get("tp") == 1
    for name in ("drop", "blocks.0.drop1", "blocks.1.drop2"):
        first, second = ranks[0][name], ranks[1][name]
        assert len(first) == 4
        for mine, other in zip(first, second, strict=True):
            assert 0.35 < mine.float().mean() < 0.65
            assert independent(mine, other) if apart else torch.equal(mine, other), name
        assert all(independent(a, b) for i, a in enumerate(first) for b in first[:i])
        if nproc == 4:
            assert all(independent(a, b) for a in first for b in ranks[2][name])
    assert independent(ranks[0]["blocks.0.drop1"][0], ranks[0]["blocks.1.drop2"][0])
    # Attention weights belong to heads, which ranks share: their dropout draws from each rank's own stream.
    assert not any(torch.equal(a, b) for a, b in zip(ranks[0]["stream"], ranks[1]["stream"], strict=True))


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c == "2x1" else pytest.mark.slow) for c in CASES])
def test_replicas_stay_equal_and_checkpointing_changes_nothing(case: str, tmp_path: Path) -> None:
    """With dropout, replicas agree to the bit; so do losses and weights with activation checkpointing and without."""
    nproc, options = CASES[case]
    settings = {"strategy": "tp", "nproc": nproc, "strategy_opt": options, "dropout": 0.3, "until_step": 4}
    _, plain = trained(tmp_path / "plain", **settings)
    _, again = trained(tmp_path / "again", **settings, activation_checkpointing=True)
    expected, found = whole([s.ended for s in plain]), whole([s.ended for s in again])
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    assert again[0].losses == plain[0].losses


def _called(_payload: Any, ctx: RankContext, _worker: Any) -> bool:
    """One dropout module in two places, made shared, recomputed, in place; whether all masks are as they should be."""
    assert ctx.mesh is not None
    drop = nn.Dropout(0.5)
    model = nn.ModuleDict({"first": drop, "second": drop, "third": nn.Dropout(0.5, inplace=True)})
    shared = share_dropout(model, dict.fromkeys(model, "dropout"), ctx.mesh.get_group(), ctx.device)
    shared.renew()
    x = torch.ones(64, 64, requires_grad=True)
    first, second = checkpoint(model["first"], x, use_reentrant=False), model["second"](x)
    first.sum().backward()
    given = torch.ones(64, 64)
    same = model["third"](given)
    assert x.grad is not None
    apart = independent(first.detach() == 0, second.detach() == 0)
    return apart and torch.equal(x.grad, first.detach()) and same is given and bool((given == 0).any())


def test_one_dropout_in_several_places() -> None:
    """It drops other elements in each place; when it is recomputed, the same ones; in place where it was made so."""
    outcome = run_ranks(_called, nproc=2, device="cpu")
    assert outcome.exit_reason == "done", outcome.failure
    assert outcome.value is True
