"""Strategy ``cp`` as it is found and planned. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from mtb_core import ConfigError, Layout, Plan, StrategyInfo, World, divisors, hookimpl, option
from mtb_cp.cutting import BALANCES, number_of_parts

if TYPE_CHECKING:
    from mtb_core import TrainConfig  # loading it takes a fifth of the time of `mtb --help`

PLUGIN_API = 2

ATTENTIONS = ("gather", "ring")
DATA_PARALLEL = ("ddp", "fsdp")


@attrs.frozen
class CPOptions:
    """Options of strategy ``cp``."""

    cp: int | None = option(
        None,
        help="Context-parallel degree: ranks that share each sequence. It divides the ranks. none: all ranks.",
        minimum=1,
    )
    attention: str = option(
        "gather",
        help="How queries meet the keys and values of other ranks: gather: all of them at once; ring: those of one rank "
        "at a time, passed on from rank to rank.",
        choices=ATTENTIONS,
    )
    balance: str = option(
        "zigzag",
        help="Positions of a rank. zigzag: one part of the front and one of the end, equal work for all; contiguous: "
        "one part, later ranks have more work.",
        choices=BALANCES,
    )
    data_parallel: str = option(
        "ddp",
        help="How all ranks hold the model: as replicas (ddp), or in shards (fsdp).",
        choices=DATA_PARALLEL,
    )


def degrees(options: CPOptions, world: int) -> tuple[int, int]:
    """(dp, cp) on `world` ranks.

    Raises:
        ConfigError: cp does not divide `world`.
    """
    cp = world if options.cp is None else options.cp
    if world % cp:
        valid = ", ".join(map(str, divisors(world)))
        raise ConfigError(
            f"strategy 'cp' has cp={cp} on {world} ranks; valid: the divisors of the number of ranks, {valid}."
        )
    return world // cp, cp


def plan(options: CPOptions, config: TrainConfig, world: World) -> Plan:
    """Neighbouring ranks share samples (``cp``, the inner axis), each with its own positions; all share the model."""
    dp, cp = degrees(options, world.size)
    if cp > 1:
        _check_length(config.seq_length, cp, options.balance)
    sharded = options.data_parallel == "fsdp"
    return Plan(
        Layout((("dp", dp), ("cp", cp)), {"dp": "data", "cp": "tokens"}),
        auto_sync="every" if sharded else "last",  # as strategies fsdp and ddp have it
        sharded=sharded and world.size > 1,
        custom_models=cp == 1,
    )


def _check_length(length: int, cp: int, balance: str) -> None:
    count = number_of_parts(cp, balance)
    if length % count == 0:
        return
    below, above = length // count * count, (length // count + 1) * count
    nearest = f"{below} or {above}" if below else f"{above}"
    other = ", or use balance=contiguous" if balance == "zigzag" and length % cp == 0 else ""
    raise ConfigError(
        f"strategy 'cp' with cp={cp} and balance={balance} cuts a sequence into {count} equal parts, and --seq-length "
        f"{length} is not a multiple of {count}; nearest valid: {nearest}. Change --seq-length or cp{other}."
    )


@hookimpl
def mtb_strategies() -> Sequence[StrategyInfo]:
    """Strategy ``cp``."""
    return [
        StrategyInfo(
            "cp",
            "Context parallel: sequences cut over ranks (gathered or ring attention), times data parallel by DDP or FSDP2",
            "mtb_cp.strategy:CPStrategy",
            plan,
            CPOptions,
        )
    ]
