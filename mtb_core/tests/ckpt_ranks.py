"""For tests of checkpoints: real ranks over gloo, forked, and a small training to save."""

import contextlib
import json
import multiprocessing
import os
import pickle
import random
import tempfile
import traceback

import numpy as np
import torch
import torch._dynamo  # the first AdamW imports it, two seconds in every forked rank that has not got it from here
from torch import nn

from mtb_core.api.state import module_state
from mtb_core.api.values import Piece, State
from mtb_core.ckpt import files
from mtb_core.ckpt.manager import CheckpointManager
from mtb_core.ckpt.manifest import ready_text

FORK = multiprocessing.get_context("fork")


class RankFailed(Exception):
    """What a rank raised, as text."""


def run_ranks(world, function, *args, timeout=240, expect=None):
    """Run ``function(rank, *args)`` on `world` forked ranks with a gloo group; the ranks' results in order.

    A rank that raises gives a `RankFailed`, which is raised here unless `expect` is "errors"; one that was killed
    gives its negative exit code.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _run(world, function, args, f"{folder}/store", timeout, expect)


def _run(world, function, args, store, timeout, expect):
    ends, processes = [], []
    for rank in range(world):
        receive, send = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_rank, args=(rank, world, store, send, function, args))
        process.start()
        send.close()
        ends.append(receive)
        processes.append(process)
    results = []
    try:
        for receive, process in zip(ends, processes, strict=True):
            try:
                assert receive.poll(timeout), "a rank hangs"
                # Plain pickle: no shared memory that ends with a rank.
                results.append(pickle.loads(receive.recv_bytes()))
            except EOFError:
                process.join()
                results.append(process.exitcode)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if expect != "errors":
        for result in results:
            if isinstance(result, RankFailed):
                raise result
    return results


def _rank(rank, world, store, send, function, args):
    torch.set_num_threads(1)
    try:
        if world > 1:
            torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        send.send_bytes(pickle.dumps(function(rank, *args)))
        # A rank that left now would close connections that slower ranks are still making. The test's end kills it.
        multiprocessing.parent_process().join()
    except BaseException as error:  # noqa: BLE001  (told to the test)
        with contextlib.suppress(Exception):
            text = f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
            send.send_bytes(pickle.dumps(RankFailed(text)))
    finally:
        send.close()
        os._exit(0)


class Training:
    """A few steps of a small model with dropout and AdamW, whose data depend on the step alone."""

    def __init__(self, rank=0, seed=0, widths=(5, 7, 1)):
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(widths[0], widths[1]), nn.Dropout(0.5), nn.Tanh(), nn.Linear(widths[1], widths[2])
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        for seed_stream in (torch.manual_seed, np.random.seed, random.seed):
            seed_stream(100 + rank)
        self.done = 0
        self.rank = rank

    def step(self):
        self.done += 1
        data = torch.randn(4, 5, generator=torch.Generator().manual_seed(self.done))
        loss = self.model(data + np.random.rand()).square().mean()
        loss.backward()
        if torch.distributed.is_initialized():
            for p in self.model.parameters():
                torch.distributed.all_reduce(p.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def state(self):
        return module_state(self.model, self.optimizer)

    def sections(self):
        return {
            "train_state": {"global_step": self.done},
            "scheduler": {"completed_steps": self.done},
            "data": {"samples_seen": 4 * self.done},
        }

    def save(self, manager, **kwargs):
        meta = {"strategy": "single", "precision": "fp32", "samples_seen": 4 * self.done, "tokens_seen": 0}
        return manager.save(self.done, self.state(), meta=meta, sections=self.sections(), **kwargs)

    def load(self, manager, path, **kwargs):
        loaded = manager.load(path, self.state(), **kwargs)
        loaded.restore_random(manager.ctx)
        self.done = loaded.step
        return loaded

    def copy(self):
        return {k: [p.tensor.clone() for p in pieces] for k, pieces in self.state().pieces.items()}


def same(left, right):
    """Whether two `Training.copy` are equal to the bit."""
    return left.keys() == right.keys() and all(
        torch.equal(a, b) for k in left for a, b in zip(left[k], right[k], strict=True)
    )


def saved(folder, steps=(1,), **kwargs):
    """Publish checkpoints of a fresh `Training` after `steps`, in this process; returns the training."""
    training = Training()
    with CheckpointManager(folder, asynchronous=False, **kwargs) as manager:
        manager.preflight()
        while training.done < max(steps):
            training.step()
            if training.done in steps:
                training.save(manager)
    return training


def sharded_state(tensors, rank, world, dim=0):
    """A `State` in which each of `world` ranks holds a slice (maybe empty) of every tensor along `dim`."""
    pieces = {}
    for key, tensor in tensors.items():
        if not tensor.dim():
            pieces[key] = [Piece(tensor, (), ())]
            continue
        at = min(dim, tensor.dim() - 1)
        size = -(-tensor.shape[at] // world)
        low, high = min(rank * size, tensor.shape[at]), min((rank + 1) * size, tensor.shape[at])
        offset = tuple(low if d == at else 0 for d in range(tensor.dim()))
        pieces[key] = [Piece(tensor.narrow(at, low, high - low), tuple(tensor.shape), offset)]
    return State(pieces)


def edit(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values, indent=1, sort_keys=True) + "\n")


def resealed(path, change):
    """Edit the manifest, and make READY fit: a forger, not an accident."""
    edit(path / "manifest.json", change)
    (path / "READY").write_bytes(ready_text(files.digest_bytes((path / "manifest.json").read_bytes())))
