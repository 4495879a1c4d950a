import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import importlib, inspect, json, sys
import torch
from torch import nn
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from mtb_core.ranks.dynamo import avoid_dynamo_import

out = {"in place": avoid_dynamo_import(), "numbers": [], "asked too much": []}

def note(what):
    if hasattr(sys.modules.get("torch._dynamo"), "__file__"):
        out["asked too much"].append(what)

torch.manual_seed(0)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
note("init_process_group")

def train(model, make, wrap=lambda m: m):
    model = wrap(model)
    optimizer = make(model.parameters())
    for _ in range(2):
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        out["numbers"].append(float(loss))

def net():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()
    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)

train(net(), lambda p: torch.optim.AdamW(p, fused=True), nn.parallel.DistributedDataParallel)
note("ddp, fused adamw")
train(net(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
note("sgd")
train(Checkpointed(), torch.optim.AdamW)
note("activation checkpointing")
def shard(model):
    fully_shard(model)
    return model
train(net(), torch.optim.AdamW, shard)
note("fully_shard")
def helper(x):
    return x + 1
kept = torch.compiler.disable(helper)
out["numbers"].append(kept(1))
inspect.getmodule(helper)
torch.compiler.is_compiling()
out["compiling"] = torch._dynamo.is_compiling()
out["same settings"] = importlib.import_module("torch._dynamo.config") is torch._dynamo.config
torch._dynamo.config.recompile_limit = 5
note("disable, is_compiling, settings")

# From here on the real one is needed.
compiled = torch.compile(lambda x: kept(x.sin()) * 2, backend="eager")
out["numbers"] += compiled(torch.ones(2)).tolist()
real = sys.modules["torch._dynamo"]
out["real"] = hasattr(real, "__file__") and torch._dynamo is real and not out["asked too much"]
out["setting kept"] = real.config.recompile_limit
import torch._dynamo.backends.registry as registry
out["one registry"] = registry is real.backends.registry and "eager" in real.list_backends(None)
model = torch.compile(net(), backend="eager")
train(model, torch.optim.AdamW, nn.parallel.DistributedDataParallel)
out["again"] = avoid_dynamo_import()
step = torch.optim.Optimizer.add_param_group.__wrapped__
out["turned"] = getattr(getattr(step, "__dynamo_disable"), "_torchdynamo_disable", False)
print(json.dumps(out))
"""


def run(**environment):
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", PROGRAM],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_eager_training_imports_no_compiler_and_compiling_still_works():
    """Eager training leaves the real module out; compiling brings it, whole; all is as without the stand-in."""
    with_it, without = run(MTB_NO_DYNAMO_SHIM=""), run(MTB_NO_DYNAMO_SHIM="1")
    assert with_it["in place"] is True
    assert with_it["asked too much"] == []
    assert with_it["real"] is True
    assert with_it["turned"] is True
    assert with_it["one registry"] is True
    assert without["in place"] is False
    same = ("numbers", "compiling", "same settings", "setting kept", "one registry", "again", "turned")
    assert {k: with_it[k] for k in same} == {k: without[k] for k in same}
