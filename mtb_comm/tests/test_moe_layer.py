"""The distributed layer on real ranks against the naive one: outputs and all gradients, whoever is idle."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch

from mtb_comm.moe import layer as layer_module
from mtb_comm.moe.check import Inputs, compare, differentiate, failures
from mtb_comm.moe.distributions import preference
from mtb_comm.moe.exchange import Exchange
from mtb_comm.moe.experts import PARAMETERS
from mtb_comm.moe.layer import TORCH_DTYPES, MoELayer, Passed, Traffic
from mtb_comm.moe.seeds import generator
from mtb_comm.moe.settings import RouteSettings
from mtb_core import CountCollectives, gather_objects, run_ranks

#: 5 experts: no multiple of 2 or 3.
SMALL = RouteSettings(tokens_per_rank=9, hidden_size=6, ffn_size=10, num_experts=5, dtype="fp64", aux_weight=0.5)

CASES = [
    attrs.evolve(SMALL, overflow=overflow, gate=gate, capacity_factor=factor, distribution=distribution, top_k=top_k)
    for overflow, gate, factor, distribution, top_k in itertools.product(
        ("drop", "residual", "next"), ("softmax", "sigmoid"), (0.6, 1.25), ("uniform", "hot"), (1, 2, 3)
    )
]
CASES += [
    attrs.evolve(SMALL, capacity_factor=None, gate=gate, distribution=distribution, top_k=top_k)
    for gate, distribution, top_k in itertools.product(("softmax", "sigmoid"), ("zipf", "hot"), (1, 2))
]
CASES += [attrs.evolve(SMALL, routing="expert", gate=gate, top_k=k) for gate in ("softmax", "sigmoid") for k in (1, 5)]
CASES += [attrs.evolve(SMALL, distribution="counts", counts=(0.0, 3.0, 0.0, 3.0, 0.0), top_k=2)]
CASES += [attrs.evolve(SMALL, dtype=dtype, overflow="residual") for dtype in ("fp32", "bf16")]
# Gates that vanish altogether.
CASES += [
    attrs.evolve(
        SMALL, dtype="fp32", overflow="next", distribution="zipf", zipf_s=200.0, capacity_factor=0.5, gate=gate
    )
    for gate in ("softmax", "sigmoid")
]


@attrs.frozen
class Work:
    """Cases, the tokens of each rank (None: as the settings say), and whether the logits alone decide."""

    cases: Sequence[RouteSettings]
    tokens: Sequence[int] | None = None
    by_logits: bool = False
    leaf: bool = True


def one_pass(settings: RouteSettings, work: Work, ctx: Any) -> tuple[MoELayer, Inputs, Passed]:
    """Forward and backward on this rank."""
    layer = MoELayer(settings, Exchange(lambda _phase: None), ctx.device)
    tokens = work.tokens or [settings.tokens_per_rank] * ctx.world_size
    mine = tokens[ctx.rank]
    random = generator(settings.seed, "test", ctx.rank)
    dtype = TORCH_DTYPES[settings.dtype]
    x = torch.randn(mine, settings.hidden_size, generator=random).to(dtype).requires_grad_(work.leaf)
    wanted = None
    if not work.by_logits:
        wanted = preference(attrs.evolve(settings, tokens_per_rank=max(tokens)), ctx.rank, ctx.world_size)[:mine]
    inputs = Inputs(x, wanted, torch.randn(mine, settings.hidden_size, generator=random).to(dtype))
    passed = layer(x, wanted, total=sum(tokens))
    differentiate(passed, inputs.cotangent, layer)
    return layer, inputs, passed


def errors_of(work: Work, ctx: Any, _worker: Any) -> list[tuple[dict[str, float], list[Traffic]]]:
    """Errors against the naive layer, and every rank's traffic, for each case."""
    out = []
    for settings in work.cases:
        layer, inputs, passed = one_pass(settings, work, ctx)
        out.append((compare(ctx, layer, inputs, passed), gather_objects(ctx, passed.traffic())))
    return out


def on_ranks(main: Callable[..., Any], nproc: int, work: Any) -> Any:
    """Value of rank 0; a failing rank fails the test with its traceback."""
    outcome = run_ranks(main, work, nproc=nproc, device="cpu")
    assert outcome.exit_reason == "done", outcome.failure.traceback
    return outcome.value


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_equals_the_naive_layer(nproc: int):
    """Outputs, both losses, drops and gradients of tokens, router and experts: every policy, gate and distribution."""
    for settings, (errors, _) in zip(CASES, on_ranks(errors_of, nproc, Work(CASES)), strict=True):
        assert not failures(errors, settings.dtype), (settings, errors)
        assert len(errors) == 7


