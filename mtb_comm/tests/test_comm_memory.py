"""Sizes that no memory holds are refused before any rank starts."""

from __future__ import annotations

import pytest

from mtb_comm.definitions import OPERATIONS
from mtb_comm.memory import buffer_bytes, refuse_too_large
from mtb_comm.points import CommRequest, plan_points
from mtb_core import ConfigError


@pytest.mark.parametrize(
    ("operation", "needed"),
    [("all_reduce", 4096), ("all_gather", 6144), ("reduce_scatter", 6144), ("all_to_all", 8192), ("send_recv", 8192),
     ("broadcast", 4096), ("reduce", 4096), ("gather", 3072), ("scatter", 3072), ("barrier", 0)],
)  # fmt: skip
def test_buffers(operation, needed):
    """Two ranks allocate this many bytes for S of 2 KiB with the usual placement."""
    (point,) = plan_points(CommRequest(operations=(operation,), sizes=(2048,)), 2, "gloo")
    assert buffer_bytes(point, 2) == needed


def test_the_point_is_named():
    """The message has the operation, its size, and how much there is; sizes that fit are let through."""
    points = plan_points(CommRequest(operations=("all_reduce", "broadcast"), sizes=(1024, 900 * 2**40)), 2, "gloo")
    with pytest.raises(ConfigError, match=r"all_reduce fp32 sum 900T needs 1,843,200.0 GiB .* give smaller ones"):
        refuse_too_large(points, 2)
    refuse_too_large(plan_points(CommRequest(operations=tuple(OPERATIONS), sizes=(2**20,)), 2, "gloo"), 2)
