"""Everything about a run that is checked and decided before any rank starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs

from mtb_core.api.descriptions import OptimizerInfo, RunPluginInfo, SinkInfo, StrategyInfo, construct
from mtb_core.api.errors import ConfigError
from mtb_core.api.layout import World
from mtb_core.api.options import NoOptions, parse_options
from mtb_core.config import ResolvedRun, TrainConfig, resolve, write_toml
from mtb_core.config.toml import PATHS, shorten_home
from mtb_core.data import Dataset
from mtb_core.data.source import open_dataset
from mtb_core.model.spec import check_model, model_options
from mtb_core.registry.discovery import Registry

from .checkpointing import ResumePoint, check_resume, find_checkpoint
from .schedule import Schedule


@attrs.frozen
class Planned:
    """A run that may start.

    Attributes:
        sinks: (name, description, parsed options), in order.
        resume: the checkpoint to go on from.
    """

    resolved: ResolvedRun
    registry: Registry
    strategy: StrategyInfo
    sinks: tuple[tuple[str, SinkInfo, Any], ...]
    run_plugins: tuple[tuple[str, RunPluginInfo, Any], ...]
    optimizer: tuple[OptimizerInfo, Any]
    schedule: Schedule
    dataset: Dataset
    eval_dataset: Dataset | None
    resume: ResumePoint | None


def plan_run(config: TrainConfig, registry: Registry, world: World) -> Planned:
    """Check `config` as a whole against what is installed and what the data is.

    Raises:
        ConfigError, PluginError: anything that cannot run.
    """
    strategy = registry.strategy(config.strategy)
    sinks = _sinks(config, registry)
    run_plugins = _run_plugins(config, registry)
    registry.checkpoint_format(config.checkpoint_format)
    check_model(config.model, named=registry.models)
    model_options(config, registry.models)
    optimizer, scheduler = registry.optimizer(config.optimizer), registry.schedule(config.lr_scheduler)
    optimizer_options = parse_options(optimizer.options, config.optimizer_opt, owner=f"optimizer '{optimizer.name}'")
    scheduler_options = parse_options(
        scheduler.options, config.lr_scheduler_opt, owner=f"learning-rate schedule '{scheduler.name}'"
    )
    dataset = open_dataset(config, named=registry.datasets)
    eval_dataset = None if config.eval_data is None else open_dataset(config, "eval_data", named=registry.datasets)
    if eval_dataset is not None and eval_dataset.size is None and not config.eval_batches:
        raise ConfigError(
            f"--eval-data {config.eval_data} has no end; set --eval-batches to say how much of it to use."
        )
    opened = None
    if config.resume is not None:
        opened = find_checkpoint(config, registry)
    elif config.checkpoint_dir is not None:
        _check_checkpoint_folder(Path(config.checkpoint_dir))
    start_step = 0 if opened is None else opened.step
    resolved = resolve(config, strategy, world, vocab_size=dataset.vocab_size, start_step=start_step)
    for _, info, options in run_plugins:
        if info.check is not None:
            info.check(options, resolved.config)
    vocabulary = resolved.config.vocab_size
    if eval_dataset is not None and vocabulary is not None and eval_dataset.vocab_size > vocabulary:
        raise ConfigError(
            f"--eval-data {config.eval_data} has a vocabulary of {eval_dataset.vocab_size}, the model one of "
            f"{vocabulary}; evaluate on data made the same way, or set --vocab-size {eval_dataset.vocab_size}."
        )
    resume = None if opened is None else check_resume(opened, resolved, dataset)
    if resume is not None and resume.sync_mode is not None:
        resolved = attrs.evolve(resolved, sync_mode=resume.sync_mode)
    return Planned(
        resolved,
        registry,
        strategy,
        sinks,
        run_plugins,
        (optimizer, optimizer_options),
        construct(scheduler, scheduler_options, resolved.config),
        dataset,
        eval_dataset,
        resume,
    )


def _run_plugins(config: TrainConfig, registry: Registry) -> tuple[tuple[str, RunPluginInfo, Any], ...]:
    """The run plugins that take part: those that always do, and those of which an option is given."""
    given: dict[str, dict[str, Any]] = {}
    for key, value in config.plugin_opt.items():
        name, dot, option = key.partition(".")
        if not dot and not isinstance(value, Mapping):
            raise ConfigError(f"--plugin-opt {key} must be PLUGIN.KEY=VALUE; `mtb plugins list` shows the run plugins.")
        # A file may have a table for each plugin.
        own = given.setdefault(registry.run_plugin(name).name, {})
        own.update({option: value} if dot else value)
    chosen = []
    for name, info in registry.run_plugins.items():
        always = info.options is NoOptions if info.always is None else info.always
        if always or name in given:
            options = parse_options(info.options, given.get(name, {}), owner=f"run plugin '{name}'")
            chosen.append((name, info, options))
    return tuple(chosen)


def _sinks(config: TrainConfig, registry: Registry) -> tuple[tuple[str, SinkInfo, Any], ...]:
    out: list[tuple[str, SinkInfo, Any]] = []
    for text in config.sink:
        name, _, rest = text.partition(":")
        info = registry.sink(name)
        given: dict[str, str] = {}
        for pair in filter(None, rest.split(",")):
            key, equals, value = pair.partition("=")
            if not equals:
                msg = f"--sink {text}: '{pair}' is not KEY=VALUE; write --sink NAME:KEY=VALUE,KEY=VALUE."
                raise ConfigError(msg)
            given[key.strip()] = value
        if any(name == other for other, _, _ in out):
            msg = f"--sink {name} is given twice; name each sink once."
            raise ConfigError(msg)
        out.append((name, info, parse_options(info.options, given, owner=f"sink '{name}'")))
    return tuple(out)


def _check_checkpoint_folder(folder: Path) -> None:
    """Two trainings in one folder would prune each other's checkpoints, and `latest` would go back."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--checkpoint-dir {folder} is a file; name a folder.")
    from mtb_core.ckpt.catalog import list_steps  # noqa: PLC0415  (most runs save nothing)

    ready = [found.step for found in list_steps(folder) if found.ready] if folder.is_dir() else []
    if ready:
        raise ConfigError(
            f"--checkpoint-dir {folder} holds checkpoints of another run, up to step {max(ready)}. Go on with that run "
            "by --resume latest (or auto), or name another folder for a new one."
        )


