"""Entry point: strategy ``ddp``. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from mtb_core import ConfigError, Layout, Plan, StrategyInfo, SyncMode, World, hookimpl, option

if TYPE_CHECKING:
    from mtb_core import TrainConfig  # loading it takes a fifth of the time of `mtb --help`

PLUGIN_API = 2

COMM_HOOKS = ("none", "fp16", "bf16", "powersgd")


@attrs.frozen
class DDPOptions:
    """Options of strategy ``ddp``."""

    bucket_cap_mb: int | None = option(
        None,
        help="Size of a gradient bucket, MiB; a bucket is one all-reduce. none: torch's own sizes, 1 for the first "
        "bucket that backward fills and 25 for the others.",
        minimum=1,
    )
    gradient_as_bucket_view: bool = option(
        True, help="Let gradients live in the buckets, which saves a copy of them in memory and time."
    )
    static_graph: bool = option(
        False, help="Promise that each step uses the same parameters; copes with unused ones without searching."
    )
    find_unused_parameters: bool = option(
        False, help="Search each step's graph for parameters that are not used, so that ranks need not wait for them."
    )
    comm_hook: str = option(
        "none",
        help="Compress gradients on the wire: fp16 and bf16 halve the bytes, powersgd sends low-rank factors.",
        choices=COMM_HOOKS,
    )
    powersgd_rank: int = option(2, help="Rank of the approximation of comm_hook=powersgd.", minimum=1)
    zero1: bool = option(
        False, help="ZeRO stage 1: each rank keeps and updates the optimizer state of its share of the parameters."
    )


def plan(options: DDPOptions, config: TrainConfig, world: World) -> Plan:
    """Every rank holds the whole model and sees its own samples."""
    if options.static_graph and options.find_unused_parameters:
        raise ConfigError(
            "strategy 'ddp' has both static_graph and find_unused_parameters set; a static graph copes with unused "
            "parameters already: set one of them."
        )
    every = config.gradient_sync_mode == "every" or options.static_graph
    if options.comm_hook != "none" and every and (config.grad_accum_steps or 1) > 1:
        raise ConfigError(
            f"strategy 'ddp' compresses gradients with comm_hook={options.comm_hook}, and --gradient-sync-mode every "
            "(which static_graph implies) would compress the sum of earlier micro-batches again each time; valid: auto, "
            "last."
        )
    if options.comm_hook == "powersgd" and options.static_graph:
        raise ConfigError("strategy 'ddp' cannot combine comm_hook=powersgd with static_graph; drop one of them.")
    modes: tuple[SyncMode, ...] = ("every", "last")
    if options.static_graph:  # it is recorded in the first backward and must see every one of a step synchronised
        modes = ("every",)
    elif options.comm_hook != "none":
        modes = ("last",)
    reduce_dtype = {"none": "fp32", "powersgd": "fp32"}.get(options.comm_hook, options.comm_hook)
    return Plan(
        Layout((("dp", world.size),)),
        sync_modes=modes,
        auto_sync="every" if options.static_graph else "last",
        exact=options.comm_hook == "none",
        reduce_dtype=reduce_dtype,
        missing_gradients=options.static_graph or options.find_unused_parameters,
        exact_resume=options.comm_hook != "powersgd",  # its error feedback is not saved
    )


@hookimpl
def mtb_strategies() -> Sequence[StrategyInfo]:
    """Strategy ``ddp``."""
    return [
        StrategyInfo(
            "ddp",
            "Data parallel: replicas with all-reduced gradients (DistributedDataParallel), optionally ZeRO-1",
            "mtb_ddp.strategy:DDPStrategy",
            plan,
            DDPOptions,
        )
    ]
