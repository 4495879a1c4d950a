"""The strategy ``single``: one process, no communication."""

from __future__ import annotations

from collections.abc import Sequence

from mtb_core import Job, Prepared, Shards, Strategy


class Single(Strategy):
    """The plain module on one rank."""

    def prepare(self, job: Job) -> Prepared:
        """Build, fill, change in place."""
        module = job.in_place(job.materialize(job.build()))
        # The trainable parameters are listed once: walking the module tree in every step is not free.
        trainable = [p for p in module.parameters() if p.requires_grad]
        return Prepared(module, module, job.make_optimizer(module), engine=trainable)

    def gradients(self, prepared: Prepared) -> Sequence[Shards]:
        """All gradients; no other rank holds a copy."""
        return [Shards([p.grad for p in prepared.engine if p.grad is not None], copies=1)]
