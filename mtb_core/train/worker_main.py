"""Entry of every rank: join the others, check that all are alike, train, hand over the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from mtb_core.api.descriptions import construct, load_reference
from mtb_core.api.evidence import Evidence
from mtb_core.api.layout import World
from mtb_core.api.values import RankContext
from mtb_core.config import ResolvedRun, TrainConfig, config_values, fingerprint
from mtb_core.measure.flops import device_peak_flops, mfu
from mtb_core.measure.redaction import redact, redact_values
from mtb_core.measure.result import Result, combine_trials, rank_report, trial_row
from mtb_core.model.spec import load_model
from mtb_core.ranks.agree import from_rank_zero, gather_objects, same_on_all
from mtb_core.ranks.context import open_ranks
from mtb_core.ranks.dynamo import avoid_dynamo_import
from mtb_core.ranks.failures import Failure
from mtb_core.ranks.worker import Worker
from mtb_core.registry.discovery import Registry, discover
from mtb_core.registry.run_hooks import Hooks

from .checkpointing import Published, newest_published
from .planning import Planned, make_run_folder, nothing_left, plan_run, write_config
from .trial import TrialInputs, TrialOutcome, run_trial


@attrs.frozen
class Payload:
    """Input of every rank, from the launcher; picklable.

    Attributes:
        folder: None where no launcher could decide it (several nodes, torchrun); rank 0 then does.
        plugins: the caller's own run plugins by name, made anew in every trial.
        planned: what the launcher has worked out and opened already. Forked ranks share it; it is not pickled, so
            spawned ranks work it out themselves.
        resolved: the run as it was planned at first; after a restart its end is still the end.
        newest: the newest checkpoint that was there before this run.
        started: see `RunInfo`.
    """

    config: TrainConfig
    folder: Path | None
    argv: tuple[str, ...]
    resolved: ResolvedRun
    newest: Published | None
    plugins: Mapping[str, Callable[[], object]] = attrs.field(factory=dict)
    planned: Planned | None = None
    started: float = attrs.field(factory=time.monotonic)

    def __reduce__(self) -> tuple[Any, ...]:
        kept = (self.config, self.folder, self.argv, self.resolved, self.newest, self.plugins, None, self.started)
        return Payload, kept


def rank_main(payload: Payload, worker: Worker) -> dict[str, Any]:
    """Run all trials on this rank. Returns the result's JSON, the same on every rank.

    Raises:
        BaseException: whatever failed without the ranks having agreed on it.
    """
    if not payload.config.compile:
        avoid_dynamo_import()
    planned = payload.planned
    if worker.restarts and worker.launched_by == "mtb":
        planned = _plan_restart(payload, worker.world)
    elif planned is None or planned.resolved.world != worker.world:
        planned = plan_run(payload.config, discover(disabled=payload.config.no_plugin), worker.world)
    registry = planned.registry
    evidence = registry.make_evidence()
    config = planned.resolved.config
    with open_ranks(worker, planned.resolved.plan, device=config.device, backend=config.backend) as ctx:
        same_on_all(ctx, "the plugins they loaded", registry.plugins_in_use())
        same_on_all(ctx, "the configuration", _comparable(config))
        same_on_all(ctx, "the checkpoint to resume from", None if planned.resume is None else str(planned.resume.path))
        # Ranks that were started again owe the result of what was done before.
        nothing = None if worker.restarts else from_rank_zero(ctx, nothing_left(planned))
        if nothing is not None:
            idle = idle_result(planned, payload.argv, nothing, evidence).to_json() if ctx.rank == 0 else {}
            return from_rank_zero(ctx, idle)
        restarted = worker.restarts > 0
        folder = _agreed_folder(payload, planned, ctx, restarted=restarted)
        if ctx.rank == 0 and not (restarted and (folder / "config.toml").exists()):
            write_config(folder, config)
        inputs = TrialInputs(
            resolved=planned.resolved,
            ctx=ctx,
            model=load_model(config, named=registry.models),
            dataset=planned.dataset,
            eval_dataset=planned.eval_dataset,
            hooks=partial(_make_hooks, planned, payload.plugins, partial(_warn, worker)),
            optimizer=construct(*planned.optimizer, planned.resolved.config, ctx.device),
            schedule=planned.schedule,
            folder=folder,
            plugins=registry.plugins_in_use(),
            resume=planned.resume,
            stop=worker.stop,
            progress=worker.progress,
            started=payload.started,
        )
        rows: list[dict[str, Any]] = []
        for trial in range(config.repeat):
            outcome = run_trial(inputs, trial)
            reports = gather_objects(ctx, rank_report(outcome.records, outcome.pauses_ms))
            rows.append(_row(trial_row(outcome.records, reports), outcome, inputs))
            if outcome.exit_reason != "done":
                break
        result = _result(inputs, outcome, rows, registry, payload, worker.restarts, evidence)
        if ctx.rank == 0:
            result.write(folder / "result.json")
        return from_rank_zero(ctx, result.to_json() if ctx.rank == 0 else {})


def _plan_restart(payload: Payload, world: World) -> Planned:
    """The run that was planned at first, from the newest checkpoint that it has published itself, if any."""
    first, asked = payload.resolved, payload.config
    resume = asked.resume
    if asked.checkpoint_dir is not None:
        newest = newest_published(Path(asked.checkpoint_dir))
        if newest is not None and newest != payload.newest:
            resume = str(newest.path)
    config = attrs.evolve(
        first.config, resume=resume, batch_size=first.config.batch_size if world == first.world else None
    )
    planned = plan_run(config, discover(disabled=asked.no_plugin), world)
    resolved = attrs.evolve(
        planned.resolved,
        config=attrs.evolve(planned.resolved.config, resume=asked.resume),
        warmup_until=first.warmup_until,
        last_step=first.last_step,
    )
    return attrs.evolve(planned, resolved=resolved)


def idle_result(planned: Planned, argv: Sequence[str], nothing: str, evidence: Evidence) -> Result:
    """The result of a run with nothing to do, for the reason `nothing`. Called by one process.

    No folder is made for it. It is written only to a ``--run-dir`` that was asked for and has no result yet: it never
    replaces that of the run which did the work.
    """
    config, resume = planned.resolved.config, planned.resume
    assert resume is not None
    folder = None if config.run_dir is None else make_run_folder(planned)
    result = Result(
        **base_fields(planned.resolved, folder),
        **attrs.asdict(resume.progress),
        exit_reason="done",
        runtime={
            "resumed": False,
            "latest_checkpoint": resume.path.name,
            "checkpoint_dir": None if config.checkpoint_dir is None else redact(config.checkpoint_dir),
            "restarts": 0,
            "seed": config.seed,
        },
        plugins=[{"name": name, "version": version} for name, version in planned.registry.plugins_in_use()],
        **evidence.origin(argv),
        execution_complete=True,
        performance_invalid_reasons=[redact(nothing)],
    )
    if folder is not None and not (folder / "result.json").exists():
        write_config(folder, config)
        result.write(folder / "result.json")
    return result


def _comparable(config: TrainConfig) -> dict[str, Any]:
    """Settings that must be equal on all ranks; where output goes may differ between machines."""
    values = config_values(config)
    return {k: v for k, v in values.items() if k not in ("run_dir", "output", "rdzv_endpoint", "debug")}


def _agreed_folder(payload: Payload, planned: Planned, ctx: RankContext, *, restarted: bool) -> Path:
    """One run folder for all, decided by one rank; it exists on return."""
    folder = payload.folder
    if folder is None:
        folder = from_rank_zero(ctx, make_run_folder(planned, restarted=restarted) if ctx.rank == 0 else None)
        assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _warn(worker: Worker, text: str) -> None:
    """Show a warning to whoever started the ranks, also where progress is not shown."""
    worker.progress({"event": "warning", "text": text, "rank": worker.rank})


def _make_hooks(planned: Planned, own: Mapping[str, Callable[[], object]], warn: Callable[[str], None]) -> Hooks:
    """A trial's own strategy, sinks and run plugins."""
    sinks = {name: load_reference(info.impl)(options) for name, info, options in planned.sinks}
    plugins = {name: construct(info, options) for name, info, options in planned.run_plugins}
    plugins.update({name: make() for name, make in own.items()})
    strategy = load_reference(planned.strategy.impl)()
    return Hooks(strategy, sinks=sinks, plugins=plugins, warn=warn)


