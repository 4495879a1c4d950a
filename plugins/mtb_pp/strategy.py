"""Strategy ``pp``: consecutive parts of the model on different ranks, times data parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mtb_core import (
    ConfigError,
    EvaluationWork,
    Job,
    Loss,
    MicroBatch,
    Prepared,
    RankContext,
    RunFailed,
    Shards,
    State,
    StepWork,
    Strategy,
    gather_objects,
)
from mtb_ddp import ReplicatedModule, wrap_ddp
from mtb_fsdp import ShardedModule, sharded_optimizer, wrap_fsdp
from mtb_pp.bubble import by_formula, simulated
from mtb_pp.cutting import Cut, Part, cut, together
from mtb_pp.pipeline import Pipeline, Stage
from mtb_pp.plugin import PPOptions, check_rounds
from mtb_pp.shapes import outputs
from mtb_pp.ties import Tie, sum_gradients, ties_of


@attrs.define
class _Engine:
    """The strategy's own values.

    Attributes:
        data: each stage of this rank over the ranks that see different samples.
        group: the ranks of this pipeline.
        buffers: whether data-parallel ranks have buffers to bring into agreement.
        first_s: seconds of the first step: (all of it, forwards and backwards).
    """

    ctx: RankContext
    pipeline: Pipeline
    data: Sequence[ReplicatedModule | ShardedModule]
    ties: Sequence[Tie]
    group: dist.ProcessGroup
    buffers: bool
    first_s: tuple[float, float] | None = None


class PPStrategy(Strategy):
    """torch's pipeline schedules along the outer ranks; DistributedDataParallel or FSDP2 along the inner ones."""

    def prepare(self, job: Job) -> Prepared:
        """Cut the model, keep this rank's stages, fill and wrap them.

        Raises:
            RunFailed: on all ranks; the model cannot be cut so.
        """
        options: PPOptions = job.options
        assert job.ctx.mesh is not None
        pp_mesh, dp_mesh = job.ctx.mesh["pp"], job.ctx.mesh["dp"]
        model = job.build()
        shape = (job.config.batch_size or 1, job.config.seq_length)
        sharded = options.data_parallel == "fsdp" and dp_mesh.size() > 1
        try:
            if options.schedule == "interleaved":
                check_rounds(job.accumulation, pp_mesh.size())
            found = cut(model, job.model, pp=pp_mesh.size(), virtual=options.virtual or 1, world=job.ctx.world_size)
            passed = _passed(job, model, found, shape, sharded=sharded)
        except ConfigError as error:  # each rank looks at the whole model, so all fail alike
            raise RunFailed(str(error), agreed=True) from error
        parts, data, stages = [], [], []
        for index in range(pp_mesh.get_local_rank(), len(found.parts), pp_mesh.size()):
            inputs, output = passed[index : index + 2]
            parts.append(Part(model, found.parts[index], None if output is None else output.dtype))
            data.append(_data_parallel(job, parts[-1], dp_mesh, sharded=sharded))
            assert inputs is not None
            stages.append(
                Stage(
                    data[-1].module,
                    index,
                    len(found.parts),
                    inputs=inputs,
                    output=output,
                    device=torch.device(job.ctx.device),
                    group=pp_mesh.get_group(),
                )
            )
        core = together(parts)
        engine = _Engine(
            ctx=job.ctx,
            pipeline=Pipeline(stages, options.schedule, job.accumulation, shape),
            data=data,
            ties=ties_of(core, found.tied, pp_mesh.get_group()),
            group=pp_mesh.get_group(),
            buffers=dp_mesh.size() > 1 and next(core.buffers(), None) is not None,
        )
        modules = nn.ModuleList(each.module for each in data)
        return Prepared(modules, core, sharded_optimizer(job, core), engine, facts=_facts(job, found))

    def accumulate(self, prepared: Prepared, work: StepWork) -> Loss:
        """All micro-batches by the schedule; then the sums over stages that share a parameter."""
        engine: _Engine = prepared.engine
        pipeline, sync = engine.pipeline, work.micros[-1].sync
        if engine.buffers:
            _settle(engine)
        with _synchronised(engine, sync=sync):
            total = pipeline.step(work, engine.data[0].loss_factor)
        if sync:
            sum_gradients(engine.ties, engine.group)
        _count_bubble(prepared)
        return total

    def evaluate(self, prepared: Prepared, work: EvaluationWork) -> Loss | None:
        """All batches by the schedule, forwards only."""
        engine: _Engine = prepared.engine
        if engine.buffers:
            _settle(engine)
        return engine.pipeline.evaluate(work)

    def gradients(self, prepared: Prepared) -> Sequence[Shards]:
        """Gradients of what this stage alone has, and of what it shares with others."""
        engine: _Engine = prepared.engine
        data, shared = engine.data[0], {id(tie.parameter) for tie in engine.ties}
        out = list(data.gradients(p for p in prepared.trainable if id(p) not in shared))
        for tie in engine.ties:
            out += data.gradients([tie.parameter], copies=len(tie.ranks))
        return out

    def state(self, prepared: Prepared) -> State:
        """State of this rank's stages in terms of the whole model. Buffers are those of the first data rank."""
        _settle(prepared.engine)
        return super().state(prepared)

    def close(self, prepared: Prepared) -> None:
        """Torch's schedule and stages refer to each other and to the process group."""
        prepared.engine.pipeline.close()


