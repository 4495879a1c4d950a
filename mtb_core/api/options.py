"""Declared, typed, documented options of strategies and sinks.

An options class is a frozen attrs class whose fields are made by `option`; it is torch-free, so that it can be shown
and validated before any rank starts::

    @attrs.frozen
    class Options:
        bucket_cap_mb: int = option(25, help="Size of a gradient bucket in MiB.", minimum=1)
        comm_hook: str = option("none", help="…", choices=("none", "bf16"))
"""

from __future__ import annotations

import difflib
import math
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from .errors import ConfigError

_MANY = 1024
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@attrs.frozen
class NoOptions:
    """For strategies and sinks that have none."""


def option(
    default: Any,
    *,
    help: str,
    choices: tuple[Any, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A field of an options class: its default, help text, and valid values (`choices`, or bounds, both inclusive).

    Where None is possible, ``none`` means it, unless it is one of `choices`.
    """
    return attrs.field(
        default=default, metadata={"help": help, "choices": choices, "minimum": minimum, "maximum": maximum}
    )


def divisors(number: int) -> list[int]:
    """The divisors of `number` up to 1024, ascending: valid values for a message. `number` may be of any size."""
    return [n for n in range(1, min(number, _MANY) + 1) if number % n == 0]


def nearest(word: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the known word nearest to `word`, or an empty string."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.55)
    return f" Did you mean '{found[0]}'?" if found else ""


@attrs.frozen
class OptionHelp:
    """One option as it is shown to people and programs."""

    name: str
    type: str
    default: Any
    choices: tuple[Any, ...]
    help: str


def describe_options(cls: type) -> list[OptionHelp]:
    """The options that `cls` declares, in order."""
    hints = typing.get_type_hints(cls)
    return [
        OptionHelp(
            f.name, _type_name(hints[f.name]), f.default, tuple(f.metadata.get("choices", ())), f.metadata["help"]
        )
        for f in attrs.fields(cls)
    ]


def parse_options(cls: type, given: Mapping[str, Any], *, owner: str) -> Any:
    """An instance of `cls` from values that are strings (command line) or TOML values.

    Raises:
        ConfigError: unknown name, wrong type or value out of range; the message names `owner` (``"strategy 'ddp'"``)
            and what is valid.
    """
    fields = {f.name: f for f in attrs.fields(cls)}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, raw in given.items():
        if name not in fields:
            valid = ", ".join(fields) or "it has no options"
            msg = f"{owner} has no option '{name}'.{nearest(name, fields)} Valid: {valid}."
            raise ConfigError(msg)
        values[name] = _convert(raw, hints[name], fields[name].metadata, f"option '{name}' of {owner}")
    return cls(**values)


def _type_name(hint: Any) -> str:
    parts = [a for a in typing.get_args(hint) if a is not type(None)]
    return str((parts[0] if parts else hint).__name__)


def _convert(raw: Any, hint: Any, metadata: Mapping[str, Any], what: str) -> Any:
    choices, low, high = metadata.get("choices"), metadata.get("minimum"), metadata.get("maximum")
    optional = type(None) in typing.get_args(hint)
    if optional and (raw is None or (raw == "none" and raw not in (choices or ()))):
        return None
    kind = next((a for a in typing.get_args(hint) if a is not type(None)), hint)
    value = _scalar(raw, kind, what)
    if choices and value not in choices:
        hint_text = nearest(str(value), map(str, choices))
        msg = f"{what} is {value!r}; valid: {', '.join(map(str, choices))}.{hint_text}"
        raise ConfigError(msg)
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"at most {high}" if low is None else f"from {low} to {high}"
        msg = f"{what} is {value!r}; it must be {bounds}."
        raise ConfigError(msg)
    return value


def _scalar(raw: Any, kind: type, what: str) -> Any:
    wrong = f"{what} is {raw!r}; it must be "
    if kind is bool:
        found = raw if isinstance(raw, bool) else _BOOLEANS.get(str(raw).lower())
        if found is None:
            raise ConfigError(wrong + "true or false.")
        return found
    if kind is str:
        return str(raw)
    if isinstance(raw, bool) or not isinstance(raw, str | int | float):
        raise ConfigError(wrong + _KINDS[kind])
    try:
        value = kind(raw)
        fits = math.isfinite(value) and not (isinstance(raw, float) and value != raw)
    except (ValueError, OverflowError):
        raise ConfigError(wrong + _KINDS[kind]) from None
    if not fits:
        raise ConfigError(wrong + _KINDS[kind])
    return value


_KINDS = {int: "a whole number.", float: "a number."}
