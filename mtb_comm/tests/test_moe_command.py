"""`mtb moe` from the command line: documents, tables, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtb_comm.moe import benchmark
from mtb_comm.moe import layer as layer_module
from mtb_comm.moe import learned as learned_module
from mtb_core.cli import main

TINY = ["--tokens-per-rank", "16", "--hidden-size", "8", "--ffn-size", "8", "--iters", "3", "--warmup", "1"]
TINY += ["--device", "cpu", "--start-method", "fork"]


def run(capfd: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    """(stdout, stderr) of ``mtb moe``, which must end with `code`."""
    found = main(["moe", *argv])
    out, err = capfd.readouterr()
    assert found == code, err
    return out, err


def strict(text: str) -> Any:
    """JSON without NaN and infinities."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


def test_route_as_json(capfd: pytest.CaptureFixture[str], tmp_path: Path):
    """One strict document on stdout and the same in the file; its counts agree with each other."""
    file = tmp_path / "route.json"
    options = ["--nproc", "2", "--num-experts", "3", "--capacity-factor", "0.5", "--json", "--output", str(file)]
    out, err = run(capfd, "route", *TINY, *options)
    found = strict(out)
    assert found == strict(file.read_text())
    assert err == "moe: point 1 of 1\n"
    assert (found["benchmark"], found["schema_version"], found["exit_reason"]) == ("moe_routing", 1, "done")
    assert (found["world_size"], found["backend"], found["device"], found["dtype"]) == (2, "gloo", "cpu", "fp32")
    assert (found["total_tokens"], found["slots"]) == (32, 64)
    assert found["capacity_per_expert"] == 11  # ceil(0.5 * 2 * 32 / 3)
    assert found["expert_owner_map"] == [0, 0, 1]
    assert found["slots"] - found["dropped_slots"] == sum(found["expert_token_counts"])
    assert [list(column) for column in zip(*found["send_counts"], strict=True)] == found["recv_counts"]
    assert [sum(row) for row in found["recv_counts"]] == found["rank_token_counts"]
    assert found["rank_token_counts"] == [sum(found["expert_token_counts"][:2]), found["expert_token_counts"][2]]
    assert found["check"]["failed"] == []
    assert set(found["time_ms"]["dispatch"]) == {"mean", "min", "p50", "p95", "p99", "max"}
    assert 0 < found["communication_share"] < 1
    assert found["execution_complete"]
    assert found["performance_valid"] is (found["performance_invalid_reasons"] == []) is False
    assert any("only 3 measured iterations in a point" in reason for reason in found["performance_invalid_reasons"])
    assert found["conditions"]["duration_s"] > 0
    assert found["provenance"]["command"]
    assert found["environment"]["torch"]


