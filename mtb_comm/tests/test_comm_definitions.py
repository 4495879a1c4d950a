"""S, algbw and busbw are those of nccl-tests."""

from __future__ import annotations

import pytest

from mtb_comm.definitions import OPERATIONS, bandwidths, bus_factor, count_of, whole_elements

#: busbw / algbw at 1, 2, 3, 4 and 8 ranks, worked out by hand from doc/PERFORMANCE.md of nccl-tests; on one rank 0.
RANKS = (1, 2, 3, 4, 8)
FACTORS = {
    "all_reduce": (0, 1, 4 / 3, 1.5, 1.75),
    "all_gather": (0, 0.5, 2 / 3, 0.75, 0.875),
    "reduce_scatter": (0, 0.5, 2 / 3, 0.75, 0.875),
    "all_to_all": (0, 0.5, 2 / 3, 0.75, 0.875),
    "gather": (0, 0.5, 2 / 3, 0.75, 0.875),
    "scatter": (0, 0.5, 2 / 3, 0.75, 0.875),
    "broadcast": (0, 1, 1, 1, 1),
    "reduce": (0, 1, 1, 1, 1),
    "send_recv": (0, 1, 1, 1, 1),
}

#: S and count for 1000 bytes of fp32 asked for, at the same numbers of ranks: 250 elements, in whole parts where the
#: operation has one part for each rank.
SIZES = {
    "all_reduce": ((1000, 250), (1000, 250), (1000, 250), (1000, 250), (1000, 250)),
    "broadcast": ((1000, 250), (1000, 250), (1000, 250), (1000, 250), (1000, 250)),
    "reduce": ((1000, 250), (1000, 250), (1000, 250), (1000, 250), (1000, 250)),
    "send_recv": ((1000, 250), (1000, 250), (1000, 250), (1000, 250), (1000, 250)),
    "all_gather": ((1000, 250), (1000, 125), (996, 83), (992, 62), (992, 31)),
    "reduce_scatter": ((1000, 250), (1000, 125), (996, 83), (992, 62), (992, 31)),
    "all_to_all": ((1000, 250), (1000, 125), (996, 83), (992, 62), (992, 31)),
    "gather": ((1000, 250), (1000, 125), (996, 83), (992, 62), (992, 31)),
    "scatter": ((1000, 250), (1000, 125), (996, 83), (992, 62), (992, 31)),
}


def test_every_operation_is_in_the_tables():
    """The tables here leave out no operation that has data."""
    assert set(FACTORS) == set(SIZES) == set(OPERATIONS) - {"barrier"}


@pytest.mark.parametrize("operation", FACTORS)
def test_bus_factor(operation):
    """The factor is the one worked out by hand."""
    assert pytest.approx(FACTORS[operation], rel=1e-15) == [bus_factor(operation, n) for n in RANKS]


@pytest.mark.parametrize("operation", SIZES)
def test_size_and_count(operation):
    """S is rounded down to whole parts, and count is what nccl-tests prints."""
    found = []
    for ranks in RANKS:
        elements = whole_elements(operation, 1000, "fp32", ranks)
        found.append((elements * 4, count_of(operation, elements, ranks)))
    assert SIZES[operation] == tuple(found)


def test_bandwidths_in_units_of_1e9_bytes():
    """3 GB in 2 s on 4 ranks: algbw 1.5, and busbw 2.25 for all_reduce."""
    assert bandwidths("all_reduce", 3_000_000_000, 2.0, 4) == (1.5, 2.25)


def test_no_bandwidth_without_size_or_time():
    """A barrier has none, and a clock that did not move gives none."""
    assert bandwidths("barrier", 0, 1.0, 4) == (None, None)
    assert bandwidths("all_reduce", 8, 0.0, 4) == (None, None)


def test_one_rank_uses_no_bus():
    """On one rank algbw is real and busbw 0, for every operation."""
    for operation in FACTORS:
        assert bandwidths(operation, 10**9, 1.0, 1) == (1.0, 0.0)
