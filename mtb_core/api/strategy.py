"""The base class of strategies. Subclass it; no decorators are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from .errors import RunFailed
from .values import Job, Prepared, State
from .work import EvaluationWork, Loss, MicroBatch, Shards, StepWork

if TYPE_CHECKING:
    import torch


class Strategy:
    """A parallel strategy: each public method implements the run hook ``mtb_<name>``, see `mtb_core.api.hooks`.

    One object serves one trial of a run, on one rank. The defaults suit a plain module on one rank. Keep state in
    the `Prepared` value, not on the strategy: a plugin that wraps a hook may replace what it returns. Helper methods
    start with an underscore; an unknown public method is refused, with a suggestion.
    """

    def prepare(self, job: Job) -> Prepared:
        """Build, shard, fill the weights, make the optimizer."""
        raise NotImplementedError(f"{type(self).__name__} must define prepare(job)")

    def micro_batch(self, prepared: Prepared, micro: MicroBatch) -> AbstractContextManager[None]:
        """The sync context around forward and backward of one micro-batch."""
        return nullcontext()

    def backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        """Add this micro-batch's gradients; over all ranks and micro-batches they must come out as the SUM."""
        loss.backward()

    def accumulate(self, prepared: Prepared, work: StepWork) -> Loss:
        """Forward and backward of every micro-batch, one after the other."""
        total: Loss | None = None
        last = len(work.micros) - 1
        for micro, inputs, targets, valid in zip(work.micros, work.inputs, work.targets, work.valid, strict=True):
            done = False
            with work.micro_batch(micro):
                loss = work.forward(prepared.module, inputs, targets, valid)
                total = loss.plus(total)
                if micro.index == last:
                    work.announce(total)
                work.backward(loss.objective * work.share)
                done = True
            if not done:
                raise RunFailed("The sync context of mtb_micro_batch ended an exception; it must let it pass.")
        assert total is not None
        return total

    def evaluate(self, prepared: Prepared, work: EvaluationWork) -> Loss | None:
        """Forward of every batch; their losses are added up in float64, for there may be thousands."""
        total: Loss | None = None
        for inputs, targets, valid in work.batches:
            loss = work.forward(prepared.module, inputs, targets, valid)
            total = Loss(loss.sum.double(), None, loss.metrics).plus(total)
        return total

    def all_sum(self, prepared: Prepared, vector: torch.Tensor) -> Callable[[], object]:
        """All-reduce over the default process group."""
        import torch.distributed as dist  # noqa: PLC0415  (torch is imported when it is used)

        work = dist.all_reduce(vector, async_op=True)
        assert work is not None
        waiting: Callable[[], object] = work.wait
        return waiting

    def gradients(self, prepared: Prepared) -> Sequence[Shards]:
        """This rank's gradients for norm and clipping."""
        return [Shards([p.grad for p in prepared.trainable if p.grad is not None], copies=1)]

    def optimizer_step(self, prepared: Prepared, apply: bool) -> bool:
        """Apply the optimizer if `apply`, and clear the gradients in either case; True if it was applied."""
        if apply:
            prepared.optimizer.step()
        for parameter in prepared.trainable:
            parameter.grad = None
        return apply

    def state(self, prepared: Prepared) -> State:
        """Parameters, persistent buffers and optimizer state in global coordinates."""
        from .state import module_state  # noqa: PLC0415  (torch is imported when it is used)

        return module_state(prepared.core, prepared.optimizer)

    def state_loaded(self, prepared: Prepared, state: State) -> None:
        """Bring into agreement whatever was derived from the pieces of `state`, which have just been filled."""

    def close(self, prepared: Prepared) -> None:
        """Release what must not outlive the process group; no collectives."""
