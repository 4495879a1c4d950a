"""Probabilities against tables and against what they must be by symmetry."""

from __future__ import annotations

import math

import pytest

from mtb_profile.chance import robust_spread, sign_test, t_test


def test_signs():
    """Of n steps, all slower: 2^-n; none: certain to be met."""
    assert sign_test([1.0] * 7) == 2.0**-7
    assert sign_test([1.0] * 9 + [-1.0]) == 11 / 1024
    assert sign_test([-1.0] * 3) == 1.0


@pytest.mark.parametrize(("steps", "t"), [(2, 12.706205), (3, 4.302653), (4, 3.182446), (10, 2.262157), (31, 2.042272)])
def test_student(steps, t):
    """The 0.975 quantiles of Student's t leave 2.5% above them, and as much below their negative."""
    half = (steps - 1) / 2
    spread = [-1.0, 1.0] if steps == 2 else [k - half for k in range(steps)]
    scale = math.sqrt(sum(v * v for v in spread) / (steps - 1)) / math.sqrt(steps)
    values = [v + t * scale for v in spread]
    assert t_test(values) == pytest.approx(0.025, rel=1e-5)
    assert t_test([-v for v in values]) == pytest.approx(0.975, rel=1e-5)


def test_no_spread():
    """Values that are all the same prove their sign; one value proves nothing."""
    assert (t_test([3.0, 3.0]), t_test([0.0, 0.0]), t_test([-3.0, -3.0]), t_test([3.0])) == (0.0, 1.0, 1.0, 1.0)


def test_outliers_do_not_count():
    """A single step that took long does not make the others' spread."""
    assert robust_spread([1.0, 1.0, 1.0, 900.0]) == 0.0