def nan_in_turn(settings: RouteSettings, ctx: Any, _worker: Any) -> dict[str, list[str]]:
    """By name of an expert's gradient: the checks that fail if it is NaN on rank 1."""
    layer, inputs, passed = one_pass(settings, Work(()), ctx)
    out = {}
    for name in PARAMETERS:
        grad = layer.experts.get_parameter(name).grad
        assert grad is not None
        kept = grad.clone()
        if ctx.rank == 1:
            grad[-1].view(-1)[-1] = math.nan
        out[name] = failures(compare(ctx, layer, inputs, passed), settings.dtype)
        grad.copy_(kept)
    return out


def test_any_nan_fails():
    """A NaN in one gradient of the last expert alone fails the check, whichever tensor it is in."""
    found = on_ranks(nan_in_turn, 2, attrs.evolve(SMALL, num_experts=4, capacity_factor=None))
    assert found == {name: ["expert_grads"] for name in PARAMETERS}


@pytest.mark.parametrize("tokens", [(0, 7), (7, 0), (4, 0, 5), (1, 9, 0)])
def test_ranks_without_tokens(tokens: tuple[int, ...]):
    """A rank that has no token takes part in all collectives, forward and backward."""
    cases = [
        attrs.evolve(SMALL, overflow="next", capacity_factor=0.7),
        attrs.evolve(SMALL, capacity_factor=None),
        attrs.evolve(SMALL, routing="expert"),
    ]
    for settings, (errors, _) in zip(cases, on_ranks(errors_of, len(tokens), Work(cases, tokens)), strict=True):
        assert not failures(errors, settings.dtype), (settings, errors)


@pytest.mark.parametrize("experts", [1, 2])
def test_ranks_without_experts(experts: int):
    """With fewer experts than ranks some own none; tokens and gradients are right all the same."""
    cases = [
        attrs.evolve(SMALL, num_experts=experts, top_k=1, overflow="residual", gate="sigmoid", capacity_factor=0.5)
    ]
    ((errors, traffic),) = on_ranks(errors_of, 3, Work(cases))
    assert not failures(errors, "fp64"), errors
    assert sum(traffic[2].receive) == 0


def test_everything_to_one_expert():
    """All tokens on one expert of rank 0: with room it takes all, without it each policy does what it says."""
    hot = attrs.evolve(SMALL, distribution="hot", top_k=1)
    cases = [
        attrs.evolve(hot, capacity_factor=None),
        attrs.evolve(hot, capacity_factor=1.0, overflow="drop"),
        attrs.evolve(hot, capacity_factor=1.0, overflow="next"),
    ]
    (_, every), (_, drop), (_, rerouted) = on_ranks(errors_of, 2, Work(cases))
    assert [t.receive for t in every] == [[9, 9], [0, 0]]
    assert [sum(t.receive) for t in drop] == [4, 0]  # capacity is ceil(18 / 5)
    assert [t.dropped_tokens for t in drop] == [5, 9]
    assert [t.overflowed_slots for t in rerouted] == [5, 9]
    assert sum(t.dropped_slots for t in rerouted) == 0  # 5 experts of 4 places hold all 18
    assert max(sum(t.per_expert[e] for t in rerouted) for e in range(5)) <= 4


@pytest.mark.parametrize("nproc", [1, 2])
def test_the_logits_decide(nproc: int):
    """Without preferences the router routes by its own logits."""
    cases = [attrs.evolve(SMALL, overflow=overflow, capacity_factor=0.8) for overflow in ("drop", "next")]
    for settings, (errors, _) in zip(cases, on_ranks(errors_of, nproc, Work(cases, by_logits=True)), strict=True):
        assert not failures(errors, settings.dtype), (settings, errors)


