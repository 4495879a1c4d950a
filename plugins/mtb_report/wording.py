"""What the commands about results have in common when they talk to people."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from rich.console import Console

#: Columns of a file or pipe, which has no width of its own.
_WIDTH = 140


def console() -> Console:
    """Where results are shown: standard output."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)


def by_kind(reasons: Iterable[str]) -> dict[str, int]:
    """The first of the reasons that differ in their figures only, with how many there are."""
    first: dict[str, str] = {}
    counts: dict[str, int] = {}
    for reason in reasons:
        shown = first.setdefault(re.sub(r"\d+(?:\.\d+)?", "#", reason), reason)
        counts[shown] = counts.get(shown, 0) + 1
    return counts
