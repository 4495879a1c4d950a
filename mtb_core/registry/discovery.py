"""Discovery: which plugins are installed, what they provide, and why some of it cannot be used.

Each plugin is loaded on its own (`loading`); here the results are put together. What a plugin breaks is recorded, and
becomes an error only for whoever asks for that plugin.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from mtb_core import __version__
from mtb_core.api import (
    CommandInfo,
    ConfigError,
    DatasetInfo,
    DoctorCheck,
    Evidence,
    EvidenceInfo,
    FormatInfo,
    LauncherInfo,
    ModelInfo,
    OptimizerInfo,
    PluginError,
    RunPluginInfo,
    ScheduleInfo,
    SinkInfo,
    StrategyInfo,
    load_reference,
    nearest,
)

from .entry_points import Source, installed
from .loading import Loaded, load
from .records import KINDS, Kind, PluginRecord

CORE = Source("core", "mtb_core.builtin.plugin", "mtb-core", __version__)


@attrs.frozen
class Registry:
    """All installed plugins, core first, and what the active ones provide, by name.

    Lookups (`strategy`, `command`, …) raise `PluginError` with a suggestion, or with the recorded reason where the
    name belongs to a plugin that is disabled or failed.
    """

    records: tuple[PluginRecord, ...]
    strategies: Mapping[str, StrategyInfo]
    commands: Mapping[str, CommandInfo]
    sinks: Mapping[str, SinkInfo]
    run_plugins: Mapping[str, RunPluginInfo]
    models: Mapping[str, ModelInfo]
    datasets: Mapping[str, DatasetInfo]
    optimizers: Mapping[str, OptimizerInfo]
    schedules: Mapping[str, ScheduleInfo]
    checkpoint_formats: Mapping[str, FormatInfo]
    launchers: Mapping[str, LauncherInfo]
    evidence: Mapping[str, EvidenceInfo]
    doctor_checks: Mapping[str, DoctorCheck]

    def plugins_in_use(self) -> list[tuple[str, str]]:
        """(name, version) of the active plugins, in order; ranks compare them before they train."""
        return [(r.name, r.version) for r in self.records if r.status == "active"]

    @property
    def failed(self) -> tuple[PluginRecord, ...]:
        """The plugins that could not be loaded."""
        return tuple(r for r in self.records if r.status == "failed")

    def provider(self, kind: str, name: str) -> PluginRecord | None:
        """The active plugin that provides `name` of the kind (``"strategies"``, …)."""
        found = (r for r in self.records if r.status == "active" and name in r.provides.get(kind, ()))
        return next(found, None)

    def strategy(self, name: str) -> StrategyInfo:
        """The strategy `name`."""
        return self._find("strategies", name)  # type: ignore[no-any-return]

    def command(self, name: str) -> CommandInfo:
        """The command `name`."""
        return self._find("commands", name)  # type: ignore[no-any-return]

    def sink(self, name: str) -> SinkInfo:
        """The sink `name`."""
        return self._find("sinks", name)  # type: ignore[no-any-return]

    def model(self, name: str) -> ModelInfo:
        """The model `name`."""
        return self._find("models", name)  # type: ignore[no-any-return]

    def dataset(self, name: str) -> DatasetInfo:
        """The data set `name`."""
        return self._find("datasets", name)  # type: ignore[no-any-return]

    def run_plugin(self, name: str) -> RunPluginInfo:
        """The run plugin `name`."""
        return self._find("run_plugins", name)  # type: ignore[no-any-return]

    def optimizer(self, name: str) -> OptimizerInfo:
        """The optimizer `name`."""
        return self._find("optimizers", name)  # type: ignore[no-any-return]

    def schedule(self, name: str) -> ScheduleInfo:
        """The learning-rate schedule `name`."""
        return self._find("schedules", name)  # type: ignore[no-any-return]

    def checkpoint_format(self, name: str) -> FormatInfo:
        """The checkpoint format `name`."""
        return self._find("checkpoint_formats", name)  # type: ignore[no-any-return]

    def launcher(self, name: str) -> LauncherInfo:
        """The launcher `name`."""
        if not self.launchers:
            raise PluginError(
                "Ranks cannot be started without a launcher. Install mtb-launcher, or do not switch it off; or start the ranks "
                "with torchrun."
            )
        return self._find("launchers", name)  # type: ignore[no-any-return]

    def make_evidence(self) -> Evidence:
        """A new object of the one class that vouches for runs, of core's own where no plugin has one.

        Raises:
            PluginError: several plugins have one.
        """
        if len(self.evidence) > 1:
            raise PluginError(
                f"Only one plugin can vouch for a run; disable all but one of: {', '.join(self.evidence)}."
            )
        made = [load_reference(info.impl)() for info in self.evidence.values()]
        return made[0] if made else Evidence()

    def _find(self, plural: str, name: str) -> Any:
        known = getattr(self, plural)
        if name in known:
            return known[name]
        kind = next(k for k in KINDS if k.plural == plural)
        raise PluginError(self.why_not(kind, name))

    def why_not(self, kind: Kind, name: str) -> str:
        """One paragraph on why there is no `name` of this kind."""
        for record in self.records:
            if record.status != "active" and name in (
                record.name,
                record.distribution,
                *record.provides.get(kind.plural, ()),
            ):
                verb = "is disabled" if record.status == "disabled" else "could not be loaded"
                return f"There is no {kind.singular} '{name}' now: {record.label} {verb}: {record.reason}."
        known = getattr(self, kind.plural)
        text = f"Unknown {kind.singular} '{name}'.{nearest(name, known)} Valid: {', '.join(known) or 'none installed'}."
        if self.failed:
            broken = "; ".join(f"{r.label}: {r.reason}" for r in self.failed)
            text += f" Not loaded: {broken}."
        return text


def discover(*, disabled: Iterable[str] = (), strict: bool | None = None) -> Registry:
    """Load all installed plugins but those `disabled` (entry points or distributions) or in ``MTB_DISABLE_PLUGINS``.

    Within a process the answer is remembered. `strict` makes any failed plugin an error; None: if
    ``MTB_STRICT_PLUGINS`` is 1.

    Raises:
        ConfigError: `disabled` holds an unknown name, or ``core``.
        PluginError: `strict`, and a plugin failed.
    """
    by_environment = frozenset(filter(None, (n.strip() for n in os.environ.get("MTB_DISABLE_PLUGINS", "").split(","))))
    registry = _discover(frozenset(disabled), by_environment, tuple(sys.path))
    if registry.failed and (strict_plugins() if strict is None else strict):
        broken = "; ".join(f"{r.label}: {r.reason}" for r in registry.failed)
        msg = (
            f"MTB_STRICT_PLUGINS is 1 and not every plugin could be loaded. {broken}. Repair, uninstall or disable it."
        )
        raise PluginError(msg)
    return registry


def strict_plugins() -> bool:
    """True if any failed plugin ends the command, for CI."""
    return os.environ.get("MTB_STRICT_PLUGINS", "") == "1"


_warned: set[tuple[str, str]] = set()


def warn_failed(registry: Registry, warn: Callable[[str], None]) -> None:
    """Call `warn` with one line for each failed plugin, once a process."""
    for record in registry.failed:
        if (record.name, record.distribution) not in _warned:
            _warned.add((record.name, record.distribution))
            warn(f"{record.label} could not be loaded: {record.reason}. See `mtb plugins list`.")


@functools.lru_cache(maxsize=8)
def _discover(disabled: frozenset[str], by_environment: frozenset[str], _path: tuple[str, ...]) -> Registry:
    sources = [CORE, *(source for source in installed() if source.target != CORE.target)]
    _check_disabled(disabled, by_environment, sources)
    records: list[PluginRecord] = []
    tables: dict[str, dict[str, Any]] = {kind.plural: {} for kind in KINDS}
    for source in sources:
        names = {source.name, source.distribution}
        if names & (disabled | by_environment):
            by = "--no-plugin" if names & disabled else "MTB_DISABLE_PLUGINS"
            loaded = Loaded(
                PluginRecord(source.name, source.distribution, source.version, "disabled", f"switched off by {by}")
            )
        else:
            loaded = load(source)
            clash = _clash(loaded, records) if loaded.record.status == "active" else None
            if clash:
                loaded = Loaded(attrs.evolve(loaded.record, status="failed", reason=clash))
        records.append(loaded.record)
        for plural, found in loaded.infos.items():
            tables[plural].update(found)
    return Registry(tuple(records), **tables)


def _check_disabled(disabled: frozenset[str], by_environment: frozenset[str], sources: list[Source]) -> None:
    for where, names in (("--no-plugin", disabled), ("MTB_DISABLE_PLUGINS", by_environment)):
        if names & {CORE.name, CORE.distribution}:
            msg = f"{where} names 'core', which cannot be switched off; it holds what every run needs."
            raise ConfigError(msg)
    known = {s.name for s in sources if s is not CORE} | {s.distribution for s in sources if s is not CORE}
    for name in sorted(disabled - known):
        valid = ", ".join(s.name for s in sources if s is not CORE) or "none is installed"
        msg = f"--no-plugin names '{name}', but there is no such plugin.{nearest(name, known)} Valid: {valid}."
        raise ConfigError(msg)


def _clash(new: Loaded, records: list[PluginRecord]) -> str | None:
    """Error text if an earlier, active plugin already provides a part of `new`, which is then refused as a whole."""
    for old in (r for r in records if r.status == "active"):
        if old.name == new.record.name:
            return f"the plugin name '{old.name}' is taken by {old.distribution}; {_refused(new, old)}"
        for kind in KINDS:
            both = [n for n in new.infos.get(kind.plural, ()) if n in old.provides.get(kind.plural, ())]
            if both:
                return (
                    f"the {kind.singular} '{both[0]}' is provided by {old.distribution} already; {_refused(new, old)}"
                )
    return None


def _refused(new: Loaded, old: PluginRecord) -> str:
    advice = "rename it" if old.name == CORE.name else "disable one of the two"
    return f"{new.record.distribution} comes later in the order and is refused as a whole: {advice}"
