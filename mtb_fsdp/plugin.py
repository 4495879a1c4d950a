"""Entry point: strategies ``fsdp`` and ``fsdp1``. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from mtb_core import ConfigError, Layout, Plan, StrategyInfo, World, divisors, hookimpl, option

if TYPE_CHECKING:
    from mtb_core import TrainConfig  # loading it takes a fifth of the time of `mtb --help`

PLUGIN_API = 2

WRAPS = ("block", "root", "auto-size")
SHARDINGS = ("full", "grad-op", "none")
_WRAP_HELP = (
    "What is gathered together: each of the model's blocks, the whole model (root), or each module of at least "
    "wrap_size parameters (auto-size)."
)
_SIZE_HELP = "Parameters from which wrap=auto-size makes a module a unit of its own; 0: not set."


@attrs.frozen
class FSDPOptions:
    """Options of strategy ``fsdp``."""

    reshard_after_forward: str = option(
        "true",
        help="Free a unit's gathered parameters after forward and gather them again for backward: true, false, or N: "
        "keep them spread over N ranks meanwhile.",
    )
    wrap: str = option("block", help=_WRAP_HELP, choices=WRAPS)
    wrap_size: int = option(0, help=_SIZE_HELP, minimum=0)
    param_dtype: str = option(
        "auto",
        help="Dtype in which parameters are gathered and computed with; auto: that of --precision. Shards stay fp32.",
        choices=("auto", "fp32", "bf16"),
    )
    reduce_dtype: str = option("fp32", help="Dtype in which gradients are summed over ranks.", choices=("fp32", "bf16"))
    hsdp: int = option(
        1, help="Copies of the sharded model: each is sharded over (ranks / copies) ranks; 1: no copies.", minimum=1
    )
    cpu_offload: bool = option(
        False, help="Keep shards, gradients and optimizer state in host memory; the optimizer steps there."
    )
    prefetch: int = option(
        0, help="Units that are gathered ahead of the one that computes; 0: as torch does by itself.", minimum=0
    )
    unused_parameters: bool = option(
        False, help="Let some ranks not use a parameter that others use: its gradient there counts as zero."
    )

    @property
    def reshard(self) -> bool | int:
        """`reshard_after_forward` as torch takes it.

        Raises:
            ConfigError: it is none of the valid values.
        """
        text = self.reshard_after_forward.lower()
        if text in ("true", "false"):
            return text == "true"
        if not text.isdecimal():
            raise ConfigError(
                f"option 'reshard_after_forward' of strategy 'fsdp' is {self.reshard_after_forward!r}; valid: true, "
                "false, or a number of ranks."
            )
        return int(text)


@attrs.frozen
class FSDP1Options:
    """Options of strategy ``fsdp1``."""

    sharding: str = option(
        "full",
        help="full: gather for forward and again for backward; grad-op: keep gathered in between; none: shard nothing.",
        choices=SHARDINGS,
    )
    wrap: str = option("block", help=_WRAP_HELP, choices=WRAPS)
    wrap_size: int = option(0, help=_SIZE_HELP, minimum=0)


def plan(options: FSDPOptions, config: TrainConfig, world: World) -> Plan:
    """Shards over all ranks, or over the ranks of each copy; every rank sees its own samples."""
    _check_wrap("fsdp", options.wrap, options.wrap_size)
    if world.size % options.hsdp:
        raise ConfigError(
            f"strategy 'fsdp' has hsdp={options.hsdp} copies on {world.size} ranks; valid: the divisors of the number "
            f"of ranks, {_listed(divisors(world.size))}."
        )
    shards = world.size // options.hsdp
    _check_reshard(options, shards)
    if options.wrap == "root" and options.prefetch:
        raise ConfigError(
            f"strategy 'fsdp' has prefetch={options.prefetch} with wrap=root, which makes one unit, so there is none "
            "to gather ahead; set prefetch=0, or wrap=block."
        )
    layout = Layout((("dp", world.size),))
    if options.hsdp > 1:
        layout = Layout((("replicate", options.hsdp), ("shard", shards)), {"replicate": "data", "shard": "data"})
    lower = options.param_dtype == "bf16" and config.precision == "fp32"
    return Plan(
        layout,
        auto_sync="every",  # `last` keeps whole gradients on every rank in between
        exact=options.reduce_dtype == "fp32" and not lower,
        reduce_dtype=options.reduce_dtype,
        missing_gradients=options.unused_parameters,
        sharded=shards > 1,
    )


def plan_legacy(options: FSDP1Options, config: TrainConfig, world: World) -> Plan:
    """Shards over all ranks; every rank sees its own samples.

    What is not synchronised is added up in the dtype of the computation, which for bf16 would not be fp32 sums.
    """
    _check_wrap("fsdp1", options.wrap, options.wrap_size)
    fp32 = config.precision == "fp32"
    return Plan(
        Layout((("dp", world.size),)),
        auto_sync="last" if options.sharding == "none" and fp32 else "every",
        sync_modes=("every", "last") if fp32 else ("every",),
        missing_gradients=True,  # a unit's gradients are one tensor, in which unused parameters have zeros
        sharded=options.sharding != "none" and world.size > 1,
    )


def _check_wrap(strategy: str, wrap: str, size: int) -> None:
    if (wrap == "auto-size") != (size > 0):
        what = f"has wrap={wrap} and wrap_size={size}"
        raise ConfigError(
            f"strategy '{strategy}' {what}; wrap_size is needed by wrap=auto-size (a number of parameters, such as "
            "1000000) and used by nothing else."
        )


def _check_reshard(options: FSDPOptions, shards: int) -> None:
    reshard = options.reshard
    if isinstance(reshard, bool):
        return
    valid = [n for n in divisors(shards) if 1 < n < shards]
    if reshard not in valid:
        numbers = f", {_listed(valid)}" if valid else f" (no number divides {shards} ranks)"
        raise ConfigError(
            f"strategy 'fsdp' has reshard_after_forward={reshard} where parameters are sharded over {shards} ranks; "
            f"valid: true, false{numbers}."
        )
    if options.wrap == "root":
        raise ConfigError(
            f"strategy 'fsdp' has reshard_after_forward={reshard} with wrap=root: the root stays gathered until its "
            "backward, so there is nothing to spread; set wrap=block."
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


@hookimpl
def mtb_strategies() -> Sequence[StrategyInfo]:
    """Strategies ``fsdp`` and ``fsdp1``."""
    return [
        StrategyInfo(
            "fsdp",
            "Fully sharded data parallel: parameters, gradients and optimizer state in shards (FSDP2 fully_shard)",
            "mtb_fsdp.strategy:FSDPStrategy",
            plan,
            FSDPOptions,
        ),
        StrategyInfo(
            "fsdp1",
            "The older FullyShardedDataParallel, to compare with and to migrate from",
            "mtb_fsdp.legacy:FSDP1Strategy",
            plan_legacy,
            FSDP1Options,
            legacy=True,
        ),
    ]
