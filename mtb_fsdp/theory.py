"""Communication of strategy ``fsdp`` in one optimizer step, by arithmetic alone.

The sums follow how FSDP2 works: the parameters of a unit travel in one message, each padded in its first dimension to
a multiple of the number of shards. A unit is gathered for forward and, if it was resharded since, for backward; its
gradients are reduce-scattered once for each micro-batch that synchronises; with copies (HSDP), each shard is then
all-reduced over them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}


@attrs.frozen
class Unit:
    """Parameters that travel together.

    Attributes:
        shapes: of the parameters, each with at least one dimension.
        trainable: whether each gets a gradient.
        resharded: whether it is gathered again for backward.
    """

    shapes: tuple[tuple[int, ...], ...]
    trainable: tuple[bool, ...]
    resharded: bool


@attrs.frozen
class Traffic:
    """Collectives of one kind in one step, on one rank.

    Attributes:
        elements: of all messages together; a message is the larger of what goes in and what comes out.
        bytes: the same in bytes.
    """

    calls: int = 0
    elements: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.elements + other.elements, self.bytes + other.bytes)


def step_traffic(
    units: Sequence[Unit],
    *,
    shards: int,
    copies: int = 1,
    micro_batches: int = 1,
    synchronised: int = 1,
    param_dtype: str = "fp32",
    reduce_dtype: str = "fp32",
) -> dict[str, Traffic]:
    """Traffic by kind of collective; kinds that do not occur are left out.

    Args:
        units: all units, the root among them.
        shards: ranks over which each parameter is split.
        copies: how many times the whole is replicated (HSDP).
        micro_batches: forwards with backwards in the step.
        synchronised: those of them that synchronise gradients (1 with sync mode ``last``).
    """
    out: dict[str, Traffic] = {}

    def add(kind: str, calls: int, elements: int, dtype: str) -> None:
        if calls and elements:
            total = calls * elements
            out[kind] = out.get(kind, Traffic()) + Traffic(calls, total, total * ELEMENT_BYTES[dtype])

    for unit in units:
        gathered = sum(_padded(shape, shards) for shape in unit.shapes)
        reduced = reduced_elements(unit, shards)
        if shards > 1:
            add("all_gather", micro_batches * (2 if unit.resharded else 1), gathered, param_dtype)
            add("reduce_scatter", synchronised, reduced, reduce_dtype)
        if copies > 1:
            add("all_reduce", synchronised, reduced // shards, reduce_dtype)
    return out


def reduced_elements(unit: Unit, shards: int) -> int:
    """Elements of the message in which `unit`'s gradients are reduce-scattered."""
    return sum(_padded(shape, shards) for shape, t in zip(unit.shapes, unit.trainable, strict=True) if t)


def ddp_step_traffic(parameters: int, *, synchronised: int = 1) -> dict[str, Traffic]:
    """The same for strategy ``ddp`` with one bucket: all-reduces of every gradient in fp32."""
    total = synchronised * parameters
    return {"all_reduce": Traffic(synchronised, total, total * ELEMENT_BYTES["fp32"])}


def _padded(shape: tuple[int, ...], shards: int) -> int:
    return -(-shape[0] // shards) * shards * math.prod(shape[1:])
