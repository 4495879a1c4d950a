"""Mistakes in what is found before any rank starts."""

from __future__ import annotations

import itertools

import attrs
import torch

from mtb_core import Layout, Plan, option
from mtb_kit import Capabilities

from . import plans
from .catalogue import mistake
from .right import Replicated

calls = itertools.count(1)


def with_torch(options, config, world):
    """A plan in a module that imports torch."""
    return Plan(Layout((("dp", world.size),)), reduce_dtype=str(torch.float32).replace("torch.float", "fp"))


def remembering(options, config, world):
    """A plan that depends on how often one was made."""
    return Plan(Layout((("dp", world.size), (f"spare{next(calls)}", 1))))


def one_rank_short(options, config, world):
    """A plan with room for fewer ranks than there are."""
    return Plan(Layout((("dp", max(world.size - 1, 1)),)))


@attrs.define
class Mutable:
    """Options that whoever has them may change."""

    buckets: int = option(1, help="Number of buckets.")


@mistake("discovery.torch_free", plan=with_torch)
class TorchAtDiscovery(Replicated):
    """Finding the strategy imports torch."""


@mistake("discovery.torch_free", plan=plans.looks_at_devices)
class TorchWhenPlanning(Replicated):
    """The module is free of torch, but the plan imports it when it is made."""


@mistake("discovery.plan", plan=remembering)
class PlanNotPure(Replicated):
    """The plan is another one each time that it is made."""


@mistake("discovery.plan", plan=one_rank_short)
class LayoutOfOtherSize(Replicated):
    """The layout is not one of all ranks."""


@mistake("discovery.capabilities", capabilities=Capabilities(world_sizes=(2,), sharded=True))
class DeclaredNotPlanned(Replicated):
    """The author declares sharding, of which the plan knows nothing."""


@mistake("discovery.promises", plan=plans.without_bf16)
class PromisedAndRefused(Replicated):
    """The plan promises bf16, and its function refuses it."""


@mistake("discovery.hooks")
class MisspeltHook(Replicated):
    """A hook has a name that core does not know, and would never be called."""

    def optimiser_step(self, prepared, apply):
        raise NotImplementedError


@mistake("discovery.options", options=Mutable)
class OptionsMutable(Replicated):
    """Options can be changed after they were checked."""
