"""Entry of each rank of an episode."""

from __future__ import annotations

import contextlib
import copyreg
import faulthandler
import io
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

from mtb_core.ranks.worker import Worker
from mtb_core.train.planning import Planned
from mtb_core.train.worker_main import Payload, rank_main

from . import debugging, stage
from .episodes import Probe


@attrs.frozen
class RankWork:
    """Input of every rank of an episode, from the laboratory.

    Attributes:
        impl: reference of the strategy's class.
        deadline_s: a rank that takes longer shows its stacks and ends.
        debug: a terminal for one rank, where a debugger was asked for.
    """

    planned: Planned
    impl: str
    probes: tuple[Probe, ...]
    states: tuple[int, ...]
    folder: Path
    deadline_s: float
    debug: debugging.Terminal | None = None


def rank_of_episode(work: RankWork, worker: Worker) -> None:
    """Train as core would, watched; the trace is written also where the run fails.

    With one thread, whatever ``OMP_NUM_THREADS`` says: models are tiny, sums are added in the same order on every
    machine, and torch starts no pool within the run, whose threads would look like left by the strategy.
    """
    torch.set_num_threads(1)
    debugged = work.debug is not None and work.debug.rank == worker.rank
    if work.debug is None:
        faulthandler.dump_traceback_later(work.deadline_s, exit=True, file=sys.stderr)
    here = stage.Stage(worker.rank, work.impl, work.states)
    stage.enter(here)
    plugins: dict[str, Callable[[], object]] = {"kit-recorder": partial(stage.Recorder, here)}
    plugins |= {f"kit-probe-{i}": partial(probe.observer, here) for i, probe in enumerate(work.probes)}
    if debugged and work.debug is not None:
        plugins["kit-debugger"] = partial(debugging.Debugger, work.debug)
    payload = Payload(
        work.planned.resolved.config,
        work.folder / "run",
        ("mtb", "plugins", "check"),
        work.planned.resolved,
        None,
        plugins,
        work.planned,
    )
    try:
        with contextlib.ExitStack() as stack:
            for probe in work.probes:
                stack.enter_context(probe.around(here.trace))
            if debugged and work.debug is not None:
                stack.enter_context(work.debug.post_mortem())
            here.trace.result = rank_main(payload, worker)
    finally:
        trace_path(work.folder, worker.rank).write_bytes(_pickled(here.trace))
        faulthandler.cancel_dump_traceback_later()


def _pickled(trace: stage.RankTrace) -> bytes:
    """The trace for `read_traces`; torch's own way takes some hundred microseconds a tensor."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _by_bytes}
    pickler.dump(trace)
    return file.getvalue()


def _by_bytes(tensor: torch.Tensor) -> tuple[Any, ...]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return _from_bytes, (data, tensor.dtype, tuple(tensor.shape))


def _from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def trace_path(folder: Path, rank: int) -> Path:
    """The file of a rank's trace."""
    return folder / f"trace-{rank}.pickle"


def read_traces(folder: Path, ranks: int) -> list[Any]:
    """The traces that were written, by rank; None where a rank was killed first."""
    paths = [trace_path(folder, rank) for rank in range(ranks)]
    return [pickle.loads(p.read_bytes()) if p.exists() else None for p in paths]  # noqa: S301  (written just now)
