"""Integrity of one checkpoint against its manifest; torch-free, read-only, one small buffer in memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs

from mtb_core.ckpt.layout import MANIFEST, READY, DamagedCheckpoint, name_problem, rng_name
from mtb_core.ckpt.manifest import Manifest, read_manifest
from mtb_core.ckpt.opened import RNG_BYTES, file_problem, open_checkpoint, read_json, storage_of, unlisted


@attrs.frozen
class Problem:
    """One thing that is wrong: `file` relative to the checkpoint."""

    file: str
    problem: str


@attrs.frozen
class Integrity:
    """Outcome of `verify_checkpoint`."""

    path: Path
    step: int | None
    files: int
    size_bytes: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether the checkpoint is exactly what was published."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """As a JSON value."""
        return {
            "path": str(self.path),
            "ok": self.ok,
            "step": self.step,
            "files": self.files,
            "size_bytes": self.size_bytes,
            "problems": [attrs.asdict(problem) for problem in self.problems],
        }


def verify_checkpoint(path: Path) -> Integrity:
    """Check every file of the checkpoint at `path`: present, regular, of the right size and digest, and nothing else.

    Raises:
        PluginError: no plugin has the format of its tensors.
        OSError: `path` cannot be listed. (What is wrong with the checkpoint is in the result.)
    """
    try:
        manifest = read_manifest(path)
    except DamagedCheckpoint as error:
        return Integrity(path, None, 0, 0, (Problem(error.file, error.problem),))
    missing = unlisted(manifest, storage_of(manifest))
    problems = [Problem(MANIFEST, f"it does not list {name}") for name in missing]
    if misnamed := name_problem(path, manifest.step):
        problems.append(Problem(MANIFEST, misnamed))
    problems += [Problem(name, problem) for name, problem in _surplus(path, manifest)]
    for name in sorted(manifest.files):
        problem = file_problem(path, name, manifest)
        if problem is not None:
            problems.append(Problem(name, problem))
    if not problems:
        problems += _unreadable(path, manifest)
    size = sum(entry.size for entry in manifest.files.values())
    return Integrity(path, manifest.step, len(manifest.files), size, tuple(problems))


def _surplus(path: Path, manifest: Manifest) -> list[tuple[str, str]]:
    """What is in the folder and not in the manifest; folders that hold listed files are expected."""
    expected = {MANIFEST, READY, *manifest.files}
    folders = {str(parent) for name in manifest.files for parent in Path(name).parents}
    out = []
    for top, below, names in os.walk(path):
        for name in (*below, *names):
            relative = str((Path(top) / name).relative_to(path))
            if relative not in expected and relative not in folders:
                out.append((relative, "it does not belong there: the manifest does not list it"))
    return sorted(out)


def _unreadable(path: Path, manifest: Manifest) -> list[Problem]:
    """Files that are what was published, but make no sense."""
    try:
        with open_checkpoint(path).tensors() as tensors:
            tensors.check_all()
        for rank in range(manifest.world_size):
            read_json(path, rng_name(rank), RNG_BYTES)
    except DamagedCheckpoint as error:
        return [Problem(error.file, error.problem)]
    return []
