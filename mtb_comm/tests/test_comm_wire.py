"""Bytes that algorithms send, worked out by hand."""

from __future__ import annotations

import pytest

from mtb_comm.wire import WireBytes, split_loads, split_wire_bytes, wire_bytes

#: Busiest rank and total for S = 1200 bytes on 2, 3 and 4 ranks over gloo.
GLOO = {
    "all_reduce": ((1200, 2400), (1600, 4800), (1800, 7200)),
    "reduce_scatter": ((1200, 2400), (1600, 4800), (1800, 7200)),
    "all_gather": ((600, 1200), (800, 2400), (900, 3600)),
    "all_to_all": ((600, 1200), (800, 2400), (900, 3600)),
    "broadcast": ((1200, 1200), (2400, 2400), (2400, 3600)),
    "reduce": ((1200, 1800), (1200, 3200), (1200, 4500)),
    "gather": ((600, 600), (400, 800), (300, 900)),
    "scatter": ((600, 600), (800, 800), (900, 900)),
    "send_recv": ((1200, 2400), (1200, 3600), (1200, 4800)),
}


@pytest.mark.parametrize("operation", GLOO)
def test_gloo(operation):
    """The busiest rank's bytes and all ranks' together."""
    found = [wire_bytes(operation, 1200, ranks, "gloo") for ranks in (2, 3, 4)]
    assert found == [WireBytes(*pair) for pair in GLOO[operation]]


def test_one_rank_sends_nothing():
    """A rank alone has nobody to send to."""
    assert wire_bytes("all_reduce", 1200, 1, "gloo") == WireBytes(0, 0)


def test_nccl_chooses_for_itself():
    """Point to point is known; what NCCL picks an algorithm for is not guessed."""
    assert wire_bytes("all_reduce", 1200, 4, "nccl") is None
    assert wire_bytes("all_to_all", 1200, 4, "nccl") == WireBytes(900, 3600)


def test_uneven_splits():
    """A rank's own part is not sent; the load is the larger of sent and received bytes."""
    table = ((100, 20, 0), (300, 50, 0), (40, 10, 7))
    assert split_wire_bytes(table) == WireBytes(300, 370)
    assert split_loads(table) == [340, 300, 50]