def test_route_as_tables(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """People see every phase, why times are not valid, and nothing on stderr when quiet."""
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    out, err = run(capfd, "route", *TINY, "--nproc", "1", "--dropless", "--quiet", "--routing", "token")
    assert err == ""
    for phase in ("gate", "permute", "count_exchange", "dispatch", "expert", "combine", "unpermute", "backward"):
        assert phase in out
    assert "dropless" in out
    assert "not to compare: " in out
    assert "PYTHONASYNCIODEBUG=1 is set" in " ".join(out.split())  # lines are wrapped
    assert "check against the naive layer: ok" in out


def test_experts_choose(capfd: pytest.CaptureFixture[str]):
    """Every expert takes its capacity, nothing overflows, and there is no load-balancing loss to tell."""
    options = ["--nproc", "2", "--num-experts", "3", "--routing", "expert", "--capacity-factor", "1"]
    found = strict(run(capfd, "route", *TINY, *options, "--json", "--quiet")[0])
    assert found["expert_token_counts"] == [22, 22, 22]  # ceil(2 * 32 / 3)
    assert (found["dropped_slots"], found["load_balance_loss"], found["overflow"]) == (0, None, None)
    assert found["check"]["failed"] == []
    assert "load-balancing" not in run(capfd, "route", *TINY, *options)[0]


def test_counts_of_an_earlier_result(capfd: pytest.CaptureFixture[str], tmp_path: Path):
    """A result's own counts can be replayed, exactly where the sizes are the same."""
    file = tmp_path / "counts.json"
    options = ["--nproc", "2", "--dropless", "--num-experts", "4", "--quiet", "--json"]
    first = strict(run(capfd, "route", *TINY, *options, "--distribution", "zipf", "--output", str(file))[0])
    again = strict(run(capfd, "route", *TINY, *options, "--distribution", "counts", "--counts", str(file))[0])
    assert again["expert_token_counts"] == first["expert_token_counts"]
    before = file.read_text()
    assert main(["moe", "route", *TINY, "--distribution", "counts", "--counts", str(file), "--output", str(file)]) == 2
    assert "this command reads it, and would replace it" in capfd.readouterr().err
    assert file.read_text() == before


def test_a_learned_router(capfd: pytest.CaptureFixture[str], tmp_path: Path):
    """The router is trained on the text before it is measured, and the check holds for what was learned."""
    text = tmp_path / "text"
    text.write_text("abcdefgh" * 30)
    options = ["--nproc", "2", "--distribution", "learned", "--data", str(text), "--router-steps", "20", "--json"]
    found = strict(run(capfd, "route", *TINY, *options)[0])
    assert found["router_loss_last"] < found["router_loss_first"]
    assert found["check"]["failed"] == []
    assert str(tmp_path) not in json.dumps({k: v for k, v in found.items() if k != "provenance"})


def test_sweep(capfd: pytest.CaptureFixture[str], tmp_path: Path):
    """A row for each pair; more capacity never drops more; the plot is drawn, in a folder that is made for it."""
    plot = tmp_path / "new" / "sweep.png"
    options = ["--nproc", "2", "--capacity-factors", "0.5,1,4", "--skews", "0,2", "--plot", str(plot), "--json"]
    found = strict(run(capfd, "sweep", *TINY, *options, "--quiet")[0])
    rows = found["results"]
    assert [(r["zipf_s"], r["capacity_factor"]) for r in rows] == [
        (s, factor) for s in (0, 2) for factor in (0.5, 1, 4)
    ]
    for skew in (0, 2):
        rates = [r["drop_rate"] for r in rows if r["zipf_s"] == skew]
        assert rates == sorted(rates, reverse=True)
        assert rates[0] >= 0.5
    assert all(r["status"] == "ok" for r in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")
    out, _ = run(capfd, "sweep", *TINY, "--nproc", "1", "--capacity-factors", "1", "--skews", "1")
    assert "drop rate" in out
    assert "not to compare: " in out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["route", "--top-k", "9"], "valid: 1 to 8"),
        (["route", "--capacity-factor", "1e300"], "at most 1e+06"),
        (["sweep", "--capacity-factors", "1,nan"], "above 0"),
        (["sweep", "--skews", "0,1e300"], "--zipf-s is 1e+300; it must be a number from 0 to 1e+06"),
        (["route", "--z-weight", "1e300"], "--z-weight is 1e+300"),
        (["route", "--aux-weight", "nan"], "--aux-weight is nan"),
        (["route", "--dropless", "--capacity-factor", "1"], "exclude each other"),
        (["route", "--nproc", "0"], "at least 1"),
        (["route", "--distribution", "ziph"], "zipf"),
        (["route", "--distribution", "counts", "--counts", "missing.json"], "cannot be read"),
        (["route", "--distribution", "learned", "--data", "missing.txt"], "cannot be read"),
        (["route", "--backend", "nccl", "--device", "cpu"], "needs a CUDA device"),
        (["sweep", "--skews", "1,x"], "--skews is '1,x'"),
        (["sweep", "--plot", "x.txt"], "valid: .png, .svg, .pdf"),
        (["route", "--output", "."], "--output . cannot be written: it is a folder"),
        (["sweep", "--output", "/proc/x.json"], "cannot be written"),
        (["sweep", "--plot", "folder.png"], "--plot folder.png cannot be written: it is a folder"),
    ],
)
def test_wrong_input_is_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: list[str], text: str
):
    """Exit code 2 and one paragraph, before any rank starts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()

    def never(*_args: Any) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(benchmark, "measure_points", never)
    out, err = run(capfd, *argv, code=2)
    assert out == ""
    assert text in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("content", ["[1, 2", '{"a": 1}', '[1, "x"]', "[true]"])
def test_odd_counts_are_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path, content: str):
    """A file that is no list of numbers is refused by name."""
    file = tmp_path / "counts.json"
    file.write_text(content)
    _, err = run(capfd, "route", "--distribution", "counts", "--counts", str(file), code=2)
    assert "counts.json" in err


def test_a_short_text_is_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path):
    """A text too short to learn from is refused with its size."""
    file = tmp_path / "text"
    file.write_text("abc")
    _, err = run(capfd, "route", "--distribution", "learned", "--data", str(file), code=2)
    assert "has 3 bytes" in err


def test_a_failed_check_is_exit_code_1(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """A wrong output of the layer fails its row, makes the figures invalid, and gives exit code 1."""
    real = layer_module.unpermute
    monkeypatch.setattr(layer_module, "unpermute", lambda *args: real(*args) * 1.01)
    out, _ = run(capfd, "route", *TINY, "--nproc", "2", "--json", code=1)
    found = strict(out)
    assert found["status"] == "failed"
    assert "output" in found["check"]["failed"]
    assert not found["performance_valid"]
    out, _ = run(capfd, "route", *TINY, "--nproc", "1", code=1)
    assert "FAILED" in out
    found = strict(run(capfd, "route", *TINY, "--nproc", "1", "--json", "--no-check")[0])
    assert (found["check"], found["status"]) == (None, "ok")


def test_a_failing_rank_ends_all_and_finished_rows_stay(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Exit code 3 with the first cause; the point that was done before is in the document."""
    real = benchmark.preference

    def failing(settings: Any, rank: int, ranks: int) -> Any:
        if rank == 1 and settings.capacity_factor == 2:
            raise ValueError("boom on purpose")
        return real(settings, rank, ranks)

    monkeypatch.setattr(benchmark, "preference", failing)
    options = ["--nproc", "2", "--capacity-factors", "1,2,3", "--skews", "0", "--json"]
    out, err = run(capfd, "sweep", *TINY, *options, code=3)
    found = strict(out)
    assert [row["capacity_factor"] for row in found["results"]] == [1]
    assert (found["exit_reason"], found["execution_complete"]) == ("failed", False)
    assert found["failure"] == {"rank": 1, "text": "Rank 1 failed: ValueError: boom on purpose"}
    assert "boom on purpose" in err
    assert "Traceback" not in err
    _, err = run(capfd, "sweep", *TINY, *options, "--debug", code=3)
    assert "Traceback" in err


