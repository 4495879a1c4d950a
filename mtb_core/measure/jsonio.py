"""Strict JSON: what is written here any parser can read, and a non-finite number is visible, never laundered.

JSON has no NaN and no infinity. Such a float becomes null, and the object that holds it gets a flag beside it::

    {"grad_norm": inf}           ->  {"grad_norm": null, "grad_norm_nonfinite": "inf"}
    {"losses": [1.0, nan, inf]}  ->  {"losses": [1.0, null, null], "losses_nonfinite": "nan,inf"}
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import attrs

#: Appended to a key whose value is, or holds, a non-finite number.
FLAG_SUFFIX = "_nonfinite"


def to_plain(value: Any) -> Any:
    """`value` in dicts, lists, strings, numbers, booleans and None; floats, also non-finite ones, stay as they are.

    Instances of attrs classes become dicts of their fields, mappings get string keys, sets are sorted, paths become
    text.

    Raises:
        TypeError: a value that is none of these; the message names its type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if attrs.has(type(value)):
        return {f.name: to_plain(getattr(value, f.name)) for f in attrs.fields(type(value))}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, AbstractSet):
        return [to_plain(item) for item in sorted(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(
        f"JSON has no place for {value!r} of type {type(value).__name__}; convert it to a plain value first."
    )


def to_strict(value: Any) -> Any:
    """`to_plain`, with every non-finite float replaced by None and flagged as the module's docstring shows.

    A non-finite float that no object holds (alone, or in a top-level list) becomes None without a flag.
    """
    return _strict(to_plain(value), [])


def dumps(value: Any, **kwargs: Any) -> str:
    """Strict JSON text of `value` (see `to_strict`); `kwargs` are those of `json.dumps`."""
    return json.dumps(to_strict(value), allow_nan=False, **kwargs)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as indented strict JSON so that readers see the old file or the whole new one, also after a crash.

    The folder is made if it is missing. A path that exists and is no regular file (``/dev/stdout``, a named pipe) is
    written to directly.

    Raises:
        OSError: the file cannot be written; an earlier one is left as it was.
    """
    target = Path(path)
    text = dumps(value, indent=2) + "\n"
    if target.exists() and not target.is_file() and not target.is_dir():
        target.write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(target))  # a link stays a link; what it points to is replaced
    target.parent.mkdir(parents=True, exist_ok=True)
    # The name stays short enough for file systems whatever the target's own length.
    temporary = target.parent / f".tmp-{secrets.token_hex(8)}"
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _strict(value: Any, kinds: list[str]) -> Any:
    """Replace non-finite floats; those that no dict inside `value` holds are named in `kinds`, for its owner."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        kinds.append("nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
        return None
    if isinstance(value, list):
        return [_strict(item, kinds) for item in value]
    if isinstance(value, dict):
        out: dict[str, Any] = {}
        flags: set[str] = set()
        for key, item in value.items():
            if key in flags:  # should a key have a flag's very name, the flag stays
                continue
            found: list[str] = []
            out[key] = _strict(item, found)
            if found:
                out[key + FLAG_SUFFIX] = ",".join(dict.fromkeys(found))
                flags.add(key + FLAG_SUFFIX)
        return out
    return value
