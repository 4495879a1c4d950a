"""Names in a folder of checkpoints, and the JSON in its files; torch-free.

A published checkpoint is a folder ``step_00000010`` whose ``READY`` names the digest of its manifest. Everything that
starts with ``.tmp-`` is work in progress, or its leftovers, and never resumed from.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mtb_core.api.errors import MtbError

LATEST = "latest"
READY = "READY"
MANIFEST = "manifest.json"
README = "README.md"
STATE = "state.json"
METADATA = ".metadata"
RNG_FOLDER = "rng"
TEMPORARY = ".tmp-"

#: The manifest of the older layouts, versions 1 and 2.
LEGACY_MANIFEST = "metadata.json"

#: Largest JSON or small text file that is read into memory.
SMALL_FILE_BYTES = 256 << 20

_STEP_NAME = re.compile(r"step_(\d{8,18})")
_TEMPORARY_NAME = re.compile(r"\.tmp-(step_\d{8,18}|latest|probe)-[0-9a-f]{16}(-\d+)?")


class DamagedCheckpoint(MtbError):
    """A checkpoint, or a file in it, is not what was published. `file` is relative to the checkpoint."""

    def __init__(self, path: Path, file: str, problem: str) -> None:
        super().__init__(
            f"The checkpoint {path} is damaged: {file}: {problem}. Resume from another one, or copy it again; "
            f"`mtb checkpoint verify {path}` lists everything that is wrong with it."
        )
        self.path, self.file, self.problem = path, file, problem

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.file, self.problem)


def step_name(step: int) -> str:
    """Name of the folder of `step`."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a folder's name stands for; None for every other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def is_temporary(name: str) -> bool:
    """Whether a name is one that only this package gives to work in progress."""
    return _TEMPORARY_NAME.fullmatch(name) is not None


def rng_name(rank: int) -> str:
    """Where the random state of `rank` lies in a checkpoint."""
    return f"{RNG_FOLDER}/rank_{rank:05d}.json"


def shard_name(rank: int) -> str:
    """Where the tensors that `rank` wrote lie in a checkpoint."""
    return f"__{rank}_0.distcp"


def parse_json(text: bytes) -> Any:
    """Strict JSON: no NaN, no infinity, no key twice.

    Raises:
        ValueError: anything else.
    """
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dump_json(value: Any) -> bytes:
    """Canonical, indented, strict JSON of `value`.

    Raises:
        ValueError, TypeError: a value that JSON has no place for, non-finite numbers among them.
    """
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n").encode()


def _refuse(token: str) -> Any:
    raise ValueError(f"{token} is not JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key appears twice")
    return out
