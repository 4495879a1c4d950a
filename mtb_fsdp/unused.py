"""A rank that does not use what the others use must say so before it communicates otherwise than they expect.

FSDP gathers the units that run and sends the gradients that there are. Where ranks use different ones, their messages
differ in length or kind, of which gloo aborts or waits for ever, and NCCL hangs. So such a rank asks the others, as
core does for missing gradients: if all miss the same, they go on alike, and core names the parameters that got no
gradient; if not, the rank raises, and whoever started the ranks ends those that wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mtb_core import Answer, Inquiry, MissingGradient, RankContext
from mtb_fsdp.theory import reduced_elements
from mtb_fsdp.units import describe_units, unit_parameters


class UsageCheck:
    """Watches that every rank runs every unit, and has a gradient for every trainable parameter of those that ran.

    Args:
        module: not sharded yet; a hook of it is registered here.
        units: names of the units besides the root.
        shards: over how many ranks each parameter is split.
        ctx: its world are the ranks that hold `module`.
        ignored: parameters of `module` that are not sharded at all.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[str],
        shards: int,
        ctx: RankContext,
        ignored: Collection[nn.Parameter] = (),
    ) -> None:
        self._ctx = ctx
        self._waiting = set(units)
        self._units = frozenset(units)
        self._forwards = 0
        self.units_run = Inquiry(ctx, "units", self._ran)
        self.gradients_sent = Inquiry(ctx, "unit-gradients", self._sent)
        self.reduce_scatters: dict[str, CheckedReduceScatter] = {}
        descriptions = describe_units(module, units, resharded=False, ignored=ignored)
        parameters_by_unit = unit_parameters(module, units, ignored)
        for (name, parameters), description in zip(parameters_by_unit.items(), descriptions, strict=True):
            trainable = [n for n, p in parameters if p.requires_grad]
            length = reduced_elements(description, shards)
            self.reduce_scatters[name] = CheckedReduceScatter(self, name, trainable, (length, length // shards))
        if ctx.world_size > 1:
            module.register_forward_hook(self._after_forward)

    def watch(self, name: str, unit: nn.Module) -> None:
        """Notice when the unit `name` runs. `unit` is sharded: its own hook or call waits for others, which may ask."""
        unit.register_forward_pre_hook(_Note(self._waiting, name), prepend=True)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002  (a hook gets them)
        missing = sorted(self._waiting)
        answer = self.units_run.all_miss(self._forwards + 1, "\n".join(missing)) if missing else Answer.ALL
        if answer is not Answer.ALL:
            raise MissingGradient(
                f"Module '{missing[0]}' did not run on rank {self._ctx.rank} ({answer.value}). It is gathered by all "
                "ranks together, so all must run it in each forward: let the others leave it out too, multiply its "
                "output by zero, or use --strategy fsdp --strategy-opt wrap=root.",
                rank=self._ctx.rank,
            )
        # In this order: to whoever asks meanwhile, a unit must not seem to have run in the next forward.
        self._waiting.update(self._units)
        self._forwards += 1

    def _ran(self, forward: int, units: str) -> bool:
        """True if this rank ran any of `units`: in a forward that ended, or that waits for others in a later unit."""
        here = forward == self._forwards + 1 and not self._waiting.issuperset(units.split("\n"))
        return here or forward <= self._forwards

    def _sent(self, message: int, what: str) -> bool:
        """True if this rank sent gradients of a unit, or wants to, of another length than the rank that asks."""
        length, _, unit = what.partition(" ")
        return self.reduce_scatters[unit].differs(message, int(length))

    def no_gradient(self, unit: str, names: Sequence[str], answer: Answer) -> MissingGradient:
        """Error for gradients of `unit` that are missing on this rank; `names` are all that it trains."""
        where = f"module '{unit}'" if unit else "the model outside of its units"
        shown = ", ".join(f"'{n}'" for n in names[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return MissingGradient(
            f"No gradient on rank {self._ctx.rank} ({answer.value}) for some of the parameters of {where} "
            f"({shown}{more}): forward did not use them there. Use them in the loss on every rank, freeze them with "
            "requires_grad_(False), or use --strategy fsdp --strategy-opt unused_parameters=true, which counts them as "
            "zero.",
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
        self._allocated = 0
        self._asking = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer for the message, or for what remains of it: the first that is known of its length."""
        if size[0] not in self._lengths:
            self._asking = size[0]
            answer = self._check.gradients_sent.all_miss(self._allocated + 1, f"{size[0]} {self._unit}")
            if answer is not Answer.ALL:
                raise self._check.no_gradient(self._unit, self._names, answer)
        self._allocated += 1
        self._asking = 0
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def differs(self, number: int, length: int) -> bool:
        """True if the buffer `number` of this unit has another length here than `length`, and none that was agreed on."""
        return number <= self._allocated or (number == self._allocated + 1 and self._asking not in (0, length))

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """As torch does it by default."""
        return dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
