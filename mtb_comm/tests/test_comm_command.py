"""``mtb comm`` as people and programs start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mtb_comm.command import comm
from mtb_comm.fit import fit_rows
from mtb_core import ConfigError

SMALL = ["--device", "cpu", "--sizes", "256,2K", "-n", "3", "-w", "1"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
#: Keys that nothing which is shown, drawn or compared is made of.
UNUSED = {
    "definition", "config", "conditions", "execution_complete", "comparisons", "elements", "wire_bytes", "wire_bytes_total", "points",
    "beta_busbw_gb_per_sec",
}  # fmt: skip
ROW_KEYS = {
    "operation", "dtype", "reduction", "in_place", "split", "world_size", "size_bytes", "elements", "count", "iterations",
    "time_ms", "algbw_gb_per_sec", "busbw_gb_per_sec", "wire_bytes", "wire_bytes_total", "wrong", "busiest_rank",
    "splits_bytes", "status", "reason",
}  # fmt: skip


def mtb(*words, **options):
    command = [sys.executable, "-m", "mtb_core", "comm", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENVIRONMENT, check=False, **options)


def refusal(*words):
    """The message of a command that is refused as wrong usage, which `mtb` turns into exit code 2."""
    done = CliRunner().invoke(comm, words)
    assert isinstance(done.exception, ConfigError), done.output
    assert done.stdout == ""
    return str(done.exception)


def test_json_is_one_document(tmp_path):
    """--json prints one document and nothing else on stdout; --output holds the same; rows have the known keys."""
    output = tmp_path / "new" / "comm.json"
    done = mtb("all_reduce", "barrier", *SMALL, "--json", "--output", str(output))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads(output.read_text())
    assert {k: document[k] for k in ("benchmark", "schema_version", "exit_reason", "world_size", "backend", "device")} == {
        "benchmark": "communication", "schema_version": 1, "exit_reason": "done", "world_size": 2, "backend": "gloo",
        "device": "cpu",
    }  # fmt: skip
    assert all(set(row) == ROW_KEYS for row in document["results"])
    assert [row["operation"] for row in document["results"]] == ["all_reduce", "all_reduce", "barrier"]
    assert document["provenance"]["command"].endswith(f"--output {output}")
    assert document["execution_complete"] is True
    assert document["performance_valid"] is (document["performance_invalid_reasons"] == []) is False
    assert document["conditions"]["cores"] == os.cpu_count()
    assert document["conditions"]["duration_s"] > 0
    assert "3/3" in done.stderr


def test_table_names_its_definition(monkeypatch):
    """The table says whose definition of bandwidth it shows, and why its times are not valid; --quiet is quiet."""
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    words = ["all_reduce", "all_gather", *SMALL, "--dtype", "fp32,int8", "--reduction", "avg", "--quiet"]
    done = CliRunner().invoke(comm, words)
    assert done.exit_code == 0, done.output
    assert "as nccl-tests defines them; GB = 1e9 bytes" in done.stdout
    assert "skipped: all_reduce int8 avg: gloo cannot average int8" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("not to compare: ")]
    assert "PYTHONASYNCIODEBUG=1 is set; only 3 measured calls in a point, fewer than 10" in line
    assert done.stderr == ""


def test_files_from_an_earlier_document(tmp_path):
    """A document can be shown, compared with itself, drawn as PNG and SVG, and fitted, without measuring again."""
    first, calibration = tmp_path / "first.json", tmp_path / "calibration.json"
    assert CliRunner().invoke(comm, ["all_reduce", "broadcast", *SMALL, "--output", str(first)]).exit_code == 0
    _times_by_hand(first)
    for picture, start in (("a.png", b"\x89PNG"), ("b.svg", b"<?xml")):
        words = ["--plot", str(tmp_path / picture), "--calibration", str(calibration), "--compare", str(first)]
        done = CliRunner().invoke(comm, ["--result", str(first), *words])
        assert done.exit_code == 0, done.output
        assert (tmp_path / picture).read_bytes().startswith(start)
    both = CliRunner().invoke(comm, ["--result", str(first), "--compare", str(first), "--json"])
    (compared,) = json.loads(both.stdout)["comparisons"]
    assert compared["with"] == "first.json"
    assert [point["ratio"] for point in compared["points"]] == [1.0] * 4
    _documents_that_lack_something(json.loads(first.read_text()), tmp_path / "broken.json")
    assert "4 points in both" in done.stdout
    assert "1.000" in done.stdout
    written = json.loads(calibration.read_text())
    assert written["kind"] == "communication_calibration"
    assert written["fits"] == json.loads(first.read_text())["fits"]


def _times_by_hand(path):
    """Times that lie on a line: whether measured ones do depends on the machine, and without a line there is no fit."""
    document = json.loads(path.read_text())
    for row in document["results"]:
        row["time_ms"] = dict.fromkeys(row["time_ms"], 0.03 + row["size_bytes"] * 1e-6)
    document["fits"] = fit_rows(document["results"])
    assert len(document["fits"]) == 2
    path.write_text(json.dumps(document))


def _documents_that_lack_something(document, path):
    """The command names a value that is missing or of another type before it measures anything."""
    row, fit = document["results"][0], document["fits"][0]
    for place in (document, row, row["time_ms"], fit):
        for key in [key for key in place if key not in UNUSED]:
            kept = place.pop(key)
            path.write_text(json.dumps(document))
            assert "Give a file" in refusal("all_reduce", "--compare", str(path)), key
            place[key] = {"odd": 1} if not isinstance(kept, dict) else 1
            path.write_text(json.dumps(document))
            assert "Give a file" in refusal("--result", str(path)), key
            place[key] = kept
    path.write_text(json.dumps({**document, "results": [1]}))
    assert "results[0] is no object" in refusal("--result", str(path))


def test_against_nccl_tests(tmp_path):
    """A log of nccl-tests is set beside the rows."""
    log = tmp_path / "log"
    log.write_text(
        "# Collective test starting: all_reduce_perf\n"
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong\n"
        "        2048           512     float     sum      -1    10.00    0.10    0.10       0    12.00    0.17    0.29       0\n"
    )
    done = CliRunner().invoke(comm, ["all_reduce", *SMALL, "--against", "nccl-tests", str(log)])
    assert done.exit_code == 0, done.output
    assert "this run and nccl-tests: 1 points in both" in done.stdout
    assert "0.012" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["al_reduce"], "no operation 'al_reduce'. Did you mean 'all_reduce'?"),
        (["--sizes", "0"], "must be at least 1 byte"),
        (["-b", "1M", "-e", "1K"], "swap them"),
        (["all_to_all", "--splits", "1K,1K;1K,2K"], "adds up to 3072 bytes"),
        (["--group-size", "4"], "--group-size is 4, but there are 2 ranks"),
        (["all_reduce", "--device", "cpu", "--dtype", "int8", "--reduction", "avg"], "gloo cannot average int8"),
        (["--device", "cpu", "--backend", "nccl"], "needs a CUDA device"),
        (["--iters", "0"], "--iters is 0"),
        (["--time", "0"], "--time is 0"),
        (["--iters", "1000001"], "at most 1000000"),
        (["--warmup", "1000001"], "at most 1000000"),
        (["-f", "nan"], "-f is nan"),
        (["-f", "inf"], "-f is inf"),
        (["-f", "1.0000000000000002"], "at most 10000"),
        (["--timeout", "-1"], "--timeout is -1"),
        (["--timeout", "0"], "--timeout is 0"),
        (["--timeout", "nan"], "--timeout is nan"),
        (["--timeout", "1e300"], "--timeout is 1e+300"),
        (["--splits", "1K,3K"], "name it alone"),
        (["all_to_all", "broadcast", "--splits", "1K,3K"], "but all_to_all, broadcast are to be measured"),
        (["all_to_all", "--splits", "1K,3K", "--split", "equal"], "--split is equal"),
        (["all_reduce", "--device", "cpu", "--sizes", "1K,900T"], "900T"),
        (["--plot", "picture.bmp"], "Valid: .png, .svg"),
        (["--against", "mpi", "log"], "valid: nccl-tests"),
        (["--compare", "missing.json"], "cannot be read as JSON"),
        (["--output", f"{__file__}/x.json"], "cannot be written"),
    ],
)
def test_wrong_usage(words, message):
    """Each mistake is refused with exit code 2 before any rank starts, in words that say what is valid."""
    assert message in refusal(*words)


def test_wrong_usage_has_exit_code_2():
    """The whole program says it on stderr, and leaves with 2."""
    done = mtb("all_reduce", "--sizes", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "must be at least 1 byte" in done.stderr


def test_another_document_is_refused(tmp_path):
    """A result of training is no communication document."""
    other = tmp_path / "result.json"
    other.write_text('{"benchmark": "training", "schema_version": 1}')
    assert "holds 'training'" in refusal("--result", str(other))


#: One short point, then one that takes far longer than a test.
LONG = ["--sizes", "256,32M", "-n", "500"]


def started(*words, launcher=(sys.executable, "-m", "mtb_core")):
    """A measurement that goes on for long, after its first row is done."""
    command = [*launcher, "comm", *words, "--device", "cpu", "-w", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    seen = []
    for line in process.stderr:
        if line.startswith("[1/2] "):
            return process
        seen.append(line)
    raise AssertionError("".join(seen))


def workers(process):
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.parametrize(
    ("number", "code", "reason"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 4, "stopped")]
)
def test_stop_keeps_finished_rows(tmp_path, number, code, reason):
    """Ctrl-C and SIGTERM in the middle of a long point: the row before it is in the document."""
    output = tmp_path / "x.json"
    process = started("all_reduce", *LONG, "--output", str(output))
    process.send_signal(number)
    process.communicate(timeout=240)
    document = json.loads(output.read_text())
    assert (process.returncode, document["exit_reason"]) == (code, reason)
    assert [row["size_bytes"] for row in document["results"]] == [256]
    assert not document["execution_complete"]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_killed_rank_ends_all(tmp_path, victim):
    """The death of any rank gives exit code 3, ends all, keeps finished rows, and names the cause."""
    output = tmp_path / "x.json"
    process = started("all_reduce", *LONG, "--output", str(output))
    ranks = workers(process)
    os.kill(ranks[victim], signal.SIGKILL)
    _, errors = process.communicate(timeout=240)
    document = json.loads(output.read_text())
    assert (process.returncode, document["exit_reason"]) == (3, "failed")
    assert [row["size_bytes"] for row in document["results"]] == [256]
    assert f"Rank {victim} died by SIGKILL" in errors
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "mtb_core"]


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    """One document, from rank 0, of torchrun's ranks."""
    output = tmp_path / "x.json"
    command = [*TORCHRUN, "comm", "all_gather", *SMALL, "--json", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(output.read_text())
    assert json.loads(done.stdout)["world_size"] == 2


@pytest.mark.slow
def test_killed_rank_under_torchrun(tmp_path):
    """Rank 0 writes what was finished before it leaves with the failure that it has of a lost peer."""
    output = tmp_path / "x.json"
    process = started("all_reduce", *LONG, "--output", str(output), launcher=TORCHRUN)
    os.kill(workers(process)[1], signal.SIGKILL)
    process.communicate(timeout=240)
    document = json.loads(output.read_text())
    assert process.returncode == 1
    assert (document["exit_reason"], [row["size_bytes"] for row in document["results"]]) == ("failed", [256])
