"""One trial of a run on one rank: everything is built here, stepped to the end, and dropped again."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from mtb_core.api.errors import RunFailed
from mtb_core.api.records import RunInfo, StepRecord
from mtb_core.api.values import Job, ModelSpec, OptimizerRecipe, Prepared, RankContext
from mtb_core.config import ResolvedRun
from mtb_core.data.dataset import Dataset
from mtb_core.data.evaluation import eval_batches
from mtb_core.data.loader import Loader
from mtb_core.measure.collectives import CountCollectives
from mtb_core.measure.memory import PeakMemory
from mtb_core.model import services
from mtb_core.ranks.agree import gather_objects
from mtb_core.ranks.failures import Failure, failure_of
from mtb_core.ranks.signals import StopFlag
from mtb_core.registry.run_hooks import Hooks

from .building import ModelBuild, count_parameters
from .checkpointing import ResumePoint, RunCheckpoints
from .optim import optimizer_groups
from .trainer import Progress, Trainer

_LOGGER = logging.getLogger("mtb")


@attrs.frozen
class TrialInputs:
    """The things a trial needs that outlive it.

    Attributes:
        hooks: makes the trial's own strategy, sinks and run plugins.
        optimizer: of the configuration, for this rank's device.
        schedule: the learning rate of the step that follows so many completed ones.
        started: see `RunInfo`.
    """

    resolved: ResolvedRun
    ctx: RankContext
    model: ModelSpec
    dataset: Dataset
    eval_dataset: Dataset | None
    hooks: Callable[[], Hooks]
    optimizer: OptimizerRecipe
    schedule: Callable[[int], float]
    folder: Path
    plugins: Sequence[tuple[str, str]]
    resume: ResumePoint | None
    stop: StopFlag
    progress: Callable[[dict[str, Any]], None]
    started: float


@attrs.define
class TrialOutcome:
    """Outcome of a trial on one rank; plain values.

    Attributes:
        exit_reason: ``"done"``, ``"stopped"``, ``"interrupted"`` or ``"failed"``; equal on all ranks.
        stop_reason: the words of the run plugin that ended the run early.
        failure: why, where all ranks failed by agreement; any other failure is raised.
        progress: how far the training is.
        pauses_ms: how long this rank was held up by each checkpoint.
        runtime: the part of the result's ``runtime`` about checkpoints.
        actions: acts of run plugins on the run (saved, skipped, went back), in order, as JSON.
        collectives: calls by kind in one step, and their bytes; None where they were not counted, with the reason.
        strategy_facts: of `Prepared.facts`.
        plugin_results: of sinks and run plugins, by name.
    """

    exit_reason: str = "done"
    stop_reason: str | None = None
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
    actions: list[dict[str, Any]] = attrs.field(factory=list)
    strategy_facts: Mapping[str, Any] = attrs.field(factory=dict)
    plugin_results: Mapping[str, Any] = attrs.field(factory=dict)


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
    built = ModelBuild(inputs.model, inputs.resolved, ctx)
    job = _make_job(inputs, built)
    prepared: Prepared | None = None
    finished = "failed"
    try:
        hooks.worker_started(ctx, inputs.folder)
        hooks.phase("prepare", 0)
        prepared = hooks.prepare(job)
        _check_positions(job, prepared)
        built.check_equal()
        outcome.parameters = built.parameters or count_parameters(prepared.core)
        seed_generators(config.seed, ctx)
        checkpoints = RunCheckpoints(
            job,
            hooks,
            prepared,
            folder=inputs.folder,
            point=inputs.resume,
            plugins=inputs.plugins,
            dataset=inputs.dataset,
            schedule=inputs.schedule,
        )
        if inputs.resume is not None:
            hooks.phase("load", inputs.resume.step)
        progress = outcome.progress = checkpoints.start()
        with _Data(inputs, job, prepared) as data:
            trainer = Trainer(
                job,
                hooks,
                prepared,
                data.open(progress.samples_seen),
                schedule=inputs.schedule,
                stop=inputs.stop,
                memory_mib=memory.mib,
                save_vote=checkpoints.vote,
                progress=progress,
            )
            _Training(inputs, trainer, checkpoints, data, outcome).run(trial)
        outcome.pauses_ms, outcome.runtime = checkpoints.pauses_ms, checkpoints.runtime()
        outcome.strategy_facts, outcome.plugin_results = dict(prepared.facts), hooks.results()
        finished = outcome.exit_reason
    except RunFailed as error:
        if not error.agreed:
            raise
        outcome.exit_reason, outcome.failure = "failed", failure_of(error, ctx.rank)
    finally:
        with ExitStack() as ending:
            if prepared is not None:
                ending.callback(hooks.close, prepared)
            ending.callback(hooks.run_finished, finished)
            hooks.phase("close", outcome.progress.global_step)
        built.used_up()
    return outcome


def _check_positions(job: Job, prepared: Prepared) -> None:
    """Every rank checks its own; what is wrong is wrong on all ranks, for they run the same code."""
    positions, length = prepared.positions, job.config.seq_length
    if positions is not None and not all(0 <= p < length for p in positions):
        raise RunFailed(
            f"Strategy '{job.config.strategy}' has the positions {min(positions)} to {max(positions)} of samples of "
            f"--seq-length {length}; they must lie in 0 to {length - 1}.",
        )


class _Data(ExitStack):
    """The loader of a trial, which can be opened again at another place in the data."""

    def __init__(self, inputs: TrialInputs, job: Job, prepared: Prepared) -> None:
        super().__init__()
        self._inputs, self._job, self._positions = inputs, job, prepared.positions

    def open(self, samples_seen: int) -> Loader:
        """A loader that begins after so many samples; the one before is closed."""
        self.close()
        config, ctx = self._job.config, self._job.ctx
        return self.enter_context(
            Loader(
                self._inputs.dataset,
                seed=config.seed,
                data_rank=ctx.data_rank,
                data_size=ctx.layout.data_size,
                batch_size=config.batch_size or 1,
                accumulation=self._job.accumulation,
                positions=self._positions,
                device=ctx.device,
                samples_seen=samples_seen,
            )
        )


class _Training:
    """All steps of a trial, with the checkpoints, evaluations and acts of run plugins between them."""

    def __init__(
        self, inputs: TrialInputs, trainer: Trainer, checkpoints: RunCheckpoints, data: _Data, outcome: TrialOutcome
    ) -> None:
        self._inputs, self._trainer, self._checkpoints = inputs, trainer, checkpoints
        self._data, self._outcome = data, outcome
        self._evaluated = 0

    def run(self, trial: int) -> None:
        """Train to the end, or until it is ended. All ranks."""
        inputs, trainer, outcome = self._inputs, self._trainer, self._outcome
        config, hooks, checkpoints = inputs.resolved.config, trainer.hooks, self._checkpoints
        first, last = trainer.progress.global_step + 1, inputs.resolved.last_step
        hooks.run_started(
            RunInfo(
                config=config,
                ctx=inputs.ctx,
                folder=inputs.folder,
                first_step=first,
                last_step=last,
                trial=trial,
                progress=inputs.progress,
                control=trainer.control,
                started=inputs.started,
            )
        )
        counted = inputs.resolved.warmup_until if _may_count(inputs, outcome, first) else None
        while (step := trainer.progress.global_step + 1) <= last:
            self._step(step, first, counted)
            checkpoints.settle(trainer.agreed.votes.save_failed)
            if self._went_back():
                continue
            if checkpoints.due(step) or trainer.agreed.votes.save:
                trainer.paused_ms = self._save()
            if self._ended():
                break
            if config.eval_every and step % config.eval_every == 0:
                self._evaluate()
        with inputs.stop.holding():
            if outcome.exit_reason != "done" or outcome.stop_reason is not None or config.save_every:
                self._save()
            checkpoints.finish()
        if inputs.eval_dataset is not None and outcome.exit_reason == "done":
            self._evaluate()

    def _step(self, step: int, first: int, counted: int | None) -> None:
        trainer, outcome, warmup_until = self._trainer, self._outcome, self._inputs.resolved.warmup_until
        trainer.hooks.phase("compile" if step == first and self._inputs.resolved.config.compile else "step", step)
        if step == counted:
            with CountCollectives() as counter:
                record = trainer.step(warmup=True)
            outcome.collectives, outcome.message_bytes = dict(counter.calls), dict(counter.message_bytes)
        else:
            record = trainer.step(warmup=step <= warmup_until)
        outcome.records.append(record)
        reason = self._said(trainer.agreed.own.skip)[0] if trainer.agreed.votes.skip else trainer.left_out
        if reason is not None:
            outcome.actions.append({"step": step, "action": "skip", "reason": reason})

    def _save(self) -> float:
        """Save the present state, unless that has been done or is not wanted; milliseconds of pause."""
        trainer, step = self._trainer, self._trainer.progress.global_step
        if not self._checkpoints.wanted(step):
            return 0.0
        trainer.hooks.phase("save", step)
        with self._inputs.stop.holding():
            pause = self._checkpoints.save(trainer.progress)
        if trainer.agreed.votes.save and not self._checkpoints.due(step):
            self._outcome.actions.append({"step": step, "action": "save"})
        return pause

    def _said(self, text: str | None) -> list[str]:
        """The reasons that any rank gave; collective."""
        return [said for said in gather_objects(self._inputs.ctx, text) if said is not None]

    def _ended(self) -> bool:
        """True if the ranks have agreed to end the run after this step: signals first, then run plugins."""
        votes, own, outcome = self._trainer.agreed.votes, self._trainer.agreed.own, self._outcome
        if votes.finish and not votes.stopped and not votes.stop:
            outcome.stop_reason = self._said(own.finish)[0]
            return True
        if votes.stopped:
            outcome.exit_reason = "interrupted" if votes.interrupted else "stopped"
        elif votes.stop:
            outcome.exit_reason, outcome.stop_reason = "stopped", self._said(own.stop)[0]
        else:
            return False
        self._inputs.stop.heed()
        return True

    def _went_back(self) -> bool:
        """Go back to a checkpoint if the ranks have agreed on it, and not to stop."""
        trainer, votes = self._trainer, self._trainer.agreed.votes
        if not votes.back or votes.stopped or votes.stop:
            return False
        wishes = [w for w in gather_objects(self._inputs.ctx, trainer.agreed.own.back) if w is not None]
        reason, before, progress = wishes[0].reason, min(w.before for w in wishes), trainer.progress
        there, leave_out = progress.global_step, [w.leave_out for w in wishes]
        trainer.hooks.phase("load", there)
        back = self._checkpoints.roll_back(before, f"{reason}: the run was to go back from step {there}")
        found = back.progress
        afterwards = max(progress.samples_seen if n is None else self._after(found.samples_seen, n) for n in leave_out)
        self._outcome.actions.append(
            {
                "step": there,
                "action": "roll_back",
                "reason": reason,
                "to": found.global_step,
                "samples_left_out": afterwards - found.samples_seen,
                "put_aside": list(back.put_aside),
            }
        )
        progress.global_step, progress.tokens_seen, progress.samples_seen = (
            found.global_step,
            found.tokens_seen,
            afterwards,
        )
        self._evaluated = 0
        trainer.restart(self._data.open(afterwards))
        if self._inputs.ctx.rank == 0:
            _LOGGER.warning("%s: went back from step %d to step %d.", reason, there, found.global_step)
        return True

    def _after(self, samples_seen: int, batches: int) -> int:
        """Place in the data after `batches` more global batches; the last one of an epoch may be shorter."""
        size, batch = self._inputs.dataset.size, self._inputs.resolved.config.global_batch_size or 1
        for _ in range(batches):
            samples_seen += batch if size is None else min(batch, size - samples_seen % size)
        return samples_seen

    def _evaluate(self) -> None:
        """Evaluate, unless it was done after this step already."""
        inputs, trainer = self._inputs, self._trainer
        step = trainer.progress.global_step
        if self._evaluated == step:
            return
        assert inputs.eval_dataset is not None
        self._evaluated = step
        trainer.hooks.phase("evaluate", step)
        config, ctx = inputs.resolved.config, inputs.ctx
        batches = eval_batches(
            inputs.eval_dataset,
            data_rank=ctx.data_rank,
            data_size=ctx.layout.data_size,
            batch_size=config.batch_size or 1,
            batches=config.eval_batches,
            positions=trainer.prepared.positions,
            device=ctx.device,
        )
        self._outcome.eval_loss, self._outcome.eval_samples = trainer.evaluate(batches)


def _make_job(inputs: TrialInputs, build: Callable[[], torch.nn.Module]) -> Job:
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
        build=build,
        materialize=partial(services.materialize, spec=model, seed=config.seed, device=ctx.device),
        in_place=partial(services.in_place, spec=model, config=config, device=ctx.device),
        optimizer_groups=inputs.optimizer.groups or partial(optimizer_groups, config=config),
        optimizer=inputs.optimizer,
        steps=resolved.last_step - (inputs.resume.step if inputs.resume is not None else 0),
    )


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


def _may_count(inputs: TrialInputs, outcome: TrialOutcome, first: int) -> bool:
    """True if collectives can be counted: in the last warm-up step, which is never timed, unless it is the first.

    In its first step a strategy may do what it does only once.
    """
    if inputs.resolved.config.compile:
        outcome.collectives_reason = "not counted with --compile"
    elif inputs.resolved.warmup_until <= first:
        outcome.collectives_reason = "counted in a second or later warm-up step; there was none"
    else:
        return True
    return False
