"""The list of mistakes: each is a class, a right one with one thing wrong, and the check that must notice it."""

from __future__ import annotations

import re
from importlib import import_module

import attrs

from mtb_core import NoOptions, StrategyInfo
from mtb_kit import Capabilities

from . import plans

REPLICATED = StrategyInfo("right-replicated", "Replicas", "broken.right:Replicated", plans.data_parallel)
SHARDED = StrategyInfo("right-sharded", "Replicas, sharded optimizer", "broken.right:Sharded", plans.data_parallel)
ZERO1 = StrategyInfo(
    "right-zero1", "Its optimizer's state is said to be sharded", "broken.right:Sharded", plans.sharded
)
GATHERING = StrategyInfo("right-gathering", "Sums by gathering", "broken.right:Gathering", plans.data_parallel)
OWN_STATE = StrategyInfo("right-own-state", "Has state of its own", "broken.right:OwnState", plans.data_parallel)
STAGES = StrategyInfo("right-stages", "A pipeline", "broken.parallel:Stages", plans.stages)
POSITIONS = StrategyInfo("right-positions", "Context parallelism", "broken.parallel:Positions", plans.tokens)
MIRRORED = StrategyInfo("right-mirrored", "Copies", "broken.parallel:Mirrored", plans.copies)
LOCAL_STEPS = StrategyInfo("right-local-steps", "Local SGD", "broken.parallel:LocalSteps", plans.local_steps)


@attrs.frozen
class Mistake:
    """A strategy that is wrong.

    Attributes:
        check: the name of the check that must fail.
        ranks: at which the mistake shows.
        right: the strategy that must pass that same check.
        capabilities: what the author of the mistake declares; None: what the plan says.
    """

    info: StrategyInfo
    check: str
    ranks: int
    right: StrategyInfo
    capabilities: Capabilities | None

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """One rank too: some mistakes show only where the number of ranks changes."""
        return (1, self.ranks)


MISTAKES: dict[str, Mistake] = {}


def mistake(check, *, ranks=2, right=REPLICATED, plan=plans.data_parallel, options=NoOptions, capabilities=None):
    """Add a class to the list; its first line of documentation says what is wrong."""

    def add(cls):
        own = re.sub(r"(?<!^)(?=[A-Z])", "-", cls.__name__).lower()
        text = cls.__doc__.partition("\n")[0]
        info = StrategyInfo(own, text, f"{cls.__module__}:{cls.__name__}", plan, options)
        MISTAKES[own] = Mistake(info, check, ranks, right, capabilities)
        return cls

    return add


def mistakes():
    """The complete list, in the order of the kit's groups."""
    for module in ("discovered", "gradients", "training", "saving", "lifecycle", "layouts", "agreements"):
        import_module(f"broken.{module}")
    return list(MISTAKES.values())
