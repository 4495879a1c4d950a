"""Check for DeepSpeed in the version that this plugin knows, without importing it or anything slow."""

from __future__ import annotations

import os
from importlib.util import find_spec

#: What the strategy reads of the engine is private to it and changes between versions.
VERSION = "0.19.8"


def check_requirements() -> None:
    """Refuse an installation with which the strategy cannot work.

    Raises:
        ImportError: DeepSpeed is missing, or it is another version.
    """
    found = find_spec("deepspeed")
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"DeepSpeed is not installed; pip install deepspeed=={VERSION}")
    version = _version(os.path.dirname(next(iter(found.submodule_search_locations))))  # noqa: PTH120  (speed)
    if version != VERSION:
        raise ImportError(
            f"DeepSpeed {version} is installed, and this plugin reads parts of the engine that are private to {VERSION}; "
            f"pip install deepspeed=={VERSION}"
        )


def _version(folder: str) -> str:
    """The version by the name of the metadata beside the package; `importlib.metadata` would take ten times as long."""
    for name in os.listdir(folder):  # noqa: PTH208  (speed)
        if name.startswith("deepspeed-") and name.endswith(".dist-info"):
            return name.removeprefix("deepspeed-").removesuffix(".dist-info")
    return "of an unknown version"
