"""The fit finds the line, is not bent by odd points, and is honest about its error."""

from __future__ import annotations

import random

import pytest

from mtb_comm.fit import calibration, fit_line, fit_rows

SIZES = [2**k for k in range(10, 27, 2)]


def times(alpha, beta, sizes=SIZES):
    return [alpha + size / beta for size in sizes]


def test_exact_line():
    """Without noise both parts come out exactly, with no error."""
    line = fit_line(SIZES, times(30e-6, 2e9))
    assert (line.alpha_s, 1 / line.seconds_per_byte) == pytest.approx((30e-6, 2e9), rel=1e-6)
    assert line.worst < 1e-6


def test_odd_points_do_not_bend_it():
    """Two sizes out of nine that take five times as long change beta by little, and show in the worst error."""
    odd = times(30e-6, 2e9)
    odd[2] *= 5
    odd[7] *= 5
    line = fit_line(SIZES, odd)
    assert 1 / line.seconds_per_byte == pytest.approx(2e9, rel=0.1)
    assert line.worst > 0.5


def test_bursts_do_not_pass_for_bandwidth():
    """A link that lets short messages through at twice its rate is seen at its rate by the long ones."""
    burst = [size / (4e9 if size < 2**17 else 2e9) for size in SIZES]
    line = fit_line(SIZES, burst)
    assert 1 / line.seconds_per_byte == pytest.approx(2e9, rel=0.05)


def test_errors_cover_the_truth():
    """With 3 % of noise, beta is within two standard errors at least eight times out of ten."""
    generator = random.Random(1)
    hits = 0
    for _ in range(200):
        noisy = [t * generator.gauss(1, 0.03) for t in times(30e-6, 2e9)]
        line = fit_line(SIZES, noisy)
        hits += abs(line.seconds_per_byte - 1 / 2e9) < 2 * line.seconds_per_byte_error
    assert hits > 160


def test_no_negative_latency():
    """Times that grow faster than the size do not make a latency below zero."""
    line = fit_line(SIZES, [size**1.2 / 1e9 for size in SIZES])
    assert line.alpha_s == 0
    assert line.seconds_per_byte > 0


def test_too_little_for_a_line():
    """One size, or time that does not grow, makes no fit; two sizes make one without an error."""
    assert fit_line([8], [1.0]) is None
    assert fit_line([8, 16], [1.0, 1.0]) is None
    assert fit_line([8, 16], [1.0, 2.0]).alpha_error_s is None


def row(size, seconds, **fields):
    return {
        "operation": "all_reduce", "dtype": "fp32", "reduction": "sum", "in_place": True, "split": None,
        "world_size": 4, "status": "ok", "size_bytes": size, "time_ms": {"p50": seconds * 1e3}, **fields,
    }  # fmt: skip


def test_series_are_fitted_apart():
    """Rows that differ in more than the size are not mixed; failed ones are left out; busbw has its factor."""
    rows = [row(s, t) for s, t in zip(SIZES, times(1e-5, 1e9), strict=True)]
    rows += [row(s, t, dtype="bf16") for s, t in zip(SIZES, times(1e-5, 3e9), strict=True)]
    rows += [row(s, 1.0, status="failed") for s in SIZES]
    fits = fit_rows(rows)
    assert [(f["dtype"], f["points"]) for f in fits] == [("fp32", 9), ("bf16", 9)]
    assert [f["beta_gb_per_sec"] for f in fits] == pytest.approx([1.0, 3.0])
    assert fits[0]["beta_busbw_gb_per_sec"] == pytest.approx(1.5)


def test_calibration_file_says_its_model():
    """The file has a schema, the model's formula with units, and the fits."""
    document = {
        "world_size": 2, "groups": 1, "backend": "gloo", "device": "cpu", "fits": [], "environment": {}, "provenance": {},
        "performance_valid": False, "performance_invalid_reasons": ["busy"],
    }  # fmt: skip
    written = calibration(document)
    assert written["schema_version"] == 1
    assert (written["performance_valid"], written["performance_invalid_reasons"]) == (False, ["busy"])
    assert "alpha_s + size_bytes / (beta_gb_per_sec * 1e9)" in written["model"]
