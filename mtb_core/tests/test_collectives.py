"""Counting real collectives, on real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import json, os, sys, warnings
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from mtb_core.measure.collectives import CountCollectives

warnings.simplefilter("ignore", FutureWarning)
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
found = {}

def step(model, micro_batches, sync_all=False):
    for index in range(micro_batches):
        model.require_backward_grad_sync = sync_all or index == micro_batches - 1
        model(torch.ones(2, 8)).sum().backward()

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
numel = sum(p.numel() for p in model.parameters())
ddp = DistributedDataParallel(model)
step(ddp, 1)
step(ddp, 1)  # buckets have been rebuilt now
for name, sync_all in (("last", False), ("every", True)):
    with CountCollectives() as counted:
        step(ddp, 4, sync_all)
    found[name] = [counted.calls, counted.message_bytes]
step(ddp, 1)
found["outside"] = [counted.calls, counted.message_bytes]

four, two, eight = torch.ones(4), torch.ones(2), torch.ones(8)
with CountCollectives() as counted:
    dist.broadcast(four, 0)
    dist.all_gather_into_tensor(eight, four)
    dist.all_gather([torch.ones(4), torch.ones(4)], four)
    dist.reduce_scatter_tensor(two, four)
    dist.all_to_all_single(torch.ones(4), four)
    dist.reduce(four.bfloat16(), 0)
    dist.send(two, 1) if rank == 0 else dist.recv(two, 0)
    dist.barrier()
found["others"] = [counted.calls, counted.message_bytes]
found["seen"] = [[c.kind, c.dtype, c.elements, c.message_bytes, c.ranks] for c in counted.seen]

from torch.distributed import _functional_collectives as functional
with CountCollectives() as counted:
    functional.all_reduce(four, "sum", dist.group.WORLD) + 0
    functional.all_gather_tensor(four, 0, dist.group.WORLD) + 0
    functional.reduce_scatter_tensor(four, "sum", 0, dist.group.WORLD) + 0
found["functional"] = [counted.calls, counted.message_bytes]
alone = [dist.new_group([0]), dist.new_group([1])][rank]
with CountCollectives() as counted:
    functional.all_reduce(four, "sum", dist.group.WORLD) + 0
    functional.reduce_scatter_tensor(four, "sum", 0, alone) + 0
found["functional_ranks"] = [c.ranks for c in counted.seen]

weight = torch.ones(3, requires_grad=True)
weight.register_hook(lambda gradient: dist.all_reduce(gradient))
weight.register_post_accumulate_grad_hook(lambda parameter: dist.all_reduce(parameter.grad))
with CountCollectives() as counted:
    weight.sum().backward()
found["hooks"] = [counted.calls, counted.message_bytes]

json.dump({"numel": numel, **found}, open(f"{folder}/rank{rank}.json", "w"))
del ddp, model
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What two ranks counted."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(folder)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=240)
            assert rank.returncode == 0, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(2)]


def test_last_mode_of_ddp_is_one_all_reduce_of_all_gradients(counted: list[dict]) -> None:
    """Four micro-batches in `last` mode are exactly one all-reduce that carries each gradient once."""
    for rank in counted:
        assert [{"all_reduce": 1}, {"all_reduce": rank["numel"] * 4}] == rank["last"]


def test_every_mode_of_ddp_is_one_all_reduce_a_micro_batch(counted: list[dict]) -> None:
    """Four micro-batches in `every` mode are four all-reduces."""
    for rank in counted:
        assert [{"all_reduce": 4}, {"all_reduce": 4 * rank["numel"] * 4}] == rank["every"]


def test_nothing_is_counted_outside(counted: list[dict]) -> None:
    """What happens after the block leaves the counts alone."""
    for rank in counted:
        assert rank["every"] == rank["outside"]


def test_kinds_and_message_sizes(counted: list[dict]) -> None:
    """Each kind has the field's name and nccl-tests' size: the larger of input and output."""
    for index, rank in enumerate(counted):
        calls, size = rank["others"]
        point = "send" if index == 0 else "recv"
        expected = {"broadcast": 16, "reduce_scatter": 16, "all_to_all": 16, "reduce": 8, "barrier": 0, point: 8}
        assert calls == {"all_gather": 2, **dict.fromkeys(expected, 1)}
        assert size == {"all_gather": 2 * 32, **expected}


def test_functional_collectives_are_the_same_kinds(counted: list[dict]) -> None:
    """The functional spelling, which tensor parallelism and the compiler use, counts alike."""
    for rank in counted:
        calls, size = rank["functional"]
        assert calls == {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1}
        assert size == {"all_reduce": 16, "all_gather": 32, "reduce_scatter": 16}


def test_functional_collectives_name_their_ranks(counted: list[dict]) -> None:
    """Also those within a smaller group, so that they are not taken for others."""
    for rank, found in enumerate(counted):
        assert found["functional_ranks"] == [[0, 1], [rank]]


def test_collectives_of_autograd_hooks_are_seen(counted: list[dict]) -> None:
    """A collective issued from a gradient hook counts, whichever kind of hook."""
    for rank in counted:
        assert rank["hooks"] == [{"all_reduce": 2}, {"all_reduce": 24}]
