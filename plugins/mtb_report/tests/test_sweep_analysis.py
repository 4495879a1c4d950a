"""What follows from the cells of a sweep together: efficiency, errors, the largest that fits."""

from __future__ import annotations

from typing import Any

import pytest

from mtb_report.sweep.analysis import add_efficiency, add_errors, largest_that_fits


def row(name: str, status: str = "success", figures: dict[str, Any] | None = None, **labels: Any) -> dict[str, Any]:
    return {"id": name, "labels": labels, "status": status, "figures": figures or {}}


def test_strong_efficiency() -> None:
    """T1 / (n Tn), each strategy against its own run on one rank; without that, nothing."""
    rows = [
        row("a", figures={"step_time_ms": 100.0}, nproc=1, strategy="ddp"),
        row("b", figures={"step_time_ms": 40.0}, nproc=4, strategy="ddp"),
        row("c", figures={"step_time_ms": 50.0}, nproc=4, strategy="fsdp"),
        row("d", "oom", nproc=1, strategy="fsdp"),
    ]
    add_efficiency(rows, "strong")
    assert [r["efficiency"] for r in rows] == [1.0, 0.625, None, None]


@pytest.mark.parametrize(
    ("scaling", "batches", "words"),
    [("strong", (4, 8), "global batch is 8, but 4"), ("weak", (4, 4), "batch of a rank is 2, but 4")],
)
def test_no_efficiency_of_unlike_work(scaling: str, batches: tuple[int, int], words: str) -> None:
    """Where the batch that must be equal is not, there is a reason and no figure, and people see it."""
    rows = [
        row(str(n), figures={"step_time_ms": 1.0, "tokens_per_sec": 2.0, "global_batch_size": batch}, nproc=n)
        for n, batch in zip((1, 2), batches, strict=True)
    ]
    add_efficiency(rows, scaling)
    assert [r["efficiency"] for r in rows] == [1.0, None]
    assert words in rows[1]["efficiency_reason"]
    assert rows[0]["efficiency_reason"] is None


@pytest.mark.parametrize(
    ("status", "base_status", "reasons"),
    [
        ("success", "oom", ("the cell ended as oom", "the cell on 1 rank, the base, ended as oom")),
        ("partial", "success", (None, "the cell ended as partial")),
        (None, "success", (None, "the cell was not run")),
    ],
)
def test_no_efficiency_of_what_did_not_succeed(
    status: str | None, base_status: str, reasons: tuple[str | None, ...]
) -> None:
    """Figures of a part are none of the whole; the reason says whether it is the cell or its base."""
    rows = [
        {**row(str(n), figures={"step_time_ms": 1.0}, nproc=n), "status": end}
        for n, end in ((1, base_status), (2, status))
    ]
    add_efficiency(rows, "strong")
    assert tuple(r["efficiency_reason"] for r in rows) == reasons
    assert rows[1]["efficiency"] is None


def test_no_efficiency_against_a_base_that_is_not_valid() -> None:
    """A disturbed run on one rank makes any efficiency, also one above 1."""
    rows = [row(str(n), figures={"step_time_ms": 1.0}, nproc=n) for n in (1, 2)]
    rows[0]["performance_valid"] = False
    add_efficiency(rows, "strong")
    assert (rows[0]["efficiency"], rows[1]["efficiency"]) == (1.0, None)
    assert "no valid measurement" in rows[1]["efficiency_reason"]


@pytest.mark.parametrize(("device", "given"), [("cpu", False), ("cuda", True)])
def test_threads_are_not_compared_with_ranks(device: str, given: bool) -> None:
    """On a CPU a single rank computes with all cores, unless it is told otherwise."""
    rows = [
        row(str(n), figures={"step_time_ms": 1.0, "device": device, "torch_threads": 8 // n}, nproc=n) for n in (1, 2)
    ]
    add_efficiency(rows, "strong")
    assert (rows[1]["efficiency"] is not None) is given
    assert given or "OMP_NUM_THREADS" in rows[1]["efficiency_reason"]


def test_no_efficiency_without_a_time() -> None:
    """A cell that succeeded without a measured step has none."""
    rows = [row("a", nproc=1), row("b", figures={"step_time_ms": 1.0}, nproc=2)]
    add_efficiency(rows, "strong")
    assert [r["efficiency_reason"] for r in rows] == [
        "the cell has no time",
        "the cell on 1 rank, the base, has no time",
    ]


def test_weak_efficiency_from_two_ranks() -> None:
    """Tokens a second and rank over those of the fewest ranks, which are named."""
    rows = [
        row("a", figures={"step_time_ms": 1.0, "tokens_per_sec": 200.0}, nproc=2),
        row("b", figures={"step_time_ms": 1.0, "tokens_per_sec": 360.0}, nproc=4),
    ]
    add_efficiency(rows, "weak")
    assert rows[1]["efficiency"] == pytest.approx(0.9)
    assert rows[1]["efficiency_base_ranks"] == 2


def test_errors_against_a_reference() -> None:
    """The largest relative deviation over common steps, against the reference of the same other labels."""
    rows = [row(f"{s}{p}", strategy=s, precision=p) for s in "xy" for p in ("fp32", "bf16")]
    line = {"global_step": 1, "loss": 2.0, "grad_norm": 4.0}
    metrics = {
        "xfp32": [line, {**line, "global_step": 2, "loss": 1.0}],
        "xbf16": [
            {**line, "loss": 2.1},
            {**line, "global_step": 2, "loss": 1.2, "grad_norm": None},
            {**line, "global_step": 3},
        ],
        "yfp32": [],
    }
    add_errors(rows, {"precision": "fp32"}, metrics)
    found = {r["id"]: r for r in rows}
    assert found["xfp32"]["loss_error"] == 0.0
    assert found["xbf16"]["loss_error"] == pytest.approx(0.2)
    assert found["xbf16"]["grad_norm_error"] == 0.0
    assert found["xbf16"]["error_steps"] == 2
    assert found["ybf16"]["reference"] == "yfp32"
    assert found["ybf16"]["loss_error"] is None


@pytest.mark.parametrize("bad", ["a", "b"])
def test_a_training_that_diverged_has_no_error(bad: str) -> None:
    """Steps that are not finite, in the cell or its reference, are counted, and no small number stands in their place."""
    rows = [row(name, precision=name) for name in "ab"]
    good = [{"global_step": n, "loss": 1.0, "grad_norm": 1.0} for n in range(10)]
    broken = {"loss": None, "loss_nonfinite": "nan", "grad_norm": None, "grad_norm_nonfinite": "inf"}
    metrics = dict.fromkeys("ab", good)
    metrics[bad] = good[:2] + [{**line, **broken} for line in good[2:]]
    add_errors(rows, {"precision": "a"}, metrics)
    assert (rows[1]["loss_error"], rows[1]["grad_norm_error"]) == (None, None)
    assert (rows[1]["error_steps"], rows[1]["loss_nonfinite_steps"], rows[1]["grad_norm_nonfinite_steps"]) == (2, 8, 8)


def test_nothing_that_fits() -> None:
    """Where even the smallest is too large, no size is named."""
    assert largest_that_fits([row("a", "oom", batch_size=1)], "batch_size")[0]["largest"] is None
