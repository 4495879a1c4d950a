"""The matrix of points: what is measured, what is skipped and why, what is refused."""

from __future__ import annotations

import pytest

from mtb_comm.points import CommRequest, dtype_names, group_ranks, operation_names, plan_points, reduction_names
from mtb_core import ConfigError


def test_names():
    """Lists, repeats and other spellings are understood; each name counts once, in order."""
    assert operation_names(("broadcast,all-reduce", "alltoall", "broadcast")) == (
        "broadcast",
        "all_reduce",
        "all_to_all",
    )
    assert dtype_names(("bfloat16", "FP32", "half")) == ("bf16", "fp32", "fp16")
    assert len(operation_names(("all",))) == 10


def test_unknown_names_suggest():
    """A typing error is answered with the nearest name and all valid ones."""
    with pytest.raises(ConfigError, match=r"no operation 'al_reduce'. Did you mean 'all_reduce'\? Valid: all_reduce, "):
        operation_names(("al_reduce",))
    with pytest.raises(ConfigError, match="no dtype 'fp12'"):
        dtype_names(("fp12",))
    with pytest.raises(ConfigError, match="no reduction 'mean'"):
        reduction_names(("mean",))


def test_skipped_rows_have_a_reason():
    """In a matrix, what a backend lacks is a point with its reason, one for all sizes."""
    request = CommRequest(
        operations=("all_reduce",), sizes=(1024, 2048), dtypes=("fp32", "int8"), reductions=("avg", "band")
    )
    points = plan_points(request, 2, "gloo")
    found = {(p.dtype, p.reduction): p.reason for p in points}
    assert found == {
        ("fp32", "avg"): None,
        ("fp32", "band"): "band is for whole numbers, and fp32 is none",
        ("int8", "avg"): "gloo cannot average int8",
        ("int8", "band"): None,
    }
    assert len(points) == 2 * 2 + 2


@pytest.mark.parametrize(
    ("fields", "backend", "words"),
    [
        ({"operations": ("all_reduce",), "dtypes": ("int8",), "reductions": ("avg",)}, "gloo", "cannot average int8"),
        ({"operations": ("all_reduce",), "dtypes": ("int8",), "reductions": ("bor",)}, "nccl", "nccl has no reduction"),
        ({"operations": ("all_reduce",), "placements": (False,)}, "gloo", "in place only"),
        ({"operations": ("all_gather",), "sizes": (4,)}, "gloo", "4 bytes are less than the 8"),
    ],
)
def test_named_alone_it_is_an_error(fields, backend, words):
    """If nothing is left to measure, the reason is the error."""
    with pytest.raises(ConfigError, match=words):
        plan_points(CommRequest(**{"sizes": (1024,), **fields}), 2, backend)


def test_ring_needs_two_ranks():
    """One rank has nobody to send to."""
    with pytest.raises(ConfigError, match="at least 2 ranks"):
        plan_points(CommRequest(operations=("send_recv",), sizes=(1024,)), 1, "gloo")


def test_sizes_that_round_to_the_same_are_measured_once():
    """S of 3 ranks in whole parts: 1000 and 1003 bytes both are 996."""
    points = plan_points(CommRequest(operations=("all_gather",), sizes=(1000, 1003)), 3, "gloo")
    assert [p.size_bytes for p in points] == [996]


def test_placements():
    """Usual by default; where both are asked for, the one that torch lacks is skipped."""
    usual = plan_points(CommRequest(operations=("all_reduce", "all_gather", "barrier"), sizes=(1024,)), 2, "gloo")
    assert [p.in_place for p in usual] == [True, False, None]
    request = CommRequest(operations=("all_reduce", "all_gather"), sizes=(1024,), placements=(False, True))
    both = plan_points(request, 2, "gloo")
    assert [(p.in_place, p.reason is None) for p in both] == [(False, False), (True, True), (False, True), (True, True)]


def test_splits_in_elements():
    """Splits by hand become elements; what is no whole element is a reason."""
    request = CommRequest(
        operations=("all_to_all",), sizes=(12,), dtypes=("int8", "fp32", "fp64"), split_kinds=("uneven",),
        splits=((8, 4), (12, 0)),
    )  # fmt: skip
    points = plan_points(request, 2, "gloo")
    assert [p.splits for p in points[:2]] == [((8, 4), (12, 0)), ((2, 1), (3, 0))]
    assert "4 bytes is no whole number of fp64" in points[2].reason


@pytest.mark.parametrize("size", [0, 3, 5, 8])
def test_groups_fill_the_world(size):
    """Too many ranks in a group, or a rest, is refused with the valid sizes."""
    with pytest.raises(ConfigError, match=r"Valid: 1, 2, 4\."):
        group_ranks(CommRequest(operations=("barrier",), sizes=(8,), group_size=size), 4)
