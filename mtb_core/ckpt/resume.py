"""May this configuration go on from that checkpoint? Pure; torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtb_core.api.errors import ConfigError
from mtb_core.config import TrainConfig, config_values
from mtb_core.config.schema import option_name, settings


def check_config(saved: Mapping[str, Any], now: Mapping[str, Any], allowed: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Compare the settings that decide what is trained.

    Args:
        saved: the checkpoint's ``config``; a setting that it has not counts as having its default.
        now: the resolved settings of this run, written as the checkpoint's are.
        allowed: settings that may differ (``--allow-config-change``), with ``_`` or ``-``.

    Returns:
        The differences that were let through, to be recorded: name to ``{"saved": …, "now": …}``.

    Raises:
        ConfigError: others differ, with a table of them; or `allowed` names something that is no such setting.
    """
    known = {name for name, meta in settings().items() if meta.training}
    accepted = {name.replace("-", "_") for name in allowed}
    if strange := sorted(accepted - known):
        raise ConfigError(
            f"--allow-config-change {strange[0]}: there is no such setting that decides what is trained. "
            f"Valid: {', '.join(sorted(known))}."
        )
    then = {**config_values(TrainConfig()), **saved}  # a setting that is newer than the checkpoint had its default
    changes = {
        name: {"saved": then.get(name), "now": now.get(name)}
        for name in sorted(known)
        if then.get(name) != now.get(name)
    }
    refused = {name: change for name, change in changes.items() if name not in accepted}
    if refused:
        width = max(len(option_name(name)) for name in refused)
        rows = [f"  {option_name(n):<{width}}  saved {c['saved']!r}, now {c['now']!r}" for n, c in refused.items()]
        raise ConfigError(
            "The configuration differs from the checkpoint's in what decides the training:\n"
            + "\n".join(rows)
            + "\nGive the saved values, or let a setting through with --allow-config-change KEY."
        )
    return changes


def check_schedule(scheduler: Mapping[str, Any] | None, step: int, config: TrainConfig) -> dict[str, Any]:
    """The scheduler's state to go on with; completed steps must be the global step.

    Raises:
        ConfigError: they are not; or the checkpoint (an older format) has none and the schedule is not constant.
    """
    if scheduler is None:
        if config.lr_scheduler != "constant":
            raise ConfigError(
                f"This checkpoint holds no schedule, and --lr-scheduler {config.lr_scheduler} cannot be rebuilt from "
                "its step; valid for such older checkpoints: constant."
            )
        return {"completed_steps": step}
    if scheduler.get("completed_steps") != step:
        raise ConfigError(
            f"The checkpoint's schedule has completed {scheduler.get('completed_steps')!r} steps, but its global step is "
            f"{step}; the two must be equal. Resume from another checkpoint."
        )
    return dict(scheduler)
