"""MiniTrainBench as a contender, through its public Python API."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import mtb_core

from .gate import total_steps
from .workload import DATA, sizes


def mtb(sinks: tuple[str, ...], nproc: int) -> None:
    """A run with all guards on; `sinks` besides the gate."""
    with tempfile.TemporaryDirectory() as folder:
        config = mtb_core.TrainConfig(
            **sizes(),
            strategy="ddp" if nproc > 1 else "single",
            nproc=nproc,
            data=os.environ[DATA],
            warmup_steps=0,
            steps=total_steps(),
            sink=(*sinks, "gate"),
            run_dir=str(Path(folder) / "run"),
        )
        mtb_core.run(config).check()
