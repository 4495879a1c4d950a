"""Right strategies for tests that need one on real ranks and no plugin."""

import contextlib

import torch.distributed as dist

from mtb_core import Layout, Plan, Prepared, Shards, Strategy


def plan(options, config, world):
    return Plan(Layout((("dp", world.size),)), sync_modes=("last",))


class Right(Strategy):
    """Replicas whose gradients are summed after the last micro-batch."""

    def prepare(self, job):
        core = job.in_place(job.materialize(job.build()))
        return Prepared(core, core, job.make_optimizer(core), job)

    @contextlib.contextmanager
    def micro_batch(self, prepared, micro):
        yield
        for parameter in prepared.trainable if micro.sync else ():
            dist.all_reduce(parameter.grad)

    def gradients(self, prepared):
        return [Shards([p.grad for p in prepared.trainable], copies=dist.get_world_size())]


class FewerGroups(Right):
    """As a stage of a pipeline may: the second rank's optimizer has one group less."""

    def prepare(self, job):
        prepared = super().prepare(job)
        if dist.get_rank():
            del prepared.optimizer.param_groups[1]
        return prepared
