"""torch.distributed.pipelining as this strategy uses it: stages that tell what they do, and runs of a schedule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from mtb_core import EvaluationWork, Loss, MicroBatch, RunFailed, StepWork
from mtb_pp.bubble import Action

IGNORED = -100


class _Opaque(nn.Module):
    """Keeps torch's pipeline from seeing that `inner` is sharded.

    Torch would keep a sharded stage gathered for the whole step and reduce its gradients by hand at the end. Seen as a
    plain module, it gathers, frees and reduces by itself, in each backward that synchronises.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Stage(PipelineStage):
    """A stage of torch's pipeline that synchronises as its micro-batches say, and raises what the model raised.

    Args:
        module: runs the stage's part of the model; DistributedDataParallel or FSDP2 may wrap it.
        index: of the stage, in ``range(stages)``.
        inputs: what it takes, on ``meta``; a tensor with shape and dtype.
        output: what it gives to the next stage, likewise; None: it is the last one.
        group: the ranks of the pipeline.

    Attributes:
        micros: the micro-batches of the present step.
        filled: chunks from this number on are padding of an evaluation, and nothing is computed for them.
        done: forwards and backwards of training, as they are taken; None: not noted any more.
        busy_s: seconds spent in them, on this thread.
    """

    def __init__(
        self,
        module: nn.Module,
        index: int,
        stages: int,
        *,
        inputs: Tensor,
        output: Tensor | None,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        given = inputs.detach().requires_grad_(inputs.is_floating_point())
        sent = torch.empty(0, device="meta") if output is None else output.detach().requires_grad_()
        sharded = isinstance(module, FSDPModule)
        super().__init__(
            _Opaque(module) if sharded else module,
            index,
            stages,
            device,
            input_args=given,
            output_args=sent,
            group=group,
        )
        self.micros: Sequence[MicroBatch] = ()
        self.filled = 0
        self.done: list[Action] | None = None
        self.busy_s = 0.0
        self._sharded: Any = module if sharded else None
        self._output = sent
        self._syncs = True

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """Forward of a micro-batch."""
        if fwd_chunk_id >= self.filled:
            padding = torch.zeros(self._output.shape, dtype=self._output.dtype, device=self.device)
            self.fwd_cache[fwd_chunk_id] = (padding,), []
            return padding
        start = self._begin("F", fwd_chunk_id)
        output = _unwrapped(super().forward_one_chunk, fwd_chunk_id, args, kwargs, save_forward_output)
        if self.is_last:  # torch would keep the logits until the backward, and in an evaluation until the next step
            self.fwd_cache[fwd_chunk_id] = (), self.fwd_cache[fwd_chunk_id][1]
        self.busy_s += time.perf_counter() - start
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,  # noqa: ARG002  (torch's arguments)
    ) -> None:
        """Backward of a micro-batch; data-parallel ranks synchronise in it if the micro-batch says so.

        Torch synchronises in the last backward only, whatever was asked for.
        """
        if not self.has_backward:
            return
        start = self._begin("B", bwd_chunk_id)
        sync = self.micros[bwd_chunk_id].sync
        if self._sharded is not None and sync != self._syncs:  # setting it walks all modules
            self._sharded.set_requires_gradient_sync(sync)
            self._syncs = sync
        _unwrapped(super().backward_one_chunk, bwd_chunk_id, loss, full_backward, sync)
        self.busy_s += time.perf_counter() - start

    def _begin(self, kind: Any, chunk: int) -> float:
        if self.done is not None and self.has_backward:
            self.done.append(Action(kind, self.stage_index, chunk))
        return time.perf_counter()


def _unwrapped(call: Callable[..., Any], *arguments: Any) -> Any:
    """Result of `call`. Torch raises the errors of a model as causes of its own, which print whole tensors."""
    try:
        return call(*arguments)
    except RuntimeError as error:
        cause = error.__cause__
        if cause is None:
            raise
    raise cause  # outside of the handler, so that it keeps the context that it has


@attrs.define
class _Run:
    """The step or evaluation that is going on: its loss, as the last stage makes it."""

    loss: Callable[[Any, Tensor, int], Loss]
    valid: Sequence[int]
    scale: tuple[float, ...]
    total: Loss | None = None
    counted: int = 0


