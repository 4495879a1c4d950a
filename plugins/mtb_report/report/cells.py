"""Values as cells. What is not known says so; it is never shown as a zero, and never as an empty cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtb_report.results import Record

from .blocks import Cell

#: Shown where a value was not recorded.
UNKNOWN = Cell("unknown", None, "muted")
#: Shown in columns of performance for a row whose measurement is not valid.
NOT_VALID = Cell("-", None, "muted")

#: What `mtb_core` appends to the key of a number that was not finite.
_FLAG = "_nonfinite"


def text(value: Any) -> Cell:
    """Any value as it is."""
    if value is None or value == "":
        return UNKNOWN
    if isinstance(value, bool):
        return yes_no(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        shown = ", ".join(map(str, value))
        return Cell(shown, shown) if value else Cell("none", "")
    return Cell(str(value), value if isinstance(value, int | float) else str(value))


def code(value: Any, length: int | None = None) -> Cell:
    """A command, a path or, cut to `length`, a digest."""
    if value is None or value == "":
        return UNKNOWN
    return Cell(str(value)[:length], str(value), code=True)


def yes_no(value: bool | None, *, good: bool | None = None) -> Cell:
    """``yes`` or ``no``; `good` is the one that is as it should be."""
    if value is None:
        return UNKNOWN
    tone = "" if good is None else "good" if value == good else "bad"
    return Cell("yes" if value else "no", float(value), tone)  # type: ignore[arg-type]


def number(value: float | None, form: str = ",.4g") -> Cell:
    """A number by a format of Python's, or ``sig``: three digits, however small. One that is not finite is named."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return Cell(str(float(value)), None, "bad")
    if form == "sig":
        form = ",.0f" if abs(value) >= 1000 else ".3g"
    elif form.endswith("d") and not isinstance(value, int):  # a count, though JSON from elsewhere may say 2.0
        form = f"{form[:-1]}.0f" if float(value).is_integer() else ",.4g"
    return Cell(format(value, form), float(value))


def of(values: Mapping[str, Any], key: str, form: str = ",.4g", scale: float = 1.0) -> Cell:
    """The number at `key`; where it is null because it was not finite, what it was.

    Args:
        values: as `mtb_core.write_json` wrote them, so that ``loss_nonfinite`` may stand beside ``loss``.
        key: of the number.
        form: a format of Python's.
        scale: the number is multiplied by it first.
    """
    value = values.get(key)
    if value is None and values.get(key + _FLAG):
        return Cell(str(values[key + _FLAG]), None, "bad")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return UNKNOWN if value is None else text(value)
    return number(value if scale == 1.0 else value * scale, form)


def percent(share: float | None, form: str = ".1%") -> Cell:
    """A share as a percentage."""
    return number(share, form)


def change(ratio: float | None) -> Cell:
    """A difference relative to a base, with its sign."""
    return number(ratio, "+.1%")


def measured(record: Record, make: Callable[[], Cell]) -> Cell:
    """`make`'s cell, unless the record is known not to be a valid measurement of performance.

    Performance is time, throughput, bandwidth and memory: what disturbs one of them may disturb the others.
    """
    return NOT_VALID if record.performance_valid is False else make()


def status(value: Any) -> Cell:
    """``ok``, ``failed`` and their kin, with their tone."""
    if value is None:
        return UNKNOWN
    shown = str(value)
    good = {"ok", "done", "success", "passed", "conformant", "recovered_exact"}
    bad = {"failed", "oom", "timeout", "failed_parse", "error", "not conformant"}
    return Cell(shown, shown, "good" if shown in good else "bad" if shown in bad else "warn")


def plural(count: int, noun: str) -> str:
    """``1 run``, ``2 runs``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
