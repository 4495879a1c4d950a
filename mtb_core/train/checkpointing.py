"""Checkpoints of a run: the one it resumes from, the state it saves, and the steps at which it saves."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from mtb_core.api.errors import ConfigError, RunFailed
from mtb_core.api.values import Job, Prepared, State, SyncMode
from mtb_core.config import ResolvedRun, TrainConfig, config_values, fingerprint
from mtb_core.data.dataset import Dataset, content_digest
from mtb_core.measure.redaction import redact_values
from mtb_core.registry.discovery import Registry, discover
from mtb_core.registry.run_hooks import Hooks

from .optim import described_groups
from .schedule import Schedule
from .trainer import Progress

if TYPE_CHECKING:
    from mtb_core.ckpt.loading import Loaded
    from mtb_core.ckpt.manager import CheckpointManager
    from mtb_core.ckpt.opened import Opened

_LOGGER = logging.getLogger("mtb.checkpoint")

#: Settings that leave the training the same up to rounding: where one differs from the checkpoint's, the continuation
#: is not bitwise that of the uninterrupted run.
_ROUNDING = ("strategy", "strategy_options", "sync_mode", "batch_size", "grad_accum_steps", "device")


@attrs.frozen
class ResumePoint:
    """A checkpoint that this run may go on from.

    Attributes:
        changes: settings that differ and were let through.
        sync_mode: the sync mode it imposes (format 1), or None.
    """

    path: Path
    progress: Progress
    changes: Mapping[str, Any]
    sync_mode: SyncMode | None

    @property
    def step(self) -> int:
        """Global step after which it was taken."""
        return self.progress.global_step


def find_checkpoint(config: TrainConfig, registry: Registry) -> Opened | None:
    """The checkpoint that ``--resume`` means for this run; None: start from the beginning.

    Raises:
        ConfigError: there is no such checkpoint.
        PluginError: no plugin in `registry` has the format of its tensors.
    """
    if config.resume is None:
        return None
    from mtb_core.ckpt import catalog  # noqa: PLC0415  (importing torch.distributed.checkpoint takes a second)
    from mtb_core.ckpt.opened import open_checkpoint  # noqa: PLC0415

    folder = None if config.checkpoint_dir is None else Path(config.checkpoint_dir)
    path = catalog.find(folder, config.resume)
    return None if path is None else open_checkpoint(path, registry)


def check_resume(opened: Opened, resolved: ResolvedRun, dataset: Dataset) -> ResumePoint:
    """True if this run may go on from the checkpoint `opened`.

    Raises:
        ConfigError: its configuration or its data decide another training; or the checkpoint is of an old format that
            does not go with them.
    """
    from mtb_core.ckpt.resume import check_config, check_schedule  # noqa: PLC0415

    config, path = resolved.config, opened.path
    _check_resharding(opened, resolved)
    changes: Mapping[str, Any] = {}
    if opened.version >= 3:
        saved, now = dict(opened.values["config"]), portable_config(config)
        digest = (opened.sections.get("data") or {}).get("digest")
        if digest == content_digest(dataset):
            saved["data"] = now["data"]  # the same content may lie elsewhere
        elif digest is not None and saved.get("data") == now["data"]:
            saved["data"] = f"{saved['data']} with other content"
        changes = check_config(saved, now, config.allow_config_change)
    check_schedule(opened.sections.get("scheduler"), opened.step, config)
    imposed: SyncMode | None = None
    if opened.version == 1:
        imposed = "every"
        if config.gradient_sync_mode != "auto":
            msg = (
                f"--gradient-sync-mode {config.gradient_sync_mode}: the checkpoint {path} is of format 1, which was "
                "always trained with 'every'; leave the option out, and that is used."
            )
            raise ConfigError(msg)
    return ResumePoint(path, _progress(opened), changes, imposed)


def _check_resharding(opened: Opened, resolved: ResolvedRun) -> None:
    """Refuse another number of ranks, or another strategy, where the plan says that they cannot load what was saved."""
    strategy, ranks = str(opened.values.get("strategy")), opened.world_size
    now = resolved.config.strategy
    if not resolved.plan.resharding and (strategy, ranks) != (now, resolved.world.size):
        raise ConfigError(
            f"The checkpoint {opened.path} is of strategy '{strategy}' on {ranks} ranks, and strategy '{now}' with these "
            f"options resumes its own checkpoints on the same number of ranks only; there are {resolved.world.size} now."
        )


def _progress(checkpoint: Opened | Loaded) -> Progress:
    train_state = checkpoint.sections.get("train_state") or checkpoint.values
    return Progress(checkpoint.step, int(train_state["samples_seen"]), int(train_state.get("tokens_seen") or 0))


@attrs.frozen
class WentBack:
    """Result of going back: the progress there, and the new names of newer checkpoints."""

    progress: Progress
    put_aside: Sequence[str]


@attrs.frozen
class Published:
    """A complete checkpoint and its commit mark, which tells it from a later one of the same step."""

    path: Path
    mark: bytes


def newest_published(folder: Path) -> Published | None:
    """The newest complete checkpoint in `folder`. What is odd there is told where it is chosen, and not here."""
    from mtb_core.ckpt import catalog  # noqa: PLC0415
    from mtb_core.ckpt.layout import READY  # noqa: PLC0415

    path = catalog.newest(folder, warn=lambda *_: None)
    return None if path is None else Published(path, (path / READY).read_bytes())


class RunCheckpoints:
    """Saving and loading for one trial, on top of `CheckpointManager`; every method is called by all ranks alike.

    Without ``--checkpoint-dir`` nothing is saved.

    Args:
        folder: of the run; its metrics lines are copied into checkpoints.
        plugins: name and version of those in use, to be recorded.
        dataset: the training data; its digest is recorded.
        schedule: gives the learning rate that is recorded.
    """

    def __init__(
        self,
        job: Job,
        hooks: Hooks,
        prepared: Prepared,
        *,
        folder: Path,
        point: ResumePoint | None,
        plugins: Sequence[tuple[str, str]],
        dataset: Dataset,
        schedule: Schedule,
    ) -> None:
        self._schedule = schedule
        self._job, self._hooks, self._prepared, self._run_folder = job, hooks, prepared, folder
        self._plugins = plugins
        self._data_digest = content_digest(dataset) if job.config.checkpoint_dir is not None else None
        self._point = point
        config = job.config
        self._saves = config.checkpoint_dir is not None
        # Of the steps above the one that was resumed from, those whose checkpoints are of this training.
        self._published: set[int] = set()
        self._saved_step: int | None = None
        self.loaded: Loaded | None = None
        self.deterministic: bool | None = None
        self.reason: str | None = None
        #: Milliseconds for which this rank was held up by each save.
        self.pauses_ms: list[float] = []
        self._manager: CheckpointManager | None = None
        if self._saves or point is not None:
            from mtb_core.ckpt.manager import CheckpointManager  # noqa: PLC0415

            self._manager = CheckpointManager(
                config.checkpoint_dir if config.checkpoint_dir is not None else point.path.parent,  # type: ignore[union-attr]
                job.ctx,
                keep_last=config.keep_last,
                keep_every=config.keep_every,
                asynchronous=config.async_save,
                format_name=config.checkpoint_format,
                registry=discover(disabled=config.no_plugin),
                fault_point=hooks.fault_point,
                published=self._note_published,
            )

    def start(self) -> Progress:
        """Check that saving will work, and load what is resumed from. Random streams are put back as well."""
        if self._manager is None:
            if self._hooks.keeps_plugin_state:
                self._state()
            return Progress()
        if self._saves:
            self._manager.preflight(self._state()[0])
        if self._point is None:
            return Progress()
        loaded = self._load(self._manager, self._point.path)
        self.loaded = loaded
        self.deterministic, self.reason = loaded.deterministic, loaded.determinism_reason
        self._compare_rounding(loaded)
        self._saved_step = loaded.step
        return _progress(loaded)

    def _state(self) -> tuple[State, dict[str, Any]]:
        """All that a checkpoint holds: tensors of the strategy and of plugins, and the JSON values of plugins by name."""
        return self._with_plugins(self._hooks.state(self._prepared))

    def _with_plugins(self, state: State) -> tuple[State, dict[str, Any]]:
        pieces, values = dict(state.pieces), {}
        for name, given in self._hooks.plugin_states(state).items():
            values[name] = given.scalars if isinstance(given, State) else given
            if isinstance(given, State):
                pieces.update({f"plugins/{name}/{key}": parts for key, parts in given.pieces.items()})
        return State(pieces, state.scalars), values

    def _load(self, manager: CheckpointManager, path: Path) -> Loaded:
        state = self._hooks.state(self._prepared)
        with_plugins, values = self._with_plugins(state)
        loaded = manager.load(path, with_plugins, allow_missing_rng=self._job.config.allow_missing_rng)
        # A strategy's scalars mean nothing to another one.
        own = loaded.values.get("strategy") == self._job.config.strategy
        scalars = (loaded.sections.get("scalars") or {}) if own else {}
        self._hooks.state_loaded(self._prepared, attrs.evolve(state, scalars=scalars))
        saved = loaded.sections.get("plugins") or {}
        self._hooks.plugin_states_loaded(saved)
        for name in sorted(values.keys() - saved.keys()) if self._job.ctx.rank == 0 else ():
            _LOGGER.warning("%s holds nothing of plugin '%s', which begins anew from what was loaded.", path, name)
        loaded.restore_random(self._job.ctx)
        return loaded

    def roll_back(self, before: int, why: str) -> WentBack:
        """Load this training's newest complete checkpoint of a step below `before`; put aside later ones. All ranks.

        Raises:
            RunFailed: on all ranks; there is no such checkpoint.
        """
        manager = self._manager
        if manager is None:
            raise RunFailed(f"{why}, but it saves no checkpoints: give --checkpoint-dir and --save-every.", agreed=True)
        manager.finish()
        path = self._newest_below(manager, before)
        if path is None:
            raise RunFailed(
                f"{why}, but it has no complete checkpoint of a step below {before}; save more often (--save-every).",
                agreed=True,
            )
        loaded = self._load(manager, path)
        aside = manager.put_aside(after=loaded.step) if self._saves else []
        self._not_deterministic(why)
        self._saved_step = loaded.step
        return WentBack(_progress(loaded), aside)

    def _newest_below(self, manager: CheckpointManager, before: int) -> Path | None:
        """Of this training: the folder may hold later steps of the one that was resumed from, or of another one."""
        point, found = self._point, None
        if self._saves:
            start = point.step if point is not None and point.path.parent.absolute() == manager.folder else 0
            found = manager.newest(lambda step: step < before and (step <= start or step in self._published))
        if found is None and point is not None and point.step < before:
            return point.path
        return found

    def _note_published(self, path: Path, step: int) -> None:
        self._published.add(step)
        self._hooks.checkpoint_published(path, step)

    def vote(self) -> float:
        """This rank's word on the save in flight, for the agreement of the step."""
        return 0.0 if self._manager is None else self._manager.poll_vote()

    def settle(self, votes: float) -> None:
        """Raise on all ranks if a save has failed on any."""
        if self._manager is not None:
            self._manager.settle(votes)

    def due(self, step: int) -> bool:
        """True if ``--save-every`` asks for a checkpoint of `step`."""
        every = self._job.config.save_every
        return bool(every) and step % every == 0

    def wanted(self, step: int) -> bool:
        """True if the run saves at all and the checkpoint of `step` is not there yet."""
        return self._saves and self._saved_step != step

    def save(self, progress: Progress) -> float:
        """Save the present state; returns the milliseconds for which training was held up."""
        assert self._manager is not None
        metrics = self._run_folder / "metrics" / f"rank_{self._job.ctx.rank:05d}.jsonl"
        state, plugins = self._state()
        seconds = self._manager.save(
            progress.global_step,
            state,
            meta=self._meta(progress),
            sections=self._sections(progress, plugins),
            attachments={f"metrics/{metrics.name}": metrics} if metrics.is_file() else {},
        )
        self._saved_step = progress.global_step
        self.pauses_ms.append(seconds * 1e3)
        return seconds * 1e3

    def finish(self) -> None:
        """Wait for the save in flight; raises on all ranks if it failed."""
        if self._manager is not None:
            self._manager.finish()

    def runtime(self) -> dict[str, Any]:
        """The part of a result's ``runtime`` that is about checkpoints."""
        config, manager = self._job.config, self._manager
        newest = None if manager is None else newest_published(manager.folder)
        last = None if manager is None else manager.last_published
        return {
            "resumed": self.loaded is not None,
            "resume_path": None if self.loaded is None else str(self.loaded.path),
            "resume_deterministic": self.deterministic,
            "resume_determinism_reason": self.reason,
            "last_checkpoint": None if last is None else last.name,
            "latest_checkpoint": None if newest is None else newest.path.name,
            "ready_checkpoints": [] if manager is None else manager.ready_steps(),
            "keep_last": config.keep_last,
            "checkpoint_dir": config.checkpoint_dir,
        }

    def _meta(self, progress: Progress) -> dict[str, Any]:
        job = self._job
        return {
            "strategy": job.config.strategy,
            "strategy_options": attrs.asdict(job.options),
            "precision": job.config.precision,
            "samples_seen": progress.samples_seen,
            "tokens_seen": progress.tokens_seen,
            "gradient_sync_mode": job.sync_mode,
            "config": portable_config(job.config),
            "config_fingerprint": fingerprint(job.config),
            "plugins": [{"name": name, "version": version} for name, version in self._plugins],
            "config_changes": self._config_changes(),
            "rounding": _rounding(job),
        }

    def _config_changes(self) -> dict[str, Any]:
        """All that was let through since the training began."""
        if self._point is None or self.loaded is None:
            return {}
        return {**(self.loaded.values.get("config_changes") or {}), **self._point.changes}

    def _sections(self, progress: Progress, plugins: Mapping[str, Any]) -> dict[str, Any]:
        config, step = self._job.config, progress.global_step
        groups = described_groups(self._job.optimizer, config, self._schedule(max(step - 1, 0)))
        return {
            "train_state": attrs.asdict(progress),
            "scheduler": {
                "name": config.lr_scheduler,
                "completed_steps": step,
                "next_learning_rate": self._schedule(step),
            },
            "data": {"samples_seen": progress.samples_seen, "digest": self._data_digest},
            "optimizer": {"name": config.optimizer, "param_groups": groups},
            "loss_scaler": None,
            "plugins": plugins,
        }

    def _compare_rounding(self, loaded: Loaded) -> None:
        saved = loaded.values.get("rounding")
        if not self.deterministic or saved is None:
            return
        if not self._job.plan.exact_resume:
            self._not_deterministic("the strategy, with these options, keeps state that checkpoints do not hold")
            return
        now = _rounding(self._job)
        other = [name for name in _ROUNDING if saved.get(name) != now[name]]
        if other or (self._point is not None and self._point.changes):
            changed = [*other, *(self._point.changes if self._point is not None else ())]
            self._not_deterministic(f"different from the checkpoint's: {', '.join(changed)}")

    def _not_deterministic(self, reason: str) -> None:
        """Later checkpoints carry it on."""
        self.deterministic, self.reason = False, reason
        if self._manager is not None:
            self._manager.determinism = (False, reason)


def portable_config(config: TrainConfig) -> dict[str, Any]:
    """The settings that a checkpoint records: without where this run writes, and free of home folders."""
    places = ("run_dir", "output", "checkpoint_dir", "resume")
    return redact_values({k: v for k, v in config_values(config).items() if k not in places})


def _rounding(job: Job) -> dict[str, Any]:
    config = job.config
    return {
        "strategy": config.strategy,
        "strategy_options": attrs.asdict(job.options),
        "sync_mode": job.sync_mode,
        "batch_size": config.batch_size,
        "grad_accum_steps": config.grad_accum_steps,
        "device": job.ctx.device.partition(":")[0],
    }
