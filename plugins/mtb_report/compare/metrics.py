"""The figures that `mtb compare` can compare, and what more or less of each means."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs


@attrs.frozen
class Metric:
    """A figure of a trial.

    Attributes:
        unit: as people write it.
        quantity: what the ratio is of: "speed", for which a time is turned over, or "peak memory".
        inverse: the ratio is A's figure over B's, as for a time.
        more, less: the verdict on B where the ratio is above 1, and below.
        repeats_exactly: equal trials are no sign of copies: the same training allocates the same.
        scale: the figure times it is in `unit`.
    """

    unit: str
    quantity: str = "speed"
    inverse: bool = False
    more: str = "faster"
    less: str = "slower"
    repeats_exactly: bool = False
    scale: float = 1.0

    def change(self, ratio: float, verdict: str) -> float:
        """By how much B is `verdict`, one of the two of this metric, as a fraction.

        Of speeds it is that of the faster one over that of the slower one, less 1: at step times of 100 and 103 ms B is
        3% slower, and A compared with B is 3% faster. Of memory it is the difference over that of A.
        """
        if verdict == self.more:
            return ratio - 1
        return 1 / ratio - 1 if self.quantity == "speed" else 1 - ratio

    def shown(self, mean: float, std: float | None) -> str:
        """``1,234 ± 56 tokens/s``: four digits of the mean, and as many places as the standard deviation's first digit has."""
        mean, std = mean * self.scale, None if std is None else std * self.scale
        places = 3 - math.floor(math.log10(mean)) if mean > 0 else 3
        places = max(places, -math.floor(math.log10(std))) if std else places
        places = min(max(places, 0), 12)
        spread = "" if std is None else f" ± {std:,.{places}f}"
        return f"{mean:,.{places}f}{spread} {self.unit}"


_TIME = Metric("ms", inverse=True)
#: By their names in results.
METRICS: Mapping[str, Metric] = {
    "tokens_per_sec": Metric("tokens/s"),
    "step_time_ms": _TIME,
    "data_time_ms": _TIME,
    "forward_backward_ms": _TIME,
    "optimizer_step_ms": _TIME,
    "checkpoint_time_ms": _TIME,
    "mfu": Metric("% MFU", scale=100.0),
    "max_memory_mib": Metric("MiB", quantity="peak memory", more="larger", less="smaller", repeats_exactly=True),
}
