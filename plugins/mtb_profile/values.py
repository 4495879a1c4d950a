"""Values of a trace, which may be anything: as what they are meant to be, or as unknown."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

#: Times are further than this from 0 in no trace, ns (95 years); so those of two clocks can be subtracted in 64 bits.
TIME_LIMIT_NS = 3 * 10**18
#: The power of ten of the largest number of microseconds within that.
_TIME_DIGITS = 15


class UnusableError(ValueError):
    """A value that no trace can have, and without which the rest means nothing."""


def nanoseconds(microseconds: Decimal) -> int:
    """Whole nanoseconds.

    Raises:
        UnusableError: it is no number, or beyond `TIME_LIMIT_NS`.
    """
    if microseconds.adjusted() <= _TIME_DIGITS:  # whole numbers of more digits take long to make
        try:
            found = int((microseconds * 1000).to_integral_value())
        except (ValueError, ArithmeticError):  # not a number, or infinite
            found = TIME_LIMIT_NS + 1
        if -TIME_LIMIT_NS <= found <= TIME_LIMIT_NS:
            return found
    raise UnusableError(f"{microseconds} is no time in microseconds, or further than 95 years from 0")


def identifier(value: Any) -> int:
    """An id, which some writers give as text; -1 for what is no id of anything."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if -1 <= number < 1 << 63 else -1


def number_of_ranks(value: Any) -> int | None:
    """How many ranks there are; None for what cannot say that."""
    return value if isinstance(value, int) and 0 < value < 1 << 31 else None
