"""The bubble of a pipeline: the share of the time in which ranks wait, counted on the order in which they really work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

#: How long a forward and a backward of a stage are taken to be; a backward is two matrix products for one of forward.
DURATION = {"F": 1, "B": 2}


@attrs.frozen
class Action:
    """A forward (F) or backward (B) of a micro-batch in a stage."""

    kind: Literal["F", "B"]
    stage: int
    micro_batch: int


def simulated(orders: Sequence[Sequence[Action]], stages: int) -> float:
    """Share of all ranks' time in which they wait, from 0 to 1, if `DURATION` holds and messages take no time.

    Each rank takes its actions one after the other. A forward begins when the stage before has ended its own of that
    micro-batch; a backward when the stage behind has, and in the last stage when its forward has ended.

    Args:
        orders: by rank of the pipeline, its actions in order.
        stages: of all ranks together.

    Raises:
        ValueError: an action waits for one that never ends.
    """
    ended: dict[Action, int] = {}
    clocks = [0] * len(orders)
    places = [0] * len(orders)
    total = sum(map(len, orders))
    while len(ended) < total:
        before = len(ended)
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                action = order[places[rank]]
                needed = _needed(action, stages)
                if needed is not None and needed not in ended:
                    break
                start = clocks[rank] if needed is None else max(clocks[rank], ended[needed])
                clocks[rank] = ended[action] = start + DURATION[action.kind]
                places[rank] += 1
        if len(ended) == before:
            raise ValueError(
                "The order of forwards and backwards cannot be taken: an action waits for one that never ends."
            )
    busy = sum(DURATION[action.kind] for action in ended)
    available = len(orders) * max(clocks)
    return (available - busy) / available


def by_formula(pp: int, micro_batches: int, virtual: int = 1) -> float:
    """Bubble as a share of all time, (p - 1) / (v m + p - 1), for stages that take equally long.

    Narayanan et al. 2021 (arXiv:2104.04473, section 2.2) give it as a share of the ideal time, (p - 1) / (v m).
    """
    return (pp - 1) / (virtual * micro_batches + pp - 1)


def _needed(action: Action, stages: int) -> Action | None:
    if action.kind == "F":
        return Action("F", action.stage - 1, action.micro_batch) if action.stage else None
    if action.stage == stages - 1:
        return Action("F", action.stage, action.micro_batch)
    return Action("B", action.stage + 1, action.micro_batch)
