"""One trial of a run on one rank: everything is built here, stepped to the end, and dropped again."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from mtb_core.api.errors import RunFailed
from mtb_core.api.records import RunInfo, StepRecord
from mtb_core.api.values import Job, ModelSpec, Prepared, RankContext
from mtb_core.config import ResolvedRun
from mtb_core.data.dataset import Dataset
from mtb_core.data.evaluation import eval_batches
from mtb_core.data.loader import Loader
from mtb_core.measure.collectives import CountCollectives
from mtb_core.measure.memory import PeakMemory
from mtb_core.model import services
from mtb_core.ranks.failures import Failure, failure_of
from mtb_core.ranks.signals import StopFlag
from mtb_core.registry.run_hooks import Hooks

from .checkpointing import ResumePoint, RunCheckpoints
from .optim import optimizer_groups, optimizer_recipe
from .trainer import AGREEMENT_ELEMENTS, Progress, Trainer


@attrs.frozen
class TrialInputs:
    """What a trial needs that outlives it. `hooks` makes the trial's own strategy, sinks and plugins."""

    resolved: ResolvedRun
    ctx: RankContext
    model: ModelSpec
    dataset: Dataset
    eval_dataset: Dataset | None
    hooks: Callable[[], Hooks]
    folder: Path
    plugins: Sequence[tuple[str, str]]
    resume: ResumePoint | None
    stop: StopFlag
    progress: Callable[[dict[str, Any]], None]


@attrs.define
class TrialOutcome:
    """What a trial leaves behind on one rank; plain values.

    Attributes:
        exit_reason: ``"done"``, ``"stopped"``, ``"interrupted"`` or ``"failed"``; equal on all ranks.
        failure: why, where all ranks failed by agreement; any other failure is raised.
        progress: how far the training is.
        pauses_ms: how long this rank was held up by each checkpoint.
        runtime: the part of the result's ``runtime`` about checkpoints.
        collectives: calls by kind in one step, and their bytes; None where they were not counted, with the reason.
    """

    exit_reason: str = "done"
    failure: Failure | None = None
    records: list[StepRecord] = attrs.field(factory=list)
    parameters: int = 0
    memory_kind: str = ""
    collectives: Mapping[str, int] | None = None
    message_bytes: Mapping[str, int] | None = None
    collectives_reason: str | None = None
    eval_loss: float | None = None
    eval_samples: int | None = None
    progress: Progress = attrs.field(factory=Progress)
    pauses_ms: list[float] = attrs.field(factory=list)
    runtime: Mapping[str, Any] = attrs.field(factory=dict)


def run_trial(inputs: TrialInputs, trial: int) -> TrialOutcome:
    """Build, train, evaluate, release. Called by all ranks.

    Raises:
        BaseException: whatever failed on this rank alone, or without the ranks having agreed on it.
    """
    ctx, config = inputs.ctx, inputs.resolved.config
    outcome = TrialOutcome()
    hooks = inputs.hooks()
    memory = PeakMemory(ctx.device)
    outcome.memory_kind = memory.kind
    job = _make_job(inputs)
    prepared: Prepared | None = None
    finished = "failed"
    try:
        prepared = hooks.prepare(job)
        outcome.parameters = prepared.parameters or count_parameters(prepared.core)
        seed_generators(config.seed, ctx)
        checkpoints = RunCheckpoints(
            job,
            hooks,
            prepared,
            folder=inputs.folder,
            point=inputs.resume,
            plugins=inputs.plugins,
            dataset=inputs.dataset,
        )
        progress = outcome.progress = checkpoints.start()
        with Loader(
            inputs.dataset,
            seed=config.seed,
            data_rank=ctx.data_rank,
            data_size=ctx.layout.data_size,
            batch_size=config.batch_size or 1,
            accumulation=job.accumulation,
            device=ctx.device,
            samples_seen=progress.samples_seen,
        ) as loader:
            trainer = Trainer(
                job,
                hooks,
                prepared,
                loader,
                stop=inputs.stop,
                memory_mib=memory.mib,
                save_vote=checkpoints.vote,
                progress=progress,
            )
            _train(inputs, trainer, checkpoints, outcome, trial)
        outcome.pauses_ms, outcome.runtime = checkpoints.pauses_ms, checkpoints.runtime()
        finished = outcome.exit_reason
    except RunFailed as error:
        if not error.agreed:
            raise
        outcome.exit_reason, outcome.failure = "failed", failure_of(error, ctx.rank)
    finally:
        hooks.run_finished(finished)
        if prepared is not None:
            hooks.close(prepared)
    return outcome


