"""TOML in and out, and the merging of a file with the command line."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import tomli_w

from mtb_core.api.errors import ConfigError
from mtb_core.api.options import nearest

from .schema import GROUPS, TrainConfig, option_name, settings, value_type

#: Settings that name a file or folder; in a file they may begin with ``~/``.
PATHS = ("data", "eval_data", "checkpoint_dir", "run_dir", "output", "resume")

#: Of the three batch settings, those of the file that give way first when the command line over-determines them.
_BATCH_YIELDS = ("batch_size", "grad_accum_steps", "global_batch_size")


#: Tables of options, and the setting whose value they belong to.
_OPTIONS_OF = {
    "strategy_opt": "strategy",
    "model_opt": "model",
    "data_opt": "data",
    "optimizer_opt": "optimizer",
    "lr_scheduler_opt": "lr_scheduler",
    "plugin_opt": None,
}


def load_config(given: Mapping[str, Any] | None = None, *, file: str | Path | None = None) -> TrainConfig:
    """A `TrainConfig` from the settings of a TOML `file` and those `given`, which win.

    Of the three batch settings any two decide the third; where `given` and the file together hold all three, values
    of the file give way: first ``batch_size``, then ``grad_accum_steps`` (also where `given` changes the number of
    ranks, so that a resolved file serves other world sizes). Likewise ``steps`` against ``until_step``.

    Raises:
        ConfigError: unreadable file, unknown key (naming the nearest valid one), or a value that is not valid.
    """
    given = dict(given or {})
    merged: dict[str, Any] = dict(read_toml(file)) if file is not None else {}
    from_file = set(merged)
    unknown = [key for key in given if key not in settings()]
    if unknown:
        raise _unknown(unknown[0], "the configuration")
    for table, owner in _OPTIONS_OF.items():
        changed = owner is not None and owner in given and given[owner] != merged.get(owner, given[owner])
        if changed:
            merged.pop(table, None)  # they are another's
        elif table in given:
            given[table] = {**merged.get(table, {}), **given[table]}
    merged.update(given)
    changes_ranks = any(n in given for n in (*_BATCH_YIELDS, "nproc", "nnodes", "strategy", "strategy_opt"))
    for name in _BATCH_YIELDS:
        complete = all(merged.get(n) is not None for n in _BATCH_YIELDS)
        if complete and changes_ranks and name in from_file and name not in given:
            del merged[name]
    for mine, other in (("steps", "until_step"), ("until_step", "steps")):
        if mine in given and other in merged and other not in given:
            del merged[other]
    return TrainConfig(**merged)


def read_toml(file: str | Path) -> dict[str, Any]:
    """The settings in `file`. Keys are checked, values are not."""
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        msg = f"Cannot read the configuration file {path}: {reason}."
        raise ConfigError(msg) from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        msg = f"The configuration file {path} is not valid TOML: {error}."
        raise ConfigError(msg) from error
    for key in values:
        if key not in settings():
            raise _unknown(key, str(path))
    for key in PATHS:
        if isinstance(values.get(key), str) and values[key].startswith("~/"):
            values[key] = str(Path(values[key]).expanduser())
    return values


def shorten_home(path: str) -> str:
    """`path` with the user's own home folder as ``~``; `load_config` puts it back."""
    home = str(Path("~").expanduser())
    return "~" + path[len(home) :] if len(home) > 1 and path.startswith(home + "/") else path


def _unknown(key: str, where: str) -> ConfigError:
    spelled = key.replace("-", "_").lstrip("_")
    hint = nearest(spelled, settings())
    return ConfigError(
        f"Unknown key '{key}' in {where}.{hint} `mtb train --help` lists all settings, with '_' for '-'."
    )


def config_values(config: TrainConfig) -> dict[str, Any]:
    """The settings of `config` that are not None, as JSON- and TOML-ready values."""
    out = attrs.asdict(config, recurse=False)
    return {
        k: list(v) if isinstance(v, tuple) else dict(v) if isinstance(v, Mapping) else v
        for k, v in out.items()
        if v is not None
    }


def write_toml(config: TrainConfig) -> str:
    """A file that `load_config` reads back as an equal configuration."""
    values = config_values(config)
    tables = {k: values.pop(k) for k in list(values) if isinstance(values[k], Mapping)}
    return tomli_w.dumps({**values, **{k: v for k, v in tables.items() if v}})


def starter_toml(preset: Mapping[str, Any]) -> str:
    """A commented starter file: every setting with its help, defaults commented out, those of `preset` set."""
    lines = ["# Configuration of `mtb train --config THIS_FILE`; options on the command line win over it.", ""]
    fields = attrs.fields_dict(TrainConfig)
    for group in GROUPS:
        lines += [f"# --- {group} ---", ""]
        for name, meta in settings().items():
            if meta.group != group or value_type(name) is dict:
                continue
            default: Any = fields[name].default
            if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
                default = list(default.factory())
            lines.append(f"# {meta.help}" + (f" One of: {', '.join(meta.choices)}." if meta.choices else ""))
            if name in preset:
                lines.append(tomli_w.dumps({name: preset[name]}).strip())
            else:
                lines.append(f"# {name} =" if default is None else "# " + _one_line(name, default))
            lines.append("")
    for name, meta in settings().items():
        if value_type(name) is dict:
            lines += [f"# {meta.help}", f"# [{name}]", f"# {(meta.metavar or '').lower().replace('=', ' = ')}", ""]
    return "\n".join(lines)


def _one_line(name: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{name} = [{', '.join(repr(v) for v in value)}]".replace("'", '"')
    return tomli_w.dumps({name: value}).strip()


__all__ = ["config_values", "load_config", "option_name", "read_toml", "starter_toml", "write_toml"]
