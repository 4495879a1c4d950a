"""Tests of mtb_core.train.checkpointing: what runs save of themselves, on real ranks."""

import json

import kit_strategies as kit
import pytest
import torch

from mtb_core.api.descriptions import StrategyInfo
from mtb_core.api.values import OptimizerRecipe
from mtb_core.config import TrainConfig
from mtb_core.train.optim import described_groups
from mtb_kit.episodes import episode
from mtb_kit.lab import Lab


def test_groups_are_described_by_the_recipe(tmp_path):
    """A rank whose optimizer has fewer groups saves like the others, and ``state.json`` has both groups."""
    info = StrategyInfo("fewer-groups", "", f"{kit.__name__}:FewerGroups", kit.plan)
    with Lab(info, world_sizes=(2,)) as lab:
        lab.done(episode(2, steps=2, checkpoint_dir=str(tmp_path / "c"), save_every=1))
    state = json.loads((tmp_path / "c" / "step_00000002" / "state.json").read_text())
    groups = state["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert len({group["lr"] for group in groups}) == 1


@pytest.mark.parametrize("defaults", [{"fused": True}, {"foreach": True}, {"betas": (0.5, 0.9)}])
def test_described_groups(defaults):
    """They are what an optimizer of the recipe has in its groups, as JSON values, with the rate that is given."""
    config = TrainConfig(learning_rate=0.25, weight_decay=0.5)
    recipe = OptimizerRecipe(torch.optim.AdamW, {"lr": 0.25, **defaults})
    made = torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.zeros(1))]}], lr=0.25, **defaults).param_groups[0]
    one, other = described_groups(recipe, config, 0.125)
    expected = {k: v for k, v in made.items() if k != "params" and v is not None}
    assert one == {**expected, "weight_decay": 0.5, "initial_lr": 0.25, "lr": 0.125}
    assert other == {**one, "weight_decay": 0.0}
