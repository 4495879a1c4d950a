"""Two trainings compared to the bit: what their files say; used by `side_by_side.py`.

Read are documents that users read, too (metrics lines, ``result.json``, safetensors, the outcome of ``mtb checkpoint
verify LEFT RIGHT --json``), so that the two may be of different commits and their checkpoints of different formats.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

#: Keys of a metrics line, by the column of the table in which a difference shows.
RECORD_KEYS = {
    "losses": ("loss",),
    "norms": ("grad_norm", "clipped", "nonfinite", "skipped"),
    "counts": ("global_step", "samples_seen", "tokens_seen", "valid_tokens", "learning_rate"),
}
RESULT_KEYS = ("eval_loss", "eval_samples")
#: Sections of a checkpoint that every checkpoint has.
_ALWAYS = ("model", "optimizer", "rng")


@attrs.frozen
class Trained:
    """What one side's training left.

    Attributes:
        records: metrics lines, by part of the run and file: ``1/rank_00000``.
        evaluations: of each part, the values of `RESULT_KEYS`.
        weights: digest of each tensor of the last checkpoint, by name.
    """

    records: Mapping[str, Sequence[Mapping[str, Any]]]
    evaluations: Sequence[Mapping[str, Any]]
    weights: Mapping[str, str]

    @property
    def evaluated(self) -> bool:
        """Whether there was an evaluation at all."""
        return any(value is not None for part in self.evaluations for value in part.values())


def read_records(runs: Sequence[Path]) -> dict[str, list[dict[str, Any]]]:
    """The metrics lines in the folders of runs, which are the parts of one training.

    Raises:
        FileNotFoundError: a run left none.
    """
    found = {}
    for part, run in enumerate(runs, 1):
        files = sorted((run / "metrics").glob("*.jsonl"))
        if not files:
            raise FileNotFoundError(f"{run}/metrics has no metrics lines")
        for file in files:
            lines = file.read_text(encoding="utf-8").splitlines()
            found[f"{part}/{file.stem}"] = [json.loads(line) for line in lines]
    return found


def read_evaluations(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """What the results of runs say of their last evaluation."""
    results = [json.loads((run / "result.json").read_text(encoding="utf-8")) for run in runs]
    return [{key: result.get(key) for key in RESULT_KEYS} for result in results]


def digests(file: Path) -> dict[str, str]:
    """SHA-256 of dtype, shape and bytes of each tensor in a safetensors file, by name."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    found = {}
    for name, entry in sorted(header.items()):
        begin, end = entry["data_offsets"]
        kind = f"{entry['dtype']} {entry['shape']}\0".encode()
        found[name] = hashlib.sha256(kind + body[begin:end]).hexdigest()
    return found


def compare(base: Trained, head: Trained) -> dict[str, str | None]:
    """The first difference, by column of the table; None where all is equal to the bit."""
    found: dict[str, str | None] = {
        column: _compare_records(base.records, head.records, keys) for column, keys in RECORD_KEYS.items()
    }
    found["eval"] = _compare_evaluations(base.evaluations, head.evaluations)
    found["state"] = _compare_weights(base.weights, head.weights)
    return found


def judge(verified: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """What the comparison of two checkpoints found: (a difference, what could not be compared).

    Values that one side's checkpoints have and the other's have not are a matter of the format, not of the training:
    they are no difference. Tensors and random state have to be there.
    """
    differing: list[str] = []
    other_form: list[str] = []
    for name, section in verified["sections"].items():
        if section["exact"]:
            continue
        first = section["first_difference"] or {}
        one_sided = "missing" in (first.get("left"), first.get("right")) or (not first and name not in _ALWAYS)
        text = f"{name}: {section['reason']}{_values(first)}"
        (other_form if one_sided else differing).append(text)
    return "; ".join(differing) or None, "; ".join(other_form) or None


def same(base: Any, head: Any) -> bool:
    """Whether two JSON values are the same to the bit: 0.0 and -0.0 are not, nor are 1 and 1.0."""
    if isinstance(base, float) and isinstance(head, float):
        return struct.pack("<d", base) == struct.pack("<d", head)
    return type(base) is type(head) and base == head


def _compare_records(
    base: Mapping[str, Sequence[Mapping[str, Any]]],
    head: Mapping[str, Sequence[Mapping[str, Any]]],
    keys: Sequence[str],
) -> str | None:
    if base.keys() != head.keys():
        return f"metrics are in {', '.join(sorted(base))} | {', '.join(sorted(head))}"
    for file in sorted(base):
        if len(base[file]) != len(head[file]):
            return f"{file} has {len(base[file])} | {len(head[file])} steps"
        for number, (one, other) in enumerate(zip(base[file], head[file], strict=True), 1):
            for key in keys:
                if key not in one or key not in other:
                    return f"{key} of line {number} in {file} is missing in {'base' if key not in one else 'head'}"
                if not same(one[key], other[key]):
                    return f"{key} of step {one.get('global_step', number)} in {file}: {_apart(one[key], other[key])}"
    return None


def _compare_evaluations(base: Sequence[Mapping[str, Any]], head: Sequence[Mapping[str, Any]]) -> str | None:
    for number, (one, other) in enumerate(zip(base, head, strict=True), 1):
        for key in RESULT_KEYS:
            if not same(one[key], other[key]):
                return f"{key} of part {number}: {_apart(one[key], other[key])}"
    return None


def _compare_weights(base: Mapping[str, str], head: Mapping[str, str]) -> str | None:
    if not base:
        return "there are no weights"
    if base.keys() != head.keys():
        return f"weights that one side has only: {', '.join(sorted(base.keys() ^ head.keys()))}"
    differing = [name for name in base if base[name] != head[name]]
    return f"{len(differing)} of {len(base)} weights differ: {', '.join(differing)}" if differing else None


def _apart(base: Any, head: Any) -> str:
    """Both values, and for floats how far they are apart."""
    text = f"{base} | {head}"
    if isinstance(base, float) and isinstance(head, float) and base != head:
        text += f" (relative {abs(base - head) / max(abs(base), abs(head)):.1e})"
    return text


def _values(first: Mapping[str, Any]) -> str:
    return f" ({first['left']} | {first['right']})" if "left" in first and "right" in first else ""
