"""What tensor-parallel ranks hold in common must be equal on them; here is the check that a model keeps to it.

A model that draws dropout masks of its own on activations that ranks share, or depends on the rank in another way,
gives each rank another gradient of the same parameter. Nothing fails then: replicas drift apart, and the loss is
nearly right. The gradients of the first step tell.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from mtb_core import RunFailed

#: Differences above this share of a gradient's norm are no rounding.
TOLERANCE = 1e-3


def check_replicas(gradients: Mapping[str, torch.Tensor], group: dist.ProcessGroup) -> None:
    """Compare norm and sum of each gradient over the ranks of `group`; called by all of them, with the same names.

    What is not finite is left to the trainer, which names it better.

    Raises:
        RunFailed: on all ranks of the group, naming the first parameter whose gradients differ.
    """
    if not gradients:
        return
    own = torch.stack([torch.stack([g.norm(), g.sum()]).float() for g in gradients.values()])
    ranks = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(ranks, own, group=group)
    for rank, other in enumerate(ranks):
        far = (other - ranks[0]).abs().amax(dim=1) > TOLERANCE * ranks[0][:, 0]
        if bool((far & other.isfinite().all(dim=1)).any()):
            name = list(gradients)[int(far.nonzero()[0])]
            raise RunFailed(
                f"Tensor-parallel ranks hold '{name}' in common, but ranks 0 and {rank} of the group found different "
                "gradients of it: what they compute in common is not the same. Dropout on activations that ranks share "
                "must be an nn.Dropout with the role 'dropout' in the model's tensor_parallel, and nothing in forward "
                "may depend on the rank."
            )
