"""Table of what each backend supports, so that the rest is refused before any rank starts. Pure.

Gloo's part was tried out, every combination, with torch 2.13; NCCL's follows the tables of torch and of NCCL.
A backend that turns out to lack more says so when it is called; see `mtb_comm.bench`.
"""

from __future__ import annotations

from .definitions import FLOAT_DTYPES, OPERATIONS

_BITWISE = ("band", "bor", "bxor")


def why_not(
    operation: str, dtype: str | None, reduction: str | None, in_place: bool | None, backend: str
) -> str | None:
    """Error text if `backend` does not support this; None if it does."""
    return _placement(operation, in_place) or _reduction(dtype, reduction, backend)


def too_few_ranks(operation: str, ranks: int) -> str | None:
    """Error text if `operation` needs more than `ranks` ranks; None if it does not."""
    if operation == "send_recv" and ranks < 2:
        return "send_recv passes data around a ring, which takes at least 2 ranks"
    return None


def _placement(operation: str, in_place: bool | None) -> str | None:
    offered = OPERATIONS[operation].placements
    if in_place is None or not offered or in_place in offered:
        return None
    only = "in place" if offered[0] else "out of place"
    return f"torch.distributed does {operation} {only} only"


def _reduction(dtype: str | None, reduction: str | None, backend: str) -> str | None:
    if reduction is None:
        return None
    floating = dtype in FLOAT_DTYPES
    if backend == "nccl" and reduction in _BITWISE:
        return f"nccl has no reduction {reduction}"
    if reduction in _BITWISE and floating:
        return f"{reduction} is for whole numbers, and {dtype} is none"
    if backend == "gloo" and reduction == "avg" and not floating:
        return f"gloo cannot average {dtype}"
    return None
