"""Episodes: the short trainings from which the conformance kit draws its conclusions, and what may happen in them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

if TYPE_CHECKING:
    from .stage import RankTrace, Stage

#: Settings of every episode, as far as it does not say otherwise. Sizes are such that 2, 3 and 4 ranks divide the
#: batch but not every dimension, and heads divide by 2 and 4.
COMMON: Mapping[str, Any] = {
    "device": "cpu",
    "backend": "gloo",
    "seed": 7,
    "seq_length": 6,
    "vocab_size": 61,
    "d_model": 20,
    "n_heads": 4,
    "n_layers": 2,
    "global_batch_size": 24,
    "grad_accum_steps": 2,
    "warmup_steps": 0,
    "steps": 4,
    "learning_rate": 3e-3,
    "sink": ("jsonl",),
}


class Probe:
    """Something to watch or to make happen on every rank of an episode.

    A probe is a frozen attrs class, so that equal episodes are run once; `observer` makes the run plugin that acts.

    Attributes:
        fresh: its episode needs processes of its own: it looks at what a process has, or ends it.
    """

    fresh: ClassVar[bool] = False

    def observer(self, stage: Stage) -> object:
        """The object whose run hooks are called on this rank."""
        raise NotImplementedError

    def around(self, trace: RankTrace) -> AbstractContextManager[None]:  # noqa: ARG002  (most probes need none)
        """Entered on this rank before it joins the others, left when the process group is gone."""
        return nullcontext()


@attrs.frozen
class Episode:
    """One training: on how many ranks, of whom, with which settings, watched by which probes.

    Attributes:
        subject: the strategy under test; False: ``single``, the reference.
        settings: what differs from `COMMON`, as sorted pairs.
        states: steps after which model and optimizer are kept; 0 is before the first step of this invocation.
        fresh: the ranks are processes that have run no other episode.
    """

    ranks: int
    subject: bool
    settings: tuple[tuple[str, Any], ...]
    states: tuple[int, ...]
    probes: tuple[Probe, ...]
    fresh: bool


def episode(
    ranks: int,
    *,
    subject: bool = True,
    states: tuple[int, ...] = (),
    probes: tuple[Probe, ...] = (),
    fresh: bool = False,
    **settings: Any,
) -> Episode:
    """An `Episode`; keyword arguments are settings of `TrainConfig`."""
    alone = fresh or settings.get("start_method") == "spawn" or any(probe.fresh for probe in probes)
    return Episode(ranks, subject, tuple(sorted(settings.items())), states, probes, alone)
