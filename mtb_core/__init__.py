"""MiniTrainBench's core: what every run needs, and the plugin contract. See `mtb_core.api` for the latter.

Importing it imports no torch; `run`, `Result` and `TrainConfig` load what they need when first touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import api
from .api import *  # noqa: F403  (the public contract is re-exported under one roof)

if TYPE_CHECKING:
    from .api.state import create_missing_state, module_state
    from .ckpt.publish import keep_checkpoint
    from .cli.options import GroupedCommand, GroupedOption, given_settings, setting_options
    from .cli.train import train_command
    from .config import TrainConfig, load_config
    from .launch.worker import external_launcher
    from .launching import RanksOutcome, run_ranks
    from .measure.audit import audit_folder, private_details
    from .measure.collectives import CountCollectives
    from .measure.environment import environment, provenance, redact, redact_command
    from .measure.jsonio import dumps, write_json
    from .measure.outputs import check_output
    from .measure.result import Result
    from .measure.statistics import percentile, summarize
    from .measure.student import student_cdf, student_quantile
    from .measure.validity import Sample, Timed, formal_obstacles, gather_uses, performance_fields
    from .ranks.agree import from_rank_zero, gather_objects, same_on_all
    from .ranks.buffers import BufferSync, broadcast_buffers
    from .ranks.failures import Failure
    from .ranks.inquiry import Answer, Inquiry
    from .ranks.worker import Worker
    from .running import reports_here, run

__version__ = "0.1.0"

_LAZY = {
    "Answer": ".ranks.inquiry",
    "BufferSync": ".ranks.buffers",
    "CountCollectives": ".measure.collectives",
    "Failure": ".ranks.failures",
    "GroupedCommand": ".cli.options",
    "GroupedOption": ".cli.options",
    "Inquiry": ".ranks.inquiry",
    "RanksOutcome": ".launching",
    "Result": ".measure.result",
    "Sample": ".measure.validity",
    "Timed": ".measure.validity",
    "TrainConfig": ".config",
    "Worker": ".ranks.worker",
    "audit_folder": ".measure.audit",
    "broadcast_buffers": ".ranks.buffers",
    "check_output": ".measure.outputs",
    "create_missing_state": ".api.state",
    "dumps": ".measure.jsonio",
    "environment": ".measure.environment",
    "external_launcher": ".launch.worker",
    "formal_obstacles": ".measure.validity",
    "from_rank_zero": ".ranks.agree",
    "gather_objects": ".ranks.agree",
    "gather_uses": ".measure.validity",
    "given_settings": ".cli.options",
    "keep_checkpoint": ".ckpt.publish",
    "load_config": ".config",
    "module_state": ".api.state",
    "percentile": ".measure.statistics",
    "performance_fields": ".measure.validity",
    "private_details": ".measure.audit",
    "provenance": ".measure.environment",
    "redact": ".measure.environment",
    "redact_command": ".measure.environment",
    "reports_here": ".running",
    "run": ".running",
    "run_ranks": ".launching",
    "same_on_all": ".ranks.agree",
    "setting_options": ".cli.options",
    "student_cdf": ".measure.student",
    "student_quantile": ".measure.student",
    "summarize": ".measure.statistics",
    "train_command": ".cli.train",
    "write_json": ".measure.jsonio",
}

__all__ = [  # noqa: PLE0604  (they are strings)
    *api.__all__,
    "Answer",
    "BufferSync",
    "CountCollectives",
    "Failure",
    "GroupedCommand",
    "GroupedOption",
    "Inquiry",
    "RanksOutcome",
    "Result",
    "Sample",
    "Timed",
    "TrainConfig",
    "Worker",
    "__version__",
    "audit_folder",
    "broadcast_buffers",
    "check_output",
    "create_missing_state",
    "dumps",
    "environment",
    "external_launcher",
    "formal_obstacles",
    "from_rank_zero",
    "gather_objects",
    "gather_uses",
    "given_settings",
    "keep_checkpoint",
    "load_config",
    "module_state",
    "percentile",
    "performance_fields",
    "private_details",
    "provenance",
    "redact",
    "redact_command",
    "reports_here",
    "run",
    "run_ranks",
    "same_on_all",
    "setting_options",
    "student_cdf",
    "student_quantile",
    "summarize",
    "train_command",
    "write_json",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    msg = f"module 'mtb_core' has no attribute {name!r}"
    raise AttributeError(msg)
