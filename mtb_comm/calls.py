"""The buffers of a point, the call that is timed, and the check of what it left behind."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
import torch.distributed as dist

from .definitions import OPERATIONS
from .patterns import DTYPES, Values, contributed, count_wrong, fill, moved, reduced, slack_of
from .points import Point

ROOT = 0


@attrs.frozen
class Group:
    """The ranks that communicate: `index` is this rank's place among `ranks`; `members` are their global ranks."""

    handle: dist.ProcessGroup
    index: int
    members: tuple[int, ...]
    backend: str
    device: str

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.members)


@attrs.frozen
class Prepared:
    """A point made ready on one rank.

    Attributes:
        call: the one thing that is timed; allocates nothing of its own.
        inputs: what this rank gives.
        outputs: what it gets; may be part of, or the same as, `inputs`; empty where it gets nothing.
        given: what must be in `inputs` before a call that is checked.
        expected: what must be in `outputs` after it.
    """

    call: Callable[[], object]
    inputs: torch.Tensor
    outputs: torch.Tensor
    given: Callable[[torch.Tensor], None]
    expected: Callable[[torch.Tensor], int]


def prepare(point: Point, group: Group) -> Prepared:
    """Buffers and call of `point`; on every rank of its group."""
    return _MAKERS[point.operation](point, group)


def check(prepared: Prepared, tamper: Callable[[torch.Tensor], None] | None = None) -> int:
    """Call once on known data; elements of this rank's result that are not exactly right.

    `tamper` is given the result before it is looked at, so that tests can see the check fail.
    """
    # Outputs first: where they share memory with inputs, the data must stay.
    prepared.outputs.fill_(1)
    prepared.given(prepared.inputs)
    prepared.call()
    if tamper is not None:
        tamper(prepared.outputs)
    return prepared.expected(prepared.outputs)


def clear(prepared: Prepared) -> None:
    """Zeros stay what they are under every reduction, however often it is repeated."""
    prepared.inputs.zero_()
    prepared.outputs.zero_()


def _new(elements: int, point: Point, group: Group) -> torch.Tensor:
    assert point.dtype is not None
    return torch.zeros(elements, dtype=DTYPES[point.dtype], device=group.device)


def _reduce_op(point: Point) -> dist.ReduceOp.RedOpType:
    assert point.reduction is not None
    return getattr(dist.ReduceOp, point.reduction.upper())  # type: ignore[no-any-return]


def _filler(values: Values) -> Callable[[torch.Tensor], None]:
    return lambda buffer: fill(buffer, values)


def _counter(values: Values, start: int = 0, slack: float = 0.0) -> Callable[[torch.Tensor], int]:
    return lambda buffer: count_wrong(buffer, values, start=start, slack=slack)


def _nothing(_buffer: torch.Tensor) -> int:
    return 0


def _contribution(point: Point, group: Group) -> Values:
    assert point.dtype is not None
    assert point.reduction is not None
    return contributed(group.index, group.ranks, point.dtype, point.reduction)


def _reduced(point: Point, group: Group, start: int = 0) -> Callable[[torch.Tensor], int]:
    assert point.dtype is not None
    assert point.reduction is not None
    slack = slack_of(point.reduction, point.dtype, group.ranks, group.backend)
    return _counter(reduced(group.ranks, point.dtype, point.reduction), start, slack)


