"""From what was asked for to the list of points to measure, and those to skip with a reason. Pure; no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from typing import Any

import attrs

from mtb_core import ConfigError, divisors, external_launcher, nearest

from .definitions import DTYPE_BYTES, OPERATIONS, REDUCTIONS, whole_elements
from .sizes import drawn_splits, size_text
from .support import too_few_ranks, why_not

SPLITS = ("equal", "uneven")

#: Timed calls of one point are at most so many, also where they are to take a given time: each one's time is kept.
MAX_ITERATIONS = 1_000_000

_DTYPE_ALIASES = {
    "float32": "fp32", "float": "fp32", "float64": "fp64", "double": "fp64", "float16": "fp16", "half": "fp16",
    "bfloat16": "bf16",
}  # fmt: skip
_REDUCTION_ALIASES = {"prod": "product"}
_OPERATION_ALIASES = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all", "sendrecv": "send_recv",
}  # fmt: skip


@attrs.frozen(kw_only=True)
class CommRequest:
    """The measurement that was asked for; names are checked here.

    Attributes:
        sizes: S in bytes, as asked; each operation rounds down to what it can have.
        placements: ``in_place`` values asked for; empty: the one that is usual for each operation.
        splits: bytes that each rank of a group sends to each in an uneven all_to_all; None: drawn by `seed`.
        iterations: timed calls of each point; `seconds` of calls instead where that is set.
        group_size: ranks in each of the groups that run at once; None: one group of all.
    """

    operations: tuple[str, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...] = ("fp32",)
    reductions: tuple[str, ...] = ("sum",)
    placements: tuple[bool, ...] = ()
    split_kinds: tuple[str, ...] = ("equal",)
    splits: tuple[tuple[int, ...], ...] | None = None
    iterations: int = 20
    warmup: int = 5
    seconds: float | None = None
    group_size: int | None = None
    check: bool = True
    seed: int = 0


@attrs.frozen(kw_only=True)
class Point:
    """One row to be: what to call with how much data. `reason` says why it is skipped; None: it is measured.

    Attributes:
        ranks: size of the group that communicates.
        elements: in S.
        splits: elements that each rank sends to each; None for equal parts and other operations.
    """

    operation: str
    dtype: str | None
    reduction: str | None
    in_place: bool | None
    split: str | None
    ranks: int
    elements: int
    splits: tuple[tuple[int, ...], ...] | None = None
    reason: str | None = None

    @property
    def size_bytes(self) -> int:
        """S."""
        return 0 if self.dtype is None else self.elements * DTYPE_BYTES[self.dtype]

    @property
    def series(self) -> dict[str, Any]:
        """All but the size: points that differ in it alone make one curve."""
        names = ("operation", "dtype", "reduction", "in_place", "split")
        return {**{name: getattr(self, name) for name in names}, "world_size": self.ranks}

    def __str__(self) -> str:
        words = [self.operation, self.dtype, self.reduction]
        if self.split == "uneven":
            words.append("uneven")
        if self.in_place is not None and self.in_place is not OPERATIONS[self.operation].placements[0]:
            words.append("in place" if self.in_place else "out of place")
        if self.operation != "barrier":
            words.append(size_text(self.size_bytes))
        return " ".join(word for word in words if word)


def operation_names(words: tuple[str, ...]) -> tuple[str, ...]:
    """Operations named by `words`, each a name, a comma-separated list or ``all``."""
    return _names(words, tuple(OPERATIONS), _OPERATION_ALIASES, "operation")


def dtype_names(words: tuple[str, ...]) -> tuple[str, ...]:
    """Dtypes named by `words`."""
    return _names(words, tuple(DTYPE_BYTES), _DTYPE_ALIASES, "dtype")


def reduction_names(words: tuple[str, ...]) -> tuple[str, ...]:
    """Reductions named by `words`."""
    return _names(words, REDUCTIONS, _REDUCTION_ALIASES, "reduction")


def split_names(words: tuple[str, ...]) -> tuple[str, ...]:
    """Kinds of split named by `words`."""
    return _names(words, SPLITS, {"drawn": "uneven"}, "split")


def _names(words: tuple[str, ...], known: tuple[str, ...], aliases: dict[str, str], what: str) -> tuple[str, ...]:
    out: list[str] = []
    for word in (part.strip().lower() for entry in words for part in entry.split(",")):
        name = aliases.get(word, word.replace("-", "_"))
        if name == "all":
            out += known
        elif name in known:
            out.append(name)
        else:
            raise ConfigError(f"There is no {what} '{word}'.{nearest(name, known)} Valid: {', '.join(known)}, all.")
    return tuple(dict.fromkeys(out))


def ranks_of(nproc: int) -> int:
    """Number of all ranks: `nproc` where this process starts them, else what torchrun or Slurm says."""
    launcher = external_launcher()
    if launcher is None:
        return nproc
    return int(os.environ["WORLD_SIZE" if launcher == "torchrun" else "SLURM_NTASKS"])


def group_ranks(request: CommRequest, world_size: int) -> int:
    """Ranks in one group.

    Raises:
        ConfigError: the groups do not fill the world exactly.
    """
    size = world_size if request.group_size is None else request.group_size
    if not 1 <= size <= world_size or world_size % size:
        valid = ", ".join(map(str, divisors(world_size)))
        raise ConfigError(
            f"--group-size is {size}, but there are {world_size} ranks; groups must fill them exactly. Valid: {valid}."
        )
    return size


def plan_points(request: CommRequest, world_size: int, backend: str) -> list[Point]:
    """All points of the matrix in the order they are measured.

    Raises:
        ConfigError: nothing of it can be measured; the message has the reason of the first point.
    """
    ranks = group_ranks(request, world_size)
    points = list(_expand(request, ranks, backend))
    if all(point.reason for point in points):
        raise ConfigError(
            f"Nothing can be measured: {points[0].reason}. Name another operation, dtype, reduction or size; "
            "`mtb comm --help` lists them."
        )
    return points


def _expand(request: CommRequest, ranks: int, backend: str) -> Iterator[Point]:
    for name in request.operations:
        operation = OPERATIONS[name]
        if not operation.placements:
            yield Point(operation=name, dtype=None, reduction=None, in_place=None, split=None, ranks=ranks, elements=0)
            continue
        reductions = request.reductions if operation.reduces else (None,)
        kinds: tuple[str | None, ...] = request.split_kinds if name == "all_to_all" else (None,)
        placements = request.placements or operation.placements[:1]
        for dtype, reduction, kind, in_place in product(request.dtypes, reductions, kinds, placements):
            series = Point(
                operation=name, dtype=dtype, reduction=reduction, in_place=in_place, split=kind, ranks=ranks, elements=0
            )
            reason = too_few_ranks(name, ranks) or why_not(name, dtype, reduction, in_place, backend)
            yield from _sized(series, request, reason)


def _sized(series: Point, request: CommRequest, reason: str | None) -> Iterator[Point]:
    """The points of one series; sizes that round to the same S are measured once, one row tells what cannot be."""
    if reason:
        yield attrs.evolve(series, reason=reason)
        return
    seen: set[int] = set()
    for size in request.sizes:
        assert series.dtype is not None
        uneven = series.split == "uneven"
        elements = whole_elements(series.operation, size, series.dtype, series.ranks, uneven=uneven)
        if not elements:
            least = DTYPE_BYTES[series.dtype] * (series.ranks if OPERATIONS[series.operation].parts else 1)
            small = f"{size} bytes are less than the {least} that {series.operation} of {series.dtype} needs on {series.ranks} ranks"
            yield attrs.evolve(series, reason=small)
        elif elements not in seen:
            seen.add(elements)
            point = attrs.evolve(series, elements=elements)
            yield _with_splits(point, request) if uneven else point


def _with_splits(point: Point, request: CommRequest) -> Point:
    if request.splits is None:
        return attrs.evolve(point, splits=drawn_splits(point.elements, point.ranks, request.seed))
    assert point.dtype is not None
    width = DTYPE_BYTES[point.dtype]
    odd = next((part for row in request.splits for part in row if part % width), None)
    if odd is not None:
        return attrs.evolve(point, reason=f"the split of {odd} bytes is no whole number of {point.dtype} elements")
    return attrs.evolve(point, splits=tuple(tuple(part // width for part in row) for row in request.splits))
