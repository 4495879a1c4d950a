"""Summaries of repeated measurements."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtb_core.measure.statistics import percentile, summarize
from mtb_core.measure.student import student_cdf, student_quantile

finite = st.floats(-1e6, 1e6)


def test_summary_of_known_values() -> None:
    """Mean, sample deviation and Student's interval of five values agree with a worked example."""
    got = summarize([2.0, 4.0, 4.0, 4.0, 6.0])
    assert got is not None
    low, high = got.pop("ci95")
    assert {"mean": 4.0, "std": pytest.approx(math.sqrt(2)), "min": 2.0, "max": 6.0, "n": 5} == got
    assert [high - 4.0, 4.0 - low] == pytest.approx([2.7764451 * math.sqrt(2) / math.sqrt(5)] * 2)


def test_one_value_has_no_spread() -> None:
    """With one value there is nothing to say of spread: null, never 0."""
    assert summarize([3.0]) == {"mean": 3.0, "std": None, "min": 3.0, "max": 3.0, "n": 1, "ci95": None}


def test_values_that_were_not_measured_are_left_out() -> None:
    """None does not count; without any value there is no summary."""
    assert summarize([None, 2.0])["n"] == 1
    assert summarize([None, None]) is None
    assert summarize([]) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_cannot_hide(bad: float) -> None:
    """One non-finite value shows in every figure, wherever it stands."""
    for values in ([bad, 1.0, 2.0], [1.0, bad, 2.0], [1.0, 2.0, bad]):
        got = summarize(values)
        assert got["n"] == 3
        assert all(math.isnan(got[key]) for key in ("mean", "std", "min", "max"))


@pytest.mark.parametrize(
    ("p", "degrees", "expected"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.995, 4, 4.60409),
        (0.975, 9, 2.26216),
        (0.975, 12, 2.17881),
        (0.975, 120, 1.97993),
        (0.9, 30, 1.31042),
        (0.975, 1e6, 1.95997),
        (0.025, 9, -2.26216),
    ],
)
def test_quantiles_are_those_of_the_tables(p: float, degrees: float, expected: float) -> None:
    """Quantiles agree with printed tables, and the distribution undoes them."""
    assert student_quantile(p, degrees) == pytest.approx(expected, rel=1e-5)
    assert student_cdf(student_quantile(p, degrees), degrees) == pytest.approx(p, abs=1e-9)


@pytest.mark.parametrize(("p", "degrees"), [(0.975, 0), (0.0, 3), (1.0, 3)])
def test_what_has_no_quantile(p: float, degrees: float) -> None:
    """Zero degrees of freedom have no distribution, and nothing is certain."""
    with pytest.raises(ValueError, match="needs 0 < p < 1 and degrees > 0"):
        student_quantile(p, degrees)


@given(st.lists(finite, min_size=1, max_size=30), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    """Percentiles are numpy's linear ones."""
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), rel=1e-9, abs=1e-6)


@given(st.lists(finite, min_size=2, max_size=30))
def test_order_of_values_does_not_matter(values: list[float]) -> None:
    """A summary lies between its extremes and does not depend on the order."""
    got, turned = summarize(values), summarize(reversed(values))
    assert got["min"] - 1e-6 <= got["mean"] <= got["max"] + 1e-6
    assert got["std"] == pytest.approx(turned["std"], abs=1e-6) == pytest.approx(statistics.stdev(values), abs=1e-6)


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentile_refuses_what_has_none(values: list[float], q: float) -> None:
    """No values, or a percentile outside 0 to 100, is an error."""
    with pytest.raises(ValueError, match="percentile needs"):
        percentile(values, q)
