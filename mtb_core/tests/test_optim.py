"""Parameter groups and the optimizer's recipe."""

import pytest
import torch
from torch import nn

from mtb_core import ConfigError, TrainConfig
from mtb_core.train import optim
from mtb_core.train.optim import optimizer_groups


def optimizer_recipe(config, device):
    return getattr(optim, config.optimizer)(config, device)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(2)
        self.scalar = nn.Parameter(torch.zeros(()))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.tied = self.matrix.weight


def test_decay_only_on_parameters_with_two_or_more_dimensions():
    """Matrices decay, vectors and scalars do not, frozen ones are in no group, a tied one is in one group once."""
    module = Mixed()
    decayed, others = optimizer_groups(module, TrainConfig(weight_decay=0.3, learning_rate=0.01))
    assert decayed["params"] == [module.matrix.weight]
    assert {id(p) for p in others["params"]} == {
        id(p) for p in (module.matrix.bias, module.norm.weight, module.norm.bias, module.scalar)
    }
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    assert all(group["lr"] == group["initial_lr"] == 0.01 for group in (decayed, others))


def test_empty_groups_are_left_out():
    """A model of one kind of parameters has one group, with the decay of that kind."""
    (group,) = optimizer_groups(nn.LayerNorm(4), TrainConfig())
    assert group["weight_decay"] == 0.0
    (group,) = optimizer_groups(nn.Linear(2, 2, bias=False), TrainConfig())
    assert group["weight_decay"] == 0.1


def test_nothing_to_train_is_refused():
    """A model that is frozen as a whole is refused."""
    with pytest.raises(ConfigError, match="no trainable parameter"):
        optimizer_groups(nn.Linear(2, 2).requires_grad_(False), TrainConfig())


@pytest.mark.parametrize(
    ("settings", "factory", "values"),
    [
        ({"optimizer": "adamw", "adam_eps": 1e-6}, torch.optim.AdamW, {"eps": 1e-6, "betas": (0.9, 0.999)}),
        ({"optimizer": "sgd", "momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_recipe_is_fused_and_steps(settings, factory, values):
    """The configured optimizer is made with fused kernels and the configured values, and one step moves weights."""
    config = TrainConfig(learning_rate=0.02, **settings)
    recipe = optimizer_recipe(config, "cpu")
    module = nn.Linear(3, 2)
    before = module.weight.detach().clone()
    optimizer = recipe.factory(optimizer_groups(module, config), **recipe.defaults)
    assert type(optimizer) is factory
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(module.weight, before)
    for group in optimizer.param_groups:
        assert {name: group[name] for name in ("fused", "lr", *values)} == {"fused": True, "lr": 0.02, **values}


def test_other_devices_use_foreach():
    """Where torch has no fused kernel, the foreach one is asked for instead."""
    assert optimizer_recipe(TrainConfig(), "cuda:1").defaults["fused"]
    defaults = optimizer_recipe(TrainConfig(), "meta").defaults
    assert defaults["foreach"]
    assert "fused" not in defaults


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_fused_equals_plain(optimizer):
    """Fused kernels compute what the plain loop does, weight decay and its absence included."""
    config = TrainConfig(optimizer=optimizer, weight_decay=0.2, learning_rate=0.05)
    results = []
    for change in ({}, {"fused": False, "foreach": False}):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
        recipe = optimizer_recipe(config, "cpu")
        opt = recipe.factory(optimizer_groups(module, config), **{**recipe.defaults, **change})
        for _ in range(3):
            module(torch.linspace(-1, 1, 6).view(2, 3)).square().sum().backward()
            opt.step()
            opt.zero_grad()
        results.append([p.detach() for p in module.parameters()])
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain)