def _train(
    inputs: TrialInputs, trainer: Trainer, checkpoints: RunCheckpoints, outcome: TrialOutcome, trial: int
) -> None:
    """All steps of a trial, with the checkpoints and evaluations between and after them."""
    config, ctx = inputs.resolved.config, inputs.ctx
    first = trainer.progress.global_step + 1
    warmup_until, last = inputs.resolved.warmup_until, inputs.resolved.last_step
    trainer.hooks.run_started(RunInfo(config, ctx, inputs.folder, first, last, trial, inputs.progress))
    counted = warmup_until if _may_count(inputs, outcome, first) else None
    evaluated = 0
    for step in range(first, last + 1):
        if step == counted:
            with CountCollectives() as counter:
                record = trainer.step(warmup=True)
            _note_collectives(counter, outcome, agreed=ctx.world_size > 1)
        else:
            record = trainer.step(warmup=step <= warmup_until)
        outcome.records.append(record)
        checkpoints.settle(trainer.save_failed)
        if checkpoints.due(step):
            with inputs.stop.holding():
                trainer.paused_ms = checkpoints.save(trainer.progress)
        if trainer.stop_reason is not None:
            inputs.stop.heed()
            outcome.exit_reason = trainer.stop_reason
            break
        if config.eval_every and step % config.eval_every == 0:
            _evaluate(inputs, trainer, outcome)
            evaluated = step
    with inputs.stop.holding():
        if outcome.exit_reason != "done" or config.save_every:
            checkpoints.save(trainer.progress)
        checkpoints.finish()
    if inputs.eval_dataset is not None and outcome.exit_reason == "done" and evaluated != last:
        _evaluate(inputs, trainer, outcome)


def _evaluate(inputs: TrialInputs, trainer: Trainer, outcome: TrialOutcome) -> None:
    assert inputs.eval_dataset is not None
    config, ctx = inputs.resolved.config, inputs.ctx
    batches = eval_batches(
        inputs.eval_dataset,
        data_rank=ctx.data_rank,
        data_size=ctx.layout.data_size,
        batch_size=config.batch_size or 1,
        batches=config.eval_batches,
        device=ctx.device,
    )
    with preserved_generators():
        outcome.eval_loss, outcome.eval_samples = trainer.evaluate(batches)


def _make_job(inputs: TrialInputs) -> Job:
    resolved, ctx, model = inputs.resolved, inputs.ctx, inputs.model
    config = resolved.config
    return Job(
        ctx=ctx,
        config=config,
        plan=resolved.plan,
        options=resolved.options,
        model=model,
        sync_mode=resolved.sync_mode,
        accumulation=config.grad_accum_steps or 1,
        build=partial(services.build_module, model, config.seed, ctx.device),
        materialize=partial(services.materialize, spec=model, seed=config.seed, device=ctx.device),
        in_place=partial(services.in_place, spec=model, config=config, device=ctx.device),
        optimizer_groups=partial(optimizer_groups, config=config),
        optimizer=optimizer_recipe(config, ctx.device),
        steps=resolved.last_step - (inputs.resume.step if inputs.resume is not None else 0),
    )


def count_parameters(module: torch.nn.Module) -> int:
    """Elements of all parameters, by their global shapes; tied ones once."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in module.parameters())


def seed_generators(seed: int, ctx: RankContext) -> None:
    """Start the random streams of this rank (dropout and the user's own), different on every rank.

    Weights and data order do not use them.
    """
    digest = hashlib.blake2b(f"{seed}/rank/{ctx.rank}".encode(), digest_size=8).digest()
    own = int.from_bytes(digest, "big") >> 1
    torch.default_generator.manual_seed(own)
    if ctx.device.startswith("cuda"):
        torch.cuda.manual_seed(own)
    random.seed(own)
    np.random.seed(own % 2**32)  # noqa: NPY002  (the global stream is what user code draws from)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Leave torch's CPU stream as it was: evaluation must not change what training draws."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _may_count(inputs: TrialInputs, outcome: TrialOutcome, first: int) -> bool:
    """Whether collectives can be counted: in the last warm-up step, which is not timed, if that is not the first.

    In its first step a strategy may do what it does only once.
    """
    if inputs.resolved.config.compile:
        outcome.collectives_reason = "not counted with --compile"
    elif inputs.resolved.warmup_until <= first:
        outcome.collectives_reason = "counted in a second or later warm-up step; there was none"
    else:
        return True
    return False


def _note_collectives(counter: CountCollectives, outcome: TrialOutcome, *, agreed: bool) -> None:
    """Keep what was counted; the step's own small all-reduce, if there is one, is told apart as ``agreement``."""
    calls, sizes = dict(counter.calls), dict(counter.message_bytes)
    if agreed:
        calls["all_reduce"] -= 1
        sizes["all_reduce"] -= AGREEMENT_ELEMENTS * 8
        calls["agreement"], sizes["agreement"] = 1, AGREEMENT_ELEMENTS * 8
        for counts in (calls, sizes):
            if not counts["all_reduce"]:
                del counts["all_reduce"]
    outcome.collectives, outcome.message_bytes = calls, sizes
