"""The result of a training run: ``result.json``, schema version 1, computed from records by pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs

from mtb_core.api.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN_FAILED, EXIT_STOPPED, RunFailed
from mtb_core.api.records import StepRecord

from .jsonio import to_strict, write_json
from .statistics import percentile, summarize

SCHEMA_VERSION = 1

_EXIT_CODES = {"done": EXIT_OK, "stopped": EXIT_STOPPED, "interrupted": EXIT_INTERRUPTED, "failed": EXIT_RUN_FAILED}

#: Times of a step, in the order in which ranks hand them over.
TIMES = ("step_time_ms", "data_time_ms", "forward_backward_ms", "optimizer_step_ms")


@attrs.frozen(kw_only=True)
class Result:
    """One training run. Keys are described in ``docs/reference/json.md``; what was not measured is None.

    A time is the mean over the measured steps of the maximum over ranks, and over trials where there are several.
    ``checkpoint_time_ms`` is the mean pause of training for a checkpoint, None without one. ``tokens_per_sec`` counts the valid tokens of the global batch, against those step times.
    """

    schema_version: int = SCHEMA_VERSION
    benchmark: str = "training"
    exit_reason: str
    stop_reason: str | None = None
    failure: Mapping[str, Any] | None = None
    run_dir: str | None = None
    strategy: str
    strategy_options: Mapping[str, Any]
    world_size: int
    precision: str
    reduce_dtype: str | None = None
    device: str | None = None
    device_name: str | None = None
    backend: str | None = None
    parameters: int | None = None
    steps: int = 0
    warmup_steps: int = 0
    repeat_count: int = 1
    trial_protocol: str = "single_run"
    batch_size_per_rank: int | None = None
    global_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    gradient_sync_mode: str | None = None
    resolved_gradient_sync_mode: str | None = None
    synchronized_microbatches_per_step: int | None = None
    activation_checkpointing: bool | None = None
    nonfinite_policy: str | None = None
    tokens_per_sec: float | None = None
    step_time_ms: float | None = None
    step_time_p50_ms: float | None = None
    step_time_p95_ms: float | None = None
    data_time_ms: float | None = None
    forward_backward_ms: float | None = None
    optimizer_step_ms: float | None = None
    checkpoint_time_ms: float | None = None
    max_memory_mib: float | None = None
    memory_kind: str | None = None
    model_flops_per_token: float | None = None
    flops_convention: str | None = None
    mfu: float | None = None
    mfu_reason: str | None = None
    collectives_per_step: Mapping[str, int] | None = None
    comm_bytes_per_step: Mapping[str, int] | None = None
    collectives_reason: str | None = None
    loss: float | None = None
    loss_first: float | None = None
    eval_loss: float | None = None
    eval_samples: int | None = None
    grad_norm: float | None = None
    grad_norm_max: float | None = None
    clipped_steps: int | None = None
    skipped_steps: int | None = None
    learning_rate_start: float | None = None
    learning_rate_end: float | None = None
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    global_step: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0
    config: Mapping[str, Any] = attrs.field(factory=dict)
    config_fingerprint: str | None = None
    summary: Mapping[str, Any] = attrs.field(factory=dict)
    repeats: Sequence[Mapping[str, Any]] = ()
    runtime: Mapping[str, Any] = attrs.field(factory=dict)
    strategy_facts: Mapping[str, Any] = attrs.field(factory=dict)
    plugin_results: Mapping[str, Any] = attrs.field(factory=dict)
    environment: Mapping[str, Any] = attrs.field(factory=dict)
    conditions: Mapping[str, Any] = attrs.field(factory=dict)
    plugins: Sequence[Mapping[str, str]] = ()
    provenance: Mapping[str, Any] = attrs.field(factory=dict)
    execution_complete: bool = False
    performance_valid: bool = False
    performance_invalid_reasons: Sequence[str] = ()
    publishable: bool = True
    unpublishable_reasons: Sequence[str] = ()

    @property
    def exit_code(self) -> int:
        """Exit code of ``mtb`` after this run."""
        return _EXIT_CODES[self.exit_reason]

    def check(self) -> Result:
        """This result, if the run ended as planned.

        Raises:
            RunFailed: it did not; the message is that of the first failure.
        """
        if self.exit_reason == "done":
            return self
        failure = self.failure or {}
        reason = f"{self.exit_reason}: {self.stop_reason}" if self.stop_reason else self.exit_reason
        text = failure.get("text") or f"The run ended early: {reason}."
        raise RunFailed(text, rank=failure.get("rank"), step=failure.get("step"))

    def to_json(self) -> dict[str, Any]:
        """Strict JSON: a non-finite value is None with a flag beside it."""
        out: dict[str, Any] = to_strict(self)
        return out

    def write(self, path: str | Path) -> None:
        """Write it atomically; folders on the way are made."""
        write_json(path, self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Result:
        """The result that `to_json` gave; keys of later schema versions are left out."""
        known = {f.name for f in attrs.fields(cls)}
        return cls(**{k: v for k, v in values.items() if k in known})


@attrs.frozen
class RankReport:
    """Report of one rank at the end of a trial.

    Attributes:
        times: a row of `TIMES` for each step, warm-up included.
        pauses_ms: how long training was held up by each checkpoint.
    """

    times: Sequence[Sequence[float]]
    memory_mib: float
    pauses_ms: Sequence[float] = ()


def rank_report(records: Sequence[StepRecord], pauses_ms: Sequence[float] = ()) -> RankReport:
    """This rank's report of a trial."""
    return RankReport(
        [[getattr(r, name) for name in TIMES] for r in records],
        max((r.memory_mib for r in records), default=0.0),
        pauses_ms,
    )


