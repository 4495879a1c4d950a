"""``mtb tp`` on real ranks: right layers pass, every known mistake is seen, sizes that do not divide work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from mtb_core.cli import main
from mtb_tp.mistakes import MISTAKES


def document(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """What ``mtb tp ARGUMENTS --json`` prints, as strict JSON; it must leave with `code`."""
    assert main(["tp", *arguments, "--json"]) == code, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    return found


UNEVEN = ("--tp", "3", "--in-features", "13", "--out-features", "7", "--hidden-features", "10")


SIZES = {
    "check": ("check",),
    "mlp": ("mlp",),
    "sequence": ("sequence",),
    "check-uneven": ("check", *UNEVEN[:6]),
    "mlp-uneven": ("mlp", *UNEVEN),
    "sequence-uneven": ("sequence", "--tp", "3", "--seq-length", "6", "--hidden-size", "5", "--hidden-features", "7"),
    "check-empty-part": ("check", "--tp", "4", "--out-features", "5", "--in-features", "5"),
}
#: With the others each takes seconds, and shows little more.
FAST = {
    "check": "fp32",
    "mlp": "fp32",
    "sequence": "fp32",
    "check-uneven": "fp32",
    "mlp-uneven": "fp64",
    "sequence-uneven": "bf16",
    "check-empty-part": "fp32",
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, marks=() if FAST[case] == dtype else pytest.mark.slow)
        for case in SIZES
        for dtype in ("fp32", "bf16", "fp64")
    ],
)
def test_right_layers_pass(case: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Outputs, all gradients and all collectives of both implementations are those of one process and of theory."""
    found = document(capsys, *SIZES[case], "--dtype", dtype)
    assert found["benchmark"] == "tensor_parallel"
    assert found["schema_version"] == 1
    assert found["status"] == "ok"
    assert (found["execution_complete"], found["performance_valid"]) == (True, None)
    assert {case["implementation"] for case in found["cases"]} == {"explicit", "torch"}
    for error in found["errors"].values():
        assert 0 <= error["max_abs_error"] <= error["tolerance"]
    assert {"output", "x_grad"} < found["errors"].keys()
    assert found["provenance"]["command"]
    assert found["environment"]["torch"]


