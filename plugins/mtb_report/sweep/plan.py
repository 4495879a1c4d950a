"""A sweep file and the cells of its matrix; ``docs/compare.md`` describes the file."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from mtb_core import ConfigError, load_config, nearest

from .shape import check_shape

#: What a cell decides by itself.
_OURS = ("run_dir", "output", "config", "resume")
_OPTION = "strategy_opt."


@attrs.frozen
class Cell:
    """One training of the matrix.

    Attributes:
        id: names its folder; another one where any setting differs.
        labels: by axis the value, as the file has it.
        settings: of ``mtb train``.
    """

    id: str
    labels: Mapping[str, Any]
    settings: Mapping[str, Any]


@attrs.frozen
class SweepPlan:
    """What is to be run.

    Attributes:
        size: which of the file's sizes; None where it has none.
        scaling: "strong", "weak" or None: how efficiency over ranks is defined.
        largest: the axis whose largest value that fits is looked for; after the first cell that does not fit, larger
            ones are not tried.
        error_against: labels of the cells whose losses and norms others are held against; None for no such.
        cells: in the order of the matrix.
    """

    name: str
    about: str
    size: str | None
    scaling: str | None
    largest: str | None
    error_against: Mapping[str, Any] | None
    timeout_s: float | None
    seed: int
    cells: Sequence[Cell]

    def in_order(self) -> list[Cell]:
        """The cells as they are run: at random, by the seed, so that a drift of the machine favours none.

        Where the largest value is looked for, cells of one group follow each other in the order in which the file
        lists the values.
        """
        shuffled = list(self.cells)
        random.Random(self.seed).shuffle(shuffled)  # noqa: S311  (an order, no secret)
        if self.largest is None:
            return shuffled
        axis = self.largest
        groups = list(dict.fromkeys(group_of(cell.labels, axis) for cell in shuffled))
        sizes = in_file_order([cell.labels for cell in self.cells], axis)
        return sorted(shuffled, key=lambda c: (groups.index(group_of(c.labels, axis)), sizes.index(c.labels[axis])))


def group_of(labels: Mapping[str, Any], *without: str | None) -> tuple[tuple[str, str], ...]:
    """What cells have in common that differ in the axes `without` only; it can be compared and hashed."""
    return tuple((name, json.dumps(value)) for name, value in labels.items() if name not in without)


def in_file_order(labels: Sequence[Mapping[str, Any]], axis: str) -> list[Any]:
    """The values of `axis`, as the file lists them; `labels` are those of all cells, in the order of the matrix."""
    return list(dict.fromkeys(row[axis] for row in labels))


def read_plan(path: str | Path, size: str | None = None) -> SweepPlan:
    """The plan in a sweep file, in one of its sizes (the first, where none is named). Every cell's settings are valid.

    Raises:
        ConfigError: it cannot be read, has a key or setting that is not known, or an empty matrix.
    """
    file = Path(path)
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"The sweep file {file} cannot be read as TOML: {error}.") from error
    check_shape(file, values)
    chosen, extra = _size(file, values.get("sizes") or {}, size)
    base = {**(values.get("base") or {}), **(extra.get("base") or {})}
    matrix = {**(values.get("matrix") or {}), **(extra.get("matrix") or {})}
    for row in values.get("exclude") or []:
        _check_labels(file, "[[exclude]]", row, matrix)
    cells = list(_cells(file, base, matrix, values.get("sets") or {}, values.get("exclude") or []))
    if not matrix or not cells:
        raise ConfigError(f"{file} describes no cell: its [matrix] is empty, or [[exclude]] leaves nothing.")
    _check_axis(file, "largest", values.get("largest"), matrix)
    _check_ascending(file, values.get("largest"), matrix)
    _check_labels(file, "[error_against]", values.get("error_against") or {}, matrix)
    if values.get("scaling") is not None:
        _check_axis(file, "scaling, which needs the axis", "nproc", matrix)
    return SweepPlan(
        name=values.get("name") or file.stem,
        about=values.get("about") or "",
        size=chosen,
        scaling=values.get("scaling"),
        largest=values.get("largest"),
        error_against=values.get("error_against"),
        timeout_s=values.get("timeout_s"),
        seed=values.get("seed", 0),
        cells=cells,
    )


def _size(file: Path, sizes: Mapping[str, Any], asked: str | None) -> tuple[str | None, Mapping[str, Any]]:
    if not sizes:
        if asked is not None:
            raise ConfigError(f"--size is {asked!r}, but {file} has no sizes; leave it out.")
        return None, {}
    chosen = asked if asked is not None else next(iter(sizes))
    if chosen not in sizes:
        raise ConfigError(f"--size is {chosen!r}; {file} has {', '.join(sizes)}.{nearest(chosen, sizes)}")
    return chosen, sizes[chosen]


def _check_axis(file: Path, where: str, name: str | None, matrix: Mapping[str, Any]) -> None:
    if name is not None and name not in matrix:
        raise ConfigError(f"{file}: {where} names {name!r}, which is no axis; the axes are {', '.join(matrix)}.")


def _check_labels(file: Path, where: str, labels: Mapping[str, Any], matrix: Mapping[str, Any]) -> None:
    """Labels that name cells must be axes and values of them: a slip would name none, and nobody would know."""
    for name, value in labels.items():
        _check_axis(file, where, name, matrix)
        if value not in matrix[name]:
            raise ConfigError(f"{file}: {where} {name} is {value!r}; the values of that axis are {matrix[name]}.")


def _check_ascending(file: Path, axis: str | None, matrix: Mapping[str, Any]) -> None:
    """The order of the file says what is larger; numbers must agree with it."""
    values = matrix[axis] if axis is not None else []
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) == len(values) and sorted(set(numbers)) != values:
        raise ConfigError(
            f"{file}: largest = {axis!r} tries the values of that axis in their order, but {values} do not go from small "
            "to large; sort them."
        )


def _cells(
    file: Path,
    base: Mapping[str, Any],
    matrix: Mapping[str, Any],
    sets: Mapping[str, Any],
    exclude: Sequence[Mapping[str, Any]],
) -> Iterator[Cell]:
    seen: set[str] = set()
    for combination in itertools.product(*matrix.values()):
        labels = dict(zip(matrix, combination, strict=True))
        if any(all(labels.get(name) == value for name, value in row.items()) for row in exclude):
            continue
        settings = _settings(file, base, labels, sets)
        cell = Cell(_identity(labels, settings), labels, settings)
        if cell.id not in seen:
            seen.add(cell.id)
            yield cell


def _settings(
    file: Path, base: Mapping[str, Any], labels: Mapping[str, Any], sets: Mapping[str, Any]
) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    _merge(settings, base)
    for name, value in labels.items():
        if name in sets:
            if value not in sets[name]:
                raise ConfigError(
                    f"{file}: [matrix] {name} has {value!r}, but there is no [sets.{name}.{value}]; there are "
                    f"{', '.join(sets[name])}."
                )
            _merge(settings, sets[name][value])
        elif name.startswith(_OPTION):
            _merge(settings, {"strategy_opt": {name.removeprefix(_OPTION): value}})
        else:
            _merge(settings, {name: value})
    for name in _OURS:
        if name in settings:
            raise ConfigError(f"{file} sets {name}, which a sweep decides for each cell by itself; take it out.")
    try:
        load_config(settings)
    except ConfigError as error:
        shown = ", ".join(f"{name}={value}" for name, value in labels.items())
        raise ConfigError(f"{file}, cell {shown}: {error}") from error
    return settings


def _merge(settings: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        key = name.replace("-", "_")
        if key == "strategy_opt":
            settings[key] = {**settings.get(key, {}), **value}
        else:
            settings[key] = value


def _identity(labels: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    words = "_".join(f"{name.removeprefix(_OPTION)}-{value}" for name, value in labels.items())
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", words)[:80]
    digest = hashlib.sha256(json.dumps([labels, settings], sort_keys=True).encode()).hexdigest()[:8]
    return f"{slug}_{digest}"
