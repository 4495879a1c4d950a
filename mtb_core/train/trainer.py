"""The optimizer step: what all strategies share, and where its time is measured.

A step is: micro-batches (forward, backward) → norm of the gradients → one small all-reduce in which the ranks agree
on everything they must know together → clipping → optimizer. Nothing else synchronises ranks or the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

import attrs
import torch
import torch.distributed as dist

from mtb_core.api.errors import NonFinite
from mtb_core.api.records import StepRecord
from mtb_core.api.values import Job, MicroBatch, Prepared
from mtb_core.config.schema import IGNORE_LABEL
from mtb_core.data.loader import Loader, StepBatch
from mtb_core.measure.ranges import named_range
from mtb_core.model.loss import LossFunction
from mtb_core.ranks.agree import gather_objects
from mtb_core.ranks.signals import StopFlag
from mtb_core.registry.run_hooks import Hooks

from .gradients import GradientCheck, clip, nonfinite_gradients, squared_norm
from .schedule import LearningRate


@attrs.define
class Progress:
    """How far the training is: the part of a run's state that is plain numbers.

    `global_step` counts completed optimizer steps (skipped updates included), `samples_seen` and `tokens_seen` what
    they consumed: real samples, valid tokens.
    """

    global_step: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0


@attrs.frozen
class Agreed:
    """What all ranks know after the step's all-reduce.

    Attributes:
        loss_sum: over the valid tokens of the global batch.
        norm_squared: of the gradients.
        next_valid: valid tokens of the next global batch.
        stop: stop requests by signal; `interrupt`: those by Ctrl-C among them.
        save_failed: votes that a checkpoint in the making has failed.
    """

    loss_sum: float
    norm_squared: float
    next_valid: float
    stop: float
    interrupt: float
    save_failed: float


#: Elements of the agreement's vector, all float64: summed over ranks, so that a NaN of any rank stays one.
AGREEMENT_ELEMENTS = len(attrs.fields(Agreed))


class Trainer:
    """Steps a prepared model through its data. One object serves one trial, on one rank.

    Args:
        loader: gives this rank's batches; its first batch must follow `progress`.
        stop: raised by signals; read once a step.
        memory_mib: gives the peak memory so far.
        save_vote: gives this rank's vote on the checkpoint in the making.
    """

    def __init__(
        self,
        job: Job,
        hooks: Hooks,
        prepared: Prepared,
        loader: Loader,
        *,
        stop: StopFlag,
        memory_mib: Callable[[], float],
        save_vote: Callable[[], float] = lambda: 0.0,
        progress: Progress | None = None,
    ) -> None:
        self.job = job
        self.hooks = hooks
        self.prepared = prepared
        self.progress = progress or Progress()
        #: "stopped" or "interrupted" once all ranks have agreed to stop after a signal.
        self.stop_reason: str | None = None
        #: The sum of the ranks' votes on the checkpoint in the making, as of the last step.
        self.save_failed = 0.0
        #: To be set after saving: milliseconds that training paused since the last step.
        self.paused_ms = 0.0
        self._loader = loader
        self._stop = stop
        self._memory_mib = memory_mib
        self._save_vote = save_vote
        self._loss = LossFunction(job.model, prepared.core)
        self._rate = LearningRate(job.config, prepared.optimizer)
        self._check = GradientCheck(job, prepared)
        self._leads = job.ctx.leads
        self._micros = tuple(
            MicroBatch(i, job.accumulation, job.sync_mode == "every" or i == job.accumulation - 1)
            for i in range(job.accumulation)
        )
        self._device = torch.device(job.ctx.device)
        self._synchronize: Callable[[], object] = (
            torch.cuda.synchronize if self._device.type == "cuda" else _nothing_to_wait_for
        )
        prepared.module.train()
        self._batch: StepBatch = loader.next()
        self._loss.check_ignores(prepared.module, self._batch.inputs[0], self._batch.targets[0])
        self._valid = self._agree(0.0, 0.0, self._batch).next_valid

    def step(self, *, warmup: bool = False) -> StepRecord:
        """Take one optimizer step.

        Returns:
            Its record, after all observers have seen it.

        Raises:
            NonFinite: on all ranks, before the optimizer step, unless ``--on-nonfinite skip``.
            MissingGradient: a trainable parameter got no gradient; see `GradientCheck`.
        """
        clock = time.perf_counter_ns
        start = clock()
        batch, valid, progress = self._batch, self._valid, self.progress
        number = progress.global_step + 1
        rate = self._rate.set(progress.global_step)
        self._check.begin(number)
        local_loss = self._forward_backward(batch, valid, self._micros)
        shards = self.hooks.gradients(self.prepared)
        self._check(number)
        norm_squared = squared_norm(shards, self._device)
        waiting = clock()
        with named_range("mtb:data"):  # the only part of a step that no run hook can see
            self._batch = self._loader.next()
        fetched = clock()
        agreed = self._agree(local_loss if self._leads else 0.0, norm_squared, self._batch)
        self._valid = agreed.next_valid
        self._synchronize()
        backward_end = clock()

        norm = math.sqrt(agreed.norm_squared) if agreed.norm_squared >= 0 else math.nan
        loss = agreed.loss_sum / max(valid, 1.0)
        nonfinite = not (math.isfinite(loss) and math.isfinite(norm))
        if nonfinite:
            self._nonfinite(number, local_loss, batch, valid)
        limit = self.job.config.max_grad_norm
        clipped = bool(limit) and norm > limit
        if clipped:
            clip(shards, norm, limit)
        self.hooks.optimizer_step(self.prepared, apply=not nonfinite)
        self._synchronize()
        end = clock()

        progress.global_step = number
        progress.samples_seen += batch.samples
        progress.tokens_seen += int(valid)
        record = StepRecord(
            global_step=number,
            loss=loss,
            grad_norm=norm,
            param_norm=None,
            learning_rate=rate,
            clipped=clipped,
            skipped=nonfinite,
            nonfinite=nonfinite,
            samples_seen=progress.samples_seen,
            tokens_seen=progress.tokens_seen,
            valid_tokens=int(valid),
            data_time_ms=(fetched - waiting) / 1e6,
            forward_backward_ms=(backward_end - start - (fetched - waiting)) / 1e6,
            optimizer_step_ms=(end - backward_end) / 1e6,
            step_time_ms=(end - start) / 1e6,
            checkpoint_time_ms=self.paused_ms,
            memory_mib=self._memory_mib(),
            warmup=warmup,
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )
        self.paused_ms = 0.0
        self.hooks.step_recorded(record)
        self.save_failed = agreed.save_failed
        if agreed.stop:
            self.stop_reason = "interrupted" if agreed.interrupt else "stopped"
        return record

    def evaluate(self, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, int]:
        """Mean loss over the valid tokens of `batches`, and how many samples had any; equal on all ranks.

        Every rank must bring the same number of batches; padding has no valid tokens and weighs nothing.
        """
        module = self.prepared.module
        total = torch.zeros(3, dtype=torch.float64, device=self._device)
        module.eval()
        try:
            with torch.no_grad():
                for inputs, targets in batches:
                    real = targets.ne(IGNORE_LABEL)
                    loss = self._loss(module, inputs, targets, int(real.sum()))
                    total += torch.stack([loss.double(), real.sum().double(), real.any(dim=1).sum().double()])
        finally:
            module.train()
        if not self._leads:
            total.zero_()
        self._reduce(total)
        loss_sum, valid, samples = total.tolist()
        loss = loss_sum / max(valid, 1.0)
        self.hooks.evaluated(self.progress.global_step, loss, int(samples))
        return loss, int(samples)

    def _forward_backward(self, batch: StepBatch, valid: float, micros: Sequence[MicroBatch]) -> torch.Tensor:
        """The micro-batches of a step. Returns this rank's summed loss, detached, on the device."""
        hooks, prepared, loss_of = self.hooks, self.prepared, self._loss
        share = 1.0 / max(valid, 1.0)
        total: torch.Tensor | None = None
        for micro, inputs, targets, count in zip(
            micros, batch.inputs, batch.targets, batch.valid_by_micro_batch, strict=True
        ):
            with hooks.micro_batch(prepared, micro):
                loss = loss_of(prepared.module, inputs, targets, count)
                hooks.backward(prepared, loss * share)
            detached = loss.detach()
            total = detached if total is None else total + detached
        assert total is not None
        return total

    def _agree(self, local_loss: torch.Tensor | float, norm_squared: torch.Tensor | float, batch: StepBatch) -> Agreed:
        """The step's one small all-reduce."""
        requested = self._stop.requested
        valid = float(batch.valid_tokens) if self._leads else 0.0
        stop, interrupt = float(requested is not None), float(requested == "SIGINT")
        own = (local_loss, norm_squared, valid, stop, interrupt, self._save_vote())
        if self._device.type == "cpu":
            values = [float(v) for v in own]
            if self.job.ctx.world_size > 1:
                vector = torch.tensor(values, dtype=torch.float64)
                dist.all_reduce(vector)
                values = vector.tolist()
        else:
            vector = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self._device) for v in own])
            self._reduce(vector)
            values = vector.tolist()
        return Agreed(*values)

    def _reduce(self, vector: torch.Tensor) -> None:
        if self.job.ctx.world_size > 1:
            dist.all_reduce(vector)

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
        """Which rank's gradient is not finite, where every loss is.

        After synchronisation all ranks hold the same non-finite sum. So the step's forward and backward are done once
        more without synchronisation, where the strategy can do that, to see each rank's own.
        """
        reduced = nonfinite_gradients(self.prepared)
        if "last" in self.job.plan.sync_modes:
            self.hooks.optimizer_step(self.prepared, apply=False)
            self._forward_backward(batch, valid, [attrs.evolve(m, sync=False) for m in self._micros])
            own = gather_objects(self.job.ctx, nonfinite_gradients(self.prepared))
            for rank, names in enumerate(own):
                if names:
                    return rank, f"on rank {rank}: every loss is finite, but its gradient of {names} is not"
        what = f"the gradient of {reduced}, as summed over ranks," if reduced else "the gradient norm"
        return None, f"on all ranks: every loss is finite, but {what} is not"


def _nothing_to_wait_for() -> None:
    """CPU work is done when a call returns."""
