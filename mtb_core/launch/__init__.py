"""Public names for authors of launchers: see `LauncherInfo`.

A launcher is a function ``(spec: LaunchSpec) -> LaunchOutcome``. It starts ``spec.entry(spec.payload, worker)`` on every
rank with a `Worker`, passes stop signals on, and ends all ranks when one fails.
"""

from mtb_core.ranks.failures import Failure, exit_failure, failure_of, first_cause
from mtb_core.ranks.network import local_address, split_endpoint
from mtb_core.ranks.signals import STOP_SIGNALS, Insistence, StopFlag
from mtb_core.ranks.worker import Worker, available_cores

from .spec import LaunchOutcome, LaunchSpec, rank_log, start_ranks
from .worker import attach, limit_threads, threads_for

__all__ = [
    "STOP_SIGNALS",
    "Failure",
    "Insistence",
    "LaunchOutcome",
    "LaunchSpec",
    "StopFlag",
    "Worker",
    "attach",
    "available_cores",
    "exit_failure",
    "failure_of",
    "first_cause",
    "limit_threads",
    "local_address",
    "rank_log",
    "split_endpoint",
    "start_ranks",
    "threads_for",
]
