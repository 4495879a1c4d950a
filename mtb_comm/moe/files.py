"""Files that the command reads, looked at before any rank starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mtb_core import ConfigError

#: Keys under which an earlier result holds numbers of tokens for each expert.
_KEYS = ("requested_counts", "expert_token_counts")


def read_counts(path: Path) -> tuple[float, ...]:
    """One number for each expert: a JSON list, or a JSON result of ``mtb moe route``.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--counts {path} cannot be read as JSON: {error}.") from error
    if isinstance(value, dict):
        value = next((value[key] for key in _KEYS if key in value), value)
    if not isinstance(value, list) or not all(isinstance(n, int | float) and not isinstance(n, bool) for n in value):
        raise ConfigError(
            f"--counts {path} holds no numbers for experts; valid are a JSON list such as [10, 20, 5, 5], or an object "
            f"with such a list as {' or '.join(_KEYS)}."
        )
    return tuple(value)


def check_text(path: Path, shortest: int) -> None:
    """Refuse a text that no router can be learned on.

    Raises:
        ConfigError: it is no readable file, or shorter than `shortest` bytes.
    """
    try:
        with path.open("rb") as file:
            size = len(file.read(shortest))
    except OSError as error:
        raise ConfigError(f"--data {path} cannot be read: {error.strerror}; give a file, of any text.") from error
    if size < shortest:
        raise ConfigError(f"--data {path} has {size} bytes; at least {shortest} are needed to learn from.")
