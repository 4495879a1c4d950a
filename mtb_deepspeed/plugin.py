"""Entry point: strategy ``deepspeed`` and the command ``deepspeed``. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtb_core import CommandInfo, DoctorCheck, Layout, Plan, StrategyInfo, World, hookimpl
from mtb_deepspeed.options import DeepSpeedOptions, settled
from mtb_deepspeed.requirements import check_requirements

if TYPE_CHECKING:
    from mtb_core import TrainConfig

PLUGIN_API = 2

check_requirements()  # raising here makes the plugin one that is listed with the reason, and nothing else fails


def plan(options: DeepSpeedOptions, config: TrainConfig, world: World) -> Plan:
    """Every rank sees its own samples; what each holds of the model depends on the stage."""
    found = settled(options, config)
    # Stages 0 and 1 keep whole gradients and can wait with the reduction until the last micro-batch. Stages 2 and 3
    # keep the reduced part only, so every micro-batch is reduced.
    mode = "last" if found.stage in (0, 1) else "every"
    reduced_in_bf16 = config.precision == "bf16" and found.stage != 0
    return Plan(
        Layout((("dp", world.size),)),
        sync_modes=(mode,),  # type: ignore[arg-type]
        auto_sync=mode,  # type: ignore[arg-type]
        reduce_dtype="bf16" if reduced_in_bf16 else "fp32",
        finds_missing_gradients=True,
        sharded=found.stage != 0,
        options=found,
    )


@hookimpl
def mtb_strategies() -> Sequence[StrategyInfo]:
    """Strategy ``deepspeed``."""
    return [
        StrategyInfo(
            "deepspeed",
            "DeepSpeed's engine: ZeRO stages 0 to 3 split optimizer state, gradients, parameters over ranks",
            "mtb_deepspeed.strategy:DeepSpeedStrategy",
            plan,
            DeepSpeedOptions,
            preload="mtb_deepspeed.engine:import_deepspeed",
        )
    ]


@hookimpl
def mtb_commands() -> Sequence[CommandInfo]:
    """Command ``deepspeed``."""
    return [
        CommandInfo(
            "deepspeed", "Train with DeepSpeed's ZeRO: `train` with --zero-stage", "mtb_deepspeed.command:command"
        )
    ]


@hookimpl
def mtb_doctor_checks() -> Sequence[DoctorCheck]:
    """Check that DeepSpeed can be imported."""
    return [DoctorCheck("deepspeed", "DeepSpeed imports, without building anything", "mtb_deepspeed.doctor:check")]
