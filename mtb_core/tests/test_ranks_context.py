import os

import pytest
import torch
import torch.distributed as dist

from mtb_core.api import ConfigError, RunFailed, World
from mtb_core.launch.worker import alone
from mtb_core.ranks.context import open_ranks
from mtb_core.ranks.signals import StopFlag
from mtb_core.ranks.worker import Worker
from mtb_core.tests.launching import plan_for, run_ranks


def test_one_rank_without_group():
    """A plan that needs no process group gets none."""
    with alone() as worker, open_ranks(worker, plan_for(1, process_group=False), device="cpu") as ctx:
        assert (ctx.rank, ctx.device, ctx.backend, ctx.mesh, ctx.store) == (0, "cpu", None, None, None)
        assert not dist.is_initialized()


def fail_with_a_model_alive(x):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(x).sum().backward()
    raise ValueError("boom")


def test_one_rank_with_group_again_and_again(monkeypatch):
    """A group of one rank in this process is closed at the end, also after an exception, and can be made again."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for _ in range(2):
        with alone() as worker, open_ranks(worker, plan_for(1), device="cpu") as ctx:
            x = torch.ones(2)
            dist.all_reduce(x)
            assert (ctx.backend, ctx.mesh.mesh_dim_names, x.tolist()) == ("gloo", ("dp",), [1.0, 1.0])
        assert not dist.is_initialized()
        with (
            pytest.raises(ValueError, match="boom"),
            alone() as worker,
            open_ranks(worker, plan_for(1), device="cpu"),
        ):
            fail_with_a_model_alive(x)
        assert not dist.is_initialized()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def look(_payload, worker):
    with open_ranks(worker, plan_for(2), device="cpu") as ctx:
        ctx.store.set(f"hello {ctx.rank}", "x")
        other = ctx.store.get(f"hello {1 - ctx.rank}")
        seen = (ctx.rank, ctx.world, ctx.device, ctx.backend, ctx.mesh.size(), other, os.environ["GLOO_SOCKET_IFNAME"])
    return (*seen, dist.is_initialized(), torch.cuda.is_initialized())


def test_two_ranks(tmp_path, monkeypatch):
    """Ranks have a mesh, a group and a store in common; on one node gloo uses the loopback interface."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    out = run_ranks(look, tmp_path)
    assert out.values == {r: (r, World(2, 2), "cpu", "gloo", 2, b"x", "lo", False, False) for r in range(2)}


@pytest.mark.parametrize("process_group", [True, False])
def test_nccl_needs_cuda(process_group):
    """The backend nccl on cpu is refused, also by one rank that needs no backend."""
    with (
        alone() as worker,
        pytest.raises(ConfigError, match="valid here: gloo"),
        open_ranks(worker, plan_for(1, process_group=process_group), device="cpu", backend="nccl"),
    ):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_missing_device():
    """Asking for cuda where there is none says what is there."""
    with (
        alone() as worker,
        pytest.raises(RunFailed, match="has 0"),
        open_ranks(worker, plan_for(1), device="cuda"),
    ):
        pass


def test_bad_meeting_place(monkeypatch):
    """A rank that cannot make the store where ranks meet says which variables to set."""
    blocker = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(blocker.port))
    worker = Worker(0, 0, World(2, 2), StopFlag(), "slurm")
    with pytest.raises(RunFailed, match=f"MASTER_PORT={blocker.port}"), open_ranks(worker, plan_for(2), device="cpu"):
        pass
