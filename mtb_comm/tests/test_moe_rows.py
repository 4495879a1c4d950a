"""From traffic and times to a row, by hand."""

from __future__ import annotations

import pytest

from mtb_comm.moe.layer import Traffic
from mtb_comm.moe.rows import BACKWARD, FORWARD, RankRecord, imbalance, padding_waste, row
from mtb_comm.moe.settings import RouteSettings

SETTINGS = RouteSettings(tokens_per_rank=4, hidden_size=8, num_experts=3, top_k=1, capacity_factor=1.0, dtype="bf16")


def record(per_expert: list[int], send: list[int], receive: list[int], dispatch: list[float], expert: float):
    """A rank that dropped one slot."""
    traffic = Traffic([5, 2, 1], per_expert, send, receive, 4, 1, 1, 1, 3)
    phases = tuple({"dispatch": d, "expert": expert, "backward": 1.0} for d in dispatch)
    return RankRecord(traffic, phases, 24)


ROW = row(
    SETTINGS,
    [record([2, 1, 0], [3, 0], [3, 2], [1.0, 5.0], 2.0), record([1, 1, 1], [2, 1], [0, 1], [4.0, 3.0], 6.0)],
)


def test_loads():
    """Counts are sums over ranks; imbalance is max over mean; padding is what capacity leaves empty."""
    assert ROW["expert_token_counts"] == [3, 2, 1]
    assert ROW["rank_token_counts"] == [5, 1]
    assert ROW["send_counts"] == [[3, 0], [2, 1]]
    assert ROW["recv_counts"] == [[3, 2], [0, 1]]
    assert ROW["expert_owner_map"] == [0, 0, 1]
    assert ROW["capacity_per_expert"] == 3
    assert (ROW["slots"], ROW["overflowed_slots"], ROW["dropped_slots"], ROW["rerouted_slots"]) == (8, 2, 2, 0)
    assert ROW["drop_rate"] == 0.25
    assert ROW["dropped_tokens"] == 2
    assert ROW["requested_imbalance_ratio"] == 15 / 8
    assert ROW["load_imbalance_ratio"] == 1.5
    assert ROW["rank_imbalance_ratio"] == 5 / 3
    assert ROW["padding_waste"] == pytest.approx(1 - 6 / 9)
    assert ROW["busiest_rank"] == 0


def test_bytes_that_leave_their_rank():
    """Two rows of 8 bf16 numbers cross, in each of four phases, beside the counts."""
    assert ROW["sent_bytes"]["dispatch"] == 2 * 8 * 2
    assert ROW["sent_bytes"]["count_exchange"] == 48
    assert ROW["communication_bytes"] == 48 + 4 * 32
    assert ROW["remote_share"] == 2 / 6


def test_times_are_those_of_the_slowest_rank_in_each_iteration():
    """The maximum over ranks is taken within an iteration, then statistics over iterations; shares are of all time."""
    times = ROW["time_ms"]
    assert (times["dispatch"]["mean"], times["dispatch"]["max"], times["dispatch"]["min"]) == (4.5, 5, 4)
    assert times["expert"]["mean"] == 6
    assert times["iteration"]["mean"] == (11 + 10) / 2
    assert set(times) == {*FORWARD, *BACKWARD, "forward_pass", "backward_pass", "iteration"}
    assert ROW["slowest_rank"] == 1
    assert ROW["ranks"][0]["communication_ms"] == 3
    assert ROW["communication_share"] == pytest.approx(6.5 / (6 + 10.5))
    assert ROW["tokens_per_sec"] == pytest.approx(8 / 10.5e-3)


def test_extremes():
    """Even is 1; all on one is the number of counts; without a capacity padding goes up to the fullest."""
    assert imbalance([4, 4]) == 1
    assert imbalance([0, 0, 7]) == 3
    assert padding_waste([1, 3], None) == pytest.approx(1 / 3)
    assert padding_waste([1, 3], 4) == 0.5
