"""Options of the run plugins, and what is checked of them before any rank starts. Torch-free."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from mtb_core import ConfigError, option

if TYPE_CHECKING:
    from mtb_core import TrainConfig

_DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?")


def seconds(text: str, name: str) -> float:
    """A duration such as ``2h30m``, ``90m``, ``1d``, or a whole number of seconds.

    Raises:
        ConfigError: `text` is none; the message names the option, `name`.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        raise ConfigError(
            f"--plugin-opt {name} is {text!r}; it must be a duration like 2h30m, 90m or 1d, or whole seconds."
        )
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


@attrs.frozen
class EarlyStopOptions:
    """Options of ``early-stop``."""

    watch: str = option(
        "eval", help="Which loss: of evaluations (--eval-every), or of training steps.", choices=("eval", "train")
    )
    patience: int | None = option(
        None, help="End after so many evaluations, or steps, without improvement. none: never.", minimum=1
    )
    min_delta: float = option(0.0, help="By how much the loss must fall below the best one to improve.", minimum=0.0)
    target: float | None = option(None, help="End when the loss is at most this. none: never.")


def check_early_stop(options: EarlyStopOptions, config: TrainConfig) -> None:
    """Something must be able to end the run."""
    if options.patience is None and options.target is None:
        raise ConfigError(
            "Run plugin 'early-stop' would never end the run; set early-stop.patience or early-stop.target."
        )
    if options.watch == "eval" and not config.eval_every:
        raise ConfigError(
            "Run plugin 'early-stop' watches the loss of evaluations: give --eval-data and --eval-every, or set "
            "early-stop.watch=train."
        )


@attrs.frozen
class WallTimeOptions:
    """Options of ``wall-time``."""

    limit: str | None = option(None, help="Wall time of this invocation: 2h30m, 90m, 1d, or seconds.")
    margin: str = option("1m", help="How long before the limit to stop: the time to write a checkpoint and to leave.")


def check_wall_time(options: WallTimeOptions, config: TrainConfig) -> None:
    """There must be time to train."""
    del config  # it may be anything
    if options.limit is None:
        raise ConfigError("Run plugin 'wall-time' needs a limit: set wall-time.limit, like 2h30m.")
    limit, margin = seconds(options.limit, "wall-time.limit"), seconds(options.margin, "wall-time.margin")
    if limit <= margin:
        raise ConfigError(
            f"Run plugin 'wall-time' would stop at once: its limit is {limit:g} s and its margin {margin:g} s. Raise "
            "wall-time.limit, or lower wall-time.margin."
        )


@attrs.frozen
class BestOptions:
    """Options of ``best``."""

    folder: str = option("best", help="Where the checkpoint is kept: a folder in --checkpoint-dir.")
    min_delta: float = option(
        0.0, help="By how much the loss must fall below the best one to take its place.", minimum=0.0
    )


def check_best(options: BestOptions, config: TrainConfig) -> None:
    """There must be checkpoints and evaluations, and a folder that is free."""
    name = options.folder
    if name != Path(name).name or name.startswith((".", "step_", "latest")):
        raise ConfigError(
            f"--plugin-opt best.folder is {name!r}; it must be a plain name, and none that checkpoints have (step_…, "
            "latest, or a leading dot)."
        )
    if config.checkpoint_dir is None or config.eval_data is None:
        raise ConfigError(
            "Run plugin 'best' keeps checkpoints by their evaluation: give --checkpoint-dir and --eval-data."
        )
    place = Path(config.checkpoint_dir) / name
    if config.resume is None and place.exists():
        raise ConfigError(
            f"{place} holds the best checkpoint of another run. Remove it, set best.folder, or go on with that run by "
            "--resume."
        )


@attrs.frozen
class EmaOptions:
    """Options of ``ema``."""

    decay: float = option(0.999, help="Share of the average that each update keeps.", minimum=0.0, maximum=1.0)
    evaluate: bool = option(False, help="Evaluate with the average instead of the weights.")


@attrs.frozen
class LossSpikeOptions:
    """Options of ``loss-spike``."""

    factor: float = option(2.0, help="A value above so many times the median is a spike.", minimum=1.0)
    window: int = option(32, help="Steps whose median it is; before there are as many, nothing is a spike.", minimum=1)
    watch: str = option("loss", help="Which value.", choices=("loss", "grad_norm"))
    action: str = option(
        "rollback",
        help="rollback: go back to the newest checkpoint before the spike. skip: leave out the update of the step.",
        choices=("rollback", "skip"),
    )
    leave_out: int | None = option(
        None,
        help="rollback: batches left out after the checkpoint's; none: all that were taken since, the spike's included.",
        minimum=0,
    )
    at_most: int = option(3, help="How often a training, resumed or not, may do that.", minimum=1)


def check_loss_spike(options: LossSpikeOptions, config: TrainConfig) -> None:
    """Going back needs checkpoints."""
    if options.action == "rollback" and not config.save_every:
        raise ConfigError(
            "Run plugin 'loss-spike' goes back to checkpoints: give --checkpoint-dir and --save-every, or set "
            "loss-spike.action=skip."
        )
