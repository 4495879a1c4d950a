"""Names in a folder of checkpoints, and the JSON in its files; torch-free.

A published checkpoint is a folder ``step_00000010`` whose ``READY`` names the digest of its manifest. Everything that
starts with ``.tmp-`` is work in progress, or its leftovers, and never resumed from.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from mtb_core.api.errors import MtbError

LATEST = "latest"
READY = "READY"
MANIFEST = "manifest.json"
README = "README.md"
STATE = "state.json"
RNG_FOLDER = "rng"
#: First part of the key of a run plugin's tensor, ``plugins/NAME/KEY``.
PLUGINS = "plugins"
TEMPORARY = ".tmp-"

#: The manifest of the older layouts, versions 1 and 2.
LEGACY_MANIFEST = "metadata.json"

#: Largest JSON or small text file that is read into memory.
SMALL_FILE_BYTES = 256 << 20

_STEP_NAME = re.compile(r"step_(\d{8,18})")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_TEMPORARY_NAME = re.compile(r"\.tmp-(step_\d{8,18}|latest|probe)-[0-9a-f]{16}(-\d+)?")


class DamagedCheckpoint(MtbError):
    """A checkpoint, or a file in it, is not what was published. `file` is relative to the checkpoint."""

    def __init__(self, path: Path, file: str, problem: str) -> None:
        super().__init__(
            f"The checkpoint {shown(str(path))} is damaged: {shown(file)}: {shown(problem)}. Resume from another one, or copy it again; "
            f"`mtb checkpoint verify {shown(str(path))}` lists everything that is wrong with it."
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


def name_problem(path: Path, step: int) -> str | None:
    """Error text if the folder is named after a different step than `step`; None if it matches or is no step's name."""
    named = step_of(Path(os.path.abspath(path)).name)  # noqa: PTH100  (without following links, unlike resolve)
    if named is None or named == step:
        return None
    return f"it is of step {step}, but its folder is named {step_name(named)}; give the folder its own name back"


def is_legacy(path: Path) -> bool:
    """True if the folder is of an old format without a manifest; a stray ``metadata.json`` beside a manifest does not make it so."""
    return (path / LEGACY_MANIFEST).is_file() and not os.path.lexists(path / MANIFEST)


def shown(text: str) -> str:
    """`text` from a file for a terminal or a log: what is not printable is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def is_temporary(name: str) -> bool:
    """True if this package alone gives such a name, to work in progress."""
    return _TEMPORARY_NAME.fullmatch(name) is not None


def rng_name(rank: int) -> str:
    """File of the random state of `rank` in a checkpoint."""
    return f"{RNG_FOLDER}/rank_{rank:05d}.json"


def parse_json(text: bytes) -> Any:
    """Strict JSON in UTF-8: no NaN, no number beyond a double, no key twice, no half of a surrogate pair.

    Raises:
        ValueError: anything else.
    """
    try:
        # Decoded here, for `json.loads` lets surrogates in bytes pass.
        value = json.loads(text.decode(), parse_constant=_refuse, parse_float=_finite_float, object_pairs_hook=_once)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeError as error:
        raise ValueError(f"it is not text in UTF-8 ({error.reason})") from None  # type: ignore[attr-defined]
    else:
        return value


def dump_json(value: Any) -> bytes:
    """Canonical, indented, strict JSON of `value`.

    Raises:
        ValueError, TypeError: a value that JSON has no place for, non-finite numbers among them.
    """
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n").encode()


def _refuse(token: str) -> Any:
    raise ValueError(f"{token} is not JSON")


def _finite_float(token: str) -> float:
    value = float(token)
    if not math.isfinite(value):
        raise ValueError(f"the number {token[:40]} is too large")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key appears twice")
    return out
