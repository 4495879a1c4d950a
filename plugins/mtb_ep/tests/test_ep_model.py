"""Model `moe` computes what loops over tokens and experts do, and its loss adds up over any parts of a batch."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from mtb_core import ConfigError, ModelSpec, TrainConfig
from mtb_ep.model import MoE, moe
from mtb_ep.plugin import MoEOptions
from mtb_ep.routing import route

SIZES: dict[str, Any] = {"seq_length": 8, "vocab_size": 40, "d_model": 16, "n_heads": 2, "n_layers": 2}


def made(options: MoEOptions, **settings: Any) -> tuple[ModelSpec, nn.Module]:
    """The model's description, and the model, filled."""
    spec = moe(TrainConfig(**{**SIZES, **settings}), options)
    model = spec.build()
    with torch.no_grad():
        for i, (name, parameter) in enumerate(model.named_parameters()):
            assert spec.init is not None
            spec.init(name, parameter, torch.Generator().manual_seed(i))
    return spec, model


@pytest.mark.parametrize(("top_k", "factor"), [(1, None), (2, None), (2, 0.6), (4, 1.0)])
def test_layer_equals_loops(top_k: int, factor: float | None) -> None:
    """Outputs, and gradients of inputs, router and experts; dropped tokens get zeros, and idle experts zero gradients."""
    torch.manual_seed(0)
    layer = MoE(6, MoEOptions(experts=4, top_k=top_k, d_ff=5, capacity_factor=factor))
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 9, 6, requires_grad=True)
    cotangent = torch.randn(2, 9, 6)
    inputs = [x, *layer.parameters()]
    out, _ = layer(x)
    found = torch.autograd.grad((out * cotangent).sum(), inputs)

    routed = route(x @ layer.router.weight.T, top_k, factor)
    rows = []
    for b in range(2):
        for t in range(9):
            total = torch.zeros(6)
            for choice, e in enumerate(routed.experts[b, t].tolist()):
                if routed.placed is None or routed.placed[b, t, choice]:
                    hidden = F.gelu(x[b, t] @ layer.experts.up[e])
                    total = total + routed.weights[b, t, choice] * (hidden @ layer.experts.down[e])
            rows.append(total)
    wanted = torch.stack(rows).view_as(x)
    assert torch.allclose(out, wanted, rtol=1e-4, atol=1e-5)
    for a, b in zip(found, torch.autograd.grad((wanted * cotangent).sum(), inputs), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)
    if factor is not None and factor < 1:
        assert routed.placed is not None
        assert not routed.placed.all()


def test_idle_experts_have_zero_gradients() -> None:
    """An expert that no token goes to has a gradient, of zeros; so have those of a rank to which none goes at all."""
    layer = MoE(4, MoEOptions(experts=3, top_k=1, d_ff=4))
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    out, _ = layer(torch.ones(1, 3, 4))  # equal logits: all tokens go to expert 0
    out.sum().backward()
    assert layer.experts.up.grad is not None
    assert layer.experts.up.grad[0].abs().sum() > 0
    assert not layer.experts.up.grad[1:].any()
    layer.zero_grad()
    layer.experts(torch.empty(0, 4), torch.zeros(3, dtype=torch.int64)).sum().backward()
    assert layer.experts.up.grad is not None
    assert layer.experts.down.grad is not None
    assert not layer.experts.up.grad.any()


def test_loss_adds_up_over_samples() -> None:
    """With ragged targets the sums of loss, auxiliary losses and figures are those of the samples, one by one."""
    spec, model = made(MoEOptions(experts=4, aux_loss=0.3, z_loss=0.2))
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(40, (5, 8), generator=generator)
    targets = torch.randint(40, (5, 8), generator=generator)
    for sample, valid in enumerate((8, 3, 0, 1, 5)):
        targets[sample, valid:] = -100
    assert spec.loss is not None
    with torch.no_grad():
        whole: Any = spec.loss(model(tokens), targets)
        parts: list[Any] = [spec.loss(model(tokens[i : i + 1]), targets[i : i + 1]) for i in range(5)]
    for name in ("sum", "extra"):
        assert float(getattr(whole, name)) == pytest.approx(sum(float(getattr(p, name)) for p in parts), rel=1e-5)
    for name in spec.metrics:
        assert float(whole.metrics[name]) == pytest.approx(sum(float(p.metrics[name]) for p in parts), rel=1e-5)
    assert float(parts[2].extra) == 0
    weighted = 0.3 * float(whole.metrics["aux_loss"]) + 0.2 * float(whole.metrics["z_loss"])
    assert float(whole.extra) == pytest.approx(weighted, rel=1e-6)
    assert 1.0 <= float(whole.metrics["aux_loss"]) / 17 < 1.3


@pytest.mark.parametrize("tied", [False, True])
def test_first_loss_is_near_that_of_a_guess(tied: bool) -> None:
    """A model that has learnt nothing gives each word the same chance."""
    _, model = made(MoEOptions(), tie_embeddings=tied, vocab_size=256, seq_length=64)
    tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(0))
    logits, _ = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(math.log(256), rel=0.03)


def test_earlier_positions_do_not_see_later_tokens() -> None:
    """Also with a capacity, the logits up to a position depend on the tokens up to it only."""
    _, model = made(MoEOptions(experts=4, capacity_factor=0.5))
    tokens = torch.randint(40, (3, 8), generator=torch.Generator().manual_seed(5))
    other = tokens.clone()
    other[:, 5:] = (other[:, 5:] + 7) % 40
    assert torch.allclose(model(tokens)[0][:, :5], model(other)[0][:, :5], atol=1e-6)


def test_flops_count_active_experts() -> None:
    """FLOPs are those of the weights that a token meets: top_k of the experts, and the whole router."""
    options = MoEOptions(experts=6, top_k=2, d_ff=10)
    spec, model = made(options)
    met = sum(
        p.numel() * (2 / 6 if ".experts." in name else 1)
        for name, p in model.named_parameters()
        if p.dim() >= 2 and name not in ("tokens.weight", "positions.weight")
    )
    attention = 2 * 16 * 8
    assert spec.flops_per_token["palm"] == pytest.approx(6 * met + 12 * attention)
    assert spec.flops_per_token["causal"] == pytest.approx(6 * met + 6 * attention)
    one, _ = made(attrs.evolve(options, top_k=1))
    assert one.flops_per_token["palm"] < spec.flops_per_token["palm"]


def test_options_that_contradict_each_other() -> None:
    """A token cannot go to more experts than there are, and a model without a vocabulary is none."""
    with pytest.raises(ConfigError, match="top_k=3, but only experts=2; valid: 1 to 2"):
        moe(TrainConfig(**SIZES), MoEOptions(experts=2, top_k=3))
    with pytest.raises(ConfigError, match="set --vocab-size"):
        moe(TrainConfig(), MoEOptions())
