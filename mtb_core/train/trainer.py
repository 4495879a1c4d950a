"""The optimizer step: the part that all strategies share, and where its time is measured.

A step is: micro-batches (forward, backward) → norm of the gradients → one small all-reduce in which the ranks agree
on everything they must know together → clipping → optimizer. Nothing else synchronises ranks or the device. Where every
rank holds all reduced gradients, the norm needs no agreement, and the all-reduce travels while backward runs.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial

import attrs
import torch

from mtb_core.api.control import Control
from mtb_core.api.errors import NonFinite, RunFailed
from mtb_core.api.records import StepRecord
from mtb_core.api.values import Job, Prepared
from mtb_core.api.work import EvaluationWork, Loss, MicroBatch, Shards, StepWork
from mtb_core.config.schema import IGNORE_LABEL
from mtb_core.data.loader import Loader, StepBatch
from mtb_core.measure.ranges import named_range
from mtb_core.model.aside import undisturbed
from mtb_core.model.loss import LossFunction
from mtb_core.ranks.agree import gather_objects
from mtb_core.ranks.signals import StopFlag
from mtb_core.registry.run_hooks import Hooks

from .agreement import Agreed, Agreement
from .gradients import GradientCheck, clip, nonfinite_gradients, squared_norm
from .schedule import LearningRate


@attrs.define
class Progress:
    """Counters of the training: the part of a run's state that is plain numbers.

    `global_step` counts completed optimizer steps (skipped updates included), `samples_seen` and `tokens_seen` what
    they consumed: real samples, valid tokens.
    """

    global_step: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0


class Trainer:
    """Steps a prepared model through its data. One object serves one trial, on one rank.

    Args:
        loader: gives this rank's batches; its first batch must follow `progress`.
        schedule: the learning rate of the step that follows so many completed ones.
        stop: raised by signals; read once a step.
        memory_mib: gives the peak memory so far.
        save_vote: gives this rank's vote on the checkpoint in the making.

    Attributes:
        agreed: the outcome of the last step's agreement.
        control: the requests of run plugins.
        left_out: why a run plugin had the last update left out by ``mtb_before_update``.
        paused_ms: to be set after saving: milliseconds that training paused since the last step.
    """

    def __init__(
        self,
        job: Job,
        hooks: Hooks,
        prepared: Prepared,
        loader: Loader,
        *,
        schedule: Callable[[int], float],
        stop: StopFlag,
        memory_mib: Callable[[], float],
        save_vote: Callable[[], float] = lambda: 0.0,
        progress: Progress | None = None,
    ) -> None:
        self.job = job
        self.hooks = hooks
        self.prepared = prepared
        self.progress = progress or Progress()
        self.control = Control(_without_owner(self._renew))
        self.left_out: str | None = None
        self.paused_ms = 0.0
        self._loader = loader
        self._memory_mib = memory_mib
        self._loss = LossFunction(job.model, prepared.core)
        self._rate = LearningRate(job.config.learning_rate, schedule, prepared.optimizer)
        self._check = GradientCheck(job, prepared)
        self._agreement = Agreement(job, hooks, prepared, control=self.control, stop=stop, save_vote=save_vote)
        self._micros = tuple(
            MicroBatch(i, job.accumulation, job.sync_mode == "every" or i == job.accumulation - 1)
            for i in range(job.accumulation)
        )
        self._device = torch.device(job.ctx.device)
        self._synchronize: Callable[[], object] = (
            torch.cuda.synchronize if self._device.type == "cuda" else _nothing_to_wait_for
        )
        self._fetching = 0
        # Whether the ranks may agree before the norm is known; they find out together in the first step.
        self._early = False
        self._applied = True
        if not prepared.core.training:  # as a pretrained model comes; parts of one that trains keep their own mode
            prepared.module.train()
        self._batch: StepBatch = loader.next()
        self._loss.check_ignores(prepared.module, self._batch.inputs[0], self._batch.targets[0])
        self._agreement.begin(None, self._batch.valid_tokens)
        self.agreed: Agreed = self._agreement.end()

    def restart(self, loader: Loader) -> None:
        """Go on with the batches of `loader`, from where `progress` has been set to. All ranks."""
        self._loader, self._applied = loader, True
        self._check.restart()
        self._batch = loader.next()
        self._agreement.begin(None, self._batch.valid_tokens)
        self.agreed = self._agreement.end()

    def step(self, *, warmup: bool = False) -> StepRecord:
        """Take one optimizer step.

        Returns:
            Its record, after all observers have seen it.

        Raises:
            NonFinite: on all ranks, before the optimizer step, unless ``--on-nonfinite skip``.
            MissingGradient: a trainable parameter got no gradient; see `GradientCheck`.
            RunFailed: on all ranks, if only some of them have applied the update before.
        """
        clock = time.perf_counter_ns
        start = clock()
        batch, valid, progress = self._batch, self.agreed.votes.next_valid, self.progress
        number = progress.global_step + 1
        rate = self._rate.set(progress.global_step)
        self._check.begin(number)
        self._fetching = 0
        if self._early:  # its tokens are told in the middle of the step
            self._next_batch()
        local = self._forward_backward(batch, valid, self._micros, self._announced if self._early else _ignored)
        shards = self.hooks.gradients(self.prepared)
        self._check(number)
        agreed, norm_squared = self._agree(local, shards, squared_norm(shards, self._device))
        self._check_applied(agreed.votes.unapplied)
        self._synchronize()
        backward_end = clock()

        norm = math.sqrt(norm_squared) if norm_squared >= 0 else math.nan
        loss = agreed.votes.loss_sum / max(valid, 1.0)
        nonfinite = not (math.isfinite(loss) and math.isfinite(norm))
        if nonfinite:
            self._nonfinite(number, local.sum, batch, valid)
        self.left_out = None if nonfinite else self.hooks.before_update(number, loss, norm)
        limit = self.job.config.max_grad_norm
        clipped = bool(limit) and norm > limit
        if clipped:
            clip(shards, norm, limit)
        leave_out = nonfinite or agreed.votes.skip or self.left_out is not None
        self._applied = applied = self.hooks.optimizer_step(self.prepared, apply=not leave_out)
        self._synchronize()
        end = clock()

        progress.global_step = number
        progress.samples_seen += batch.samples
        progress.tokens_seen += int(valid)
        waited = self._fetching
        record = StepRecord(
            global_step=number,
            loss=loss,
            grad_norm=norm,
            param_norm=None,
            learning_rate=rate,
            clipped=clipped,
            skipped=not applied,
            nonfinite=nonfinite,
            samples_seen=progress.samples_seen,
            tokens_seen=progress.tokens_seen,
            valid_tokens=int(valid),
            data_time_ms=waited / 1e6,
            forward_backward_ms=(backward_end - start - waited) / 1e6,
            optimizer_step_ms=(end - backward_end) / 1e6,
            step_time_ms=(end - start) / 1e6,
            checkpoint_time_ms=self.paused_ms,
            memory_mib=self._memory_mib(),
            warmup=warmup,
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            metrics=_metrics(agreed, valid),
        )
        self.paused_ms = 0.0
        self.agreed = agreed
        self.hooks.step_recorded(record)
        return record

    def evaluate(self, batches: Iterator[tuple[torch.Tensor, torch.Tensor, int]]) -> tuple[float, int]:
        """Mean loss over the valid tokens of `batches`, and how many samples had any; equal on all ranks.

        Every rank must bring the same number of batches; padding has no valid tokens and weighs nothing. A batch is
        inputs, targets, and how many of its samples have anything to predict.
        """
        ctx = self.job.ctx
        valid_tokens = counted = 0

        def taken() -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
            nonlocal valid_tokens, counted
            for inputs, targets, samples in batches:
                valid = int(targets.ne(IGNORE_LABEL).sum())
                valid_tokens += valid
                counted += samples
                yield inputs, targets, valid

        with undisturbed(self.prepared.module, ctx.device), torch.no_grad():
            work = EvaluationWork(taken(), self._loss.forward, self._loss.of)
            found = self.hooks.evaluate(self.prepared, work)
        total = torch.zeros(3, dtype=torch.float64, device=self._device)
        if ctx.counts_loss and found is not None:
            total[0], total[1] = found.sum, valid_tokens
        if ctx.counts_samples:
            total[2] = counted
        self._agreement.sum(total)
        loss_sum, valid, samples = total.tolist()
        loss = loss_sum / max(valid, 1.0)
        self.hooks.evaluated(self.progress.global_step, loss, int(samples))
        return loss, int(samples)

    def _forward_backward(
        self, batch: StepBatch, valid: float, micros: Sequence[MicroBatch], announce: Callable[[Loss], None]
    ) -> Loss:
        """The micro-batches of a step; this rank's loss, detached, on the device."""
        hooks, prepared = self.hooks, self.prepared
        work = StepWork(
            inputs=batch.inputs,
            targets=batch.targets,
            valid=batch.valid_by_micro_batch,
            share=1.0 / max(valid, 1.0),
            micros=micros,
            forward=self._loss.forward,
            loss=self._loss.of,
            micro_batch=partial(hooks.micro_batch, prepared),
            backward=partial(hooks.backward, prepared),
            announce=announce,
        )
        return hooks.accumulate(prepared, work)

    def _announced(self, total: Loss) -> None:
        """Let the ranks agree while the rest of backward runs."""
        self._agreement.begin(total, self._batch.valid_tokens, partial=False, applied=self._applied)

    def _agree(self, local: Loss, shards: Sequence[Shards], norm_squared: torch.Tensor) -> tuple[Agreed, float]:
        """The agreement, and the squared norm of the whole model's gradients."""
        ranks, layout = self.job.ctx.world_size, self.job.ctx.layout
        # Without a sum over all ranks a non-finite value may be on one of them only, which then must be agreed on.
        whole = layout.sums_everywhere and all(part.copies == ranks for part in shards if part.tensors)
        if self._agreement.begun:
            return self._agreement.end(), float(norm_squared) * ranks
        if not self._early:
            self._next_batch()
        self._agreement.begin(
            local,
            self._batch.valid_tokens,
            norm_squared=norm_squared,
            partial=not whole,
            applied=self._applied,
        )
        agreed = self._agreement.end()
        self._early = not agreed.votes.partial
        return agreed, agreed.votes.norm_squared

    def _check_applied(self, unapplied: float) -> None:
        """All ranks are here, and raise together where the update before was applied on some of them only."""
        if 0 < unapplied < self.job.ctx.world_size:
            raise RunFailed(
                f"{int(unapplied)} of {self.job.ctx.world_size} ranks have left out the last update, so the weights differ "
                "between ranks. What mtb_optimizer_step and mtb_before_update return must be equal on all ranks.",
                step=self.progress.global_step,
                agreed=True,
            )

    def _renew(self) -> None:
        self.hooks.state_loaded(self.prepared, self.hooks.state(self.prepared))

    def _next_batch(self) -> None:
        """Fetch the batch of the next step; the time it takes is the step's time for data."""
        start = time.perf_counter_ns()
        with named_range("mtb:data"):  # the only part of a step that no run hook can see
            self._batch = self._loader.next()
        self._fetching += time.perf_counter_ns() - start

    def _nonfinite(self, step: int, local_loss: torch.Tensor, batch: StepBatch, valid: float) -> None:
        """All ranks are here. Raise on all of them, naming rank and step, or return where updates are skipped."""
        if self.job.config.on_nonfinite == "skip":
            return
        losses = gather_objects(self.job.ctx, float(local_loss))
        rank = next((r for r, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if rank is not None:
            where = f"on rank {rank}: the loss is {losses[rank]}"
        else:
            rank, where = self._blame_gradient(batch, valid)
        self.hooks.optimizer_step(self.prepared, apply=False)
        message = (
            f"Non-finite values at step {step} {where}. All ranks stopped before the optimizer step, so the weights are "
            "those of the step before. Lower --learning-rate, set --max-grad-norm, use --precision fp32, or pass "
            "--on-nonfinite skip to leave such updates out."
        )
        raise NonFinite(message, rank=rank, step=step, agreed=True)

    def _blame_gradient(self, batch: StepBatch, valid: float) -> tuple[int | None, str]:
        """Find the rank whose gradient is not finite although every loss is.

        After synchronisation all ranks hold the same non-finite sum. So the step's forward and backward are done once
        more without synchronisation, where the strategy can do that, to see each rank's own.
        """
        reduced = nonfinite_gradients(self.prepared)
        if "last" in self.job.plan.sync_modes:
            self.hooks.optimizer_step(self.prepared, apply=False)
            self._forward_backward(batch, valid, [attrs.evolve(m, sync=False) for m in self._micros], _ignored)
            own = gather_objects(self.job.ctx, nonfinite_gradients(self.prepared))
            for rank, names in enumerate(own):
                if names:
                    return rank, f"on rank {rank}: every loss is finite, but its gradient of {names} is not"
        what = f"the gradient of {reduced}, as summed over ranks," if reduced else "the gradient norm"
        return None, f"on all ranks: every loss is finite, but {what} is not"


def _without_owner(method: Callable[[], None]) -> Callable[[], None]:
    """Call a bound method without keeping its owner alive: plugins outlive the model of a trial."""
    held = weakref.WeakMethod(method)

    def call() -> None:
        found = held()
        if found is None:
            raise RunFailed("The trial has ended; its weights cannot be renewed any more.")
        found()

    return call


def _nothing_to_wait_for() -> None:
    """CPU work is done when a call returns."""


def _ignored(total: Loss) -> None:
    """Stands in if nothing may be sent before the norm is known."""


def _metrics(agreed: Agreed, valid: float) -> dict[str, float]:
    """The figures of a record beyond the common ones."""
    found = {name: total / max(valid, 1.0) for name, total in agreed.model_metrics.items()}
    return {**found, **agreed.plugin_metrics}