def nothing_left(planned: Planned) -> str | None:
    """Reason if the run has nothing to do, because its checkpoint is at ``--until-step``; None if it has.

    Its last evaluation is something, unless ``--run-dir`` holds a result already.
    """
    config, resume = planned.resolved.config, planned.resume
    if config.until_step is None or resume is None or resume.step < config.until_step:
        return None
    told = config.run_dir is not None and (Path(config.run_dir) / "result.json").exists()
    if planned.eval_dataset is not None and not told:
        return None
    return f"nothing left to do: {resume.path} is at step {resume.step}, and --until-step is {config.until_step}"


def make_run_folder(planned: Planned, *, restarted: bool = False) -> Path:
    """Make the run's folder and check that it can be written to. Called by one process only.

    Args:
        restarted: the run that a ``--run-dir`` holds is this one.

    Raises:
        ConfigError: it holds another run already, or cannot be made or written.
    """
    config = planned.resolved.config
    if config.run_dir is None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        return _make_fresh(Path("runs"), f"{stamp}-{config.strategy}-w{planned.resolved.world.size}")
    folder = Path(config.run_dir)
    _make(folder / "logs")
    if (folder / "result.json").is_dir():
        raise ConfigError(f"--run-dir {folder}: result.json in it is a folder, and cannot be written; remove it.")
    if (folder / "config.toml").exists() and config.resume is None and not restarted:
        msg = (
            f"--run-dir {folder} already holds a run. A run never overwrites another one: name a new folder, remove "
            "this one, or go on with the run by --resume."
        )
        raise ConfigError(msg)
    return folder


def _make_fresh(parent: Path, name: str) -> Path:
    """A folder that did not exist: two runs that start in the same second get different ones."""
    _make(parent)
    for number in range(1, 1000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    msg = f"No free folder name like {parent / name}; set --run-dir."
    raise ConfigError(msg)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        msg = (
            f"The run folder {folder} cannot be written: {error.strerror} (errno {error.errno}); "
            "set --run-dir to a folder that can."
        )
        raise ConfigError(msg) from error


def write_config(folder: Path, config: TrainConfig) -> None:
    """Write the resolved configuration; ``mtb train --config`` of it repeats the run, in a folder of its own.

    Paths in the user's home begin with ``~/``. Where several nodes meet is left out: it names a host.
    """
    changes: dict[str, Any] = {
        name: shorten_home(path) for name in PATHS if (path := getattr(config, name)) is not None
    }
    portable = attrs.evolve(config, **{**changes, "run_dir": None, "output": None})
    lines = write_toml(portable).splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("rdzv_endpoint = "))
    (folder / "config.toml").write_text(text, encoding="utf-8")
