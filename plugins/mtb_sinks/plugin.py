"""Entry point: sinks; see `mtb_core.hookimpl`. They are imported when used."""

from __future__ import annotations

from collections.abc import Sequence

from mtb_core import SinkInfo, hookimpl

from .options import PrometheusOptions, TensorboardOptions

PLUGIN_API = 2


@hookimpl
def mtb_sinks() -> Sequence[SinkInfo]:
    """`csv`, `tensorboard` and `prometheus`."""
    return [
        SinkInfo("csv", "metrics/rank_NNNNN.csv in the run's folder.", "mtb_sinks.csv_sink:CsvSink"),
        SinkInfo(
            "tensorboard",
            "Event files for TensorBoard, from rank 0.",
            "mtb_sinks.tensorboard_sink:TensorboardSink",
            TensorboardOptions,
        ),
        SinkInfo(
            "prometheus",
            "Metrics for Prometheus: text files, or an HTTP exporter per node.",
            "mtb_sinks.prometheus_sink:PrometheusSink",
            PrometheusOptions,
        ),
    ]
