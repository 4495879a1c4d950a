"""MiniTrainBench's core: what every run needs, and the plugin contract. See `mtb_core.api` for the latter.

Importing it imports no torch; `run`, `Result` and `TrainConfig` load what they need when first touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    from .measure.collectives import CountCollectives
    from .measure.jsonio import dumps, write_json
    from .measure.outputs import check_output
    from .measure.redaction import redact, redact_command
    from .measure.result import Result
    from .measure.statistics import percentile, summarize
    from .measure.student import student_cdf, student_quantile
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
    "TrainConfig": ".config",
    "Worker": ".ranks.worker",
    "broadcast_buffers": ".ranks.buffers",
    "check_output": ".measure.outputs",
    "create_missing_state": ".api.state",
    "dumps": ".measure.jsonio",
    "external_launcher": ".launch.worker",
    "from_rank_zero": ".ranks.agree",
    "gather_objects": ".ranks.agree",
    "given_settings": ".cli.options",
    "keep_checkpoint": ".ckpt.publish",
    "load_config": ".config",
    "module_state": ".api.state",
    "percentile": ".measure.statistics",
    "redact": ".measure.redaction",
    "redact_command": ".measure.redaction",
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
    "TrainConfig",
    "Worker",
    "__version__",
    "broadcast_buffers",
    "check_output",
    "create_missing_state",
    "dumps",
    "external_launcher",
    "from_rank_zero",
    "gather_objects",
    "given_settings",
    "keep_checkpoint",
    "load_config",
    "module_state",
    "percentile",
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

__getattr__ = api.lazy_names(__name__, _LAZY)
