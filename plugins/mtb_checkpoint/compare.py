"""Are two checkpoints the same training state? One ordinary process, no torch, a few blocks of a tensor in memory.

Tensors are compared in global coordinates, so it does not matter how many ranks wrote them or how they were sharded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import attrs
import numpy as np
import xxhash

from mtb_core.ckpt import files
from mtb_core.ckpt.dtypes import as_numbers, as_ordered
from mtb_core.ckpt.layout import DamagedCheckpoint, dump_json
from mtb_core.ckpt.opened import Opened, read_rng
from mtb_core.ckpt.tensors import TensorFiles

#: Sections of tensors, with the prefix of their keys: every other tensor is in `OTHER_TENSORS`. Sections of JSON values.
TENSOR_SECTIONS = {"model": "model/", "optimizer": "optim/"}
OTHER_TENSORS = "other_tensors"
JSON_SECTIONS = ("scheduler", "train_state", "data")


@attrs.define
class Section:
    """Outcome for one section.

    Attributes:
        exact: equal to the bit, and there at all.
        within_tolerance: None where no tolerance applies.
        reason: why it is not exact.
        differing: how many tensors (or values) differ.
        first_difference: of the first that differs: name, index, both values; for numbers `max_abs`, `max_rel`
            and `max_ulps` over that whole tensor.
    """

    exact: bool = True
    within_tolerance: bool | None = None
    reason: str | None = None
    compared: int = 0
    differing: int = 0
    first_difference: dict[str, Any] | None = None
    max_abs: float = 0.0
    max_rel: float = 0.0

    def differs(self, reason: str, first: dict[str, Any] | None = None, *, within: bool = False) -> None:
        """Note a difference; `within`: the tolerance covers it."""
        self.exact = False
        self.differing += 1
        if self.reason is None:
            self.reason, self.first_difference = reason, first
        if self.within_tolerance is not None:
            self.within_tolerance = self.within_tolerance and within


def compare_checkpoints(left: Opened, right: Opened, tolerance: float | None = None) -> dict[str, Any]:
    """Compare two opened checkpoints section by section.

    `exact_match` says that all sections are equal to the bit, with every tensor of both sides in one of them.
    `matches` is the same without a `tolerance`. With one, tensors match if ``max|left - right| <= tolerance *
    max(|left|)`` for each tensor, the other sections must be equal, and random state does not count if the world
    sizes differ. `not_compared` lists sections of plugins that only one side has.

    Returns:
        A JSON value; see ``docs/checkpoints.md``.

    Raises:
        DamagedCheckpoint: one of them cannot be read.
    """
    digests: dict[str, dict[str, str | None]] = {"left": {}, "right": {}}
    sections: dict[str, Section] = {}
    with left.tensors() as one, right.tensors() as other:
        for name, keys in _tensor_sections(left.entries.keys() | right.entries.keys()).items():
            sections[name] = _compare_tensors(one, other, keys, tolerance, digests, name)
    _param_groups(sections["optimizer"], left.sections.get("optimizer"), right.sections.get("optimizer"))
    for name in JSON_SECTIONS:
        sections[name] = _compare_json(name, left.sections.get(name), right.sections.get(name), digests)
    if left.sections.get("scalars") or right.sections.get("scalars"):  # a strategy's own state, none in older formats
        one_side, other_side = (dict(side.sections.get("scalars") or {}) for side in (left, right))
        sections["scalars"] = _compare_json("scalars", one_side, other_side, digests)
    # What else there is (plugins, loss scaler) counts where both sides have it.
    named = {*TENSOR_SECTIONS, *JSON_SECTIONS, "scalars"}
    further = sorted(n for n in left.sections.keys() | right.sections.keys() if n not in named)
    for name in further:
        if left.sections.get(name) and right.sections.get(name):
            sections[name] = _compare_json(name, left.sections[name], right.sections[name], digests)
    sections["rng"] = _compare_rng(left, right, digests)
    exact = all(section.exact for section in sections.values())
    counted = {
        name: section
        for name, section in sections.items()
        if not (tolerance is not None and name == "rng" and left.world_size != right.world_size)
    }
    matches = exact if tolerance is None else all(s.exact or s.within_tolerance is True for s in counted.values())
    return {
        "left": str(left.path),
        "right": str(right.path),
        "exact_match": exact,
        "matches": matches,
        "tolerance": tolerance,
        "step": {"left": left.step, "right": right.step},
        "world_size": {"left": left.world_size, "right": right.world_size},
        "not_compared": [n for n in further if n not in sections],
        "sections": {name: attrs.asdict(section) for name, section in sections.items()},
        "reasons": [f"{name}: {s.reason}" for name, s in sections.items() if s.reason is not None],
        "digests": digests,
        "left_deterministic": left.values["deterministic"],
        "right_deterministic": right.values["deterministic"],
        "left_determinism_reason": left.values["determinism_reason"],
        "right_determinism_reason": right.values["determinism_reason"],
    }


def _tensor_sections(keys: AbstractSet[str]) -> dict[str, list[str]]:
    """All of `keys`, sorted, by section; what is neither the model's nor the optimizer's is there if there is any."""
    out = {name: sorted(key for key in keys if key.startswith(prefix)) for name, prefix in TENSOR_SECTIONS.items()}
    others = sorted(keys - {key for named in out.values() for key in named})
    return {**out, OTHER_TENSORS: others} if others else out


def _compare_tensors(
    left: TensorFiles,
    right: TensorFiles,
    keys: Sequence[str],
    tolerance: float | None,
    digests: dict[str, dict[str, str | None]],
    name: str,
) -> Section:
    """The tensors `keys`; also the digest of each side's content, whatever its sharding."""
    section = Section(within_tolerance=None if tolerance is None else True)
    hashes = xxhash.xxh3_128(), xxhash.xxh3_128()
    for key in keys:
        section.compared += 1
        present = [side for side in (left, right) if key in side.entries]
        for side, digest in zip((left, right), hashes, strict=True):
            if key in side.entries:
                entry = side.entries[key]
                digest.update(f"{key}\0{entry.dtype}\0{entry.shape}\0".encode())
        same_kind = len(present) == 2 and (left.entries[key].dtype, left.entries[key].shape) == (
            right.entries[key].dtype,
            right.entries[key].shape,
        )
        if same_kind:
            _compare_one(key, left, right, tolerance, section, hashes)
            continue
        for side, digest in zip((left, right), hashes, strict=True):
            for _, block in side.blocks(key) if key in side.entries else ():
                digest.update(block.view(np.uint8).data)
        kinds = [_kind(side, key) for side in (left, right)]
        section.differs(f"{key} is {kinds[0]} on the left and {kinds[1]} on the right", {"name": key})
    if not section.compared:
        section.exact = name == "optimizer"  # an optimizer may have no state; a model without tensors is no model
        section.reason = None if section.exact else "there are no tensors on either side"
    for side_name, digest in zip(("left", "right"), hashes, strict=True):
        digests[side_name][name] = digest.hexdigest()
    return section


