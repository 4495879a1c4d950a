"""Gradients after backward: global norm, clipping, and the search for missing and non-finite ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mtb_core.api.errors import MissingGradient
from mtb_core.api.values import Job, Prepared
from mtb_core.api.work import Shards
from mtb_core.ranks.inquiry import Answer, Inquiry


def squared_norm(shards: Sequence[Shards], device: torch.device) -> torch.Tensor:
    """This rank's part of the squared global 2-norm: summed over ranks it is the whole. float64 scalar on `device`."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in shards:
        if part.tensors:
            norms = torch.stack(torch._foreach_norm(part.tensors))  # noqa: SLF001  (as torch.nn.utils does)
            total = total + norms.double().square().sum() / part.copies
    return total


def clip(shards: Sequence[Shards], norm: float, limit: float) -> None:
    """Scale gradients in place so that their global norm `norm` becomes `limit`.

    The factor is ``limit / (norm + 1e-6)``, that of ``torch.nn.utils.clip_grad_norm_``.
    """
    for part in shards:
        if part.tensors:
            torch._foreach_mul_(part.tensors, limit / (norm + 1e-6))


def nonfinite_gradients(prepared: Prepared) -> str:
    """Names of parameters whose gradient, as this rank holds it, is not finite; empty if there is none."""
    names = [
        name
        for name, parameter in prepared.core.named_parameters()
        if parameter.grad is not None and not bool(torch.isfinite(_local(parameter.grad)).all())
    ]
    return _some(names) if names else ""


class GradientCheck:
    """Every trainable parameter must have a gradient after backward.

    Checked at the first step, and at each step where there are several ranks: a parameter without gradient on some
    ranks only leaves the others waiting inside backward for a bucket that never comes. The rank that misses it
    asks the others (`Inquiry`). If all miss it, all raise together; if not, it raises alone and leaves, and whoever
    started the ranks ends those that wait.
    """

    def __init__(self, job: Job, prepared: Prepared) -> None:
        self._ctx = job.ctx
        self._strategy = job.config.strategy
        self._active = not (job.plan.missing_gradients or job.plan.finds_missing_gradients)
        self._parameters = {n: p for n, p in prepared.core.named_parameters() if p.requires_grad}
        self._begun = self._passed = 0
        self._inquiry = Inquiry(job.ctx, "gradients", self._has) if self._active else None

    def begin(self, step: int) -> None:
        """From here on, gradients are those of `step`: those of the step before are gone."""
        self._begun = step

    def restart(self) -> None:
        """Forget what was passed: the run has gone back, and takes these steps again."""
        self._begun = self._passed = 0

    def __call__(self, step: int) -> None:
        """Look at the gradients of `step`.

        Raises:
            MissingGradient: see the class.
        """
        if not self._active:
            return
        missing = [name for name, parameter in self._parameters.items() if parameter.grad is None]
        if missing:
            self._raise(missing, step)
        self._begun, self._passed = 0, step
        if self._ctx.world_size == 1:
            self._active = False

    def _raise(self, missing: list[str], step: int) -> None:
        assert self._inquiry is not None
        answer = self._inquiry.all_miss(step, missing[0])
        alone = answer is not Answer.ALL
        where = f"on rank {self._ctx.rank} ({answer.value})" if alone else "on all ranks"
        message = (
            f"No gradient at step {step} {where} for {_some(missing)}: forward did not use it, or used it detached. "
            "Use it in the loss, freeze it with requires_grad_(False), or choose a strategy option that copes with "
            f"unused parameters (`mtb plugins show {self._strategy}`)."
        )
        raise MissingGradient(message, rank=self._ctx.rank if alone else None, step=step, agreed=not alone)

    def _has(self, step: int, name: str) -> bool:
        parameter = self._parameters.get(name)  # it may be another rank's part of the model
        return step <= self._passed or (step == self._begun and parameter is not None and parameter.grad is not None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{n}'" for n in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
