"""Capabilities of a strategy: its plan promises them, and its author may insist on one or leave one out."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from mtb_core.api.errors import ConfigError
from mtb_core.api.values import SyncMode


def _numbers_of_ranks(_instance: object, _attribute: object, value: tuple[int, ...]) -> None:
    if not value or min(value) < 1 or len(set(value)) != len(value):
        raise ConfigError(
            f"Capabilities(world_sizes={value!r}): these are the numbers of ranks to check at, at least one of them, each "
            "at least 1 and named once. Leave world_sizes out for 1, 2 and 3."
        )


@attrs.frozen(kw_only=True)
class Capabilities:
    """Declaration of an author beside the plan: mostly the numbers of ranks.

    What is checked follows from the promises of `Plan`, whose names the other attributes have. None: as the plan says.
    True: the plan must promise it at every number of ranks above one, or `discovery.capabilities` fails. False: it is not checked, though
    the plan may promise it.

    Attributes:
        world_sizes: numbers of ranks to check at.
        sync_modes: those of the plan's sync modes to check; None: all.

    Raises:
        ConfigError: `world_sizes` is empty, or has a number below 1 or twice.
    """

    world_sizes: tuple[int, ...] = attrs.field(default=(1, 2, 3), validator=_numbers_of_ranks)
    sync_modes: tuple[SyncMode, ...] | None = None
    sums_gradients: bool | None = None
    exact: bool | None = None
    sharded: bool | None = None
    accumulation: bool | None = None
    clipping: bool | None = None
    bf16: bool | None = None
    tied_weights: bool | None = None
    custom_models: bool | None = None
    exact_resume: bool | None = None
    resharding: bool | None = None

    @property
    def promises(self) -> dict[str, bool]:
        """The promises that the author insists on (True) or leaves out (False), by name."""
        return {name: value for name in PROMISES if (value := getattr(self, name)) is not None}


#: Names of the promises of `Plan` on which checks depend.
PROMISES: Sequence[str] = tuple(
    f.name for f in attrs.fields(Capabilities) if f.name not in ("world_sizes", "sync_modes")
)
