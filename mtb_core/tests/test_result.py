"""The result's figures, from records alone."""

from __future__ import annotations

import math

import pytest

from mtb_core import RunFailed
from mtb_core.measure.result import RankReport, Result, combine_trials, rank_report, trial_row
from mtb_kit.examples import example_record


def test_times_are_means_of_the_slowest_rank() -> None:
    """For each measured step the maximum over ranks is taken, then the mean; warm-up is left out."""
    records = [example_record(step, valid_tokens=100) for step in range(1, 5)]  # two of warm-up
    times = [[[900.0, 0.0, 0.0, 0.0]] * 2 + [[10.0, 1.0, 8.0, 1.0], [20.0, 2.0, 16.0, 2.0]]]
    times.append([[900.0, 0.0, 0.0, 0.0]] * 2 + [[30.0, 1.0, 8.0, 1.0], [10.0, 2.0, 16.0, 2.0]])
    row = trial_row(records, [RankReport(times[0], 5.0, [4.0]), RankReport(times[1], 7.0, [6.0])])
    assert (row["steps"], row["warmup_steps"]) == (2, 2)
    assert row["step_time_ms"] == 25.0
    assert row["tokens_per_sec"] == pytest.approx(200 / 0.05)
    assert row["max_memory_mib"] == 7.0
    assert row["checkpoint_time_ms"] == 6.0
    assert (row["loss_first"], row["loss"]) == (records[0].loss, records[3].loss)


def test_without_measured_steps_times_are_unknown() -> None:
    """Not 0."""
    row = trial_row([example_record(1)], [rank_report([example_record(1)])])
    assert row["step_time_ms"] is None
    assert row["tokens_per_sec"] is None
    assert row["checkpoint_time_ms"] is None


def test_a_norm_that_is_not_a_number_is_the_largest() -> None:
    """It must not hide behind finite ones."""
    records = [example_record(step, grad_norm=norm) for step, norm in ((3, 1.0), (4, math.nan), (5, 2.0))]
    assert math.isnan(trial_row(records, [rank_report(records)])["grad_norm_max"])


def test_trials_are_averaged() -> None:
    """The mean stands in the result, its spread in the summary, raw values with the trials."""
    figures, summary = combine_trials([{"loss": 1.0, "steps": 3}, {"loss": 3.0, "steps": 3}])
    assert figures == {"loss": 2.0, "steps": 3}
    assert (summary["loss"]["n"], summary["loss"]["min"], summary["loss"]["max"]) == (2, 1.0, 3.0)


def test_json_and_back() -> None:
    """A result survives its JSON; a failed one raises when asked to."""
    result = Result(
        exit_reason="failed",
        failure={"text": "Rank 1 failed: x", "rank": 1, "step": 2},
        strategy="s",
        strategy_options={},
        world_size=2,
        precision="fp32",
        loss=math.inf,
    )
    values = result.to_json()
    assert (values["loss"], values["loss_nonfinite"]) == (None, "inf")
    assert Result.from_json(values).exit_code == 3
    with pytest.raises(RunFailed, match="Rank 1 failed: x") as caught:
        result.check()
    assert (caught.value.rank, caught.value.step) == (1, 2)
