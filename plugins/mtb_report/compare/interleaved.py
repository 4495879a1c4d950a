"""Two configurations measured in turns on this machine: A B A B …, so that both halves of a pair are close in time."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mtb_core import ConfigError, RunFailed, load_config
from mtb_report.results import Record, read_record
from mtb_report.training import Attempt, train

from .unlike import WORK_KEYS

#: What a pair decides by itself.
_OURS = ("run_dir", "output", "repeat")
_EXCLUDED = ("resume", "checkpoint_dir")


def read_settings(file: Path) -> dict[str, Any]:
    """The settings of a configuration to be measured, all valid.

    Raises:
        ConfigError: it is no configuration, or one that a second trial would not do again from the start.
    """
    load_config(file=file)
    settings = tomllib.loads(file.read_text(encoding="utf-8"))
    for name in _EXCLUDED:
        if settings.get(name) is not None:
            raise ConfigError(
                f"{file} sets {name} = {settings[name]!r}, but compare --run trains several times from the start, "
                "without checkpoints. Take it out."
            )
    return {k: v for k, v in settings.items() if k not in _OURS}


def unlike_work(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The settings that are other work in two configurations, before anything is measured, as "name: A | B".

    The global batch is not among them: it may follow from ranks and strategy, and is compared in the results.
    """
    left, right = load_config(a), load_config(b)
    names = [name for name in WORK_KEYS if hasattr(left, name) and name != "global_batch_size"]
    pairs = {name: (getattr(left, name), getattr(right, name)) for name in names}
    return [f"{name}: {x} | {y}" for name, (x, y) in pairs.items() if x != y and None not in (x, y)]


def measure_pairs(
    a: dict[str, Any],
    b: dict[str, Any],
    *,
    pairs: int,
    folder: Path,
    timeout_s: float | None,
    on_progress: Callable[[str], None],
) -> tuple[list[Record], list[Record]]:
    """Train with `a` and `b` in turns, `pairs` times each, every trial in a folder of its own.

    Raises:
        RunFailed: a training did not end as planned.
    """
    sides: dict[str, list[Record]] = {"a": [], "b": []}
    for pair in range(pairs):
        for side, settings in (("a", a), ("b", b)):
            attempt = train(folder / f"pair_{pair:03d}" / side, settings, timeout_s=timeout_s)
            sides[side].append(_measured(attempt, side, pair))
            on_progress(f"pair {pair + 1} of {pairs}, {side.upper()}: {attempt.seconds:.1f} s")
    return sides["a"], sides["b"]


def read_pairs(folder: Path) -> tuple[list[Record], list[Record]]:
    """The trials that `measure_pairs` left in `folder`, A's and B's in the order of the pairs.

    Raises:
        ConfigError: it holds no pairs, or one without both results.
    """
    pairs = sorted(folder.glob("pair_*"))
    if not pairs:
        raise ConfigError(
            f"{folder} holds no trials of compare --run, and there is no B. Name two results, or the folder of a --run."
        )
    for result in (pair / side / "run" / "result.json" for pair in pairs for side in "ab"):
        if not result.is_file():
            raise ConfigError(
                f"{result} is not there: measuring ended early. Remove {result.parents[2]} to compare the other pairs."
            )
    return [read_record(pair / "a") for pair in pairs], [read_record(pair / "b") for pair in pairs]


def _measured(attempt: Attempt, side: str, pair: int) -> Record:
    if attempt.status != "success" or attempt.result is None:
        raise RunFailed(
            f"Training {side.upper()} of pair {pair + 1} ended with status {attempt.status} (exit code "
            f"{attempt.exit_code}): {attempt.reason}. The command was: {attempt.command}"
        )
    return attempt.result
