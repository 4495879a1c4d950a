"""Entry point: strategy ``ep`` and model ``moe``. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import attrs

from mtb_core import (
    ConfigError,
    Layout,
    ModelInfo,
    Plan,
    StrategyInfo,
    World,
    divisors,
    hookimpl,
    option,
    parse_options,
)

if TYPE_CHECKING:
    from mtb_core import TrainConfig  # loading it takes a fifth of the time of `mtb --help`

PLUGIN_API = 2


@attrs.frozen
class MoEOptions:
    """Options of model ``moe``."""

    experts: int = option(8, help="Experts of each block.", minimum=1)
    top_k: int = option(2, help="Experts that a token goes to.", minimum=1)
    d_ff: int | None = option(None, help="Hidden width of an expert. none: 4 x d_model.", minimum=1)
    capacity_factor: float | None = option(
        None,
        help="An expert takes ceil(factor x top_k x T / experts) of the T tokens of a sample, the first ones, and drops "
        "the others. none: it takes all.",
        minimum=0.01,
    )
    aux_loss: float = option(0.01, help="Weight of the load-balancing loss.", minimum=0.0)
    z_loss: float = option(0.001, help="Weight of the router's z-loss.", minimum=0.0)


@attrs.frozen
class EPOptions:
    """Options of strategy ``ep``."""

    ep: int | None = option(
        None, help="Expert-parallel degree: ranks that share the experts. none: all ranks.", minimum=1
    )


def check_moe(options: MoEOptions) -> None:
    """Check the options against each other.

    Raises:
        ConfigError: tokens cannot go to so many experts.
    """
    if options.top_k > options.experts:
        raise ConfigError(
            f"model 'moe' has top_k={options.top_k}, but only experts={options.experts}; valid: 1 to {options.experts}."
        )


def check_degree(ep: int, experts: int) -> None:
    """Check that `ep` ranks can share `experts` evenly.

    Raises:
        ConfigError: they cannot; the message lists the degrees that can.
    """
    if experts % ep:
        raise ConfigError(
            f"strategy 'ep': {experts} experts cannot be shared by ep={ep} ranks; valid: {_listed(divisors(experts))}. "
            "Set --strategy-opt ep, or change the number of experts."
        )


def plan(options: EPOptions, config: TrainConfig, world: World) -> Plan:
    """Neighbouring ranks share experts (``ep``, the inner axis); every rank has samples of its own."""
    ep = world.size if options.ep is None else options.ep
    if world.size % ep:
        raise ConfigError(
            f"strategy 'ep' has ep={ep}, which does not divide the {world.size} ranks; valid: "
            f"{_listed(divisors(world.size))}. Change ep or --nproc."
        )
    if config.model == "gpt":
        raise ConfigError(
            "strategy 'ep' needs a model with experts, and --model gpt has none; use --model moe, or another strategy."
        )
    if config.model == "moe":
        model = parse_options(MoEOptions, config.model_opt, owner="model 'moe'")
        check_moe(model)
        check_degree(ep, model.experts)
    return Plan(
        Layout((("dp", world.size // ep), ("ep", ep)), roles={"dp": "data", "ep": "data"}),
        custom_models=False,
        sharded=ep > 1,
        metrics=("rank_imbalance",) if ep > 1 else (),
        options=attrs.evolve(options, ep=ep),
    )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


@hookimpl
def mtb_strategies() -> Sequence[StrategyInfo]:
    """Strategy ``ep``."""
    return [
        StrategyInfo(
            "ep",
            "Expert parallel: experts spread over ranks (all-to-all), everything else data parallel (DDP)",
            "mtb_ep.strategy:EPStrategy",
            plan,
            EPOptions,
        )
    ]


@hookimpl
def mtb_models() -> Sequence[ModelInfo]:
    """Model ``moe``."""
    return [
        ModelInfo("moe", "GPT-like decoder with a mixture of experts in each block", "mtb_ep.model:moe", MoEOptions)
    ]
