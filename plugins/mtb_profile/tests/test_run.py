"""``mtb profile run`` on real ranks: what it writes, and whether it finds what was put there."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mtb_core import ConfigError
from mtb_profile import plugin
from mtb_profile.command import profile
from mtb_profile.setting import NOT_VALID

HERE = Path(__file__).parent
SMALL = ["--vocab-size", "64", "--d-model", "16", "--n-layers", "1", "--seq-length", "8", "--batch-size", "2"]
SLEEP_MS = 600.0  # so that the disturbances of a busy machine are a small part of it


def mtb(*words, launcher=("-m", "mtb_core"), **env):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MTB_TEST_SLEEP": str(SLEEP_MS / 1e3), **env}
    return subprocess.run(
        [sys.executable, *launcher, *map(str, words)],
        capture_output=True, text=True, timeout=240, env=environment, check=False,
    )  # fmt: skip


def profiled(folder, *words):
    """The document of a profiled DDP run on two ranks."""
    words = ["--strategy", "ddp", "--nproc", "2", "--device", "cpu", "--warmup-steps", "1", "--run-dir", folder, *words]
    done = mtb("profile", *words, "--json", "--quiet")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def read_trace(folder, rank):
    return json.loads(gzip.decompress((folder / "trace" / f"rank_{rank:05d}.json.gz").read_bytes()))


def test_what_is_written(tmp_path):
    """Traces that any viewer opens, without this machine's name; a result that is no measurement; the analysis in it."""
    output = tmp_path / "out.json"
    folder = tmp_path / "run"
    document = profiled(
        folder, *SMALL, "--profile-active", 3, "--memory-timeline", "--show-collectives", "--output", output
    )
    assert (document["benchmark"], document["exit_reason"], document["performance_valid"]) == ("profile", "done", False)
    assert document["performance_invalid_reasons"][0] == NOT_VALID
    assert document["steps"] == 5
    assert document == json.loads(output.read_text()) == json.loads((folder / "result.json").read_text())
    found = document["profile"]
    assert [(r["rank"], r["window"], [s["step"] for s in r["steps"]]) for r in found["ranks"]] == [
        (0, "steps", [3, 4, 5]),
        (1, "steps", [3, 4, 5]),
    ]
    assert set(found["ranks"][0]["own_time_us"]["3"]) == {"data", "forward", "backward", "optimizer", "other"}
    assert found["matched_collectives"] == 6
    assert found["unmatched_collectives"] == {}
    told = [reason for reason in document["performance_invalid_reasons"] if reason != NOT_VALID]
    assert found["uncertain_because"] == told
    assert "only 5 measured steps in a trial, fewer than 10" in told
    assert any(row["name"].startswith("aten::") for row in found["operators"])
    assert (folder / "trace" / "collectives.svg").read_text().startswith("<svg")
    for rank in (0, 1):
        trace = read_trace(folder, rank)
        assert trace["distributedInfo"]["rank"] == rank
        assert "host_name" not in trace
        assert trace["traceName"] == f"rank_{rank:05d}.json.gz"
        rows = [*csv.DictReader((folder / "trace" / "memory" / f"rank_{rank:05d}.csv").read_text().splitlines())]
        assert len(rows) == sum(e["name"] == "[memory]" for e in trace["traceEvents"]) > 0
        assert all(int(row["allocated_bytes"]) >= 0 and row["device"] == "cpu" for row in rows)
    assert sorted(p.name for p in (folder / "trace").iterdir()) == [
        "collectives.svg", "memory", "operators", "rank_00000.json.gz", "rank_00001.json.gz",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "phase",
    ["data", pytest.param("forward", marks=pytest.mark.slow), pytest.param("optimizer", marks=pytest.mark.slow)],
)
def test_a_slow_rank_is_named(tmp_path, phase):
    """Rank 1 sleeps for a while in one phase of each step: it is named, with that phase, and the size within 15 %."""
    model = ["--model", f"{HERE / 'slow_rank.py'}:{phase}", "--seq-length", "8", "--profile-active", 5]
    document = profiled(tmp_path / "run", *model)
    found = document["profile"]
    worst = found["stragglers"][0]
    assert (worst["rank"], worst["phase"]) == (1, phase)
    assert worst["excess_us"] / 1e3 == pytest.approx(SLEEP_MS, rel=0.15)
    assert found["verdict"] == "straggler-bound"
    late = {row["rank"]: row["mean_lateness_us"] for row in found["arrivals"]}
    assert late[1] > late[0]


