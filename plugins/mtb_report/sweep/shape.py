"""Whether a sweep file has the tables, lists and texts that a plan is made of; what they say is checked in `plan`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtb_core import ConfigError, nearest

KEYS: Mapping[str, Any] = {
    "name": str, "about": str, "scaling": str, "largest": str, "timeout_s": (int, float), "seed": int, "base": dict,
    "matrix": dict, "sets": dict, "exclude": list, "error_against": dict, "sizes": dict,
}  # fmt: skip
_SCALING = ("strong", "weak")
_SIZE_KEYS = ("base", "matrix")
_KINDS = {str: "a text", int: "a whole number", dict: "a table", list: "a list of tables"}


def check_shape(file: Path, values: Mapping[str, Any]) -> None:
    """Refuse what has another form than ``docs/compare.md`` says.

    Raises:
        ConfigError: naming the key, its value, and what it must be.
    """
    for key, value in values.items():
        if key not in KEYS:
            raise ConfigError(f"{file} has the key {key!r}; valid: {', '.join(KEYS)}.{nearest(key, tuple(KEYS))}")
        if not isinstance(value, KEYS[key]) or isinstance(value, bool):
            kind = _KINDS.get(KEYS[key], "a number")
            raise ConfigError(f"{file} has {key} = {value!r}; it must be {kind}.")
    if values.get("scaling") not in (None, *_SCALING):
        raise ConfigError(f"{file} has scaling = {values['scaling']!r}; valid: {', '.join(_SCALING)}.")
    if "timeout_s" in values:
        check_seconds(f"{file}: timeout_s", values["timeout_s"])
    _check_settings(file, "[base]", values.get("base", {}))
    _check_matrix(file, "[matrix]", values.get("matrix", {}))
    for name, sets in values.get("sets", {}).items():
        _check_table(file, f"[sets.{name}]", sets)
        for value, settings in sets.items():
            _check_settings(file, f"[sets.{name}.{value}]", settings)
    for row in values.get("exclude", []):
        _check_table(file, "[[exclude]]", row)
    _check_sizes(file, values.get("sizes", {}))
    for what, name in (("name", values.get("name")), *(("size", size) for size in values.get("sizes", {}))):
        _check_name(file, what, name)


def check_seconds(where: str, seconds: float) -> None:
    """Refuse a time that is not positive and finite."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"{where} is {seconds}; it must be a number of seconds above 0, and finite.")


def _check_table(file: Path, where: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: {where} is {value!r}; it must be a table.")


def _check_settings(file: Path, where: str, settings: Any) -> None:
    """Options of the strategy must be a table; all else is for the training's own check."""
    _check_table(file, where, settings)
    for name, value in settings.items():
        if name.replace("-", "_") == "strategy_opt":
            _check_table(file, f"{where} {name}", value)


def _check_matrix(file: Path, where: str, matrix: Any) -> None:
    """An axis is a list of plain values: they are compared, and name folders."""
    _check_table(file, where, matrix)
    for name, values in matrix.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{file}: {where} {name} is {values!r}; it must be a list of values, not empty.")
        for value in values:
            if not isinstance(value, str | int | float) or (isinstance(value, float) and not math.isfinite(value)):
                raise ConfigError(
                    f"{file}: {where} {name} has {value!r}; each value must be a text, a number, true or false. Several "
                    "settings under one name are a [sets] table."
                )


def _check_sizes(file: Path, sizes: Mapping[str, Any]) -> None:
    for size, parts in sizes.items():
        _check_table(file, f"[sizes.{size}]", parts)
        for key in parts:
            if key not in _SIZE_KEYS:
                raise ConfigError(f"{file}: [sizes.{size}] has {key!r}; valid: {', '.join(_SIZE_KEYS)}.")
        _check_settings(file, f"[sizes.{size}.base]", parts.get("base", {}))
        _check_matrix(file, f"[sizes.{size}.matrix]", parts.get("matrix", {}))


def _check_name(file: Path, what: str, name: str | None) -> None:
    """A name is part of a folder's name, and never leads elsewhere."""
    if name is not None and (not name.strip(" .") or not name.isprintable() or set(name) & set("/\\")):
        raise ConfigError(
            f"{file} has the {what} {name!r}; it names a folder, so it can have no / or \\ and not be empty."
        )
