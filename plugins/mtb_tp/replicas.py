"""Check that tensor-parallel ranks hold equal values of all that they hold in common.

A model that draws dropout masks of its own on activations that ranks share, or depends on the rank in another way,
gives each rank another gradient of the same parameter. Nothing fails then: replicas drift apart, and the loss is
nearly right. The gradients of the first step tell, unless something hides the difference: behind a layer that begins
as zeros nothing upstream gets a gradient yet. So they are compared until every split parameter has one. What shows
later, as dropout that sets in after a while, shows in the values; these are compared at each save and at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtb_core import RunFailed
from mtb_tp.sharding import local_gradient, local_part

#: Differences above this share of a tensor's norm are no rounding. Values gather rounding over many steps, but
#: gradients are what little is left of large sums.
GRADIENT_TOLERANCE, VALUE_TOLERANCE = 1e-3, 1e-4

_ADVICE = (
    "what they compute in common is not the same. Dropout on activations that ranks share must be an nn.Dropout with "
    "the role 'dropout' in the model's role function, and nothing in forward may depend on the rank."
)


class Replicas:
    """Compares what the ranks of `group` hold in common; every method is called by all of them.

    Args:
        core: the model as it is trained.
        split: names of the parameters of which each rank holds another part.
    """

    def __init__(self, core: nn.Module, split: frozenset[str], group: dist.ProcessGroup) -> None:
        self._core, self._group = core, group
        parameters = dict(core.named_parameters())
        self._common = {name: p for name, p in parameters.items() if name not in split}
        self._trained = {name: p for name, p in self._common.items() if p.requires_grad}
        self._split = [parameters[name] for name in sorted(split) if parameters[name].requires_grad]
        self._pending = bool(self._trained)

    def compare_gradients(self) -> None:
        """After a step's backward: compare norm and sum of each gradient, until a step in which none can hide.

        What is not finite is left to the trainer, which names it better, and so is what no rank has.

        Raises:
            RunFailed: on all ranks, naming the first parameter whose gradients differ.
        """
        if not self._pending:
            return
        gradients = [local_gradient(p) for p in self._trained.values()]
        device = next(iter(self._trained.values())).device
        rows = [_summary(g) if g is not None else torch.zeros(2, dtype=torch.float64, device=device) for g in gradients]
        used = torch.tensor([float(g is not None) for g in gradients], dtype=torch.float64, device=device)
        # One row for each parameter, whether this rank has its gradient or not: all ranks must bring the same shape.
        own = torch.cat([torch.cat([torch.stack(rows), used[:, None]], dim=1), self._hidden(device)])
        ranks = self._gathered(own)
        names = list(self._trained)
        for rank, other in enumerate(ranks):
            if bool((other[:-1, 2] != ranks[0][:-1, 2]).any()):
                name = names[int((other[:-1, 2] != ranks[0][:-1, 2]).nonzero()[0])]
                user, idle = (rank, 0) if other[names.index(name), 2] else (0, rank)
                raise RunFailed(
                    f"Tensor-parallel ranks hold '{name}' in common, but in forward rank {user} of the group used it "
                    f"and rank {idle} did not: {_ADVICE}"
                )
        _refuse_differences(names, [r[:-1, :2] for r in ranks], GRADIENT_TOLERANCE, "found different gradients of it")
        self._pending = any(bool(r[-1, 0]) for r in ranks)

    def compare_values(self) -> None:
        """Compare norm and sum of each common parameter and persistent buffer.

        Raises:
            RunFailed: on all ranks, naming the first one that differs.
        """
        tensors: dict[str, Tensor] = {name: local_part(p.detach()) for name, p in self._common.items()}
        persistent = self._core.state_dict(keep_vars=True).keys()
        tensors |= {name: b for name, b in self._core.named_buffers() if name in persistent}
        if not tensors:
            return
        ranks = self._gathered(torch.stack([_summary(t) for t in tensors.values()]))
        _refuse_differences(list(tensors), ranks, VALUE_TOLERANCE, "have come to different values of it")

    def _hidden(self, device: torch.device) -> Tensor:
        """A row that says whether a gradient of a split parameter is all zeros here."""
        gradients = [g for p in self._split if (g := local_gradient(p)) is not None and g.numel()]
        row = torch.zeros(1, 3, dtype=torch.float64, device=device)
        if gradients:
            row[0, 0] = (torch.stack(torch._foreach_norm(gradients)) == 0).any()  # noqa: SLF001  (as torch.nn.utils does)
        return row

    def _gathered(self, own: Tensor) -> list[Tensor]:
        ranks = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(ranks, own, group=self._group)
        return [rank.cpu() for rank in ranks]


def _summary(tensor: Tensor) -> Tensor:
    """(norm, sum) in float64."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        tensor = tensor.double()
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64), tensor.sum(dtype=torch.float64)])


def _refuse_differences(names: Sequence[str], ranks: Sequence[Tensor], tolerance: float, what: str) -> None:
    """`ranks`: of each rank, norm and sum of each of `names`."""
    for rank, other in enumerate(ranks):
        far = (other - ranks[0]).abs().amax(dim=1) > tolerance * ranks[0][:, 0]
        far &= other.isfinite().all(dim=1)
        if bool(far.any()):
            raise RunFailed(
                f"Tensor-parallel ranks hold '{names[int(far.nonzero()[0])]}' in common, but ranks 0 and {rank} of the "
                f"group {what}: {_ADVICE}"
            )
