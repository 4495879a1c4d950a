"""Formal sweeps: of clean code on a quiet machine, published as a whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtb_core import ConfigError, RunFailed, formal_obstacles, provenance


def check_formal(argv: Sequence[str]) -> None:
    """Refuse to begin where the results could not be published.

    Raises:
        ConfigError: naming every obstacle.
    """
    obstacles = formal_obstacles(provenance(argv))
    if obstacles:
        raise ConfigError(f"--formal cannot begin: {'; '.join(obstacles)}.")


def staging_folder(folder: Path) -> Path:
    """Where a formal sweep is run; `folder` itself stays as it was published."""
    return folder.with_name(folder.name + ".unpublished")


def publish(document: Mapping[str, Any], staged: Path, folder: Path, argv: Sequence[str]) -> None:
    """Put the sweep in `staged` in the place of `folder`, if every trial succeeded on one unchanged revision.

    Raises:
        RunFailed: a cell did not succeed, or the code changed meanwhile; what was published before stays.
    """
    bad = [row["id"] for row in document["cells"] if row["status"] != "success"]
    if bad:
        raise RunFailed(
            f"Not published: {len(bad)} of {len(document['cells'])} cells did not succeed ({', '.join(bad[:5])}). The "
            f"results are in {staged}; --retry runs those cells again."
        )
    now, then = provenance(argv), document["provenance"]
    if now["git_dirty"] or now["git_revision"] != then["git_revision"]:
        raise RunFailed(
            f"Not published: the code changed while the sweep ran (revision {then['git_revision']} at first, now "
            f"{now['git_revision']}, changed files: {now['git_dirty']}). The results are in {staged}."
        )
    replaced = folder.with_name(folder.name + ".replaced")
    if replaced.exists():
        shutil.rmtree(replaced)
    if folder.exists():
        folder.rename(replaced)
    staged.rename(folder)
    if replaced.exists():
        shutil.rmtree(replaced)
