"""The public contract: values, hooks, the `Strategy` base class, options, errors. Torch-free until used."""

from .control import Control
from .descriptions import (
    CommandInfo,
    DatasetInfo,
    DoctorCheck,
    DoctorResult,
    EvidenceInfo,
    FormatInfo,
    LauncherInfo,
    ModelInfo,
    OptimizerInfo,
    RunPluginInfo,
    ScheduleInfo,
    SinkInfo,
    StrategyInfo,
    load_reference,
)
from .errors import (
    CheckFailed,
    ConfigError,
    MissingGradient,
    MtbError,
    NonFinite,
    PluginError,
    RunFailed,
)
from .evidence import Evidence
from .flat import fragment_pieces
from .hooks import PLUGIN_API, DiscoverySpecs, ObserverSpecs, RunSpecs, StrategySpecs, hookimpl
from .layout import Layout, Role, World
from .lazy import lazy_names
from .options import NoOptions, OptionHelp, describe_options, divisors, nearest, option, parse_options
from .records import Phase, RunInfo, StepRecord
from .strategy import Strategy
from .values import Job, ModelSpec, OptimizerRecipe, Piece, Plan, Prepared, RankContext, State, SyncMode
from .work import EvaluationWork, Loss, MicroBatch, Shards, StepWork

__all__ = [
    "PLUGIN_API",
    "CheckFailed",
    "CommandInfo",
    "ConfigError",
    "Control",
    "DatasetInfo",
    "DiscoverySpecs",
    "DoctorCheck",
    "DoctorResult",
    "EvaluationWork",
    "Evidence",
    "EvidenceInfo",
    "FormatInfo",
    "Job",
    "LauncherInfo",
    "Layout",
    "Loss",
    "MicroBatch",
    "MissingGradient",
    "ModelInfo",
    "ModelSpec",
    "MtbError",
    "NoOptions",
    "NonFinite",
    "ObserverSpecs",
    "OptimizerInfo",
    "OptimizerRecipe",
    "OptionHelp",
    "Phase",
    "Piece",
    "Plan",
    "PluginError",
    "Prepared",
    "RankContext",
    "Role",
    "RunFailed",
    "RunInfo",
    "RunPluginInfo",
    "RunSpecs",
    "ScheduleInfo",
    "Shards",
    "SinkInfo",
    "State",
    "StepRecord",
    "StepWork",
    "Strategy",
    "StrategyInfo",
    "StrategySpecs",
    "SyncMode",
    "World",
    "describe_options",
    "divisors",
    "fragment_pieces",
    "hookimpl",
    "lazy_names",
    "load_reference",
    "nearest",
    "option",
    "parse_options",
]
