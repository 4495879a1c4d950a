"""Gradients of experts, summed over the ranks that hold the same experts while the rest of backward runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn

from mtb_core import MicroBatch


class ExpertSums:
    """Turns the gradients of `parameters` into sums over all ranks.

    Rows of all ranks that share the experts have gone through them, so only the ranks of `group`, which have the same
    experts, are still to be summed over. Each gradient is sent as soon as backward has finished it.

    Args:
        group: None: no other rank has these experts.
        loss_factor: what the loss is multiplied by before backward; gradients are divided by it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, loss_factor: int) -> None:
        self._parameters, self._group, self._factor = parameters, group, loss_factor
        self._active = self._summed = False
        self._works: list[dist.Work] = []
        self._handles = [p.register_post_accumulate_grad_hook(self._finished) for p in parameters]

    @contextmanager
    def micro_batch(self, micro: MicroBatch) -> Iterator[None]:
        """The sync context around forward and backward."""
        earlier = self._set_aside() if micro.sync and self._summed else []
        self._active = micro.sync
        self._summed = False
        try:
            yield
        finally:
            works, self._works, self._active = self._works, [], False
        for work in works:
            work.wait()
        for parameter, gradient in earlier:
            assert parameter.grad is not None
            parameter.grad.add_(gradient)
        self._summed = micro.sync and micro.index < micro.count - 1

    def close(self) -> None:
        """Let go of the parameters."""
        for handle in self._handles:
            handle.remove()

    def _set_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The sums of earlier micro-batches of the step, which must not be summed again."""
        earlier = [(p, p.grad) for p in self._parameters if p.grad is not None]
        for parameter in self._parameters:
            parameter.grad = None
        return earlier

    def _finished(self, parameter: Tensor) -> None:
        if not self._active:
            return
        assert parameter.grad is not None
        if self._factor != 1:
            parameter.grad.div_(self._factor)
        if self._group is not None:
            work = dist.all_reduce(parameter.grad, group=self._group, async_op=True)
            assert work is not None
            self._works.append(work)
