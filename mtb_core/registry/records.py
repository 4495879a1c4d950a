"""Records of plugins, loaded or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from mtb_core.api import (
    CommandInfo,
    DatasetInfo,
    DoctorCheck,
    EvidenceInfo,
    FormatInfo,
    LauncherInfo,
    ModelInfo,
    OptimizerInfo,
    RunPluginInfo,
    ScheduleInfo,
    SinkInfo,
    StrategyInfo,
)

Status = Literal["active", "disabled", "failed"]


@attrs.frozen
class Kind:
    """One kind of thing that a discovery hook describes."""

    hook: str
    plural: str  # attribute of `Registry`, key of `PluginRecord.provides`
    singular: str  # in messages
    info: type[Any]
    options: str = ""  # how its options are given on the command line


KINDS = (
    Kind("mtb_strategies", "strategies", "strategy", StrategyInfo, "--strategy-opt KEY=VALUE"),
    Kind("mtb_commands", "commands", "command", CommandInfo),
    Kind("mtb_sinks", "sinks", "sink", SinkInfo, "--sink NAME:KEY=VALUE,…"),
    Kind("mtb_run_plugins", "run_plugins", "run plugin", RunPluginInfo, "--plugin-opt NAME.KEY=VALUE"),
    Kind("mtb_models", "models", "model", ModelInfo, "--model-opt KEY=VALUE"),
    Kind("mtb_datasets", "datasets", "data set", DatasetInfo, "--data-opt KEY=VALUE"),
    Kind("mtb_optimizers", "optimizers", "optimizer", OptimizerInfo, "--optimizer-opt KEY=VALUE"),
    Kind("mtb_schedules", "schedules", "learning-rate schedule", ScheduleInfo, "--lr-scheduler-opt KEY=VALUE"),
    Kind("mtb_checkpoint_formats", "checkpoint_formats", "checkpoint format", FormatInfo),
    Kind("mtb_launchers", "launchers", "launcher", LauncherInfo),
    Kind("mtb_evidence", "evidence", "evidence", EvidenceInfo),
    Kind("mtb_doctor_checks", "doctor_checks", "doctor check", DoctorCheck),
)


@attrs.frozen
class PluginRecord:
    """One installed plugin.

    Attributes:
        name: of its entry point; unique among active plugins.
        distribution: name of the distribution that the entry point belongs to.
        version: of the distribution.
        status: ``"active"``, ``"disabled"`` (its code was not imported) or ``"failed"``.
        reason: why it is not active; one line.
        api: the `PLUGIN_API` it was written for; None where that is not known.
        hooks: names of the discovery hooks it implements.
        provides: names of what it provides, by kind (``"strategies"``, ``"commands"``, …). What a failed plugin would
            have provided is kept where it is known.
    """

    name: str
    distribution: str
    version: str
    status: Status
    reason: str | None = None
    api: int | None = None
    hooks: tuple[str, ...] = ()
    provides: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)

    @property
    def label(self) -> str:
        """Name in messages."""
        return f"plugin '{self.name}' ({self.distribution} {self.version})"

    def as_json(self) -> dict[str, Any]:
        """The row of ``mtb plugins list --json``; every kind is a key of its own."""
        head = {n: getattr(self, n) for n in ("name", "distribution", "version", "api", "status", "reason")}
        kinds = {kind.plural: list(self.provides.get(kind.plural, ())) for kind in KINDS}
        return {**head, "hooks": list(self.hooks), **kinds}
