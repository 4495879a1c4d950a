"""Real traces of GPU jobs and of gloo, against values that were worked out independently.

The traces are large and not ours to copy: MTB_REFERENCE_TRACES names a folder with `expected.json` (values in µs by trace
and window), the traces that it names, and `t1/` (two ranks under gloo, of which rank 1 sleeps 150 ms a step).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mtb_profile.analysis import analyze
from mtb_profile.breakdown import activity
from mtb_profile.loading import load_trace
from mtb_profile.verdict import judge
from mtb_profile.windows import look

FOLDER = os.environ.get("MTB_REFERENCE_TRACES")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOLDER is None, reason="MTB_REFERENCE_TRACES names no folder with reference traces"),
]

WINDOWS = {"trace": "whole_trace", "steps": "all_steps", "steps-but-last": "drop_last_step"}
NAMES = {"span": "span", "compute": "compute", "communication": "comm", "overlapped": "overlap", "idle": "idle"}


def _file(folder, name):
    """`trace_filter/x.json.gz` may lie flat, and under its folder's name where that tells it from others."""
    parent, _, base = name.rpartition("/")
    for candidate in (name, base, f"{parent.partition('_length')[0]}_{base}"):
        if (folder / candidate).is_file():
            return folder / candidate
    return None


def test_expected_values():
    """Every value of every trace and window: exactly where the trace has whole µs, within 0.1 % otherwise."""
    folder = Path(FOLDER)
    expected = json.loads((folder / "expected.json").read_text())
    compared = 0
    for name, windows in expected.items():
        path = _file(folder, name)
        assert path is not None, f"{name} is not in the folder"
        trace = load_trace(path)
        whole = not (trace.work.start % 1000).any()
        for window, key in WINDOWS.items():
            found, values = activity(look(trace, window)).times(), windows[key]
            names = {**NAMES, "exposed": "exposed_comm" if "exposed_comm" in values else "exposed"}
            names |= {"memory_total": "mem"} if "mem" in values else {}
            for ours, theirs in names.items():
                value = getattr(found, ours) / 1e3
                assert value == (values[theirs] if whole else pytest.approx(values[theirs], rel=1e-3)), (
                    name,
                    key,
                    ours,
                )
                compared += 1
            assert found.compute + found.exposed + found.memory + found.idle == found.span
    assert compared >= 18 * len(expected)


def test_the_slow_rank_of_gloo():
    """Rank 1's sleep is named by its range, with its size within 15 %."""
    found = analyze(sorted((Path(FOLDER) / "t1").glob("rank*.json")))
    (straggler,) = found.stragglers
    assert straggler.rank == 1
    assert straggler.phase_excess / 1e6 == pytest.approx(150, rel=0.15)
    assert judge(found).bound == "straggler-bound"


def test_two_ranks_of_a_gpu_job():
    """All collectives of both ranks find their partners, though the clocks differ a little."""
    folder = Path(FOLDER)
    found = analyze([folder / "sampled_rank-0.json.gz", folder / "sampled_rank-1.json.gz"])
    assert [r.rank for r in found.ranks] == [0, 1]
    assert len(found.matching.matched) == 10
    assert found.matching.unmatched == {}
