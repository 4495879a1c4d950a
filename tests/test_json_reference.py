"""docs/reference/json.md describes every key that is written, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

import mtb_core
from mtb_core.cli import main
from mtb_doctor.command import doctor
from mtb_evidence import environment, provenance


def described(section: str) -> set[str]:
    """Keys of the table below the heading `section`."""
    page = (Path(__file__).parent.parent / "docs" / "reference" / "json.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"^#+ `?{re.escape(section)}`?\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))


def test_result() -> None:
    """Every key of result.json, in code and page."""
    assert described("result.json") == {f.name for f in attrs.fields(mtb_core.Result)}


def test_metrics_lines() -> None:
    """Every key of a metrics line."""
    assert described("Metrics lines") == {f.name for f in attrs.fields(mtb_core.StepRecord)}


def test_environment_and_provenance() -> None:
    """Every key of what is recorded of machine and code."""
    assert described("environment") == set(environment())
    assert described("provenance") == set(provenance(["mtb"]))


def test_doctor() -> None:
    """Every key of doctor's document."""
    assert described("mtb doctor --json") == set(json.loads(CliRunner().invoke(doctor, ["--json"]).stdout))


def test_a_real_run(tmp_path: Path) -> None:
    """result.json, its runtime, and the metrics lines of a real run hold these keys."""
    size = {"seq_length": 8, "d_model": 8, "n_heads": 2, "n_layers": 1, "vocab_size": 64}
    config = mtb_core.TrainConfig(
        steps=1, warmup_steps=0, device="cpu", sink=("jsonl",), run_dir=str(tmp_path / "run"), **size
    )
    mtb_core.run(config, quiet=True).check()
    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert {key for key in result if not key.endswith("_nonfinite")} == described("result.json")
    assert set(result["runtime"]) == described("runtime")
    line = (tmp_path / "run" / "metrics" / "rank_00000.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert set(json.loads(line)) == described("Metrics lines")


def test_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key of the conformance kit's certificate and of its entries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    output = tmp_path / "certificate.json"
    assert main(["plugins", "check", "single", "--only", "discovery.plan", "--quiet", "--output", str(output)]) == 0
    document = json.loads(output.read_text(encoding="utf-8"))
    assert described("mtb plugins check --json") == set(document)
    assert described("An entry of `checks`") == set(document["checks"][0])