def _parts_of_all(point: Point, group: Group) -> Values:
    """Everybody's part, one after the other, each numbered from 0."""
    assert point.dtype is not None
    part, dtype = point.elements // group.ranks, point.dtype

    def values(positions: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(positions)
        owners = positions // part
        for owner in range(int(owners[0]), int(owners[-1]) + 1):
            mine = owners == owner
            out[mine] = moved(owner, dtype)(positions[mine] - owner * part)
        return out

    return values


def _all_reduce(point: Point, group: Group) -> Prepared:
    data, op, handle = _new(point.elements, point, group), _reduce_op(point), group.handle
    return Prepared(
        lambda: dist.all_reduce(data, op, handle),
        data,
        data,
        _filler(_contribution(point, group)),
        _reduced(point, group),
    )


def _reduce(point: Point, group: Group) -> Prepared:
    data, op, handle, root = _new(point.elements, point, group), _reduce_op(point), group.handle, group.members[ROOT]
    # Elsewhere than at the root the buffer is left with whatever the algorithm put there.
    counted = _reduced(point, group) if group.index == ROOT else _nothing
    return Prepared(
        lambda: dist.reduce(data, root, op, handle), data, data, _filler(_contribution(point, group)), counted
    )


def _broadcast(point: Point, group: Group) -> Prepared:
    assert point.dtype is not None
    data, handle, root = _new(point.elements, point, group), group.handle, group.members[ROOT]
    return Prepared(
        lambda: dist.broadcast(data, root, handle),
        data,
        data,
        _filler(moved(group.index, point.dtype)),
        _counter(moved(ROOT, point.dtype)),
    )


def _own_part(whole: torch.Tensor, group: Group) -> torch.Tensor:
    part = whole.numel() // group.ranks
    return whole[group.index * part : (group.index + 1) * part]


def _all_gather(point: Point, group: Group) -> Prepared:
    assert point.dtype is not None
    whole, handle = _new(point.elements, point, group), group.handle
    part = _own_part(whole, group) if point.in_place else _new(point.elements // group.ranks, point, group)
    return Prepared(
        lambda: dist.all_gather_single(whole, part, handle),
        part,
        whole,
        _filler(moved(group.index, point.dtype)),
        _counter(_parts_of_all(point, group)),
    )


def _reduce_scatter(point: Point, group: Group) -> Prepared:
    whole, op, handle = _new(point.elements, point, group), _reduce_op(point), group.handle
    part = _own_part(whole, group) if point.in_place else _new(point.elements // group.ranks, point, group)
    return Prepared(
        lambda: dist.reduce_scatter_single(part, whole, op, handle),
        whole,
        part,
        _filler(_contribution(point, group)),
        _reduced(point, group, start=group.index * part.numel()),
    )


def _gather(point: Point, group: Group) -> Prepared:
    assert point.dtype is not None
    at_root, handle, root = group.index == ROOT, group.handle, group.members[ROOT]
    whole = _new(point.elements if at_root else 0, point, group)
    size = point.elements // group.ranks
    part = whole[:size] if at_root and point.in_place else _new(size, point, group)
    parts = list(whole.split(size)) if at_root else None
    return Prepared(
        lambda: dist.gather(part, parts, root, handle),
        part,
        whole,
        _filler(moved(group.index, point.dtype)),
        _counter(_parts_of_all(point, group)) if at_root else _nothing,
    )


def _scatter(point: Point, group: Group) -> Prepared:
    assert point.dtype is not None
    at_root, handle, root = group.index == ROOT, group.handle, group.members[ROOT]
    whole = _new(point.elements if at_root else 0, point, group)
    size = point.elements // group.ranks
    part = whole[:size] if at_root and point.in_place else _new(size, point, group)
    parts = list(whole.split(size)) if at_root else None
    return Prepared(
        lambda: dist.scatter(part, parts, root, handle),
        whole,
        part,
        _filler(moved(ROOT, point.dtype)),
        _counter(moved(ROOT, point.dtype), start=group.index * size),
    )


def _all_to_all(point: Point, group: Group) -> Prepared:
    assert point.dtype is not None
    equal = point.elements // group.ranks
    table = point.splits or tuple((equal,) * group.ranks for _ in range(group.ranks))
    to_send, to_get = list(table[group.index]), [row[group.index] for row in table]
    source, target, handle = _new(sum(to_send), point, group), _new(sum(to_get), point, group), group.handle
    dtype = point.dtype

    def wrong(buffer: torch.Tensor) -> int:
        total = 0
        for sender, piece in enumerate(buffer.split(to_get)):
            total += count_wrong(piece, moved(sender, dtype), start=sum(table[sender][: group.index]))
        return total

    if point.splits is None:
        call: Callable[[], object] = lambda: dist.all_to_all_single(target, source, group=handle)  # noqa: E731
    else:
        call = lambda: dist.all_to_all_single(target, source, to_get, to_send, group=handle)  # noqa: E731
    return Prepared(call, source, target, _filler(moved(group.index, dtype)), wrong)


def _send_recv(point: Point, group: Group) -> Prepared:
    assert point.dtype is not None
    source, target = _new(point.elements, point, group), _new(point.elements, point, group)
    after, before = (group.index + 1) % group.ranks, (group.index - 1) % group.ranks
    ring = [
        dist.P2POp(dist.isend, source, group.members[after], group.handle),
        dist.P2POp(dist.irecv, target, group.members[before], group.handle),
    ]

    def call() -> None:
        for work in dist.batch_isend_irecv(ring):
            work.wait()

    return Prepared(
        call, source, target, _filler(moved(group.index, point.dtype)), _counter(moved(before, point.dtype))
    )


def _barrier(_point: Point, group: Group) -> Prepared:
    nothing, handle = torch.zeros(0), group.handle
    return Prepared(lambda: dist.barrier(handle), nothing, nothing, lambda _buffer: None, _nothing)


_MAKERS: dict[str, Callable[[Point, Group], Prepared]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "send_recv": _send_recv,
    "barrier": _barrier,
}
assert set(_MAKERS) == set(OPERATIONS)
