"""Sizes and splits as they are written on the command line. Pure functions."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Sequence

from mtb_core import ConfigError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)

#: A sweep has at most so many sizes.
MAX_SIZES = 10_000

#: Share of destinations that a drawn split sends nothing to.
_EMPTY_SHARE = 0.25


def parse_size(text: str, what: str, *, minimum: int = 1) -> int:
    """Bytes in ``8``, ``4K``, ``64M``, ``1G`` (powers of 1024, as in nccl-tests).

    Raises:
        ConfigError: something else, or less than `minimum`; the message names `what`.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{what} is {text!r}; it must be a whole number of bytes such as 8, 4K, 64M or 1G.")
    # Python refuses to read numbers of thousands of digits; torch counts in 64 bits.
    size = int(found[1][:40]) * _UNITS[found[2].upper()]
    if size >= 2**63:
        raise ConfigError(f"{what} is {text[:40]!r}; it must be less than 2^63 bytes, which is 8192 * 1024T.")
    if size < minimum:
        raise ConfigError(f"{what} is {text!r}; it must be at least {minimum} byte{'s' if minimum != 1 else ''}.")
    return size


def size_text(size: int) -> str:
    """``size`` the short way that `parse_size` reads: ``64M``, ``1000``."""
    for unit in ("T", "G", "M", "K"):
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)


def swept_sizes(first: int, last: int, factor: float) -> list[int]:
    """`first`, then `factor` times more each, up to and including `last`.

    Raises:
        ConfigError: the bounds are in the wrong order, or the factor does not grow.
    """
    if last < first:
        raise ConfigError(
            f"-e {size_text(last)} is less than -b {size_text(first)}; sizes go up from -b to -e: swap them."
        )
    if not 1 < factor < math.inf:
        raise ConfigError(f"-f is {factor:g}; it must be a number above 1, the factor from one size to the next.")
    count = 1 + math.log(last / first) / math.log1p(factor - 1)
    if count > MAX_SIZES:
        raise ConfigError(
            f"-f is {factor!r}, which makes {count:.0f} sizes from -b to -e; there can be at most {MAX_SIZES}. Give a "
            "larger factor, such as 2, or the sizes themselves with --sizes."
        )
    sizes: list[int] = []
    size = float(first)
    while round(size) <= last:
        if not sizes or round(size) > sizes[-1]:
            sizes.append(round(size))
        size *= factor
    return sizes


def parse_splits(text: str, ranks: int, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The bytes that each rank sends to each: ``"1K,3K"`` for all ranks alike, ``"1K,3K;4K,0"`` one row for each.

    `sizes` are those asked for, if any: every row must add up to the one of them.

    Raises:
        ConfigError: a wrong number of rows or entries, or sums that differ from the size or from each other.
    """
    rows = [
        tuple(parse_size(part, "An entry of --splits", minimum=0) for part in row.split(","))
        for row in text.strip().strip(";").split(";")
    ]
    if len(rows) == 1:
        rows *= ranks
    if len(rows) != ranks:
        raise ConfigError(f"--splits has {len(rows)} rows for {ranks} ranks; give one row for all, or one per rank.")
    wanted = sizes[0] if sizes else sum(rows[0])
    if len(sizes) > 1:
        raise ConfigError(f"--splits fixes the size, but {len(sizes)} sizes are asked for; give one, or none.")
    for rank, row in enumerate(rows):
        if len(row) != ranks:
            raise ConfigError(f"Row {rank} of --splits has {len(row)} entries for {ranks} ranks; give one for each.")
        if sum(row) != wanted:
            raise ConfigError(
                f"Row {rank} of --splits adds up to {sum(row)} bytes, but every rank sends {wanted}; "
                "the parts of a row must add up to the size exactly."
            )
    if wanted == 0:
        raise ConfigError("--splits sends nothing at all; at least one entry of each row must be more than 0.")
    return tuple(rows)


def drawn_splits(elements: int, ranks: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Elements that each rank sends to each, drawn; every row adds up to `elements`, some entries are zero.

    Depends on the arguments alone. The weights of destinations are exponential, so a few get most.
    """
    generator = random.Random(f"{seed}/{ranks}")  # noqa: S311  (no secret)
    return tuple(_drawn_row(elements, ranks, generator) for _ in range(ranks))


def _drawn_row(elements: int, ranks: int, generator: random.Random) -> tuple[int, ...]:
    weights = [generator.expovariate(1.0) * (generator.random() >= _EMPTY_SHARE) for _ in range(ranks)]
    if not any(weights):
        weights[generator.randrange(ranks)] = 1.0
    ends = [round(elements * part / sum(weights)) for part in _running(weights)]
    ends[-1] = elements
    return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))


def _running(values: Iterable[float]) -> list[float]:
    out, total = [], 0.0
    for value in values:
        total += value
        out.append(total)
    return out
