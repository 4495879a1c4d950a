"""Functions on ranks: what comes back, and how failures end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mtb_core import ConfigError, Layout, PluginError, RunFailed, TrainConfig, run, run_ranks
from mtb_core.launch import LaunchSpec, start_ranks


def add_up(payload, ctx, worker):
    total = torch.full((2,), float(ctx.rank + payload))
    dist.all_reduce(total)
    worker.progress({"rank": ctx.rank})
    return ctx.rank, total.tolist(), None if ctx.mesh is None else ctx.mesh.mesh_dim_names


def fail_on_one(payload, ctx, _worker):
    if ctx.rank == payload:
        raise ValueError("boom on purpose")
    dist.barrier()


@pytest.mark.parametrize("nproc", [1, 2])
def test_rank_zero_gives_the_value(nproc):
    """Every rank is in the group; what rank 0 returns comes back, and progress arrives."""
    seen = []
    outcome = run_ranks(add_up, 1, nproc=nproc, device="cpu", on_progress=seen.append)
    assert outcome.exit_reason == "done"
    assert outcome.value == (0, [float(sum(range(1, nproc + 1)))] * 2, ("ranks",))
    assert {message["rank"] for message in seen} == set(range(nproc))


@pytest.mark.parametrize(("nproc", "bad"), [(1, 0), (2, 1)])
def test_a_failing_rank_ends_all(nproc, bad):
    """The outcome names the first cause, and no value is made up."""
    outcome = run_ranks(fail_on_one, bad, nproc=nproc, device="cpu")
    assert (outcome.exit_reason, outcome.value) == ("failed", None)
    assert (outcome.failure.rank, outcome.failure.kind, outcome.failure.message) == (
        bad,
        "ValueError",
        "boom on purpose",
    )


def test_what_cannot_start_is_refused():
    """Wrong numbers and backends are refused before any rank."""
    with pytest.raises(ConfigError, match="at least 1"):
        run_ranks(add_up, nproc=0)
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        run_ranks(add_up, device="cpu", backend="nccl")
    with pytest.raises(ConfigError, match="has 4 ranks, but there are 2"):
        run_ranks(add_up, nproc=2, layout=Layout((("dp", 4),)))


@pytest.mark.parametrize(
    ("count", "options", "refused"),
    [
        (0, {"device": "cuda"}, "--device cuda .* has 0 for 2 ranks"),
        (1, {"device": "cuda"}, "--device cuda .* has 1 for 2 ranks"),
        (0, {"backend": "nccl"}, "--backend nccl .* has 0 for 2 ranks"),
        (1, {}, "--device auto .* has 1 for 2 ranks"),
    ],
)
def test_ranks_without_a_device_are_refused(monkeypatch, count, options, refused):
    """Where CUDA devices are asked for, or would be used, there must be one for each rank of this machine."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    with pytest.raises(ConfigError, match=refused):
        run_ranks(add_up, 1, nproc=2, **options)


def test_no_device_is_no_obstacle_on_the_cpu(monkeypatch):
    """On auto, ranks of a machine without CUDA compute on its CPU; where that is asked for, devices do not matter."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert run_ranks(add_up, 1, nproc=1).exit_reason == "done"
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert run_ranks(add_up, 1, nproc=2, device="cpu").exit_reason == "done"


def test_under_torchrun_this_process_is_a_rank(tmp_path: Path):
    """Ranks of torchrun are used as they are; rank 0 alone gets the value."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from mtb_core import run_ranks\n"
        "from test_launching import add_up\n"
        "outcome = run_ranks(add_up, 1, nproc=7, device='cpu')\n"
        "open(os.environ['RANK'] + '.txt', 'w').write(repr(outcome.value))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=240, capture_output=True)
    assert (tmp_path / "0.txt").read_text() == "(0, [3.0, 3.0], ('ranks',))"
    assert (tmp_path / "1.txt").read_text() == "None"


def test_without_a_launcher(monkeypatch):
    """Several ranks are refused with what to install; one rank needs no launcher."""
    monkeypatch.setenv("MTB_DISABLE_PLUGINS", "launcher")
    with pytest.raises(PluginError, match="Install mtb-launcher, or do not switch it off"):
        run_ranks(add_up, 1, nproc=2, device="cpu")
    with pytest.raises(PluginError, match="Install mtb-launcher"):
        run(TrainConfig(nproc=2, strategy="ddp"))
    assert run_ranks(add_up, 1, device="cpu").exit_reason == "done"


OUTCOME = "from mtb_core.launch import Failure, LaunchOutcome\ndef launch(spec): return LaunchOutcome"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("def launch(spec): return None", "it returned None, not a LaunchOutcome"),
        (f"{OUTCOME}('done', {{}})", "no value of each of the 2 ranks"),
        (f"{OUTCOME}('done', {{0: {{}}}})", r"no value of each of the 2 ranks of this node \(of \[0\]\)"),
        (f"{OUTCOME}('done', {{0: {{}}, '1': {{}}}})", "no value of each of the 2 ranks"),
        (f"{OUTCOME}('done', {{0: {{}}, 1: Failure(1, 'E', 'x')}})", "no value of each of the 2 ranks"),
        (f"{OUTCOME}('finished', {{0: {{}}, 1: {{}}}})", "exit reason is 'finished'; valid: done, stopped"),
        (f"{OUTCOME}('failed', {{}})", "says 'failed' without a Failure"),
        ("launch = 1 / 0", r"The launcher 'wrong' \(wrong_launcher:launch\) failed: ZeroDivisionError"),
        ("launch = 3", "failed: TypeError: 'int' object is not callable"),
        ("def launch(spec): 1 / 0", "failed: ZeroDivisionError"),
        ("def launch(spec): raise SystemExit(0)", "failed: SystemExit: 0"),
    ],
)
def test_a_wrong_launcher_is_named(body, told, install, tmp_path, monkeypatch):
    """Its mistakes are told as its own, so that a run that trained nothing, or only in part, is not done."""
    (tmp_path / "wrong_launcher.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wrong_launcher", raising=False)
    install(
        """
        @hookimpl
        def mtb_launchers():
            return [LauncherInfo("wrong", "Wrong.", "wrong_launcher:launch")]
        """
    )
    with pytest.raises(RunFailed, match=told):
        run(TrainConfig(nproc=2, strategy="ddp", launcher="wrong", steps=1, run_dir=str(tmp_path / "run")), quiet=True)


def test_an_unknown_launcher_is_refused_before_anything_is_made(tmp_path):
    """Also with one rank, which needs none."""
    for nproc in (1, 2):
        with pytest.raises(PluginError, match="Did you mean 'local'"):
            run(TrainConfig(nproc=nproc, launcher="locl", strategy="ddp", run_dir=str(tmp_path / "run")))
    assert list(tmp_path.iterdir()) == []


def test_a_failure_is_told_where_its_log_cannot_be_written(tmp_path):
    """The cause may be a full disk: the log's own failure must not take its place."""
    (tmp_path / "logs").write_text("a file")
    spec = LaunchSpec(entry=fail_at_once, log_dir=tmp_path / "logs")
    outcome = start_ranks(spec, None)
    assert (outcome.exit_reason, outcome.failure.message) == ("failed", "boom on purpose")


def fail_at_once(_payload, _worker):
    raise ValueError("boom on purpose")
