"""Entry point: run plugins that act on their run, each if one of its options is given. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from mtb_core import RunPluginInfo, hookimpl

from . import options

PLUGIN_API = 2


@hookimpl
def mtb_run_plugins() -> Sequence[RunPluginInfo]:
    """`early-stop`, `wall-time`, `best`, `ema` and `loss-spike`."""
    return [
        RunPluginInfo(
            "early-stop",
            "End the training, as done, when its loss is good enough or no longer improves",
            "mtb_guards.early_stop:EarlyStop",
            options.EarlyStopOptions,
            check=options.check_early_stop,
        ),
        RunPluginInfo(
            "wall-time",
            "Stop with a checkpoint, to be resumed, before a limit of wall time",
            "mtb_guards.wall_time:WallTime",
            options.WallTimeOptions,
            check=options.check_wall_time,
        ),
        RunPluginInfo(
            "best",
            "Keep the checkpoint with the lowest evaluation loss, whatever --keep-last removes",
            "mtb_guards.best:Best",
            options.BestOptions,
            check=options.check_best,
        ),
        RunPluginInfo(
            "ema",
            "Keep an exponential moving average of the weights, in checkpoints too",
            "mtb_guards.ema:Ema",
            options.EmaOptions,
        ),
        RunPluginInfo(
            "loss-spike",
            "After a spike of loss or gradient norm go back to a checkpoint, or leave the update out",
            "mtb_guards.loss_spike:LossSpike",
            options.LossSpikeOptions,
            check=options.check_loss_spike,
        ),
    ]