def _row(row: dict[str, Any], outcome: TrialOutcome, inputs: TrialInputs) -> dict[str, Any]:
    """A trial's figures with those that the records do not hold."""
    flops, peak = _flops_per_token(inputs), _peak(inputs)
    rate = row["tokens_per_sec"]
    row["eval_loss"] = outcome.eval_loss
    row["mfu"] = None if rate is None else mfu(rate, flops, peak, inputs.ctx.world_size)
    row.update(attrs.asdict(outcome.progress))
    row["exit_reason"] = outcome.exit_reason
    return row


def _flops_per_token(inputs: TrialInputs) -> float | None:
    return inputs.model.flops_per_token.get(inputs.resolved.config.flops_convention)


def _device_name(ctx: RankContext) -> str | None:
    if not ctx.device.startswith("cuda"):
        return None
    import torch  # noqa: PLC0415

    return torch.cuda.get_device_name(ctx.device)


def _peak(inputs: TrialInputs) -> float | None:
    name = _device_name(inputs.ctx)
    return None if name is None else device_peak_flops(name, inputs.resolved.config.precision)


def _result(
    inputs: TrialInputs,
    outcome: TrialOutcome,
    rows: list[dict[str, Any]],
    registry: Registry,
    payload: Payload,
    restarts: int,
    evidence: Evidence,
) -> Result:
    """The result of all trials. Called by all ranks."""
    ctx, config = inputs.ctx, inputs.resolved.config
    figures, summary = combine_trials(rows)
    exit_reason = figures.pop("exit_reason")
    flops = _flops_per_token(inputs)
    done = exit_reason == "done"
    device = ctx.device.partition(":")[0]
    early = () if done else (f"the run ended early: {exit_reason}",)
    performance = evidence.performance(ctx, rows, early)
    return Result(
        **base_fields(inputs.resolved, inputs.folder),
        **figures,
        exit_reason=exit_reason,
        stop_reason=outcome.stop_reason,
        failure=failure_fields(outcome.failure),
        device=device,
        device_name=_device_name(ctx),
        backend=ctx.backend,
        parameters=outcome.parameters,
        memory_kind=outcome.memory_kind,
        model_flops_per_token=flops,
        flops_convention=config.flops_convention if flops is not None else None,
        mfu_reason=_mfu_reason(figures["mfu"], flops, ctx),
        collectives_per_step=outcome.collectives,
        comm_bytes_per_step=outcome.message_bytes,
        collectives_reason=outcome.collectives_reason,
        eval_samples=outcome.eval_samples,
        strategy_facts=redact_values(outcome.strategy_facts),
        plugin_results=redact_values(outcome.plugin_results),
        summary=summary,
        repeats=rows,
        runtime={
            **redact_values(outcome.runtime),
            "restarts": restarts,
            "scheduler_completed_steps": figures["global_step"],
            "next_learning_rate": inputs.schedule(figures["global_step"]),
            "actions": outcome.actions,
            "seed": config.seed,
        },
        plugins=[{"name": name, "version": version} for name, version in registry.plugins_in_use()],
        execution_complete=done,
        **evidence.origin(payload.argv, ctx.device),
        **performance,
    )


