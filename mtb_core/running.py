"""`run`: a configuration in, a `Result` out, on this process's own rank or on ranks that it launches."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from mtb_core.api.descriptions import LauncherInfo
from mtb_core.api.errors import ConfigError
from mtb_core.api.evidence import Evidence
from mtb_core.api.layout import World
from mtb_core.config import TrainConfig
from mtb_core.launch.display import Display
from mtb_core.launch.spec import LaunchSpec, rank_log, start_ranks
from mtb_core.launch.worker import external_launcher, world_of
from mtb_core.measure.outputs import check_output
from mtb_core.measure.redaction import redact
from mtb_core.measure.result import Result
from mtb_core.ranks.failures import Failure
from mtb_core.ranks.network import check_network
from mtb_core.registry.discovery import discover
from mtb_core.train.checkpointing import Published, newest_published
from mtb_core.train.exclusive import exclusive
from mtb_core.train.planning import Planned, make_run_folder, nothing_left, plan_run
from mtb_core.train.worker_main import Payload, base_fields, failure_fields, idle_result, rank_main


def run(
    config: TrainConfig, *, quiet: bool = False, plugins: Mapping[str, Callable[[], object]] | None = None
) -> Result:
    """Train as `config` says and measure it.

    One process with ``nproc=1``; with more, workers are launched from here; started by torchrun or Slurm, this
    process is one rank and every rank returns the same result. A run that failed after its ranks started is a result
    too, with ``exit_reason`` "failed" and `failure`; call `Result.check` to raise instead.

    Args:
        quiet: no progress on stderr.
        plugins: run plugins of your own by name: called without arguments on every rank to make an object with run
            hooks, see `mtb_core.api.hooks`. Picklable where workers are spawned.

    Raises:
        ConfigError: nothing was started; the message says what would be valid.
    """
    started = time.monotonic()
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and config.checkpoint_dir and config.resume is None:
        config = attrs.evolve(config, resume="auto")  # torchrun starts the same command again
    registry = discover(disabled=config.no_plugin)
    external = external_launcher() is not None
    world = world_of() if external else World(config.nproc * config.max_nodes, config.nproc)
    here = external or (world.size == 1 and not config.max_restarts)
    # An unknown name is refused also where no launcher is needed.
    named = None if here and config.launcher == "local" else registry.launcher(config.launcher)
    launcher = None if here else named
    planned = plan_run(config, registry, world)
    newest = _newest(config)
    evidence = registry.make_evidence()
    if config.output is not None:
        read = (config.data, config.eval_data, config.model.partition(":")[0])
        check_output(config.output, inputs=[place for place in read if place is not None])
    if config.formal and (obstacles := evidence.obstacles(sys.argv)):
        raise ConfigError(f"--formal cannot begin: {'; '.join(obstacles)}.")
    check_network(config)
    several_nodes = config.max_nodes > 1
    nothing = nothing_left(planned)
    alike = not (external or several_nodes)  # else ranks must agree on what this process sees
    own = dict(plugins or {})
    with ExitStack() as held:
        if config.checkpoint_dir is not None and reports_here() and not several_nodes:
            held.enter_context(_holding(Path(config.checkpoint_dir), config, newest))
        folder = make_run_folder(planned) if alike and nothing is None else None
        if folder is not None and config.run_dir is not None:
            held.enter_context(exclusive(folder, "--run-dir"))
        payload = Payload(config, folder, tuple(sys.argv), planned.resolved, newest, own, planned, started)
        # Of several external ranks one talks; the others only warn.
        display = held.enter_context(Display(quiet=quiet or not reports_here(), redirect=here))
        if config.resume is not None and planned.resume is None:
            display.message(f"Nothing to resume from in {config.checkpoint_dir}: starting anew.")
        if nothing is not None:
            display.message(f"{nothing[0].upper()}{nothing[1:]}.")
        if nothing is not None and alike:
            result = idle_result(planned, payload.argv, nothing, evidence)
        else:
            result = _on_ranks(payload, planned, evidence, display, launcher)
        if reports_here():
            result = _audited(result, evidence, payload.folder, display.warning)
    measured_before = nothing is not None and config.output is not None and Path(config.output).is_file()
    if config.output is not None and not measured_before and not (external and _external_rank() != 0):
        result.write(config.output)
    return result


@contextmanager
def _holding(checkpoints: Path, config: TrainConfig, newest: Published | None) -> Iterator[None]:
    """Hold the folder of checkpoints, in which `newest` was the newest one when the run was planned.

    Raises:
        ConfigError: another live run holds it, or has saved since.
    """
    with exclusive(checkpoints, "--checkpoint-dir"):
        if _newest(config) != newest:
            raise ConfigError(
                f"--checkpoint-dir {checkpoints}: another run has saved there while this one began; start it again."
            )
        yield


def _newest(config: TrainConfig) -> Published | None:
    return None if config.checkpoint_dir is None else newest_published(Path(config.checkpoint_dir))


def _audited(result: Result, evidence: Evidence, folder: Path | None, warn: Callable[[str], None]) -> Result:
    """`result`, marked as not publishable if the records of the run tell who ran it or where."""
    place = folder if folder is not None else Path(result.run_dir or "").expanduser()
    if result.run_dir is None or not (place / "result.json").is_file():
        return result
    reasons = list(evidence.audit(place))
    if not reasons:
        return result
    warn(
        f"The records in {redact(str(place))} must not be handed on: {'; '.join(reasons)}. See which setting or plugin "
        "put it there."
    )
    marked = attrs.evolve(result, publishable=False, unpublishable_reasons=reasons)
    marked.write(place / "result.json")
    return marked


def reports_here() -> bool:
    """True if this process talks to people; of external ranks only rank 0 does."""
    return external_launcher() is None or _external_rank() == 0


def _external_rank() -> int:
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def _on_ranks(
    payload: Payload, planned: Planned, evidence: Evidence, display: Display, launcher: LauncherInfo | None
) -> Result:
    """Train on this process's rank, or on those that `launcher` starts."""
    config = payload.config
    logs = _log_dir(payload)
    outcome = start_ranks(
        LaunchSpec(
            entry=rank_main,
            payload=payload,
            nproc=config.nproc,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            rdzv_endpoint=config.rdzv_endpoint,
            max_restarts=config.max_restarts,
            start_method=config.start_method,
            log_dir=logs,
            on_line=display.line,
            on_progress=display.progress,
            on_restart=partial(_tell_restart, display),
            on_warning=display.warning,
            debug=config.debug,
        ),
        launcher,
    )
    if not outcome.values:
        return _failed(payload, planned, evidence, outcome.failure, outcome.exit_reason, outcome.restarts, logs)
    result = Result.from_json(next(iter(outcome.values.values())))
    if payload.folder is None and config.run_dir is None and result.run_dir is not None and logs.is_dir():
        _move(logs, Path(result.run_dir).expanduser() / "logs")
    return result


