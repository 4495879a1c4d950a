"""The strategy ``single``: one process, no communication."""

from __future__ import annotations

from mtb_core import Job, Prepared, Strategy


class Single(Strategy):
    """The plain module on one rank; everything but `prepare` is what every strategy has by default."""

    def prepare(self, job: Job) -> Prepared:
        """Build, fill, change in place."""
        module = job.in_place(job.materialize(job.build()))
        return Prepared(module, module, job.make_optimizer(module))