@pytest.mark.slow
def test_only_many_buckets_can_be_hidden(tmp_path):
    """One bucket is sent when nothing of backward is left to compute beside it; of many, the first ones are not."""
    model = ["--vocab-size", "64", "--d-model", "128", "--n-layers", "4", "--seq-length", "32", "--batch-size", "4"]
    unused = ["--strategy-opt", "find_unused_parameters=true"]
    left = {}
    for buckets in (1, 500):
        folder = tmp_path / str(buckets)
        profiled(folder, *model, *unused, "--strategy-opt", f"bucket_cap_mb={buckets}")
        events = [e for e in read_trace(folder, 0)["traceEvents"] if e.get("ph") == "X"]
        backward = next(e for e in events if e["name"] == "mtb:backward")
        within = [e for e in events if backward["ts"] <= e["ts"] <= backward["ts"] + backward["dur"]]
        sent = min(e["ts"] for e in within if e["name"] == "c10d::allreduce_")
        left[buckets] = sum(e["name"] == "aten::mm" and e["ts"] > sent for e in within)
    assert left[1] > left[500] == 0


def test_for_people(tmp_path):
    """One rank, FSDP or not: tables, the top operators, where the traces are; `run` need not be said."""
    done = mtb("profile", "--device", "cpu", *SMALL, "--run-dir", tmp_path / "run", "--mfu", "--quiet")
    assert done.returncode == 0, done.stderr
    for text in (
        "not those of a training",
        "Where the time goes",
        "Verdict:",
        "Top operators of rank 0",
        "ui.perfetto.dev",
    ):
        assert text in " ".join(done.stdout.split())
    assert "profiler_start" not in done.stderr


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    """Started by torchrun, every rank writes its trace and one of them reports."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "mtb_core")
    words = ["--strategy", "ddp", "--device", "cpu", *SMALL, "--run-dir", tmp_path / "run", "--json", "--quiet"]
    done = mtb("profile", "run", *words, launcher=launcher)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [r["rank"] for r in document["profile"]["ranks"]] == [0, 1]


def test_a_run_that_fails(tmp_path):
    """A rank that raises ends the run with its cause and exit code 3; the result still says that it was a profile."""
    words = ["--strategy", "ddp", "--nproc", "2", "--device", "cpu", "--model", f"{HERE / 'slow_rank.py'}:Failing"]
    done = mtb("profile", *words, "--seq-length", "8", "--run-dir", tmp_path / "run", "--quiet")
    assert done.returncode == 3
    assert "boom on rank 1" in done.stderr
    assert done.stdout == "The profiled run ended early: failed; there is nothing to analyse.\n"
    document = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (document["benchmark"], document["exit_reason"], document["performance_valid"]) == (
        "profile",
        "failed",
        False,
    )
    assert "profile" not in document


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "3"], "--steps is 3, but the profile needs 12"),
        (["--repeat", "2"], "--repeat is 2, but a profile is of one trial"),
        (["--until-step", "9"], "--until-step 9 is set"),
        (["--profile-active", "0"], "--profile-active is 0; it must be at least 1"),
        (["--profile-wait", "-1"], "--profile-wait is -1; it must be at least 0"),
        (["--strategy", "ddpp"], "Did you mean 'ddp'?"),
        (["--output", "/proc/nowhere/x.json"], "--output /proc/nowhere/x.json cannot be written"),
    ],
)
def test_refusals(tmp_path, words, message):
    """Each mistake is refused before any rank starts and before a folder is made."""
    done = CliRunner().invoke(profile, [*words, "--run-dir", str(tmp_path / "run")])
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
    assert not (tmp_path / "run").exists()


def test_exit_code_of_a_refusal(tmp_path):
    """Wrong usage is exit code 2, with nothing on stdout."""
    done = mtb("profile", "--steps", "3", "--run-dir", tmp_path / "run")
    assert (done.returncode, done.stdout) == (2, "")
    assert "the profile needs 12" in done.stderr


def test_no_timed_run_is_profiled():
    """The recorder is given to one run by name; the plugin offers none that would observe every run."""
    assert not hasattr(plugin, "mtb_run_plugins")
    assert not hasattr(plugin, "mtb_sinks")
