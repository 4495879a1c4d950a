"""Which process group a collective belongs to, where the collective itself does not say, as gloo's ranges never do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from .values import number_of_ranks


@attrs.frozen
class Unnamed:
    """What is known of the group of the collectives of a trace that name none.

    Attributes:
        known: only one set of ranks comes into question. Where it is False, such a collective has no known partner.
        label: the ranks of that set; empty where it is all ranks, or the trace lists no groups.
        size: how many ranks take part; None where that depends on the group.
    """

    known: bool
    label: str
    size: int | None


def unnamed_group(info: Mapping[str, Any], world_size: int | None) -> Unnamed:
    """The group of a collective without a name, from a trace's ``distributedInfo``.

    ``pg_config`` there lists the groups that the rank is in. Those of one rank communicate with nobody. Groups of the same
    ranks count as one: those ranks issue the collectives of all of them in the same order.
    """
    listed = info.get("pg_config")
    groups = [g for g in map(_ranks, listed) if g is not None] if isinstance(listed, list) else []
    groups = [(size, () if size == world_size else ranks) for size, ranks in groups if size > 1]
    if not groups:
        return Unnamed(True, "", world_size)
    # No ranks at all stand for all of them, None for unknown ones.
    sizes = {size for size, _ in groups}
    size = sizes.pop() if len(sizes) == 1 else None
    sets = {ranks for _, ranks in groups}
    if len(sets) > 1 or None in sets:
        return Unnamed(False, "", size)
    ranks = sets.pop()
    return Unnamed(True, str(list(ranks)) if ranks else "", size)


def _ranks(group: Any) -> tuple[int, tuple[int, ...] | None] | None:
    """Size and ranks of an entry of ``pg_config``; some versions of torch list no ranks where all take part."""
    if not isinstance(group, dict):
        return None
    listed, size = group.get("ranks"), number_of_ranks(group.get("pg_size"))
    ranks = None
    if isinstance(listed, list) and listed and all(isinstance(r, int) for r in listed):
        ranks = tuple(sorted(listed))
    if ranks is not None:
        return len(ranks), ranks
    return (size, None) if size is not None else None
