"""Whether a record's values are of the kinds that a report works with: files come from anywhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtb_report.results import FIGURES, Found, Record

#: JSON's integers have no end, and its 1e999 is read as infinity; with neither can be reckoned.
_MOST = sys.float_info.max
#: Where there is something at all, it is a number.
_NUMBERS = {
    *FIGURES,
    "world_size",
    "parameters",
    "steps",
    "warmup_steps",
    "repeat_count",
    "batch_size_per_rank",
    "global_batch_size",
    "gradient_accumulation_steps",
    "model_flops_per_token",
    "clipped_steps",
    "skipped_steps",
    "learning_rate_start",
    "learning_rate_end",
    "global_step",
    "samples_seen",
    "tokens_seen",
    "size_bytes",
    "algbw_gb_per_sec",
    "busbw_gb_per_sec",
    "drop_rate",
    "load_imbalance_ratio",
    "communication_share",
    "mean",
    "std",
}
#: Likewise an object.
_OBJECTS = {
    "config",
    "model_config",
    "runtime",
    "failure",
    "strategy_options",
    "errors",
    "verification",
    "versions",
    "labels",
    "figures",
}
#: Likewise a list.
_LISTS = {"fits", "expert_token_counts", "requested_counts", "world_sizes", "largest_that_fits"}


def sound(found: Found, use: Callable[[Record], object]) -> Found:
    """`found` with the records that have a fault, by `fault_in`, moved to the unreadable ones, with the reason."""
    faults = [(record, fault_in(record, use)) for record in found.records]
    bad = [(record.path, fault) for record, fault in faults if fault is not None]
    return Found([record for record, fault in faults if fault is None], [*found.unreadable, *bad])


def fault_in(record: Record, use: Callable[[Record], object]) -> str | None:
    """Why `record` is of no use: `fault_of`, or what goes wrong when `use` works with it alone; None where all is well.

    Values lie too deep in too many kinds of files to check each by name. One file that someone else wrote must not cost
    the report of all others, and it is not passed over in silence either.
    """
    fault = fault_of(record)
    if fault is not None:
        return fault
    try:
        use(record)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"a value is not of the kind that a result of kind '{record.kind}' has: {error}"
    return None


def fault_of(record: Record) -> str | None:
    """What is wrong with the first value that is of another kind than its name says; None where all are right."""
    if record.kind == "trace_analysis":
        return None
    values = dict(record.values)
    if record.kind == "checkpoint_verification" and isinstance(values.get("world_size"), Mapping):
        del values["world_size"]  # of both sides
    for part in (values, *record.rows, *record.trials):
        fault = _fault(part)
        if fault is not None:
            return fault
    for name in ("environment", "provenance"):
        if not isinstance(getattr(record, name), Mapping):
            return f"'{name}' is {getattr(record, name)!r:.40}, but an object is expected"
    spreads = [name for name, spread in record.summary.items() if not isinstance(spread, Mapping)]
    return f"'summary' of '{spreads[0]}' is no object" if spreads else None


def _fault(part: Any) -> str | None:
    if not isinstance(part, Mapping):
        return f"a row is {part!r:.40}, but an object is expected"
    for name, value in part.items():
        expected = _expected(name)
        if value is not None and expected is not None and not _is(value, expected):
            return f"'{name}' is {value!r:.40}, but {expected} is expected"
    return None


def _expected(name: str) -> str | None:
    return "a number" if name in _NUMBERS else "an object" if name in _OBJECTS else "a list" if name in _LISTS else None


def _is(value: Any, expected: str) -> bool:
    if expected == "a number":
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MOST
    if expected == "an object":
        return isinstance(value, Mapping)
    return isinstance(value, Sequence) and not isinstance(value, str)
