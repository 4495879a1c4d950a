"""The data of checks: exact in every dtype, and different wherever it could be mixed up."""

from __future__ import annotations

import pytest
import torch

from mtb_comm.definitions import DTYPE_BYTES, FLOAT_DTYPES, REDUCTIONS
from mtb_comm.patterns import DTYPES, contributed, count_wrong, fill, moved, reduced, slack_of

N = 5000
POSITIONS = torch.arange(N)


def supported(dtype, reduction):
    return not (reduction in ("band", "bor", "bxor") and dtype in FLOAT_DTYPES) and not (
        reduction == "avg" and dtype not in FLOAT_DTYPES
    )


def combine(parts, reduction, order):
    """Reduce as a backend does: pair by pair in the dtype itself, in `order`; an average divides at the end."""
    operations = {
        "sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
        "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
    }  # fmt: skip
    total = parts[order[0]].clone()
    for index in order[1:]:
        total = operations[reduction](total, parts[index])
    return total / len(parts) if reduction == "avg" else total


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16, 100])
@pytest.mark.parametrize(("dtype", "reduction"), [(d, r) for d in DTYPE_BYTES for r in REDUCTIONS if supported(d, r)])
def test_reduced_is_exact_in_any_order(dtype, reduction, ranks):
    """Reducing in the dtype itself, forwards or backwards, gives exactly what is expected."""
    parts = []
    for rank in range(ranks):
        part = torch.empty(N, dtype=DTYPES[dtype])
        fill(part, contributed(rank, ranks, dtype, reduction))
        parts.append(part)
    order = list(range(ranks))
    expected = reduced(ranks, dtype, reduction)
    assert count_wrong(combine(parts, reduction, order), expected) == 0
    assert count_wrong(combine(parts, reduction, order[::-1]), expected) == 0


@pytest.mark.parametrize("ranks", [128, 256, 257, 600])
@pytest.mark.parametrize(
    ("dtype", "reduction"), [(d, r) for d in ("bf16", "int8") for r in REDUCTIONS if supported(d, r)]
)
def test_exact_on_more_ranks_than_the_dtype_counts(dtype, reduction, ranks):
    """Also where the number of ranks itself is not exact in the dtype, in both orders."""
    parts = []
    for rank in range(ranks):
        part = torch.empty(2 * ranks, dtype=DTYPES[dtype])
        fill(part, contributed(rank, ranks, dtype, reduction))
        parts.append(part)
    order = list(range(ranks))
    expected = reduced(ranks, dtype, reduction)
    assert count_wrong(combine(parts, reduction, order), expected) == 0
    assert count_wrong(combine(parts, reduction, order[::-1]), expected) == 0


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_missing_rank_is_found(reduction):
    """Leaving one rank's part out changes the result somewhere."""
    dtype = "fp32" if supported("fp32", reduction) else "int32"
    parts = []
    for rank in range(3):
        part = torch.empty(N, dtype=DTYPES[dtype])
        fill(part, contributed(rank, 3, dtype, reduction))
        parts.append(part)
    assert count_wrong(combine(parts, reduction, [0, 2]), reduced(3, dtype, reduction)) > 0


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_moved_data_tells_where_it_is_from(dtype):
    """Another sender's data, and the same data one element or one chunk further, differ nearly everywhere."""
    buffer = torch.empty(N, dtype=DTYPES[dtype])
    fill(buffer, moved(1, dtype))
    assert count_wrong(buffer, moved(1, dtype)) == 0
    assert count_wrong(buffer, moved(2, dtype)) > 0.9 * N
    for shift in (1, 64, 256, 1024):
        assert count_wrong(buffer, moved(1, dtype), start=shift) > 0.9 * N


def test_blocks_are_seamless(monkeypatch):
    """Filling in small blocks is the same as at once, and each wrong element counts once."""
    whole, pieces = torch.empty(N), torch.empty(N)
    fill(whole, moved(0, "fp32"))
    monkeypatch.setattr("mtb_comm.patterns._BLOCK", 7)
    fill(pieces, moved(0, "fp32"))
    assert torch.equal(whole, pieces)
    pieces[[0, 6, 7, N - 1]] += 1
    assert count_wrong(pieces, moved(0, "fp32")) == 4


def test_nan_is_wrong():
    """A NaN is counted, with slack or without."""
    buffer = torch.empty(10)
    fill(buffer, moved(0, "fp32"))
    buffer[3] = float("nan")
    assert count_wrong(buffer, moved(0, "fp32")) == 1
    assert count_wrong(buffer, moved(0, "fp32"), slack=0.1) == 1


def test_slack_only_where_it_rounds():
    """Only NCCL's average on ranks that are no power of two may be off, by rounding."""
    assert slack_of("avg", "fp32", 3, "nccl") < 1e-6
    assert slack_of("avg", "fp32", 3, "nccl") > 0
    assert (
        slack_of("avg", "fp32", 4, "nccl")
        == slack_of("avg", "fp32", 3, "gloo")
        == slack_of("sum", "fp32", 3, "nccl")
        == 0
    )
