"""Data whose right result is known exactly, element by element, for every operation, dtype and reduction.

What moves is a hash of (sender, position), so a chunk that went to the wrong place, or came from it, differs. What is
summed are whole numbers small enough that no dtype rounds, whatever the order of adding. Torch tensors, made block by
block: the hash needs 8 bytes an element for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .definitions import FLOAT_DTYPES

DTYPES = {
    "fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16,
    "int8": torch.int8, "uint8": torch.uint8, "int32": torch.int32, "int64": torch.int64,
}  # fmt: skip

#: The largest N such that every whole number up to N is exact; wider dtypes hold far more than is used.
_EXACT = {"bf16": 256, "fp16": 2048, "int8": 127, "uint8": 255}
_WIDEST = 2**20
#: Twos that a product may have in every dtype (int8 ends at 127).
_TWOS = 6
_BLOCK = 2**20

Values = Callable[[torch.Tensor], torch.Tensor]


def exact_limit(dtype: str) -> int:
    """Whole numbers up to this are exact in `dtype`."""
    return _EXACT.get(dtype, _WIDEST)


def moved(rank: int, dtype: str) -> Values:
    """``values(positions)``: what `rank` has at these positions (int64) of its input, where nothing is reduced."""
    return lambda positions: _hash(positions, rank) % exact_limit(dtype)


def contributed(rank: int, ranks: int, dtype: str, reduction: str) -> Values:
    """The same where ranks' inputs are reduced element by element."""
    if reduction == "sum":
        return lambda positions: _summand(positions, rank, ranks, exact_limit(dtype))
    if reduction == "avg":
        return lambda positions: _averaged(positions, rank, ranks, exact_limit(dtype))
    if reduction == "product":
        # Of many ranks only a few, other ones at each position, may hold a two.
        return lambda positions: 1 + (_hash(positions, rank) & 1) * ((positions + rank) % ranks < _TWOS)
    return moved(rank, dtype)


def reduced(ranks: int, dtype: str, reduction: str) -> Values:
    """``values(positions)`` of the reduction of `contributed` over all ranks."""
    if reduction == "avg":
        return lambda positions: _averaged_base(positions, ranks, exact_limit(dtype))
    combinations: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
        "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
    }  # fmt: skip
    combine = combinations[reduction]

    def values(positions: torch.Tensor) -> torch.Tensor:
        total = contributed(0, ranks, dtype, reduction)(positions)
        for rank in range(1, ranks):
            total = combine(total, contributed(rank, ranks, dtype, reduction)(positions))
        return total

    return values


def fill(buffer: torch.Tensor, values: Values, *, start: int = 0) -> None:
    """Write `values` of the positions from `start` on into the flat `buffer`."""
    for block, positions in _blocks(buffer, start):
        block.copy_(values(positions))


def count_wrong(buffer: torch.Tensor, values: Values, *, start: int = 0, slack: float = 0.0) -> int:
    """Elements of `buffer` that differ from `values` by more than `slack` times their size; 0: by anything at all."""
    wrong = 0
    for block, positions in _blocks(buffer, start):
        right = values(positions).to(block.dtype)
        if slack:
            # Not "differs by more": a NaN must count.
            close = (block.double() - right.double()).abs() <= slack * right.double().abs()
            wrong += int((~close).sum())
        else:
            wrong += int((block != right).sum())
    return wrong


def slack_of(reduction: str | None, dtype: str | None, ranks: int, backend: str) -> float:
    """Relative error that a right result may have.

    It is 0 but for one case: NCCL multiplies by 1/n before it adds, which rounds unless n is a power of two.
    """
    if backend == "nccl" and reduction == "avg" and dtype in FLOAT_DTYPES and ranks & (ranks - 1):
        return ranks * torch.finfo(DTYPES[dtype]).eps
    return 0.0


def _blocks(buffer: torch.Tensor, start: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for offset in range(0, buffer.numel(), _BLOCK):
        block = buffer[offset : offset + _BLOCK]
        first = start + offset
        yield block, torch.arange(first, first + block.numel(), device=buffer.device)


def _hash(positions: torch.Tensor, rank: int) -> torch.Tensor:
    """Non-negative int64, mixed well enough that neighbours and equal positions of other ranks differ."""
    mixed = (positions + 1) * 0x9E3779B1 + (rank + 1) * 0x85EBCA77
    return (mixed ^ (mixed >> 15)) * 0x2C1B3C6D >> 12 & 0x7FFFFFFF


def _summand(positions: torch.Tensor, rank: int, ranks: int, limit: int) -> torch.Tensor:
    """At most limit/ranks each; with more ranks than that, only every so many ranks hold something at a position."""
    stride = -(-ranks // limit)
    share = limit // -(-ranks // stride)
    held = _hash(positions, rank) % (share + 1)
    return held * ((positions + rank) % stride == 0) if stride > 1 else held


def _averaged_base(positions: torch.Tensor, ranks: int, limit: int) -> torch.Tensor:
    """At least 1 where the sum over all ranks, which must be exact too, allows it."""
    if ranks > limit:
        return torch.zeros_like(positions)
    return 1 + _hash(positions, ranks) % max(1, limit // ranks - 1)


def _averaged(positions: torch.Tensor, rank: int, ranks: int, limit: int) -> torch.Tensor:
    """The average, plus one on one rank and minus one on the next, so that every rank matters and the sum divides."""
    base = _averaged_base(positions, ranks, limit)
    if ranks == 1:
        return base
    chosen = positions % ranks
    return base + (chosen == rank).long() - ((chosen + 1) % ranks == rank).long()
