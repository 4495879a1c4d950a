"""The values of one step: losses, the work that a strategy is given, and the gradients that it hands back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    import torch
    from torch import nn

_NO_METRICS: Mapping[str, Any] = MappingProxyType({})


def _no_metrics() -> Mapping[str, Any]:
    return _NO_METRICS


@attrs.frozen
class MicroBatch:
    """Position of a micro-batch in its step; `sync` says whether its gradients are to be synchronised."""

    index: int
    count: int
    sync: bool


@attrs.frozen(eq=False)
class Loss:
    """The loss of one or several micro-batches: SUMs over their valid tokens, scalars.

    Attributes:
        sum: the loss that is trained on and reported.
        extra: a loss that is trained on and not reported (auxiliary losses). Like `sum` it is weighted by tokens: a
            mean over tokens must be multiplied by their number.
        metrics: further figures by name, detached. They are reported as means over the valid tokens of the global
            batch. A model declares their names in `ModelSpec.metrics`, a strategy in `Plan.metrics`.
    """

    sum: torch.Tensor
    extra: torch.Tensor | None = None
    metrics: Mapping[str, torch.Tensor] = attrs.field(factory=_no_metrics)

    @property
    def objective(self) -> torch.Tensor:
        """The scalar on which backward runs, before it is multiplied by the rank's share."""
        return self.sum if self.extra is None else self.sum + self.extra

    def plus(self, total: Loss | None) -> Loss:
        """The sum of `total` and this, detached and without `extra`."""
        if total is None:
            return Loss(self.sum.detach(), None, self.metrics)
        metrics = self.metrics
        if metrics or total.metrics:
            names = dict.fromkeys((*total.metrics, *metrics))
            metrics = {n: total.metrics.get(n, 0.0) + metrics.get(n, 0.0) for n in names}  # type: ignore[misc]
        return Loss(total.sum + self.sum.detach(), None, metrics)


@attrs.frozen(eq=False)
class StepWork:
    """The forward and backward of one step on one rank, for ``mtb_accumulate``.

    Attributes:
        inputs: int64 [micro-batches, batch, positions], on the rank's device.
        targets: the same shape; the ignore label -100 where a position does not count.
        valid: number of this rank's targets that count, by micro-batch.
        share: one divided by the number of valid tokens of the whole global batch. Backward runs on
            ``loss.objective * share``.
        micros: the micro-batches' places in the step.
        forward: ``forward(module, inputs, targets, valid)`` calls `module` on a micro-batch and gives its `Loss`.
        loss: ``loss(output, targets, valid)`` gives the `Loss` of what `module` returned.
        micro_batch: ``micro_batch(micro)`` calls the hook ``mtb_micro_batch``.
        backward: ``backward(loss)`` calls the hook ``mtb_backward``.
        announce: ``announce(total)`` tells core the step's whole loss while backward still runs, so that the ranks can
            agree meanwhile. Optional. Where it is called, it must be called on all ranks at the same place among
            their collectives.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    valid: Sequence[int]
    share: float
    micros: Sequence[MicroBatch]
    forward: Callable[[nn.Module, torch.Tensor, torch.Tensor, int], Loss]
    loss: Callable[[Any, torch.Tensor, int], Loss]
    micro_batch: Callable[[MicroBatch], AbstractContextManager[None]]
    backward: Callable[[torch.Tensor], None]
    announce: Callable[[Loss], None]


@attrs.frozen(eq=False)
class EvaluationWork:
    """The forward of one evaluation on one rank, for ``mtb_evaluate``.

    Attributes:
        batches: (inputs, targets, number of this rank's valid targets) of each batch, int64 [batch, positions]; the
            same number of batches on all ranks. All of them must be taken.
        forward: as in `StepWork`.
        loss: as in `StepWork`.
    """

    batches: Iterator[tuple[torch.Tensor, torch.Tensor, int]]
    forward: Callable[[nn.Module, torch.Tensor, torch.Tensor, int], Loss]
    loss: Callable[[Any, torch.Tensor, int], Loss]


@attrs.frozen
class Shards:
    """Gradients for the global norm and clipping: live, plain, local tensors.

    `copies` is how many ranks hold these same elements (1 where every rank holds different ones).
    """

    tensors: list[torch.Tensor]
    copies: int
