"""Putting together the parts of a tensor that ranks hold, and comparing whole ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mtb_core.ckpt.loading import owner_of

from .stage import Part, RankTrace

#: Whole tensors by key, as in `State`.
Whole = dict[str, torch.Tensor]


class Mismatch(Exception):
    """A check does not hold.

    Args:
        expected: what must hold.
        seen: what was found instead.
    """

    def __init__(self, expected: str, seen: str) -> None:
        super().__init__(f"expected {expected}; seen: {seen}")
        self.expected = expected
        self.seen = seen


def assemble(traces: Mapping[int, RankTrace], step: int, *, agreeing: bool = True) -> Whole:
    """Model and optimizer after `step`, whole. Of ranks that hold the same elements the last one counts.

    Raises:
        Mismatch: elements that no rank holds; ranks that hold the same elements but not the same values, if they must
            be `agreeing`; parts that do not fit into their whole.
    """
    for rank, trace in traces.items():
        if step not in trace.states:
            raise Mismatch(f"the state of rank {rank} after step {step}", "the rank did not get there")
    return join({rank: trace.states[step] for rank, trace in traces.items()}, agreeing=agreeing)


def join(held: Mapping[int, Mapping[str, Sequence[Part]]], *, agreeing: bool = True) -> Whole:
    """The parts that each rank holds, put together to whole tensors; raises as `assemble`."""
    parts: dict[str, list[tuple[int, Part]]] = {}
    for rank, own in held.items():
        for key, pieces in own.items():
            parts.setdefault(key, []).extend((rank, part) for part in pieces)
    return {key: _whole(key, found, agreeing) for key, found in parts.items()}


def _whole(key: str, held: list[tuple[int, Part]], agreeing: bool) -> torch.Tensor:
    shapes = {shape for _, (_, shape, _) in held}
    if len(shapes) != 1:
        raise Mismatch(f"one shape of '{key}' on all ranks", f"shapes {sorted(shapes)}")
    (shape,) = shapes
    whole = torch.zeros(shape, dtype=held[0][1][0].dtype)
    owner = torch.full(shape, -1, dtype=torch.int64)
    for rank, (tensor, _, offset) in held:
        where = tuple(slice(start, start + size) for start, size in zip(offset, tensor.shape, strict=True))
        if tensor.dim() != len(shape) or whole[where].shape != tensor.shape:
            raise Mismatch(
                f"parts of '{key}' that lie within its shape {list(shape)}",
                f"rank {rank} has one of shape {list(tensor.shape)} at {list(offset)}",
            )
        known = owner[where] >= 0
        if agreeing and known.any() and not torch.equal(_bits(whole[where])[known], _bits(tensor)[known]):
            other = int(owner[where][known].max())
            raise Mismatch(
                f"ranks that hold the same elements of '{key}' to hold the same values",
                f"ranks {other} and {rank} differ by up to {_largest(whole[where][known], tensor[known])}",
            )
        whole[where] = tensor
        owner[where] = rank
    if (owner < 0).any():
        raise Mismatch(f"every element of '{key}' on some rank", f"{int((owner < 0).sum())} elements are on none")
    return whole


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bits, so that a NaN equals itself."""
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()]) if tensor.dim() else tensor.reshape(1)


def _largest(one: torch.Tensor, other: torch.Tensor) -> str:
    return f"{float((one.double() - other.double()).abs().max()):.3g}"


def equal_bitwise(seen: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], what: str) -> None:
    """Every tensor has the same bits.

    Raises:
        Mismatch: names the first that differs, or keys that only one side has.
    """
    same_keys(seen, expected, what)
    for key, tensor in expected.items():
        if seen[key].shape != tensor.shape or seen[key].dtype != tensor.dtype:
            raise Mismatch(
                f"{what}: '{key}' of {tensor.dtype} {list(tensor.shape)}", f"{seen[key].dtype} {list(seen[key].shape)}"
            )
        if not torch.equal(seen[key], tensor):
            raise Mismatch(f"{what}: the same bits in '{key}'", f"a difference of up to {_largest(seen[key], tensor)}")


def comparable(seen: Whole, expected: Whole) -> tuple[Whole, Whole]:
    """Both without the state of an owner (a strategy, a plugin) that only one of them has, as loading leaves it out."""
    apart = {owner_of(key) for key in seen} ^ {owner_of(key) for key in expected}
    kept = [{key: t for key, t in side.items() if owner_of(key) not in apart - {None}} for side in (seen, expected)]
    return kept[0], kept[1]


def same_keys(seen: Mapping[str, Any], expected: Mapping[str, Any], what: str) -> None:
    """Both have the same keys.

    Raises:
        Mismatch: names those that only one side has.
    """
    missing, extra = sorted(expected.keys() - seen.keys()), sorted(seen.keys() - expected.keys())
    if missing or extra:
        found = [f"{len(m)} {w} ({', '.join(m[:3])}…)" for m, w in ((missing, "missing"), (extra, "unexpected")) if m]
        raise Mismatch(f"{what}: the same keys as `single`", " and ".join(found))


def equal_within(
    seen: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float, what: str
) -> float:
    """Every tensor differs by at most `tolerance` of its norm. Returns the largest relative difference.

    Raises:
        Mismatch: names the tensor that differs most.
    """
    same_keys(seen, expected, what)
    worst, at = 0.0, ""
    for key, tensor in expected.items():
        if seen[key].shape != tensor.shape:
            raise Mismatch(f"{what}: '{key}' of shape {list(tensor.shape)}", f"{list(seen[key].shape)}")
        scale = float(tensor.double().norm())
        apart = float((seen[key].double() - tensor.double()).norm()) / (scale or 1.0)
        if not apart <= worst:
            worst, at = apart, key
    if not worst <= tolerance:
        ratio = _ratio(seen[at], expected[at])
        raise Mismatch(f"{what} within {tolerance:g} of the norm", f"'{at}' differs by {worst:.3g} of its norm{ratio}")
    return worst


def _ratio(seen: torch.Tensor, expected: torch.Tensor) -> str:
    """Says so where one is a multiple of the other: the commonest mistake is a factor."""
    factor = float((seen.double() * expected.double()).sum() / expected.double().square().sum().clamp(min=1e-300))
    rest = float((seen.double() - factor * expected.double()).norm() / seen.double().norm().clamp(min=1e-300))
    return f" (it is {factor:.4g} times what it should be)" if rest < 1e-3 and abs(factor - 1) > 1e-3 else ""
