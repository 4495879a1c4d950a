"""Core's own plugin: what is there without any other. It uses public names only, like a stranger's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtb_core import (
    CommandInfo,
    ConfigError,
    DatasetInfo,
    FormatInfo,
    Layout,
    ModelInfo,
    NoOptions,
    OptimizerInfo,
    Plan,
    ScheduleInfo,
    SinkInfo,
    StrategyInfo,
    World,
    hookimpl,
)

if TYPE_CHECKING:
    from mtb_core import TrainConfig

PLUGIN_API = 2


def plan_single(options: NoOptions, config: TrainConfig, world: World) -> Plan:  # noqa: ARG001  (as every plan)
    """One process, no communication."""
    if world.size != 1:
        msg = (
            f"strategy 'single' trains in one process, but there are {world.size} ranks; use --nproc 1, or a strategy "
            "for several ranks, such as ddp: `mtb plugins list` shows those installed."
        )
        raise ConfigError(msg)
    return Plan(Layout((("dp", 1),)), process_group=False)


@hookimpl
def mtb_strategies() -> Sequence[StrategyInfo]:
    """`single`."""
    return [StrategyInfo("single", "One process, no communication.", "mtb_core.builtin.single:Single", plan_single)]


@hookimpl
def mtb_commands() -> Sequence[CommandInfo]:
    """The commands of core."""
    start, look = "Training", "Set-up and inspection"
    return [
        CommandInfo("train", "Train a model and measure it.", "mtb_core.cli.train:train", start),
        CommandInfo("init", "Write a commented starter configuration.", "mtb_core.cli.init:init", look),
        CommandInfo("plugins", "Show installed plugins and what they provide.", "mtb_core.cli.plugins:plugins", look),
    ]


@hookimpl
def mtb_sinks() -> Sequence[SinkInfo]:
    """`console` and `jsonl`."""
    return [
        SinkInfo("console", "Live progress in the terminal.", "mtb_core.builtin.sinks:ConsoleSink"),
        SinkInfo("jsonl", "metrics/rank_NNNNN.jsonl in the run's folder.", "mtb_core.builtin.sinks:JsonlSink"),
    ]


@hookimpl
def mtb_models() -> Sequence[ModelInfo]:
    """`gpt`."""
    return [ModelInfo("gpt", "Pre-norm decoder with causal attention.", "mtb_core.model.gpt:gpt_spec")]


@hookimpl
def mtb_datasets() -> Sequence[DatasetInfo]:
    """`synthetic`."""
    return [DatasetInfo("synthetic", "Random tokens, made as needed.", "mtb_core.data.synthetic:synthetic")]


@hookimpl
def mtb_optimizers() -> Sequence[OptimizerInfo]:
    """`adamw` and `sgd`, of torch."""
    return [
        OptimizerInfo("adamw", "AdamW of torch.optim.", "mtb_core.train.optim:adamw"),
        OptimizerInfo("sgd", "SGD of torch.optim, with momentum.", "mtb_core.train.optim:sgd"),
    ]


@hookimpl
def mtb_schedules() -> Sequence[ScheduleInfo]:
    """`constant` and `cosine`."""
    return [
        ScheduleInfo("constant", "Always the same rate.", "mtb_core.train.schedule:constant"),
        ScheduleInfo("cosine", "Linear warm-up, then half a cosine.", "mtb_core.train.schedule:cosine"),
    ]


@hookimpl
def mtb_checkpoint_formats() -> Sequence[FormatInfo]:
    """`safetensors`."""
    text = "Safetensors files and a JSON index."
    return [FormatInfo("safetensors", text, "mtb_core.ckpt.safetensors:SafetensorsStorage")]