class Pipeline:
    """One rank's stages with their schedule. Every rank of the pipeline makes one and calls the same methods.

    Args:
        stages: of this rank, in order.
        schedule: ``"1f1b"``, ``"gpipe"`` or ``"interleaved"``.
        micro_batches: of a step, and of a group of batches in an evaluation.
        shape: of each: samples, positions.

    Attributes:
        total_s: seconds spent in training steps, waiting included.
    """

    def __init__(self, stages: Sequence[Stage], schedule: str, micro_batches: int, shape: tuple[int, int]) -> None:
        self.stages = list(stages)
        self._done: list[Action] = []
        for stage in self.stages:
            stage.done = self._done
        self.total_s = 0.0
        self._micro_batches, self._shape = micro_batches, shape
        self._run = _Run(_no_loss, (), ())
        self._schedule: Any
        if schedule == "interleaved":
            self._schedule = ScheduleInterleaved1F1B(
                [*self.stages], micro_batches, loss_fn=self._loss, scale_grads=False
            )
        else:
            kind = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
            self._schedule = kind(self.stages[0], micro_batches, loss_fn=self._loss, scale_grads=False)

    @property
    def busy_s(self) -> float:
        """Seconds that this thread has spent in forwards and backwards of training steps."""
        return sum(stage.busy_s for stage in self.stages)

    def step(self, work: StepWork, factor: float) -> Loss:
        """Forward and backward of all micro-batches; on ranks without the last stage the loss is 0.

        Args:
            factor: what the loss is multiplied by before backward, besides the rank's share.
        """
        start = time.perf_counter()
        self._run = _Run(work.loss, work.valid, (work.share, factor))
        self._begin(self._micro_batches, work.micros)
        self._check(work.inputs)
        self._take(self._schedule.step, work.inputs.flatten(0, 1), work.targets.flatten(0, 1))
        total, self._run = self._run.total, _Run(_no_loss, (), ())
        self.total_s += time.perf_counter() - start
        return total or Loss(torch.zeros((), device=work.inputs.device))

    def evaluate(self, work: EvaluationWork) -> Loss | None:
        """Forward of all batches, in groups of as many as a step has micro-batches; losses are added up in float64."""
        total: Loss | None = None
        busy = [stage.busy_s for stage in self.stages]
        for inputs, targets, valid in _groups(work.batches, self._micro_batches):
            self._check(inputs)
            total = total or Loss(torch.zeros((), dtype=torch.float64, device=inputs.device))
            self._run = _Run(work.loss, valid, (), total)
            self._begin(len(valid))
            self._take(self._schedule.eval, inputs.flatten(0, 1), targets.flatten(0, 1))
            total = self._run.total
        for stage, before in zip(self.stages, busy, strict=True):
            stage.clear_runtime_states()
            stage.busy_s = before
        return total

    def stop_noting(self) -> list[Action]:
        """The forwards and backwards of this rank so far, in order; further ones are not noted."""
        done = self._done
        for stage in self.stages:
            stage.done = None
        self._done = []
        return done

    def close(self) -> None:
        """Drop what must not outlive the process group."""
        self._schedule = None
        self.stages.clear()

    def _begin(self, filled: int, micros: Sequence[MicroBatch] = ()) -> None:
        for stage in self.stages:
            stage.filled, stage.micros = filled, micros

    def _take(self, run: Callable[..., object], inputs: Tensor, targets: Tensor) -> None:
        first, last = self.stages[0].is_first, self.stages[-1].is_last
        run(*((inputs,) if first else ()), target=targets if last else None, return_outputs=False)

    def _check(self, inputs: Tensor) -> None:
        if tuple(inputs.shape[1:]) != self._shape:
            raise RunFailed(
                f"strategy 'pp' has prepared for micro-batches of {list(self._shape)} (samples, positions), but the data has "
                f"{list(inputs.shape[1:])}; it must give samples of --seq-length positions.",
                agreed=True,
            )

    def _loss(self, output: Any, targets: Tensor) -> Tensor:
        """Called by torch in the last stage, for one micro-batch after the other."""
        run, index = self._run, self._run.counted
        run.counted += 1
        if index >= len(run.valid):
            return targets.new_zeros(())
        found = run.loss(output, targets, run.valid[index])
        run.total = found.plus(run.total)
        objective = found.objective
        for factor in run.scale:
            objective = objective * factor
        return objective


def _groups(batches: Iterator[tuple[Tensor, Tensor, int]], size: int) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """`size` batches at a time: inputs and targets [size, samples, positions], valid targets of those that are real."""
    while group := list(islice(batches, size)):
        inputs, targets = torch.stack([g[0] for g in group]), torch.stack([g[1] for g in group])
        if missing := size - len(group):
            inputs = torch.cat([inputs, inputs.new_zeros((missing, *inputs.shape[1:]))])
            targets = torch.cat([targets, targets.new_full((missing, *targets.shape[1:]), IGNORED)])
        yield inputs, targets, [g[2] for g in group]


def _no_loss(*_: object) -> Loss:
    raise RuntimeError("a loss is made in a step or an evaluation only")
