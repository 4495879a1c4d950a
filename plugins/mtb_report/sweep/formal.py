"""Formal sweeps: of clean code on a quiet machine, published as a whole or not at all."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtb_core import ConfigError, RunFailed
from mtb_evidence import formal_obstacles, provenance
from mtb_report.results import read_record

from .plan import SweepPlan
from .runner import refuse_other


def check_formal(plan: SweepPlan, folder: Path, argv: Sequence[str]) -> None:
    """Refuse to begin where the results could not be published.

    Raises:
        ConfigError: naming every obstacle; or `folder` holds something that publishing would remove.
    """
    if folder.name in ("", ".."):
        raise ConfigError(f"--run-dir is {folder}, but --formal replaces the folder as a whole; name it from outside.")
    refuse_other(plan, folder)
    obstacles = formal_obstacles(provenance(argv))
    if obstacles:
        raise ConfigError(f"--formal cannot begin: {'; '.join(obstacles)}.")


def staging_folder(folder: Path) -> Path:
    """Where a formal sweep is run; `folder` itself stays as it was published."""
    return folder.with_name(folder.name + ".unpublished")


def publish(plan: SweepPlan, document: Mapping[str, Any], staged: Path, folder: Path, argv: Sequence[str]) -> None:
    """Put the sweep in `staged` in the place of `folder`, if every trial succeeded on one unchanged revision.

    Raises:
        RunFailed: a cell did not succeed, the code changed meanwhile, or `folder` holds something else by now; what
            was there before stays.
    """
    bad = [row["id"] for row in document["cells"] if row["status"] != "success"]
    if bad:
        raise RunFailed(
            f"Not published: {len(bad)} of {len(document['cells'])} cells did not succeed ({', '.join(bad[:5])}). The "
            f"results are in {staged}; --retry runs those cells again."
        )
    _check_source(document, staged, argv)
    try:
        refuse_other(plan, folder)
    except ConfigError as error:
        raise RunFailed(f"Not published: {error} The results are in {staged}.") from error
    _replace(staged, folder)


def _check_source(document: Mapping[str, Any], staged: Path, argv: Sequence[str]) -> None:
    """Every result, the sweep's start and this moment must be of one revision, no tracked file changed."""
    then, now = document["provenance"], provenance(argv)
    seen = {"at the start": _state(then), "now": _state(now)}
    for row in document["cells"]:
        seen[row["id"]] = _state(read_record(staged / row["result"]).provenance)
    expected = (then["git_revision"], False)
    unlike = [f"{where}: {_said(state)}" for where, state in seen.items() if state != expected]
    if unlike:
        raise RunFailed(
            f"Not published: the code changed while the sweep ran, or had changed files. It began on revision "
            f"{then['git_revision']}; unlike that are {'; '.join(unlike[:5])}. The results are in {staged}; run the sweep "
            "again on one clean revision."
        )


def _state(origin: Mapping[str, Any]) -> tuple[Any, Any]:
    return origin.get("git_revision"), origin.get("git_dirty")


def _said(state: tuple[Any, Any]) -> str:
    revision, dirty = state
    files = {True: ", with changed files", False: "", None: ", not known whether with changed files"}[dirty]
    return f"{revision or 'not known'}{files}"


def _replace(staged: Path, folder: Path) -> None:
    """Rename, so that at each moment one whole sweep is there; the old one is put back where that fails."""
    aside = folder.with_name(f"{folder.name}.replaced-{secrets.token_hex(4)}")
    there = folder.exists()
    if there:
        folder.rename(aside)
    try:
        staged.rename(folder)
    except OSError:
        if there:
            aside.rename(folder)
        raise
    if there:
        shutil.rmtree(aside)
