"""Which modules become units."""

from __future__ import annotations

import logging

import pytest
from torch import nn

from mtb_core import ConfigError
from mtb_fsdp.theory import Unit
from mtb_fsdp.units import check_dtypes, choose_units, describe_units, unit_parameters


def model() -> nn.Module:
    """Embedding 10x4, blocks of two layers of 16 and 32 elements, output 4x10."""
    blocks = [nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False)) for _ in range(3)]
    parts = {"tokens": nn.Embedding(10, 4), "blocks": nn.ModuleList(blocks), "head": nn.Linear(4, 10, bias=False)}
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


BLOCKS = ("blocks.0", "blocks.1", "blocks.2")


def test_blocks_and_root():
    """Each block is a unit; `root` makes none besides itself."""
    assert choose_units(model(), BLOCKS, "block") == list(BLOCKS)
    assert choose_units(model(), BLOCKS, "root") == []


def test_inner_units_come_first():
    """A block inside another one is sharded before it, or the outer one would take its parameters."""
    assert choose_units(model(), ("blocks.0", "blocks.0.1"), "block") == ["blocks.0.1", "blocks.0"]


def test_a_model_without_blocks_is_one_unit(caplog: pytest.LogCaptureFixture):
    """And it is said, for that costs memory."""
    with caplog.at_level(logging.WARNING):
        assert choose_units(model(), (), "block") == []
    assert "gathered as a whole" in caplog.text


def test_by_size():
    """Modules of the size or more, counted without the units inside; never a list, which is not called."""
    everything = ["tokens", "blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1", "blocks.2.0", "blocks.2.1", "head"]
    assert choose_units(model(), BLOCKS, "auto-size", 16) == everything
    assert choose_units(model(), BLOCKS, "auto-size", 40) == ["tokens", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert choose_units(model(), BLOCKS, "auto-size", 48) == ["blocks.0", "blocks.1", "blocks.2"]
    assert choose_units(model(), BLOCKS, "auto-size", 100) == []


def test_tied_parameters_stay_together():
    """A block that shares a parameter with the outside belongs to the root; one that shares inside does not."""
    module = model()
    module.get_submodule("blocks.0.0").weight = module.get_submodule("blocks.2.0").weight
    module.get_submodule("blocks.1.0").weight = module.get_submodule("blocks.1.0").weight
    assert choose_units(module, BLOCKS, "block") == ["blocks.1"]
    assert choose_units(module, BLOCKS, "auto-size", 48) == ["blocks.1"]
    root = [name for name, _ in unit_parameters(module, ["blocks.1"])[""]]
    assert root == ["tokens.weight", "blocks.0.0.weight", "blocks.0.1.weight", "blocks.2.1.weight", "head.weight"]


def test_a_block_that_is_used_twice_is_one_unit():
    """A module has one set of hooks, under whatever names it appears."""
    module = model()
    module.get_submodule("blocks")[2] = module.get_submodule("blocks.0")
    assert choose_units(module, BLOCKS, "block") == ["blocks.0", "blocks.1"]


def test_units_are_described_for_the_theory():
    """Shapes, what is trainable, and that the root is not gathered twice."""
    module = model()
    module.get_parameter("head.weight").requires_grad_(False)
    *_, block, root = describe_units(module, list(BLOCKS), resharded=True)
    assert block == Unit(((4, 4), (8, 4)), (True, True), resharded=True)
    assert root == Unit(((10, 4), (10, 4)), (True, False), resharded=False)


def test_several_dtypes_in_a_unit_are_refused():
    """The unit is named, with what it has; units of one dtype each are fine, and so are frozen parameters."""
    module = model()
    module.get_submodule("blocks.1").bfloat16()
    check_dtypes(module, list(BLOCKS))
    module.get_submodule("blocks.0.1").bfloat16()
    with pytest.raises(ConfigError, match=r"module 'blocks\.0' have dtypes bfloat16, float32"):
        check_dtypes(module, list(BLOCKS))
    module.get_submodule("blocks.0.1").requires_grad_(False)
    check_dtypes(module, list(BLOCKS))
