"""Values for observers of a run: one immutable `StepRecord` a step, and the `RunInfo` that opens it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

if TYPE_CHECKING:
    from mtb_core.config.schema import TrainConfig

    from .control import Control
    from .values import RankContext

#: What a rank is at: building the model, taking a step (``compile``: one in which torch.compile may compile), saving
#: or loading a checkpoint, evaluating, ending.
Phase = Literal["prepare", "compile", "step", "save", "load", "evaluate", "close"]


@attrs.frozen
class StepRecord:
    """One optimizer step as one rank saw it. Field names are those of a metrics line (``docs/reference/json.md``).

    Losses, norms and token counts are global and equal on all ranks; times and memory are this rank's own.
    Times are read from a monotonic clock, milliseconds; device work is waited for at their edges only.

    Attributes:
        global_step: the step's number, 1 for the first of the training; resumed runs go on counting.
        loss: mean over the valid tokens of the global batch.
        grad_norm: global 2-norm of the gradients before clipping.
        param_norm: None: not measured.
        learning_rate: of the first parameter group, as used in this step.
        skipped: the optimizer was not applied (``--on-nonfinite skip``, or a run plugin or the strategy left it out).
        valid_tokens: of the global batch, targets with the ignore label left out.
        data_time_ms: waiting for the batch.
        forward_backward_ms: all micro-batches, gradient synchronisation and the agreement of the ranks included, waiting
            for data left out.
        optimizer_step_ms: clipping, optimizer, clearing of gradients.
        step_time_ms: from asking for the batch to the end of the optimizer's work; saving, evaluation and reporting
            are outside.
        checkpoint_time_ms: how long training paused for a checkpoint since the step before.
        memory_mib: peak so far, see `memory_kind` of the result.
        warmup: the step belongs to the benchmark's warm-up and is not in the averages.
        time: UTC, ISO 8601; for people, never for durations.
        metrics: further figures by name. Those of the model and the strategy (`Loss.metrics`) are means over the valid
            tokens of the global batch, those of run plugins means over the ranks.
    """

    global_step: int
    loss: float
    grad_norm: float
    param_norm: float | None
    learning_rate: float
    clipped: bool
    skipped: bool
    nonfinite: bool
    samples_seen: int
    tokens_seen: int
    valid_tokens: int
    data_time_ms: float
    forward_backward_ms: float
    optimizer_step_ms: float
    step_time_ms: float
    checkpoint_time_ms: float
    memory_mib: float
    warmup: bool
    time: str
    metrics: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen
class RunInfo:
    """Description of a run for observers, given when one trial of it starts.

    Attributes:
        folder: the run's folder; exists on every rank.
        first_step: number of the first step of this invocation.
        last_step: number of the last step that is planned.
        trial: index of the trial under ``--repeat``.
        progress: ``progress(fields)`` hands a small JSON-like mapping to whoever owns the terminal; cheap, never
            blocks, does nothing where nobody shows it.
        control: lets a run plugin act on the run; None for sinks.
        started: when this invocation of ``mtb`` began, on the clock of `time.monotonic`; a restart of the ranks by
            ``--max-restarts`` does not change it.
    """

    config: TrainConfig
    ctx: RankContext
    folder: Path
    first_step: int
    last_step: int
    trial: int
    progress: Callable[[dict[str, Any]], None]
    control: Control | None = None
    started: float = attrs.field(factory=time.monotonic)