def _move(logs: Path, place: Path) -> None:
    """Put the logs of this node's ranks into the run's folder, which got its name after they began."""
    place.mkdir(exist_ok=True)
    for log in logs.iterdir():
        log.replace(place / log.name)
    logs.rmdir()


def _log_dir(payload: Payload) -> Path:
    """Folder for the logs of ranks launched here. On several nodes only rank 0 can name a run folder that has no name yet."""
    if payload.folder is not None:
        return payload.folder / "logs"
    if payload.config.run_dir is not None:
        return Path(payload.config.run_dir) / "logs"
    return Path("runs") / f"logs-{uuid.uuid4().hex[:12]}"


def _tell_restart(display: Display, failure: Failure, restarts: int) -> None:
    display.warning(f"{_sentence(str(failure))} Starting all ranks again (restart {restarts}).")


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _failed(
    payload: Payload,
    planned: Planned,
    evidence: Evidence,
    failure: Failure | None,
    exit_reason: str,
    restarts: int,
    logs: Path,
) -> Result:
    """The result of a run that could not report one itself; what the metrics lines tell is kept."""
    last = _last_metrics(payload.folder)
    shown = failure_fields(failure)
    if shown is not None and failure is not None and failure.traceback and not failure.expected:
        log = rank_log(logs, failure.rank or 0)
        shown["text"] = f"{_sentence(shown['text'])} The traceback is at the end of {redact(str(log))}."
    result = Result(
        **base_fields(planned.resolved, payload.folder),
        exit_reason=exit_reason,
        failure=shown,
        loss=last.get("loss"),
        global_step=last.get("global_step", 0),
        samples_seen=last.get("samples_seen", 0),
        tokens_seen=last.get("tokens_seen", 0),
        runtime={"resumed": False, "restarts": restarts, "seed": payload.config.seed},
        plugins=[{"name": name, "version": version} for name, version in planned.registry.plugins_in_use()],
        performance_invalid_reasons=[f"the run ended early: {exit_reason}"],
        **evidence.origin(payload.argv),
    )
    if payload.folder is not None:
        result.write(payload.folder / "result.json")
    return result


def _last_metrics(folder: Path | None) -> dict[str, Any]:
    """The last whole line of rank 0's metrics, if there is one."""
    path = None if folder is None else folder / "metrics" / "rank_00000.jsonl"
    if path is None or not path.is_file():
        return {}
    for line in reversed(path.read_text(encoding="utf-8").splitlines()):
        try:
            values: dict[str, Any] = json.loads(line)
        except ValueError:
            continue
        return values
    return {}
