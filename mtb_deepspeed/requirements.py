"""Whether DeepSpeed is there, in the version that this plugin knows; without importing it."""

from __future__ import annotations

import re
from importlib import metadata

#: What the strategy reads of the engine is private to it and changes between versions.
VERSION = "0.19.8"


def check_requirements() -> None:
    """Refuse an installation with which the strategy cannot work.

    Raises:
        ImportError: DeepSpeed, or something that it needs, is missing, or it is another version.
    """
    if not _installed("deepspeed"):
        raise ImportError(f"DeepSpeed is not installed; pip install deepspeed=={VERSION}")
    found = metadata.version("deepspeed")
    if found != VERSION:
        raise ImportError(
            f"DeepSpeed {found} is installed, and this plugin reads parts of the engine that are private to {VERSION}; "
            f"pip install deepspeed=={VERSION}"
        )
    missing = [name for name in _needed() if not _installed(name)]
    if missing:
        raise ImportError(f"DeepSpeed needs {', '.join(missing)}, not installed; pip install {' '.join(missing)}")


def _needed() -> list[str]:
    """Names of the distributions that DeepSpeed always needs."""
    lines = metadata.requires("deepspeed") or []
    return [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]


def _installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
