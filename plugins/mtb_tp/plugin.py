"""Entry point: strategy ``tp`` and command ``tp``. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from mtb_core import CommandInfo, ConfigError, Layout, Plan, StrategyInfo, World, divisors, hookimpl, option

if TYPE_CHECKING:
    from mtb_core import TrainConfig  # loading it takes a fifth of the time of `mtb --help`

PLUGIN_API = 2

DATA_PARALLEL = ("ddp", "fsdp")
#: Features that ranks share.
_SHARED = ("in_features", "out_features", "hidden_features")


@attrs.frozen
class TPOptions:
    """Options of strategy ``tp``."""

    tp: int | None = option(
        None, help="Tensor-parallel degree: ranks that share each layer. none: all that dp leaves.", minimum=1
    )
    dp: int | None = option(
        None,
        help="Data-parallel degree: sample streams. none: all ranks divided by tp. tp x dp is the world.",
        minimum=1,
    )
    data_parallel: str = option(
        "ddp",
        help="What works over the data-parallel ranks: replicas (ddp), or parameters sharded once more (fsdp).",
        choices=DATA_PARALLEL,
    )
    sequence_parallel: bool = option(
        False, help="Cut the residual stream along the sequence: all-gather and reduce-scatter instead of all-reduce."
    )
    vocab_parallel_loss: bool = option(
        False, help="Split embedding and output layer by vocabulary; the loss is made of the parts of the logits."
    )


def degrees(options: TPOptions, world: int) -> tuple[int, int]:
    """(dp, tp) on `world` ranks.

    Raises:
        ConfigError: they do not multiply to `world`.
    """
    given = [(name, value) for name, value in (("tp", options.tp), ("dp", options.dp)) if value is not None]
    product = 1
    for _, value in given:
        product *= value
    if world % product or (len(given) == 2 and product != world):
        asked = " and ".join(f"{name}={value}" for name, value in given)
        valid = ", ".join(map(str, divisors(world)))
        raise ConfigError(
            f"strategy 'tp' has {asked}, but there are {world} ranks; tp x dp must be the number of ranks, so each is "
            f"one of {valid}. Change --nproc, or leave out one of the two options."
        )
    if options.tp is not None:
        return world // options.tp, options.tp
    dp = options.dp or 1
    return dp, world // dp


def must_divide(what: str, value: int, tp: int, advice: str, owner: str = "strategy 'tp'") -> None:
    """Check that `tp` ranks can share `value` of something evenly.

    Raises:
        ConfigError: they cannot; the message lists the degrees that can.
    """
    if value % tp:
        valid = divisors(value)
        shown = ", ".join(map(str, valid[:12])) + (", …" if len(valid) > 12 else "")
        raise ConfigError(f"{owner}: {value} {what} cannot be shared by tp={tp} ranks; valid: {shown}. {advice}")


def check_sizes(sizes: Mapping[str, Any], ranks: int) -> None:
    """Check that `ranks` can share a sequence, and features, of these `sizes` (by option; 0 or absent: not used).

    Raises:
        ConfigError: they cannot.
    """
    advice = "All-gather and reduce-scatter take equal parts. Change --seq-length, or --tp."
    must_divide("positions (--seq-length)", sizes.get("seq_length", 0), ranks, advice, owner="mtb tp sequence")
    for name in _SHARED:
        size = sizes.get(name, 0)
        if 0 < size < ranks:
            raise ConfigError(
                f"--{name.replace('_', '-')} {size} leaves some of the --tp {ranks} ranks nothing to compute; it must be "
                f"at least {ranks} (it need not be a multiple)."
            )


def plan(options: TPOptions, config: TrainConfig, world: World) -> Plan:
    """Neighbouring ranks share layers (``tp``, the inner axis) and see the same samples; groups see different ones."""
    dp, tp = degrees(options, world.size)
    if config.model == "gpt":
        must_divide("attention heads (--n-heads)", config.n_heads, tp, "Set tp to one of them, or change --n-heads.")
    if options.sequence_parallel:
        must_divide(
            "positions (--seq-length)", config.seq_length, tp, "Change --seq-length, or leave out sequence_parallel."
        )
    if options.vocab_parallel_loss and config.vocab_size is not None:
        check_vocabulary(config.vocab_size, tp)
    sharded = options.data_parallel == "fsdp"
    return Plan(
        Layout((("dp", dp), ("tp", tp))),
        auto_sync="every" if sharded else "last",  # as strategies fsdp and ddp have it
        sharded=sharded,
        custom_models=False,
        resharding=True,
    )


def check_vocabulary(size: int, tp: int) -> None:
    """Check that `tp` ranks can share a vocabulary of `size` evenly.

    Raises:
        ConfigError: they cannot.
    """
    padded = -(-size // tp) * tp
    must_divide("words of the vocabulary (--vocab-size)", size, tp, f"Pad it: --vocab-size {padded}.")


@hookimpl
def mtb_strategies() -> Sequence[StrategyInfo]:
    """Strategy ``tp``."""
    return [
        StrategyInfo(
            "tp",
            "Tensor parallel: layers split over ranks (parallelize_module), times data parallel by DDP or FSDP2",
            "mtb_tp.strategy:TPStrategy",
            plan,
            TPOptions,
        )
    ]


@hookimpl
def mtb_commands() -> Sequence[CommandInfo]:
    """Command ``tp``."""
    return [CommandInfo("tp", "Check tensor- and sequence-parallel layers against one process", "mtb_tp.command:tp")]
