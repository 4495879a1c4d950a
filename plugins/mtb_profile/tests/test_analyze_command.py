"""``mtb profile analyze`` as people and programs start it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from mtb_core import ConfigError
from mtb_profile.command import profile

RANK_KEYS = {
    "rank", "window", "span_us", "compute_us", "communication_us", "overlapped_us", "exposed_us", "memory_us", "idle_us",
    "collectives",
}  # fmt: skip


def invoke(*words):
    done = CliRunner().invoke(profile, ["analyze", *map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.fixture
def folder(tracing, tmp_path):
    """A run's folder with the traces of two ranks."""
    for rank in (0, 1):
        t, at = tracing.Trace(rank), 0.0
        for number in range(3):
            at = tracing.host_step(t, number, at, sleep=60.0 * rank, late=60.0 * (1 - rank))
        t.write(tmp_path / "run" / "trace" / f"rank_{rank:05d}.json.gz")
    return tmp_path / "run"


def test_json(folder, tmp_path):
    """--json prints one document with the known keys and nothing else; --output writes the same."""
    output = tmp_path / "new" / "a.json"
    done = invoke(folder, "--json", "--output", output)
    document = json.loads(done.stdout)
    assert document == json.loads(output.read_text())
    assert [set(rank) & RANK_KEYS for rank in document["ranks"]] == [RANK_KEYS, RANK_KEYS]
    assert [(r["rank"], r["window"], r["span_us"], r["exposed_us"], r["idle_us"]) for r in document["ranks"]] == [
        (0, "steps", 480.0, 210.0, 30.0),
        (1, "steps", 480.0, 30.0, 210.0),
    ]
    assert document["ranks"][0]["collectives"][0] == {
        "operation": "all_reduce", "group": None, "group_size": 2, "dtype": "float", "count": 3, "bytes": 12000,
        "time_us": 210.0, "transfer_us": 30.0, "algbw_gb_per_sec": 0.4, "busbw_gb_per_sec": 0.4,
    }  # fmt: skip
    (straggler,) = document["stragglers"]
    assert (straggler["rank"], straggler["phase"], straggler["excess_us"]) == (1, "forward", 60.0)
    assert document["verdict"] == "straggler-bound"
    assert "mfu" not in document


def test_text(folder, tmp_path):
    """For people: tables, timeline, verdict; the picture is written."""
    picture = tmp_path / "pictures" / "a.svg"
    words = ["--mfu", "--flops-per-step", "1e5", "--peak-tflops", "0.01", "--show-collectives", "--svg", picture]
    shown = invoke(folder, *words).stdout
    for text in (
        "Where the time goes",
        "Stragglers",
        "ideal step",
        "Verdict: straggler-bound",
        "rank 1 |",
        "What to try",
    ):
        assert text in shown
    assert picture.read_text().startswith("<svg")


def test_files_and_windows(folder):
    """Files may be named one by one, and the window is the one asked for."""
    files = sorted((folder / "trace").iterdir())
    document = json.loads(invoke(*files, "--window", "steps-but-last", "--json").stdout)
    assert [r["span_us"] for r in document["ranks"]] == [320.0, 320.0]
    assert {r["window"] for r in document["ranks"]} == {"steps-but-last"}


def test_what_the_run_had_to_do(folder):
    """A run's own result tells the FLOPs of a step and the peak: MFU under the profiler leads back to it."""
    result = {
        "model_flops_per_token": 100.0, "global_batch_size": 4, "config": {"seq_length": 8}, "tokens_per_sec": 1e6,
        "mfu": 0.5, "world_size": 2, "activation_checkpointing": False,
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result))
    losses = json.loads(invoke(folder, "--mfu", "--json").stdout)["mfu"]
    peak = 1e6 * 100 / (0.5 * 2)
    assert losses["ideal_ms"] == pytest.approx(100 * 32 / 2 / peak * 1e3)
    assert next(x["ms"] for x in losses["losses"] if x["name"] == "recomputation") == 0


def test_the_run_s_conditions(folder):
    """What its result says of other programs and load is printed beside the verdict."""
    reason = "other processes used 31% of the machine's cores meanwhile"
    assert "What makes this uncertain" not in invoke(folder).stdout
    (folder / "result.json").write_text(json.dumps({"performance_invalid_reasons": [reason]}))
    assert f"What makes this uncertain:\n- {reason}\n" in invoke(folder).stdout
    assert json.loads(invoke(folder, "--json").stdout)["uncertain_because"] == [reason]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--window", "step"], "--window is 'step'; valid: trace, steps, steps-but-last"),
        (["--peak-tflops", "0", "--mfu"], "--peak-tflops is 0; it must be above 0 and finite"),
        (["--peak-tflops", "inf", "--mfu"], "--peak-tflops is inf; it must be above 0 and finite"),
        (["--flops-per-step", "nan", "--mfu"], "--flops-per-step is nan; it must be above 0 and finite"),
        (["--svg", "/proc/nowhere/x.svg"], "--svg /proc/nowhere/x.svg cannot be written"),
        (["--output", "/proc/nowhere/x.json"], "--output /proc/nowhere/x.json cannot be written"),
        (["--show-collectives", "--step", "9"], "--step is 9; valid are"),
    ],
)
def test_refusals(folder, words, message):
    """Each mistake is refused in words that say what is valid."""
    with pytest.raises(ConfigError) as caught:
        invoke(folder, *words)
    assert message in str(caught.value)


TORCHLESS = """
import sys
from mtb_profile.command import profile
profile(sys.argv[1:], standalone_mode=False)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize("words", [["run", "--help"], ["analyze", "--json"]])
def test_no_torch(folder, words):
    """Help and the analysis of traces do without importing torch, which takes longer and more memory than they."""
    paths = [] if "--help" in words else [str(folder)]
    done = subprocess.run(
        [sys.executable, "-c", TORCHLESS, *words, *paths], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("option", ["--svg", "--output"])
def test_a_file_is_tried_out_before_traces_are_read(tmp_path, option):
    """Reading them may take long."""
    with pytest.raises(ConfigError, match=f"{option} /proc/nowhere/x cannot be written"):
        invoke(tmp_path / "no traces", option, "/proc/nowhere/x")


def test_nothing_there(tmp_path):
    """A path that is not there and a folder without traces are refused."""
    with pytest.raises(ConfigError, match="There is no"):
        invoke(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no trace"):
        invoke(tmp_path)