def trial_row(records: Sequence[StepRecord], reports: Sequence[RankReport]) -> dict[str, Any]:
    """One trial's figures: global ones from the `records` of any rank, times and memory as maxima over all `reports`.

    Averages are over the measured steps; without any, times are None.
    """
    measured = [i for i, record in enumerate(records) if not record.warmup]
    row: dict[str, Any] = {"steps": len(measured), "warmup_steps": len(records) - len(measured)}
    slowest = [[max(report.times[i][t] for report in reports) for t in range(len(TIMES))] for i in measured]
    for t, name in enumerate(TIMES):
        row[name] = fmean(step[t] for step in slowest) if slowest else None
    for name, q in (("step_time_p50_ms", 50), ("step_time_p95_ms", 95)):
        row[name] = percentile([step[0] for step in slowest], q) if slowest else None
    pauses = [max(saves) for saves in zip(*(report.pauses_ms for report in reports), strict=False)]
    row["checkpoint_time_ms"] = fmean(pauses) if pauses else None
    seconds = sum(step[0] for step in slowest) / 1e3
    tokens = sum(records[i].valid_tokens for i in measured)
    row["tokens_per_sec"] = tokens / seconds if seconds else None
    row["max_memory_mib"] = max((report.memory_mib for report in reports), default=None) if records else None
    norms = [records[i].grad_norm for i in measured]
    row["loss"] = records[-1].loss if records else None
    row["loss_first"] = records[0].loss if records else None
    row["grad_norm"] = fmean(norms) if norms else None
    row["grad_norm_max"] = max(norms, key=_nan_last) if norms else None
    row["clipped_steps"] = sum(records[i].clipped for i in measured)
    row["skipped_steps"] = sum(r.skipped for r in records)
    row["learning_rate_start"] = records[0].learning_rate if records else None
    row["learning_rate_end"] = records[-1].learning_rate if records else None
    row["metrics"] = dict(records[-1].metrics) if records else {}
    return row


#: Figures that are averaged over trials; everything else of a result is the last trial's.
AVERAGED = (
    "tokens_per_sec",
    *TIMES,
    "step_time_p50_ms",
    "step_time_p95_ms",
    "checkpoint_time_ms",
    "max_memory_mib",
    "loss",
    "loss_first",
    "eval_loss",
    "grad_norm",
    "grad_norm_max",
    "mfu",
)


def combine_trials(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(figures of the run, summary by metric) from one row a trial."""
    figures = dict(rows[-1])
    summary = {name: summarize([row.get(name) for row in rows]) for name in AVERAGED}
    for name, spread in summary.items():
        if spread is not None:
            figures[name] = spread["mean"]
    return figures, {name: spread for name, spread in summary.items() if spread is not None}


def _nan_last(value: float) -> float:
    return float("inf") if math.isnan(value) else value