#: The command, but a point with capacity factor 2 does not end by itself.
ENDLESS = """
import sys
import attrs
from mtb_comm.moe import benchmark
from mtb_core.cli import main

class Endless(benchmark.Point):
    def __init__(self, settings, ctx, worker):
        last = settings.capacity_factor == 2
        super().__init__(attrs.evolve(settings, iters=10**9) if last else settings, ctx, worker)

benchmark.Point = Endless
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [pytest.param("SIGINT", 130, "interrupted", marks=pytest.mark.slow), ("SIGTERM", 4, "stopped")],
)
def test_finished_rows_stay_when_asked_to_stop(number: str, code: int, reason: str):
    """All ranks stop together in the middle of a point; the document has the points that were done."""
    options = ["--nproc", "2", "--capacity-factors", "1,2", "--skews", "0", "--json"]
    command = [sys.executable, "-c", ENDLESS, "moe", "sweep", *TINY, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "point 2 of 2" in line:
                process.send_signal(signal.Signals[number])
                break
        out, err = process.communicate(timeout=240)
    assert process.returncode == code, err
    found = strict(out)
    assert found["exit_reason"] == reason
    assert [row["capacity_factor"] for row in found["results"]] == [1]
    assert not found["execution_complete"]


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path):
    """Ranks of torchrun are used; one of them writes one document."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mtb_core"]
    done = subprocess.run(
        [*command, "moe", "route", *TINY, "--json", "--quiet"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert strict(done.stdout)["world_size"] == 2


def test_help_needs_no_torch():
    """The help of both commands is there without importing what only the work needs."""
    code = (
        "import sys; from mtb_core.cli import main; code = main(['moe', 'sweep', '--help'])\n"
        "assert code == 0; print(sorted({'torch', 'numpy', 'rich', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.endswith("[]\n")


#: The command, but rank 1 is killed when it comes to the point with capacity factor 2.
DYING = """
import os, signal, sys
from mtb_comm.moe import benchmark
from mtb_core.cli import main

class Dying(benchmark.Point):
    def __init__(self, settings, ctx, worker):
        if ctx.rank == 1 and settings.capacity_factor == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(settings, ctx, worker)

benchmark.Point = Dying
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_finished_rows_stay_under_torchrun(tmp_path: Path):
    """If a rank under torchrun dies, rank 0 writes the rows that were finished before it leaves."""
    script, output, plot = tmp_path / "dying.py", tmp_path / "x.json", tmp_path / "x.png"
    script.write_text(DYING)
    options = ["--capacity-factors", "1,2", "--skews", "0", "--output", str(output), "--plot", str(plot)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [*command, "moe", "sweep", *TINY, *options], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 1
    found = strict(output.read_text())
    assert (found["exit_reason"], found["world_size"], found["backend"]) == ("failed", 2, "gloo")
    assert [row["capacity_factor"] for row in found["results"]] == [1]
    assert found["failure"]["text"]
    assert plot.exists()


def test_training_a_router_stops(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A stop that comes while the router is trained ends the run at the next step of training."""
    text = tmp_path / "text"
    text.write_text("abcdefgh" * 30)
    real, drawn = learned_module._draw, []

    def draw(data: Any, settings: Any, ctx: Any, what: str) -> Any:
        drawn.append(what)
        if what == "step 3":
            os.kill(os.getpid(), signal.SIGTERM)
        return real(data, settings, ctx, what)

    monkeypatch.setattr(learned_module, "_draw", draw)
    options = ["--nproc", "1", "--distribution", "learned", "--data", str(text), "--router-steps", "1000000", "--json"]
    found = strict(run(capfd, "route", *TINY, *options, code=4)[0])
    assert drawn == ["step 0", "step 1", "step 2", "step 3"]
    assert (found["exit_reason"], found["execution_complete"]) == ("stopped", False)