def whole(work: Work, ctx: Any, _worker: Any) -> Any:
    """The same twelve tokens, however many ranks share them: outputs and router gradient of all."""
    (settings,) = work.cases
    random = generator(0, "whole")
    x = torch.randn(12, settings.hidden_size, generator=random, dtype=torch.float64)
    wanted = torch.rand(12, settings.num_experts, generator=random)
    part = slice(ctx.rank * 12 // ctx.world_size, (ctx.rank + 1) * 12 // ctx.world_size)
    layer = MoELayer(settings, Exchange(lambda _phase: None), ctx.device)
    passed = layer(x[part], wanted[part], total=12)
    differentiate(passed, torch.ones_like(passed.output), layer)
    parts = gather_objects(ctx, (passed.output.detach(), layer.router.grad))
    return torch.cat([p[0] for p in parts]), torch.stack([p[1] for p in parts]).sum(dim=0)


@pytest.mark.parametrize("overflow", ["drop", "residual", "next"])
def test_the_number_of_ranks_does_not_matter(overflow: str):
    """The same tokens go to the same experts with the same result on 1, 2 and 3 ranks."""
    work = Work([attrs.evolve(SMALL, overflow=overflow, capacity_factor=0.7)])
    alone, *others = (on_ranks(whole, nproc, work) for nproc in (1, 2, 3))
    for found in others:
        torch.testing.assert_close(found[0], alone[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[1], alone[1], rtol=1e-11, atol=1e-12)


def collectives_and_gradients(work: Work, ctx: Any, _worker: Any) -> Any:
    """Collectives that each rank issued, in order, and the largest gradients of its experts."""
    (settings,) = work.cases
    with CountCollectives() as counted:
        layer, _, _ = one_pass(settings, work, ctx)
    grads = [None if p.grad is None else p.grad.abs().amax().item() for p in layer.experts.parameters()]
    return gather_objects(ctx, ([c.kind for c in counted.seen], grads))


@pytest.mark.parametrize("leaf", [True, False])
def test_idle_ranks_issue_the_same_collectives(leaf: bool):
    """Tokens, or experts with tokens, on one rank only, and tokens that need no gradient: nobody is waited for in vain.

    Experts without tokens have gradients of zeros.
    """
    settings = attrs.evolve(SMALL, distribution="hot", top_k=1, capacity_factor=None, num_experts=2)
    found = on_ranks(collectives_and_gradients, 3, Work([settings], tokens=(0, 6, 0), leaf=leaf))
    kinds = [kinds for kinds, _ in found]
    assert kinds[0] == kinds[1] == kinds[2]
    assert kinds[0] == ["all_gather"] + ["all_to_all"] * 5  # counts; then counts, rows there and back, gradients
    assert all(grad > 0 for grad in found[0][1])  # expert 0 has all tokens
    assert found[1][1] == [0, 0, 0, 0]
    assert found[2][1] == []


def wrong_splits(_work: Any, ctx: Any, _worker: Any) -> str:
    with pytest.raises(ValueError, match="must sum to the 3 rows") as raised:
        Exchange(lambda _phase: None).rows(torch.zeros(3, 2), [1] * ctx.world_size, [1] * ctx.world_size, "dispatch")
    return str(raised.value)


def test_splits_are_checked_before_the_call():
    """Splits that do not sum to the rows are refused with the numbers, on the rank that has them."""
    assert "[1, 1]" in on_ranks(wrong_splits, 2, None)


def without_gradient(work: Work, ctx: Any, _worker: Any) -> dict[str, float]:
    (settings,) = work.cases
    layer, inputs, passed = one_pass(settings, work, ctx)
    if ctx.rank == 1:
        layer.experts.up.grad = None
    return compare(ctx, layer, inputs, passed)


def test_a_missing_gradient_is_found():
    """A gradient that is None where it must be zeros is an infinite error."""
    errors = on_ranks(without_gradient, 2, Work([attrs.evolve(SMALL, distribution="hot")]))
    assert errors["expert_grads"] == math.inf
    assert failures(errors, "fp64") == ["expert_grads"]


def _scaled(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: real(*args) * 1.001


def _rolled(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: real(*args).roll(1, 0)


@pytest.mark.parametrize(
    ("name", "fault", "seen"),
    [
        ("permute", _rolled, "output"),
        ("unpermute", _scaled, "output"),
        ("load_balancing_share", _scaled, "load_balancing_loss"),
        ("z_loss_share", _scaled, "z_loss"),
        ("slot_weights", lambda real: lambda gates, experts: real(gates.detach(), experts), "router_grad"),
    ],
)
def test_the_comparison_finds_faults(monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, seen: str):
    """A part that is wrong, by a thousandth or in the order of tokens, shows in the quantity that it makes."""
    monkeypatch.setattr(layer_module, name, fault(getattr(layer_module, name)))
    ((errors, _),) = on_ranks(errors_of, 1, Work([attrs.evolve(SMALL, dtype="fp32")]))
    assert seen in failures(errors, "fp32")


def test_nan_is_a_failure():
    """An error that is no number does not pass for a small one."""
    assert failures({"output": math.nan, "z_loss": 0.0}, "fp32") == ["output"]
