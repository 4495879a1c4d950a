"""Sink ``prometheus``: text files for node-exporter, and one HTTP exporter per node.

Every rank keeps a small text file of its own up to date; the exporter, in the process of local rank 0, answers with
what it finds in the files of its node's ranks. So nothing passes between processes but files that are replaced whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from mtb_core import ConfigError, RunInfo, StepRecord, hookimpl

from .options import PrometheusOptions

#: A rank's file is replaced at most this often, besides at the ends and after a non-finite step.
REFRESH_INTERVAL_S = 1.0

#: The metric ``mtb_KEY`` is the last step's KEY of a metrics line.
GAUGES = {
    "global_step": "Optimizer step that ended last.",
    "loss": "Mean loss over the valid tokens of the global batch.",
    "grad_norm": "Global norm of the gradients before clipping.",
    "param_norm": "Global norm of the parameters.",
    "learning_rate": "Learning rate of the first parameter group.",
    "samples_seen": "Samples consumed by optimizer steps since the start of the training.",
    "tokens_seen": "Tokens consumed by optimizer steps since the start of the training.",
    "data_time_ms": "Waiting for the batch, milliseconds.",
    "forward_backward_ms": "Forward and backward of all micro-batches, milliseconds.",
    "optimizer_step_ms": "Clipping and optimizer, milliseconds.",
    "step_time_ms": "Whole step, milliseconds.",
    "checkpoint_time_ms": "Pause for a checkpoint, milliseconds.",
    "memory_mib": "Peak memory so far, MiB.",
}
#: The metric ``mtb_KEY_steps_total`` counts the steps of this process for which KEY was true.
COUNTERS = {
    "clipped": "Steps whose gradients were clipped.",
    "skipped": "Steps whose update was skipped.",
    "nonfinite": "Steps with a non-finite loss or gradient.",
}
LABELS = ("rank", "strategy", "run")


class PrometheusSink:
    """Publishes metrics ``mtb_*`` with the labels ``rank``, ``strategy`` and ``run`` (name of the run's folder).

    The last file stays after the run, with ``mtb_running 0``; the HTTP exporter ends with the run.
    """

    def __init__(self, options: PrometheusOptions) -> None:
        self._options = options
        self._files: list[Path] = []
        self._labels: tuple[str, ...] = ()
        self._record: StepRecord | None = None
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._eval_loss: float | None = None
        self._next = 0.0
        self._exporter: _Exporter | None = None

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        """Write the first file; local rank 0 opens the exporter's port."""
        options, rank, run = self._options, info.ctx.rank, info.folder.name
        self._labels = (str(rank), info.config.strategy, run)
        if options.textfile is not None:
            self._files.append(Path(options.textfile) / f"mtb_{run}_rank_{rank:05d}.prom")
        if options.port is not None or options.textfile is None:
            self._files.append(_rank_file(info.folder, rank))
        for file in self._files:
            file.parent.mkdir(parents=True, exist_ok=True)
        self._publish(running=True)
        if options.port is not None and info.ctx.local_rank == 0:
            ranks = range(rank, rank + info.ctx.world.local_size)
            self._exporter = _Exporter(options.host, options.port, [_rank_file(info.folder, r) for r in ranks])
            self._exporter.announce(_rank_file(info.folder, rank).with_suffix(".port"))

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        """Keep the step, and refresh the file if it is time."""
        first, self._record = self._record is None, record
        for name in self._counts:
            self._counts[name] += getattr(record, name)
        if first or record.nonfinite or time.monotonic() >= self._next:
            self._publish(running=True)

    @hookimpl
    def mtb_evaluated(self, loss: float) -> None:
        """Keep the evaluation's loss, and refresh the file."""
        self._eval_loss = loss
        self._publish(running=True)

    @hookimpl
    def mtb_run_finished(self) -> None:
        """Write the last file and give the port back."""
        exporter, self._exporter = self._exporter, None
        try:
            self._publish(running=False)
        finally:
            if exporter is not None:
                exporter.close()

    def _publish(self, *, running: bool) -> None:
        if self._files:
            text = generate_latest(_Families(self._families(running=running)))
            for file in self._files:
                _replace(file, text)
        self._next = time.monotonic() + REFRESH_INTERVAL_S

    def _families(self, *, running: bool) -> list[Metric]:
        families = [_gauge("mtb_running", "1 while the run is in progress.", self._labels, float(running))]
        for name, text in GAUGES.items() if self._record is not None else ():
            value = getattr(self._record, name)
            if value is not None:
                families.append(_gauge(f"mtb_{name}", text, self._labels, value))
        if self._eval_loss is not None:
            text = "Mean loss of the last evaluation."
            families.append(_gauge("mtb_eval_loss", text, self._labels, self._eval_loss))
        for name, text in COUNTERS.items():
            family = CounterMetricFamily(f"mtb_{name}_steps", text, labels=LABELS)
            family.add_metric(self._labels, self._counts[name])
            families.append(family)
        return families


class _Families(Collector):
    """Families that are ready; what prometheus_client asks for metrics."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class _RankFiles(Collector):
    """The families found in several ranks' files at the time of asking, each family once."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for file in self._files:
            if not file.exists():  # a rank that has not started
                continue
            for family in text_string_to_metric_families(file.read_text(encoding="utf-8")):
                if family.name in families:
                    families[family.name].samples.extend(family.samples)
                else:
                    families[family.name] = family
        return families.values()


class _Exporter:
    """An HTTP server in a thread of its own, until `close`."""

    def __init__(self, host: str, port: int, files: Sequence[Path]) -> None:
        self._server: WSGIServer
        self._thread: Thread
        self._announced: Path | None = None
        try:
            self._server, self._thread = start_http_server(port, host, _RankFiles(files))
        except OSError as error:
            raise ConfigError(
                f"The Prometheus exporter cannot listen on {host}:{port}: {error.strerror or error}. Set the options "
                "'port' (0 takes a free one, and names it in a file in the run's folder) and 'host' of the sink, for "
                "example --sink prometheus:port=0."
            ) from error

    def announce(self, file: Path) -> None:
        """Write the port into `file`, for as long as it is served."""
        _replace(file, f"{self._server.server_port}\n".encode())
        self._announced = file

    def close(self) -> None:
        """Stop serving; port, thread and the announcing file are gone afterwards."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        if self._announced is not None:
            self._announced.unlink(missing_ok=True)


def _gauge(name: str, text: str, labels: Sequence[str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=LABELS)
    family.add_metric(labels, value)
    return family


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / "prometheus" / f"rank_{rank:05d}.prom"


def _replace(file: Path, text: bytes) -> None:
    """Replace `file` whole: who reads it sees the old or the new text. Readers look for ``*.prom`` only."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_bytes(text)
    temporary.replace(file)