def _passed(job: Job, model: nn.Module, found: Cut, shape: tuple[int, int], *, sharded: bool) -> list[Tensor | None]:
    """Inputs of the stages by stage; under None, the output of the last one."""
    bf16 = job.config.precision == "bf16"
    sent = outputs(model, found.parts, shape, torch.device(job.ctx.device), bf16=bf16 and not sharded)
    if bf16 and sharded:  # FSDP2 computes in bf16, and would make it of what it takes
        sent = [output.to(torch.bfloat16) for output in sent]
    return [torch.empty(shape, dtype=torch.int64, device="meta"), *sent, None]


def _data_parallel(job: Job, part: Part, mesh: DeviceMesh, *, sharded: bool) -> ReplicatedModule | ShardedModule:
    """`part`, filled, over the ranks of `mesh`, which see different samples."""
    # FSDP casts parameters where it gathers them; autocast would gather fp32 and cast afterwards.
    job.in_place(part, autocast=not sharded)
    if sharded:
        names = dict(part.named_modules())
        blocks = [name for name in job.model.blocks if name in names]
        out = wrap_fsdp(part, mesh, job.ctx, blocks=blocks, param_dtype=job.config.precision)
        job.materialize(part)
        return out
    job.materialize(part)
    return ReplicatedModule(part) if mesh.size() == 1 else wrap_ddp(part, mesh)


@contextmanager
def _synchronised(engine: _Engine, *, sync: bool) -> Iterator[None]:
    """The wrappers' sync context around a whole step, which is one micro-batch to them; `Stage` has the single ones."""
    whole = MicroBatch(0, 1, sync)
    with ExitStack() as stack:
        for each in engine.data:
            stack.enter_context(each.micro_batch(whole))
        yield


def _settle(engine: _Engine) -> None:
    for each in engine.data:
        each.settle()


def _facts(job: Job, found: Cut) -> dict[str, Any]:
    options: PPOptions = job.options
    return {
        "stages": [
            {"first": part[0], "last": part[-1], "parameters": size}
            for part, size in zip(found.parts, found.sizes, strict=True)
        ],
        "tied": {name: list(stages) for name, stages in found.tied.items()},
        "micro_batches": job.accumulation,
        "bubble": {"by_formula": by_formula(options.pp or 1, job.accumulation, options.virtual or 1)},
    }


def _count_bubble(prepared: Prepared) -> None:
    """After the first step: simulate the order in which all ranks took their actions. Later: measure this rank."""
    engine: _Engine = prepared.engine
    pipeline, bubble = engine.pipeline, prepared.facts["bubble"]
    if engine.first_s is None:
        done = gather_objects(engine.ctx, pipeline.stop_noting())
        layout = engine.ctx.layout
        one = [rank for rank in range(engine.ctx.world_size) if layout.coordinates(rank)["dp"] == 0]
        bubble["simulated"] = simulated([done[rank] for rank in one], len(prepared.facts["stages"]))
        bubble["measured"] = None
        engine.first_s = pipeline.total_s, pipeline.busy_s
    elif engine.ctx.device == "cpu":  # elsewhere work goes on when the call has returned
        total, busy = pipeline.total_s - engine.first_s[0], pipeline.busy_s - engine.first_s[1]
        bubble["measured"] = 1.0 - busy / total
