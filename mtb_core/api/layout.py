"""Arrangement of the ranks of a run, and the ranks that count loss, tokens and samples. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import attrs

Role = Literal["data", "tokens", "stages", "copies"]
_ROLES = ("data", "tokens", "stages", "copies")


@attrs.frozen
class World:
    """Number of ranks: ``size`` in all, ``local_size`` on each node."""

    size: int
    local_size: int


def _roles(given: Mapping[str, Role] | None) -> Mapping[str, Role]:
    return {"dp": "data"} if given is None else dict(given)


@attrs.frozen
class Layout:
    """The arrangement of ranks: axes outermost first, ranks row-major over them. Fixed before any rank exists.

    Attributes:
        axes: (name, number of ranks) of each axis.
        roles: the role of each axis, by name. It says how ranks differ along the axis, and which of them counts:

            - ``"data"``: each rank has its own samples; every rank counts them.
            - ``"tokens"``: the ranks share samples, and each has its own positions (`Prepared.positions`); every rank
              counts its positions (context parallelism).
            - ``"stages"``: the ranks share samples, and the last one has the loss and counts (pipeline parallelism).
            - ``"copies"``: the ranks share samples and loss; the first one counts (tensor parallelism).

            An axis that is not named here has the role ``"copies"``. None: ``{"dp": "data"}``.

    Raises:
        ValueError: an axis is named twice or has no ranks, or a role is unknown or of no axis.
    """

    axes: tuple[tuple[str, int], ...]
    roles: Mapping[str, Role] = attrs.field(default=None, converter=_roles)

    def __attrs_post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names) or any(size < 1 for _, size in self.axes):
            raise ValueError(f"Layout needs distinct axes of at least one rank each; got {self.axes}.")
        for name, role in self.roles.items():
            if name not in names:
                raise ValueError(f"Layout has a role for '{name}', which is none of its axes {names}.")
            if role not in _ROLES:
                raise ValueError(f"Layout: axis '{name}' has the role {role!r}; valid: {', '.join(_ROLES)}.")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    @property
    def data_size(self) -> int:
        """Number of different sample streams."""
        return math.prod(size for name, size in self.axes if self.role(name) == "data")

    def role(self, axis: str) -> Role:
        """The role of `axis`."""
        return self.roles.get(axis, "copies")

    @property
    def sums_everywhere(self) -> bool:
        """True if a gradient is summed over all ranks, so that a NaN or infinity of any rank reaches every rank.

        Ranks along ``"copies"`` and ``"stages"`` sum nothing: equal gradients there rest on equal computation.
        """
        return all(self.role(name) in ("data", "tokens") for name, size in self.axes if size > 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` on each axis."""
        out: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, out[name] = divmod(rank, size)
        return out

    def data_rank(self, rank: int) -> int:
        """The sample stream of `rank`, in ``range(data_size)``."""
        coordinates, index = self.coordinates(rank), 0
        for name, size in self.axes:
            if self.role(name) == "data":
                index = index * size + coordinates[name]
        return index

    def counts_loss(self, rank: int) -> bool:
        """True if the losses, metrics and valid tokens of `rank` go into the sum over ranks."""
        return self._counts(rank, everywhere=("data", "tokens"))

    def counts_samples(self, rank: int) -> bool:
        """True if the samples of `rank` go into the sum over ranks; one rank of each sample stream does."""
        return self._counts(rank, everywhere=("data",))

    def _counts(self, rank: int, everywhere: tuple[Role, ...]) -> bool:
        sizes, coordinates = dict(self.axes), self.coordinates(rank)
        return all(
            index == (sizes[name] - 1 if self.role(name) == "stages" else 0)
            for name, index in coordinates.items()
            if self.role(name) not in everywhere
        )
