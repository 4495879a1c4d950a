"""Strategy ``cp``: ranks share samples, each with its own positions of them, times data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mtb_core import Job, MicroBatch, Prepared, Shards, State, Strategy
from mtb_cp.attention import Attend, share_attention
from mtb_cp.cutting import causal_shares, cut, positions_of
from mtb_cp.gathered import GatheredAttention
from mtb_cp.plugin import CPOptions
from mtb_cp.ring import RingAttention
from mtb_cp.sharing import SharedSequence, Traffic
from mtb_ddp import ReplicatedModule, wrap_ddp
from mtb_fsdp import ShardedModule, sharded_optimizer, wrap_fsdp

_ATTENTIONS: dict[str, Callable[[SharedSequence], Attend]] = {"gather": GatheredAttention, "ring": RingAttention}


@attrs.frozen
class _Engine:
    """State of a trial besides model and optimizer.

    Attributes:
        data: the model over all ranks: each of them sees other tokens.
        shared: the sequence that this rank shares with others; None: with nobody.
    """

    data: ReplicatedModule | ShardedModule
    shared: SharedSequence | None


class CPStrategy(Strategy):
    """Attention over the ranks that share a sequence; DistributedDataParallel or FSDP2 over all ranks."""

    def prepare(self, job: Job) -> Prepared:
        """Replace the model's attention, then wrap it as ``ddp`` or ``fsdp`` would."""
        options: CPOptions = job.options
        core = job.build()
        shared = _shared_sequence(job)
        if shared is not None:
            attend = _ATTENTIONS[options.attention](shared)
            if job.config.compile:  # blocks are compiled around it: what communicates is no part of a graph
                attend = torch.compiler.disable(attend)
            share_attention(core, job.model, attend, positions_of(shared.own), job.ctx.device)
        data = _over_all_ranks(job, core)
        return Prepared(
            data.module,
            core,
            sharded_optimizer(job, core),
            _Engine(data, shared),
            positions=None if shared is None else positions_of(shared.own),
            facts=_facts(job, shared),
        )

    def micro_batch(self, prepared: Prepared, micro: MicroBatch) -> AbstractContextManager[None]:
        """Synchronisation as asked. What attention sends and holds is counted in the first micro-batch."""
        engine: _Engine = prepared.engine
        if engine.shared is None or "kv_bytes" in prepared.facts:
            return engine.data.micro_batch(micro)
        return _counted(engine.data.micro_batch(micro), engine.shared.traffic, prepared.facts)

    def backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        """DDP averages over ranks; the contract is their sum, which FSDP takes."""
        (loss * prepared.engine.data.loss_factor).backward()

    def gradients(self, prepared: Prepared) -> Sequence[Shards]:
        """Those of the whole model, equal on all ranks, or of this rank's shards."""
        engine: _Engine = prepared.engine
        return engine.data.gradients(prepared.trainable)

    def state(self, prepared: Prepared) -> State:
        """As with ``ddp`` or ``fsdp``: positions are no part of it. Buffers are those of rank 0."""
        engine: _Engine = prepared.engine
        engine.data.settle()
        return super().state(prepared)

    def close(self, prepared: Prepared) -> None:
        """Destroy the groups that FSDP2 made."""
        engine: _Engine = prepared.engine
        if isinstance(engine.data, ShardedModule):
            engine.data.close()


def _shared_sequence(job: Job) -> SharedSequence | None:
    assert job.ctx.mesh is not None
    mesh = job.ctx.mesh["cp"]
    if mesh.size() == 1:
        return None
    return SharedSequence(mesh.get_group(), cut(job.config.seq_length, mesh.size(), job.options.balance))


def _over_all_ranks(job: Job, core: nn.Module) -> ReplicatedModule | ShardedModule:
    """Fill `core` and wrap it over all ranks: gradients are sums over samples and over positions alike."""
    assert job.ctx.mesh is not None
    if job.options.data_parallel == "ddp":
        return wrap_ddp(job.in_place(job.materialize(core)), job.ctx.mesh)
    # FSDP casts parameters where it gathers them; autocast would gather fp32 and cast afterwards.
    core = job.in_place(core, autocast=False)
    everybody = init_device_mesh(job.ctx.mesh.device_type, (job.ctx.world_size,))  # one axis; two would mean copies
    precision = job.config.precision
    sharded = wrap_fsdp(core, everybody, job.ctx, blocks=job.model.blocks, param_dtype=precision)
    job.materialize(core)
    return sharded


def _facts(job: Job, shared: SharedSequence | None) -> dict[str, Any]:
    cp = 1 if shared is None else shared.ranks
    facts: dict[str, Any] = {"cp": cp, "dp": job.ctx.world_size // cp}
    if shared is not None:
        facts["positions_per_rank"] = len(positions_of(shared.own))
        facts["attention_share_by_rank"] = [round(share, 4) for share in causal_shares(shared.cuts)]
    return facts


@contextmanager
def _counted(micro_batch: AbstractContextManager[None], traffic: Traffic, facts: dict[str, Any]) -> Iterator[None]:
    traffic.sent = traffic.held = 0
    with micro_batch:
        yield
    facts["kv_bytes"] = {"sent_per_micro_batch": traffic.sent, "held_by_one_attention": traffic.held}
