"""`mtb train` on two ranks with and without mtb-evidence: the training is the same, and only one result vouches for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mtb_core.cli import main

COMMAND = [
    "train",
    "--strategy",
    "ddp",
    "--nproc",
    "2",
    "--device",
    "cpu",
    "--steps",
    "3",
    "--warmup-steps",
    "0",
    "--seq-length",
    "8",
    "--d-model",
    "8",
    "--n-heads",
    "2",
    "--n-layers",
    "1",
    "--vocab-size",
    "64",
    "--quiet",
]
#: What only the plugin knows.
VOUCHED = {
    "environment", "provenance", "conditions", "performance_valid", "performance_invalid_reasons", "publishable",
    "unpublishable_reasons",
}  # fmt: skip


def trained(folder: Path, *words: str) -> dict[str, Any]:
    """result.json of a run into `folder`."""
    assert main([*COMMAND, "--run-dir", str(folder), *words]) == 0
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result


def test_a_result_without_evidence_says_so(tmp_path: Path) -> None:
    """The losses and keys are the same; what is not known is empty, and the reasons name the plugin."""
    whole, bare = trained(tmp_path / "whole"), trained(tmp_path / "bare", "--no-plugin", "evidence")
    assert whole.keys() == bare.keys()
    assert all(whole[key] == bare[key] for key in ("loss", "grad_norm", "config_fingerprint", "execution_complete"))
    assert (whole["publishable"], whole["unpublishable_reasons"]) == (True, [])
    assert whole["performance_invalid_reasons"]
    assert not any("mtb-evidence" in reason for reason in whole["performance_invalid_reasons"])
    assert all(whole[key] for key in ("environment", "provenance", "conditions"))
    assert {key: bool(bare[key]) for key in VOUCHED} == {
        key: key in ("performance_invalid_reasons", "unpublishable_reasons") for key in VOUCHED
    }
    for key in ("performance_invalid_reasons", "unpublishable_reasons"):
        assert any("mtb-evidence" in reason for reason in bare[key])
