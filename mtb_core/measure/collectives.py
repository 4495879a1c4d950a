"""Counting the collectives that really happen, with the bytes they carry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

#: torch's operator names to the field's names. Several operators are one kind of collective.
_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "isend": "send",
    "irecv": "recv",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
_NOT_COMMUNICATION = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan")


_label: str | None = None


class counted_as:  # noqa: N801  (used like a function)
    """Within it, `CountCollectives` counts every collective of this thread under the kind `label`."""

    def __init__(self, label: str) -> None:
        self._own = label

    def __enter__(self) -> None:
        global _label  # noqa: PLW0603  (read by the dispatch mode, which is global as well)
        _label = self._own

    def __exit__(self, *_: object) -> None:
        global _label  # noqa: PLW0603
        _label = None


@attrs.frozen
class Collective:
    """One collective that this rank has issued.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, …
        dtype: of its tensors, as torch names it without the prefix; empty for a barrier.
        elements: of the message, see `CountCollectives.message_bytes`.
        message_bytes: the same in bytes.
        ranks: global ranks of its group; None where torch does not tell (functional collectives).
    """

    kind: str
    dtype: str
    elements: int
    message_bytes: int
    ranks: tuple[int, ...] | None


class CountCollectives(TorchDispatchMode):
    """Counts every collective that this rank issues inside the ``with`` block, those of autograd hooks included.

    DDP's buckets and FSDP's gathers, which are issued from C++ or from hooks, are seen as well. The mode costs some
    microseconds for every operator, so it belongs on a step that is not timed; and DDP and FSDP communicate
    differently in their first two steps (buckets are rebuilt, shards are set up), so it belongs on a later one.

    Attributes:
        calls: number of calls by kind (``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``,
            ``broadcast``, …).
        message_bytes: their message sizes by kind, summed. The size of one message is that of nccl-tests: all of the
            input or of the output, whichever is larger (an all-gather counts what every rank ends up with). It is not
            what goes over the wire, which depends on the algorithm.
        seen: each of them, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, int] = {}
        self.message_bytes: dict[str, int] = {}
        self.seen: list[Collective] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func` and count it if it communicates."""
        result = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES:
            self._count(func, args, result)
        return result

    def _count(self, func: Callable[..., Any], args: Sequence[Any], result: Any) -> None:
        name = func._schema.name.partition("::")[2]  # type: ignore[attr-defined]  # noqa: SLF001
        if name in _NOT_COMMUNICATION:
            return
        kind = _label or _KINDS.get(name, name)  # an operator not known here still shows, under torch's name
        # In-place operators take (outputs, inputs) or one buffer; functional ones take the input and return the output.
        sides = [list(_tensors(part)) for part in (*args[:2], result)]
        side = max(sides, key=_bytes)
        size = 0 if kind == "barrier" else _bytes(side)
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.message_bytes[kind] = self.message_bytes.get(kind, 0) + size
        dtype = str(side[0].dtype).removeprefix("torch.") if size else ""
        elements = sum(t.numel() for t in side) if size else 0
        self.seen.append(Collective(kind, dtype, elements, size, _ranks(args)))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _ranks(args: Sequence[Any]) -> tuple[int, ...] | None:
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):  # noqa: SLF001
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
    # Functional collectives, which DTensor uses, name their group by a text, the last of their arguments.
    if args and isinstance(args[-1], str):
        name: Any = args[-1]
        return tuple(dist.get_process_group_ranks(_resolve_process_group(name)))
    return None
