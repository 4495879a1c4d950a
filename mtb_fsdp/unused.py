"""A rank that does not use what the others use must say so before it communicates otherwise than they expect.

FSDP gathers the units that run and sends the gradients that there are. Where ranks use different ones, their messages
differ in length or kind, of which gloo aborts or waits for ever, and NCCL hangs. So such a rank says so in the store,
as core does for missing gradients: if all ranks do, they go on alike, and core names the parameters that got no
gradient; if not, the rank raises, and whoever started the ranks ends those that wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mtb_core import MissingGradient, RankContext
from mtb_fsdp.theory import reduced_elements
from mtb_fsdp.units import describe_units, unit_parameters

#: How long a rank that misses something waits to hear whether all ranks miss it, seconds.
PATIENCE_S = 2.0


class UsageCheck:
    """Watches that every rank runs every unit, and has a gradient for every trainable parameter of those that ran.

    Args:
        module: not sharded yet; its hooks are registered here.
        units: names of the units besides the root.
        shards: over how many ranks each parameter is split.
    """

    def __init__(self, module: nn.Module, units: Sequence[str], shards: int, ctx: RankContext) -> None:
        self._ctx = ctx
        self._waiting = set(units)
        self._units = frozenset(units)
        self._count = 0
        self.reduce_scatters: dict[str, CheckedReduceScatter] = {}
        descriptions = describe_units(module, units, resharded=False)
        for (name, parameters), description in zip(unit_parameters(module, units).items(), descriptions, strict=True):
            trainable = [n for n, p in parameters if p.requires_grad]
            length = reduced_elements(description, shards)
            self.reduce_scatters[name] = CheckedReduceScatter(self, name, trainable, (length, length // shards))
        for name in units:
            module.get_submodule(name).register_forward_pre_hook(_Note(self._waiting, name))
        if ctx.world_size > 1:
            module.register_forward_hook(self._after_forward)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002  (a hook gets them)
        missing = sorted(self._waiting)
        self._waiting.update(self._units)
        if missing and not self.all_ranks_miss():
            raise MissingGradient(
                f"Module '{missing[0]}' did not run on rank {self._ctx.rank}, while it did on other ranks. It is "
                "gathered by all ranks together, so all must run it in each forward: let the others leave it out too, "
                "multiply its output by zero, or set --strategy-opt wrap=root.",
                rank=self._ctx.rank,
            )

    def all_ranks_miss(self) -> bool:
        """Whether all ranks have come here as often as this one; waits a moment for them."""
        self._count += 1
        store = self._ctx.store
        if store is None or self._ctx.world_size == 1:
            return True
        key = f"mtb_fsdp/missing/{self._count}"
        found = store.add(key, 1)
        deadline = time.monotonic() + PATIENCE_S
        while found < self._ctx.world_size and time.monotonic() < deadline:
            time.sleep(0.02)
            found = store.add(key, 0)
        return bool(found >= self._ctx.world_size)

    def no_gradient(self, unit: str, names: Sequence[str]) -> MissingGradient:
        """What to raise where gradients of `unit` are missing on this rank only; `names` are all that it trains."""
        where = f"module '{unit}'" if unit else "the model outside of its units"
        shown = ", ".join(f"'{n}'" for n in names[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return MissingGradient(
            f"No gradient on rank {self._ctx.rank} (other ranks have one) for some of the parameters of {where} "
            f"({shown}{more}): forward did not use them there. Use them in the loss on every rank, freeze them with "
            "requires_grad_(False), or set --strategy-opt unused_parameters=true, which counts them as zero.",
            rank=self._ctx.rank,
        )


class _Note:
    """A forward pre-hook that takes the unit off the list of those that have not run."""

    def __init__(self, waiting: set[str], name: str) -> None:
        self._waiting, self._name = waiting, name

    def __call__(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002  (a hook gets them)
        self._waiting.discard(self._name)


class CheckedReduceScatter:
    """Reduce-scatter of one unit that knows how long its message must be.

    It has the two methods of torch's interface for this.
    """

    def __init__(self, check: UsageCheck, unit: str, names: Sequence[str], lengths: tuple[int, int]) -> None:
        self._check, self._unit, self._names, self._lengths = check, unit, names, lengths

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for the message, or for what remains of it: the first that is known of its length."""
        if size[0] not in self._lengths and not self._check.all_ranks_miss():
            raise self._check.no_gradient(self._unit, self._names)
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """As torch does it by default."""
        return dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