def _kind(side: TensorFiles, key: str) -> str:
    entry = side.entries.get(key)
    return "missing" if entry is None else f"{entry.dtype} of shape {list(entry.shape)}"


def _compare_one(
    key: str, left: TensorFiles, right: TensorFiles, tolerance: float | None, section: Section, hashes: Any
) -> None:
    dtype, shape = left.entries[key].dtype, left.entries[key].shape
    first: dict[str, Any] | None = None
    worst = _Worst()
    for (at, one), (_, other) in zip(left.blocks(key), right.blocks(key), strict=True):
        for block, digest in zip((one, other), hashes, strict=True):
            digest.update(block.view(np.uint8).data)
        if not (one.view(np.uint8) == other.view(np.uint8)).all():
            if first is None:
                first = _first(key, shape, dtype, at, one, other)
            worst.add(one, other, dtype)
        elif tolerance is not None:
            worst.scale_of(one, dtype)
    if first is None:
        return
    first |= {
        "max_abs": _finite(worst.absolute),
        "max_rel": _finite(worst.relative),
        "max_ulps": worst.ulps,
        "elements_differing": worst.count,
        "nonfinite": worst.nonfinite,
    }
    section.max_abs = max(section.max_abs, worst.absolute) if math.isfinite(worst.absolute) else section.max_abs
    section.max_rel = max(section.max_rel, worst.relative) if math.isfinite(worst.relative) else section.max_rel
    within = tolerance is not None and not worst.nonfinite and worst.absolute <= tolerance * worst.scale
    section.differs(f"{key} differs in {worst.count} of {math.prod(shape)} elements", first, within=within)


