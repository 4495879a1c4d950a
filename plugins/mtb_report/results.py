"""Reading results of every kind into one form: what `compare`, `sweep`, `evidence` and `report` work on.

A `Record` has the file's figures under today's names and units, and the file itself as ``raw``: nothing is lost. What
a file does not say is None, never 0. What was converted is listed in ``conversions``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from mtb_core import ConfigError

from .older import convert_older

#: What ``schema_version`` of a document can be read; in another one a key may mean something else.
SCHEMA_VERSION = 1

#: Figures of a training that a trial has of its own, in the order in which tables show them.
FIGURES = (
    "tokens_per_sec",
    "step_time_ms",
    "data_time_ms",
    "forward_backward_ms",
    "optimizer_step_ms",
    "checkpoint_time_ms",
    "max_memory_mib",
    "mfu",
    "loss",
    "loss_first",
    "eval_loss",
    "grad_norm",
    "grad_norm_max",
)
#: Outcomes of anything that was run.
STATUSES = ("success", "partial", "oom", "timeout", "failed", "failed_parse")

_TRAINING_STATUS = {"done": "success", "stopped": "partial", "interrupted": "partial", "failed": "failed"}
_PLAIN_STATUS = {"ok": "success", "success": "success", "recovered_exact": "success", "skipped": "partial"}
#: Folders of a run that hold no results.
_NO_RESULTS = {"metrics", "heartbeat", "logs", "trace", "hang", "rng"}
#: Where a folder that is named has its result; a trial or cell has it one level below.
_IN_FOLDER = ("result.json", "sweep.json", "comparison.json", "run/result.json")


@attrs.frozen(kw_only=True)
class Record:
    """One result.

    Attributes:
        path: the file it was read from.
        digest: SHA-256 of that file.
        kind: ``benchmark`` in the file: "training", "communication", "moe_routing", "tensor_parallel",
            "tensor_parallel_mlp", "sequence_parallel", "trace_analysis", "conformance", "sweep",
            "checkpoint_verification", "fault_tolerance", "memory_pressure", "megatron", "megatron_matrix", …
        older: it is of the schema that had no ``schema_version``.
        status: one of `STATUSES`; None where the file does not say.
        values: what the file says as a whole, under today's names; what it lacks is absent or None.
        trials: a row of `FIGURES` for each independent trial; empty where there is none of its own.
        rows: what the file holds a list of: collectives, cells, cases, records, failures.
        summary: by figure ``mean``, ``std``, ``min``, ``max``, ``n``, ``ci95``, and ``std_kind``, "sample" or
            "population".
        performance_valid: None where the file does not say.
        conversions: what is not as it stands in the file, in words.
        raw: the file.
    """

    path: Path
    digest: str
    kind: str
    older: bool
    schema_version: int | None
    status: str | None
    values: Mapping[str, Any]
    trials: Sequence[Mapping[str, Any]] = ()
    rows: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict)
    environment: Mapping[str, Any] = attrs.field(factory=dict)
    provenance: Mapping[str, Any] = attrs.field(factory=dict)
    execution_complete: bool | None = None
    performance_valid: bool | None = None
    performance_invalid_reasons: Sequence[str] = ()
    conversions: Sequence[str] = ()
    raw: Mapping[str, Any] = attrs.field(repr=False)

    def get(self, name: str) -> Any:
        """The value of that name, None where it is not known."""
        return self.values.get(name)

    @property
    def label(self) -> str:
        """A short name for people: what ran, on how many ranks."""
        for name in ("name", "benchmark_id"):
            if self.get(name):
                return str(self.get(name))
        what = str(self.get("strategy") or self.kind)
        stage = (self.get("strategy_options") or {}).get("stage")
        ranks = self.get("world_size")
        return what + (f" stage {stage}" if stage is not None else "") + (f" ×{ranks}" if ranks else "")


@attrs.frozen
class Found:
    """Results found under some paths, and the files that look like results and cannot be read, with the reason."""

    records: Sequence[Record]
    unreadable: Sequence[tuple[Path, str]]


def read_record(path: str | Path) -> Record:
    """The result in a file, or in a folder: of a run, a sweep, a ``compare --run`` or one of its trials.

    Raises:
        ConfigError: it cannot be read, or is not the JSON of a result.
    """
    file = _file_of(Path(path))
    try:
        data = file.read_bytes()
        raw = json.loads(data, parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file} cannot be read as JSON: {error}. Give a result that `mtb` wrote, or a run's folder."
        ) from error
    if not isinstance(raw, dict) or not isinstance(raw.get("benchmark"), str):
        raise ConfigError(
            f"{file} is no result: it has no key 'benchmark' at its top. Give a result.json, what --output of an `mtb` "
            "command wrote, or a run's folder."
        )
    if raw.get("schema_version") not in (None, SCHEMA_VERSION):
        raise ConfigError(
            f"{file} has schema_version {str(raw['schema_version'])[:60]!r}; this mtb reads {SCHEMA_VERSION}, and older files without one. "
            "Read it with the mtb that wrote it."
        )
    _check_forms(file, raw)
    try:
        return record_of(raw, path=file, digest=hashlib.sha256(data).hexdigest())
    except (TypeError, AttributeError, ValueError, LookupError, ArithmeticError) as error:
        raise ConfigError(
            f"{file} is a broken result of kind {raw['benchmark']!r}: a value in it has a form that it cannot have "
            f"({error}). Measure it again, or take it away."
        ) from error


_FORMS: dict[type, tuple[str, ...]] = {
    dict: ("environment", "provenance", "summary", "config", "strategy_options", "failure", "model_config"),
    list: ("repeats", "performance_invalid_reasons", "plugins"),
}


def _check_forms(file: Path, raw: Mapping[str, Any]) -> None:
    """Refuse tables and lists that are none, wherever a reader relies on them."""
    for form, names in _FORMS.items():
        for name in names:
            value = raw.get(name)
            if value is not None and not isinstance(value, form):
                _refuse(file, name, value, "a table" if form is dict else "a list")
    for name in ("repeats", "summary"):
        rows = raw.get(name) or ()
        for row in rows.values() if isinstance(rows, dict) else rows:
            if not isinstance(row, dict):
                _refuse(file, f"{name}: a row of it", row, "a table")


def _refuse(file: Path, name: str, value: Any, form: str) -> None:
    raise ConfigError(
        f"{file} is a broken result: {name} is {str(value)[:60]!r}, but must be {form}. Measure it again, or take it away."
    )


def record_of(raw: Mapping[str, Any], *, path: Path, digest: str) -> Record:
    """The record of a document that was read from `path`."""
    if raw.get("schema_version") is None:
        return Record(path=path, digest=digest, older=True, schema_version=None, raw=raw, **convert_older(raw))
    return Record(
        path=path,
        digest=digest,
        kind=str(raw["benchmark"]),
        older=False,
        schema_version=raw["schema_version"],
        status=_status(raw),
        values={k: v for k, v in raw.items() if k not in _APART},
        trials=list(raw.get("repeats") or ()),
        rows=_rows(raw),
        summary={name: {"std_kind": "sample", **spread} for name, spread in (raw.get("summary") or {}).items()},
        environment=raw.get("environment") or {},
        provenance=raw.get("provenance") or {},
        execution_complete=raw.get("execution_complete"),
        performance_valid=raw.get("performance_valid"),
        performance_invalid_reasons=list(raw.get("performance_invalid_reasons") or ()),
        raw=raw,
    )


def find_records(paths: Iterable[str | Path]) -> Found:
    """Every result in the files and folders `paths`, in the order of their names; each file once.

    In a folder only JSON files with a key ``benchmark`` count; others, and links to outside, are passed over.

    Raises:
        ConfigError: a path that is not there, or a file that was named itself and is no result.
    """
    records: list[Record] = []
    unreadable: list[tuple[Path, str]] = []
    seen: set[Path] = set()
    for given in map(Path, paths):
        if not given.exists():
            raise ConfigError(f"{given} does not exist; give results or folders that hold some.")
        for file in _json_files(given) if given.is_dir() else [given]:
            if file.resolve() in seen:
                continue
            seen.add(file.resolve())
            try:
                records.append(read_record(file))
            except ConfigError as error:
                if file == given:
                    raise
                if _looks_like_a_result(file):
                    unreadable.append((file, str(error)))
    return Found(records, unreadable)


def metrics_of(record: Record, trial: int = 0) -> dict[int, list[dict[str, Any]]]:
    """The metrics lines of a training by rank, from the run's folder that `record` lies in; {} without such.

    A last line that a killed rank left unfinished is left out.
    """
    folder = record.path.parent / "metrics"
    if trial:
        folder /= f"trial_{trial:03d}"
    out: dict[int, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("rank_*.jsonl")):
        number = file.stem.removeprefix("rank_")
        if number.isdigit():
            out[int(number)] = list(_lines(file))
    return out


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


#: Keys of a current document that a record holds elsewhere.
_APART = {
    "schema_version",
    "benchmark",
    "summary",
    "repeats",
    "results",
    "cells",
    "cases",
    "checks",
    "environment",
    "provenance",
    "execution_complete",
    "performance_valid",
    "performance_invalid_reasons",
}


def _rows(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    for name in ("results", "cells", "cases", "checks"):
        if isinstance(raw.get(name), list):
            return [row for row in raw[name] if isinstance(row, Mapping)]
    return []


def _status(raw: Mapping[str, Any]) -> str | None:
    if "conformant" in raw:
        return "success" if raw["conformant"] else "failed"
    if raw.get("status") is not None:
        return _PLAIN_STATUS.get(raw["status"], raw["status"] if raw["status"] in STATUSES else "failed")
    return _TRAINING_STATUS.get(raw.get("exit_reason", ""))


def _file_of(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in _IN_FOLDER:
        if (path / name).is_file():
            return path / name
    raise ConfigError(f"{path} holds none of {', '.join(_IN_FOLDER)}; give a run's folder or a result file.")


def _json_files(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            if entry.name not in _NO_RESULTS and not entry.name.startswith((".", "step_")) and not entry.is_symlink():
                yield from _json_files(entry)
        elif entry.suffix == ".json":
            yield entry


def _looks_like_a_result(file: Path) -> bool:
    """Whether a file that could not be read was meant to be one: by its name, or by what is in it."""
    try:
        return file.name == "result.json" or b'"benchmark"' in file.read_bytes()
    except OSError:
        return True


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
