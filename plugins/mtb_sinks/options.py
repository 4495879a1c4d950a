"""The options of the sinks; quick to import, because `mtb plugins show` and the command line need them."""

from __future__ import annotations

import attrs

from mtb_core import option


@attrs.frozen
class TensorboardOptions:
    """Options of the sink ``tensorboard``."""

    folder: str | None = option(
        None, help="Event files go to FOLDER/<name of the run's folder>. [default: tensorboard/ in the run's folder]"
    )
    every: int = option(10, help="Write every Nth step; first, last and non-finite steps always.", minimum=1)


@attrs.frozen
class PrometheusOptions:
    """Options of the sink ``prometheus``."""

    textfile: str | None = option(
        None, help="Folder of node-exporter's text files. [default without port: prometheus/ in the run's folder]"
    )
    port: int | None = option(
        None,
        help="Serve http://HOST:PORT/metrics, once a node for all its ranks; 0: a free port, see the file "
        "prometheus/rank_NNNNN.port in the run's folder.",
        minimum=0,
        maximum=65535,
    )
    host: str = option("127.0.0.1", help="Address to serve on; 0.0.0.0 lets other machines scrape it.")