@attrs.define
class _Worst:
    """The largest differences seen in a tensor; `scale` is its largest finite magnitude."""

    absolute: float = 0.0
    relative: float = 0.0
    ulps: int | None = None
    count: int = 0
    scale: float = 0.0
    nonfinite: bool = False

    def scale_of(self, values: np.ndarray, dtype: str) -> None:
        magnitudes = np.abs(as_numbers(values, dtype))
        self.scale = max(self.scale, float(np.max(magnitudes, where=np.isfinite(magnitudes), initial=0.0)))

    def add(self, left: np.ndarray, right: np.ndarray, dtype: str) -> None:
        self.scale_of(left, dtype)
        unequal = _unequal(left, right)
        self.count += int(unequal.sum())
        one, other = left[unequal], right[unequal]
        with np.errstate(all="ignore"):
            a, b = as_numbers(one, dtype), as_numbers(other, dtype)
            absolute = np.abs(a - b)
            relative = absolute / np.maximum(np.abs(a), np.abs(b))
        finite = np.isfinite(absolute)
        self.nonfinite = self.nonfinite or not finite.all()
        self.absolute = max(self.absolute, float(np.max(absolute, where=finite, initial=0.0)))
        self.relative = max(self.relative, float(np.max(relative, where=np.isfinite(relative), initial=0.0)))
        p, q = as_ordered(one, dtype), as_ordered(other, dtype)
        if p is not None and q is not None and finite.any():
            # As unsigned numbers, for the distance between the two ends does not fit into int64.
            low, high = np.minimum(p, q)[finite], np.maximum(p, q)[finite]
            self.ulps = max(self.ulps or 0, int((high.astype(np.uint64) - low.astype(np.uint64)).max()))


def _unequal(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Where the bits of two flat arrays differ."""
    size = left.itemsize
    bits = left.view(np.uint8).reshape(-1, size) != right.view(np.uint8).reshape(-1, size)
    return bits.any(axis=1)  # type: ignore[no-any-return]


def _first(
    key: str, shape: tuple[int, ...], dtype: str, at: int, left: np.ndarray, right: np.ndarray
) -> dict[str, Any]:
    where = int(np.argmax(_unequal(left, right)))
    index = np.unravel_index(at + where, shape) if shape else ()
    values = [_shown(block[where : where + 1], dtype) for block in (left, right)]
    return {"name": key, "index": [int(i) for i in index], "left": values[0], "right": values[1]}


def _shown(one: np.ndarray, dtype: str) -> Any:
    """A single value for JSON: a number, or text for what JSON has no number for."""
    if dtype == "bool" or dtype.startswith(("int", "uint")):
        return one[0].item()
    number = as_numbers(one, dtype)[0]
    if dtype.startswith("complex"):
        return str(number)
    return float(number) if math.isfinite(number) else str(float(number))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _compare_json(name: str, left: Any, right: Any, digests: dict[str, dict[str, str | None]]) -> Section:
    for side, value in (("left", left), ("right", right)):
        digests[side][name] = None if value is None else files.digest_bytes(dump_json(value))
    section = Section(compared=1)
    if left is None or right is None:
        where = "both sides" if left is None and right is None else "the left" if left is None else "the right"
        section.differs(f"it is missing on {where}")
        return section
    found = _difference(left, right, "")
    if found is not None:
        section.differs(f"{found['name'] or name} differs", found)
    return section


def _param_groups(section: Section, left: Any, right: Any) -> None:
    """The optimizer's JSON values (param groups), which belong to its section; older formats have none."""
    if left is None or right is None:
        return
    found = _difference(left, right, "param_groups")
    if found is not None:
        section.differs(f"{found['name']} differs", found)


def _difference(left: Any, right: Any, where: str) -> dict[str, Any] | None:
    """The first place at which two JSON values differ; 1 and 1.0 and True are different."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in sorted(left.keys() | right.keys()):
            place = f"{where}.{key}" if where else key
            if key not in left or key not in right:
                return {"name": place, "left": left.get(key, "missing"), "right": right.get(key, "missing")}
            if (found := _difference(left[key], right[key], place)) is not None:
                return found
        return None
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return next((f for i, (a, b) in pairs if (f := _difference(a, b, f"{where}[{i}]")) is not None), None)
    if type(left) is type(right) and left == right:
        return None
    return {"name": where, "left": left, "right": right}


def _compare_rng(left: Opened, right: Opened, digests: dict[str, dict[str, str | None]]) -> Section:
    """Random state, rank by rank; what is missing, even on both sides, is no match."""
    section = Section()
    states: dict[str, list[Any]] = {}
    for side_name, side in (("left", left), ("right", right)):
        try:
            states[side_name] = [read_rng(side, rank) for rank in range(side.world_size)]
            digests[side_name]["rng"] = files.digest_bytes(dump_json(states[side_name]))
        except DamagedCheckpoint as error:
            digests[side_name]["rng"] = None
            section.differs(f"the random state on the {side_name} is missing or damaged: {error.file}: {error.problem}")
    if len(states) < 2:
        return section
    section.compared = min(len(states["left"]), len(states["right"]))
    if left.world_size != right.world_size:
        section.differs(f"the left has {left.world_size} ranks, the right {right.world_size}")
        return section
    for rank, (one, other) in enumerate(zip(states["left"], states["right"], strict=True)):
        found = _difference(one, other, f"rank_{rank:05d}")
        if found is not None:
            section.differs(f"{found['name']} differs", {"name": found["name"]})
    return section
