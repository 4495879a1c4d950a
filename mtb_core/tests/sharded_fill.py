"""For `test_model_services`: ranks of several shardings check that they hold their part of the plain model's weights.

Each runs in a process of its own, because torch caches meshes. A process group whose collectives do nothing is enough,
as filling must not communicate.
"""

import multiprocessing
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from mtb_core import ModelSpec, TrainConfig
from mtb_core.model.gpt import gpt_spec
from mtb_core.model.services import build_module, materialize
from mtb_core.ranks.dynamo import avoid_dynamo_import

SIZE = {"d_model": 20, "n_heads": 2, "n_layers": 2, "vocab_size": 33, "seq_length": 4}
#: Ranks by kind. Five ranks share four positions: one has none, and 33 tokens do not divide.
KINDS = {"fsdp": 5, "tp": 2, "fsdp+tp": 4}


def shard_fsdp(module, mesh):
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def shard_tp(module, mesh, spec):
    style = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = {n: style[s]() for n, _ in module.named_modules() if (s := spec.role(n)) in style}
    return parallelize_module(module, mesh, plan)


def check_gpt(kind, tie):
    spec = gpt_spec(TrainConfig(**SIZE, tie_embeddings=tie))
    full = dict(materialize(build_module(spec, 0, "cpu"), spec, 0, "cpu").named_parameters())
    module = build_module(spec, 0, "cpu")
    if kind == "fsdp":
        shard_fsdp(module, init_device_mesh("cpu", (KINDS[kind],)))
    elif kind == "tp":
        shard_tp(module, init_device_mesh("cpu", (KINDS[kind],)), spec)
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        shard_fsdp(shard_tp(module, mesh["tp"], spec), mesh["dp"])
    materialize(module, spec, 0, "cpu")
    assert (module.head.weight is module.tokens.weight) == tie
    assert [n for n, _ in module.named_parameters()] == list(full)
    sharded = check_parts(module, full)
    assert sharded == (12 if kind == "tp" else len(full))


def check_columns():
    spec = ModelSpec(build=lambda: nn.Linear(5, 4, bias=False), init=lambda _, t, g: t.normal_(generator=g))
    full = dict(materialize(build_module(spec, 0, "cpu"), spec, 0, "cpu").named_parameters())
    module = build_module(spec, 0, "cpu")
    mesh = init_device_mesh("cpu", (2,))
    module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(1)], src_data_rank=None))
    check_parts(materialize(module, spec, 0, "cpu"), full)
    columns = slice(0, 3) if dist.get_rank() == 0 else slice(3, 5)
    assert torch.equal(module.weight.to_local(), full["weight"][:, columns])


def check_parts(module, full):
    """Compare with what torch's own distribution of the full tensor gives; returns how many were sharded."""
    sharded = 0
    for name, parameter in module.named_parameters():
        local, expected = parameter.detach(), full[name].detach()
        if isinstance(parameter, DTensor):
            sharded += 1
            local = local.to_local()
            mesh, placements = parameter.device_mesh, parameter.placements
            expected = distribute_tensor(expected, mesh, placements, src_data_rank=None).to_local()
        assert not local.is_meta
        assert torch.equal(local, expected), name
    return sharded


def run_rank(rank, world, check, args):
    print(f"rank {rank} of {world}: {check.__name__}{args}", flush=True)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    check(*args)


def main():
    avoid_dynamo_import()
    cases = [(world, check_gpt, (kind, tie)) for kind, world in KINDS.items() for tie in (False, True)]
    cases.append((2, check_columns, ()))
    fork, codes = multiprocessing.get_context("fork"), []
    for world, check, args in cases:
        for rank in range(world):
            process = fork.Process(target=run_rank, args=(rank, world, check, args))
            process.start()
            process.join()
            codes.append(process.exitcode)
    print(f"checked {len(codes)} ranks")
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
