"""What a strategy can do, as its author declares it and as its plan says."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import attrs

from mtb_core.api.errors import ConfigError
from mtb_core.api.values import SyncMode

if TYPE_CHECKING:
    from .lab import Lab


def _numbers_of_ranks(_instance: object, _attribute: object, value: tuple[int, ...]) -> None:
    if not value or min(value) < 1 or len(set(value)) != len(value):
        raise ConfigError(
            f"Capabilities(world_sizes={value!r}): these are the numbers of ranks to check at, at least one of them, each "
            "at least 1 and named once. Leave world_sizes out for 1, 2 and 3."
        )


@attrs.frozen(kw_only=True)
class Capabilities:
    """What is checked; what is declared must hold, what is not is skipped and listed.

    Attributes:
        world_sizes: numbers of ranks.
        exact: training equals that of ``single`` on the same global batches.
        sharded: no rank holds all of the model and its optimizer.
        sync_modes: gradient sync modes.
        accumulation: several micro-batches per step.
        clipping: ``--max-grad-norm``.
        bf16: ``--precision bf16``.
        tied: models whose layers share a parameter.
        custom_models: models other than the built-in one.
        exact_resume: a resumed run is bitwise the uninterrupted one.
        resharding: checkpoints can be resumed on another number of ranks and by other strategies.

    Raises:
        ConfigError: `world_sizes` is empty, or has a number below 1 or twice.
    """

    world_sizes: tuple[int, ...] = attrs.field(default=(1, 2, 3), validator=_numbers_of_ranks)
    exact: bool = True
    sharded: bool = False
    sync_modes: tuple[SyncMode, ...] = ("every", "last")
    accumulation: bool = True
    clipping: bool = True
    bf16: bool = True
    tied: bool = True
    custom_models: bool = True
    exact_resume: bool = True
    resharding: bool = True


def capabilities_of(lab: Lab, candidates: tuple[int, ...]) -> Capabilities:
    """What the plan says, for a strategy whose author declares nothing.

    Raises:
        ConfigError: the plan refuses every number of ranks; the reason is that of the last.
    """
    sizes, reason = [], ConfigError("no number of ranks was given")
    for ranks in candidates:
        try:
            plan = lab.plan(ranks)
        except ConfigError as error:
            reason = error
        else:
            sizes.append(ranks)
    if not sizes:
        raise reason
    bf16 = False
    with contextlib.suppress(ConfigError):
        lab.plan(sizes[-1], precision="bf16")
        bf16 = True
    return Capabilities(
        world_sizes=tuple(sizes),
        exact=plan.exact,
        sharded=plan.sharded and sizes[-1] > 1,
        sync_modes=plan.sync_modes,
        bf16=bf16,
        exact_resume=plan.exact_resume,
        custom_models=plan.custom_models,
        resharding=plan.resharding,
    )