def _mfu_reason(value: float | None, flops: float | None, ctx: RankContext) -> str | None:
    if value is not None:
        return None
    if flops is None:
        return "the model does not say its FLOPs"
    return f"the peak of {_device_name(ctx) or 'a CPU'} is not known"


def base_fields(resolved: Any, folder: Path | None) -> dict[str, Any]:
    """The part of a result that follows from the configuration alone."""
    config: TrainConfig = resolved.config
    every = resolved.sync_mode == "every"
    return {
        "run_dir": None if folder is None else redact(str(folder)),
        "strategy": config.strategy,
        "strategy_options": redact_values(attrs.asdict(resolved.options)),
        "world_size": resolved.world.size,
        "precision": config.precision,
        "reduce_dtype": resolved.plan.reduce_dtype,
        "repeat_count": config.repeat,
        "trial_protocol": "independent_reinitialize" if config.repeat > 1 else "single_run",
        "batch_size_per_rank": config.batch_size,
        "global_batch_size": config.global_batch_size,
        "gradient_accumulation_steps": config.grad_accum_steps,
        "gradient_sync_mode": config.gradient_sync_mode,
        "resolved_gradient_sync_mode": resolved.sync_mode,
        "synchronized_microbatches_per_step": config.grad_accum_steps if every else 1,
        "activation_checkpointing": config.activation_checkpointing,
        "nonfinite_policy": config.on_nonfinite,
        "config": redact_values(config_values(config)),
        "config_fingerprint": fingerprint(config),
    }


def failure_fields(failure: Failure | None) -> dict[str, Any] | None:
    """A failure as the result shows it: no traceback, which may hold paths of the machine."""
    if failure is None:
        return None
    return {
        "rank": failure.rank,
        "step": failure.step,
        "kind": failure.kind,
        "message": redact(failure.message),
        "text": redact(str(failure)),
        "time": datetime.fromtimestamp(failure.time, UTC).isoformat(timespec="seconds"),
    }
