"""Entry point: strategy ``pp``. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from mtb_core import ConfigError, Layout, Plan, StrategyInfo, World, divisors, hookimpl, option

if TYPE_CHECKING:
    from mtb_core import TrainConfig  # loading it takes a fifth of the time of `mtb --help`

PLUGIN_API = 2

SCHEDULES = ("1f1b", "gpipe", "interleaved")
DATA_PARALLEL = ("ddp", "fsdp")


@attrs.frozen
class PPOptions:
    """Options of strategy ``pp``."""

    pp: int | None = option(
        None, help="Ranks of one pipeline. none: all ranks. The others are data-parallel copies of it.", minimum=1
    )
    schedule: str = option(
        "1f1b",
        help="Order of forwards and backwards on a rank: all forwards first (gpipe), one backward after each forward "
        "(1f1b), or the latter with several stages on each rank (interleaved).",
        choices=SCHEDULES,
    )
    virtual: int | None = option(
        None, help="Stages on each rank, with schedule=interleaved. none: 2 with it, else 1.", minimum=1
    )
    data_parallel: str = option(
        "ddp",
        help="What works over the data-parallel ranks: replicas of each stage (ddp), or stages in shards (fsdp).",
        choices=DATA_PARALLEL,
    )


def plan(options: PPOptions, config: TrainConfig, world: World) -> Plan:
    """Consecutive parts of the model on the ranks of ``pp``, the outer axis; different samples along ``dp``."""
    pp = options.pp or world.size
    if world.size % pp:
        raise ConfigError(
            f"strategy 'pp' has pp={pp} on {world.size} ranks; valid: the divisors of the number of ranks, "
            f"{_listed(divisors(world.size))}."
        )
    virtual = _stages_on_a_rank(options, pp)
    dp = world.size // pp
    if config.model == "gpt":
        check_stages(config.n_layers, "blocks (--n-layers)", pp=pp, virtual=virtual, world=world.size)
    micro_batches = _micro_batches(config, dp)
    if options.schedule == "interleaved" and micro_batches >= pp:
        check_rounds(micro_batches, pp)
    sharded = options.data_parallel == "fsdp" and dp > 1
    return Plan(
        Layout((("pp", pp), ("dp", dp)), {"pp": "stages", "dp": "data"}),
        auto_sync="every" if sharded else "last",  # as strategies fsdp and ddp have it
        sharded=sharded or pp > 1,
        least_micro_batches=1 if options.schedule == "gpipe" else pp,
        custom_models=False,
        options=attrs.evolve(options, pp=pp, virtual=virtual),
    )


def _stages_on_a_rank(options: PPOptions, pp: int) -> int:
    interleaved = options.schedule == "interleaved"
    virtual = options.virtual or (2 if interleaved else 1)
    if interleaved and pp == 1:
        raise ConfigError(
            "strategy 'pp' has schedule=interleaved with pp=1, a pipeline of one rank; valid: 1f1b, gpipe, or a larger pp."
        )
    if interleaved != (virtual > 1):
        raise ConfigError(
            f"strategy 'pp' has schedule={options.schedule} with virtual={virtual}; valid: schedule=interleaved with "
            "virtual=2 or more, or another schedule with virtual=1."
        )
    return virtual


def check_stages(blocks: int, what: str, *, pp: int, virtual: int, world: int) -> None:
    """Check that each of ``pp * virtual`` stages gets at least one of `blocks`.

    Args:
        what: the blocks are called in the message.
        world: number of all ranks.

    Raises:
        ConfigError: there are too few; the message lists the numbers of ranks that have enough.
    """
    if pp * virtual <= blocks:
        return
    valid = _listed([n for n in divisors(world) if n * virtual <= blocks])
    each = f" with {virtual} stages on each rank" if virtual > 1 else ""
    raise ConfigError(
        f"strategy 'pp' has pp={pp}{each}, but the model has {blocks} {what}, and each of the {pp * virtual} stages needs "
        f"one; valid on {world} ranks: {f'pp={valid}' if valid else 'none'}. The ranks that pp leaves are data-parallel."
    )


def check_rounds(micro_batches: int, pp: int) -> None:
    """Check that schedule ``interleaved`` can share `micro_batches` evenly among its rounds.

    Raises:
        ConfigError: it cannot; the message has the nearest numbers that it can.
    """

    def fits(number: int) -> bool:
        return number >= pp and number % (number // pp) == 0

    if not fits(micro_batches):
        below = next(n for n in range(micro_batches, 0, -1) if fits(n))
        above = next(n for n in range(micro_batches, 2 * micro_batches + pp) if fits(n))
        raise ConfigError(
            f"strategy 'pp' has schedule=interleaved with {micro_batches} micro-batches a step, which {pp} ranks cannot "
            f"take in equal rounds; nearest valid: --grad-accum-steps {below} or {above}."
        )


def _micro_batches(config: TrainConfig, dp: int) -> int:
    """Micro-batches of a step, as far as they are known here."""
    if config.grad_accum_steps is not None:
        return config.grad_accum_steps
    if config.global_batch_size is None or config.batch_size is None:
        return 1
    return config.global_batch_size // (config.batch_size * dp)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


@hookimpl
def mtb_strategies() -> Sequence[StrategyInfo]:
    """Strategy ``pp``."""
    return [
        StrategyInfo(
            "pp",
            "Pipeline parallel: consecutive parts of the model on different ranks, times data parallel by DDP or FSDP2",
            "mtb_pp.strategy:PPStrategy",
            plan,
            PPOptions,
        )
    ]