def test_collectives_are_those_of_theory(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns: one all-reduce back; rows: one forward. With sequences cut: the same bytes by two other kinds."""
    sizes = ("--batch-size", "3", "--hidden-features", "20")
    linear = document(capsys, "check", *sizes[:2], "--in-features", "8", "--out-features", "12")
    for made in ("explicit", "torch"):
        assert linear["collectives"][f"{made}/column"] == {"forward": {}, "backward": {"all_reduce": 1}}
        assert linear["communication_bytes"][f"{made}/column"] == {"forward": 0, "backward": 3 * 8 * 4}
        assert linear["collectives"][f"{made}/row"] == {"forward": {"all_reduce": 1}, "backward": {}}
        assert linear["communication_bytes"][f"{made}/row"] == {"forward": 3 * 12 * 4, "backward": 0}
    mlp = document(capsys, "mlp", "--batch-size", "24", *sizes[2:], "--in-features", "16", "--out-features", "16")
    cut = document(capsys, "sequence", *sizes, "--seq-length", "8", "--hidden-size", "16")
    for made in ("explicit", "torch"):
        assert cut["collectives"][f"{made}/sequence"]["forward"] == {"all_gather": 1, "reduce_scatter": 1}
        whole, parts = (d["communication_bytes"][f"{made}/{d['check'][3:]}"] for d in (mlp, cut))
        assert parts["forward"] == whole["forward"] == 24 * 16 * 4
        vectors = 3 if made == "explicit" else 2
        assert parts["backward"] == whole["backward"] + vectors * 16 * 4


@pytest.mark.parametrize("check", ["check", "mlp", "sequence"])
@pytest.mark.parametrize(
    "more",
    [(), pytest.param(("--tp", "3", "--seq-length", "9", "--dtype", "bf16"), marks=pytest.mark.slow)],
    ids=["fp32", "bf16"],
)
def test_every_mistake_is_seen(check: str, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """The self-test makes each mistake, and finds it in a quantity that it must spoil."""
    arguments = more if check == "sequence" else tuple(a for a in more if a not in ("--seq-length", "9"))
    rows = document(capsys, check, *arguments, "--self-test")["self_test"]
    assert all(row["status"] == "ok" for row in rows)
    seen = {(row["layer"], row["mistake"]): row["seen_in"] for row in rows}
    for (layer, mistake), quantities in seen.items():
        if "backward leaves out" in mistake:
            assert quantities == ["x_grad"], layer
        elif "forward leaves out" in mistake or "bias added" in mistake or "same seed" in mistake:
            assert "output" in quantities, (layer, mistake)
    assert len(rows) == {"check": 5, "mlp": 4, "sequence": 5}[check]


def test_an_unseen_mistake_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a mistake changes nothing, the layers pass and the self-test does not: exit code 1."""
    real = MISTAKES[0]
    harmless = attrs.evolve(real, wrong=vars(real.owner)[real.name])
    monkeypatch.setattr("mtb_tp.checking.MISTAKES", (harmless, *MISTAKES[1:]))  # ranks are forked
    found = document(capsys, "check", "--self-test", code=1)
    assert all(case["status"] == "ok" for case in found["cases"])
    assert [row["status"] for row in found["self_test"]] == ["failed", "ok", "ok", "ok", "ok"]
    assert found["status"] == "failed"


@pytest.mark.parametrize(
    "arguments", [("mlp", "--atol", "100"), ("sequence", "--dropout", "0.001")], ids=["tolerance", "dropout"]
)
def test_the_self_test_is_not_blinded(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """A tolerance or a dropout that hides mistakes in the layers does not hide them from the self-test."""
    found = document(capsys, *arguments, "--self-test")
    assert {row["status"] for row in found["self_test"]} == {"ok"}


def test_a_tolerance_that_is_exceeded_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, the quantity is named, and the document is written all the same."""
    assert main(["tp", "mlp", "--atol", "0", "--quiet", "--output", str(tmp_path / "new" / "out.json")]) == 1
    said = capsys.readouterr()
    assert not said.out
    assert "output is off by" in said.err
    found = json.loads((tmp_path / "new" / "out.json").read_text())
    assert found["errors"]["output"]["status"] == found["status"] == "failed"


def test_tables_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """Errors, collectives and mistakes are shown on stdout, complete at 80 columns."""
    assert main(["tp", "sequence", "--self-test"]) == 0
    shown = capsys.readouterr().out
    for text in ("explicit sequence", "torch sequence", "norm_weight_grad", "1 all_gather of", "same seed", ": ok"):
        assert text in shown
    assert "…" not in shown


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("sequence", "--seq-length", "7"), "valid: 1, 7"),
        (("check", "--tp", "1"), "x>=2"),
        (("mlp", "--dtype", "fp16"), "'fp32', 'bf16', 'fp64'"),
        (("sequence", "--dropout", "1"), "0<=x<1"),
        (("sequence", "--dropout", "nan"), "nan is not a finite number"),
        (("check", "--atol", "nan"), "nan is not a finite number"),
        (("mlp", "--atol", "inf"), "inf is not a finite number"),
        (("check", "--in-features", "0"), "x>=1"),
        (("mlp", "--tp", "4", "--hidden-features", "3"), "at least 4"),
        (("check", "--output", "."), "is a folder"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 before any rank starts; the message says what is valid."""
    assert main(["tp", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "code"), [((), 0), (("--tp", "3"), 1)])
def test_under_torchrun(asked: tuple[str, ...], code: int) -> None:
    """Torchrun's ranks are the degree, rank 0 alone prints; another degree asked for is refused."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, "-m", "mtb_core", "tp", "check", "--json", *asked],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )
    assert ran.returncode == code, ran.stderr
    if code:
        assert "was started on 2 ranks, but needs --tp 3" in ran.stderr
    else:
        assert json.loads(ran.stdout)["tp_degree"] == 2
