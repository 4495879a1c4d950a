"""Configuration: declared in `schema`, read and written in `toml`, made whole in `resolve`. Torch-free."""

from .resolve import ResolvedRun, fingerprint, resolve
from .schema import IGNORE_LABEL, TrainConfig, option_name, settings
from .toml import config_values, load_config, starter_toml, write_toml

__all__ = [
    "IGNORE_LABEL",
    "ResolvedRun",
    "TrainConfig",
    "config_values",
    "fingerprint",
    "load_config",
    "option_name",
    "resolve",
    "settings",
    "starter_toml",
    "write_toml",
]
