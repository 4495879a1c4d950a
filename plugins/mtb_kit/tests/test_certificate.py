"""Tests of mtb_kit.certificate: which of many failures to look at first."""

import pytest

from mtb_core.registry.discovery import discover
from mtb_kit.certificate import Certificate
from mtb_kit.checking import Outcome, cases, likely_cause
from mtb_kit.lab import Lab


def outcomes(*failed, sizes=(1, 2)):
    """Those of all cases at `sizes` ranks; the checks or cases named `failed` have failed."""
    return [
        Outcome(case, "failed" if {case.name, case.check.name} & set(failed) else "passed") for case in cases(sizes)
    ]


@pytest.mark.parametrize(
    ("failed", "first"),
    [
        (["parity.losses", "parity.weights", "parity.gradients", "checkpoints.keys"], "parity.gradients@1"),
        (["parity.losses", "parity.gradients@2", "checkpoints.exact_resume"], "parity.gradients@2"),
        (["parity.losses", "parity.initial_weights@2", "parity.gradients"], "parity.initial_weights@2"),
        (["discovery.hooks", "parity.data", "failures.stop"], "discovery.hooks@2"),
        (["parity.gradients", "parity.reduce_dtype", "sync.restored"], "parity.reduce_dtype@2"),
        (["parity.losses", "parity.gradients", "parity.gradients_cleared", "sync.gradients"], "parity.gradients@1"),
        (["checkpoints.keys", "checkpoints.exact_resume", "processes.memory"], "checkpoints.keys@1"),
        (["failures.stop@2"], "failures.stop@2"),
    ],
)
def test_the_most_basic_failure_is_the_likely_cause(failed, first):
    """Basic checks come first, whatever else failed; of one check, the case of the fewest ranks."""
    found = outcomes(*failed)
    assert likely_cause(found).case.name == first
    assert likely_cause(found[::-1]).case.name == first
    certificate = Certificate(Lab(discover().strategy("single"), world_sizes=(1,)), found)
    assert certificate.as_json()["likely_cause"] == first
    begin = [line for line in certificate.text().splitlines() if line.startswith("  begin at  ")]
    assert [line.split(";")[0] for line in begin] == [f"  begin at  {first}"] * (certificate.count("failed") > 1)


def test_nothing_failed():
    """Then there is no cause."""
    assert likely_cause(outcomes()) is None
    certificate = Certificate(Lab(discover().strategy("single"), world_sizes=(1,)), outcomes())
    assert certificate.as_json()["likely_cause"] is None
    assert "begin at" not in certificate.text()


@pytest.mark.parametrize(
    ("strategy", "sizes", "skipped", "verdict"),
    [
        ("ddp", (1,), False, "INCOMPLETE (it ran on one rank alone"),
        ("ddp", (1, 2), False, "CONFORMANT"),
        ("ddp", (2,), True, "CONFORMANT AS DECLARED (1 of "),
        ("single", (1,), False, "CONFORMANT"),
    ],
)
def test_one_rank_is_no_certificate(strategy, sizes, skipped, verdict):
    """A strategy for several ranks is certified on several, and what was skipped is counted in the verdict."""
    found = outcomes(sizes=sizes)
    if skipped:
        found[0] = Outcome(found[0].case, "skipped", reason="not promised")
    certificate = Certificate(Lab(discover().strategy(strategy), world_sizes=sizes), found)
    (line,) = [text for text in certificate.text().splitlines() if text.startswith("  verdict")]
    assert line.startswith(f"  verdict   {verdict}")
    assert (line.endswith("CONFORMANT")) == (verdict == "CONFORMANT")
    assert certificate.complete == certificate.conformant == (not verdict.startswith("INCOMPLETE"))
