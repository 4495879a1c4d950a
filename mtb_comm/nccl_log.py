"""Reading the tables that nccl-tests prints (https://github.com/NVIDIA/nccl-tests, any version with a header line)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from mtb_core import ConfigError

_OPERATIONS = {
    "all_reduce": "all_reduce", "all_gather": "all_gather", "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all", "broadcast": "broadcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter",
    "sendrecv": "send_recv",
}  # fmt: skip
_PROGRAM = re.compile(r"\b(" + "|".join(sorted(_OPERATIONS, key=len, reverse=True)) + r")_perf(?:_mpi)?\b")
_DTYPES = {
    "float": "fp32", "double": "fp64", "half": "fp16", "bfloat16": "bf16", "int8": "int8", "uint8": "uint8",
    "int32": "int32", "int64": "int64",
}  # fmt: skip
_REDUCTIONS = {"sum": "sum", "prod": "product", "min": "min", "max": "max", "avg": "avg"}
#: What mpirun puts before each line.
_TAG = re.compile(r"^\[\d+,\d+\]<std\w+>:")
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b")
_ROW = re.compile(r"^\s*\d+\s+\d+\s+\w+")
#: Columns of one half of the table, in all versions: time in µs, algbw, busbw, wrong.
_HALF = 4


@attrs.frozen(kw_only=True)
class LogRow:
    """One half of a line of the table. `operation` is None where the log does not name its program.

    `root` is None where the log has no such column, or says that the operation has none (-1).
    """

    operation: str | None
    dtype: str
    reduction: str | None
    root: int | None
    in_place: bool
    world_size: int | None
    size_bytes: int
    time_ms: float
    algbw_gb_per_sec: float
    busbw_gb_per_sec: float
    wrong: int | None


def read_log(path: str | Path) -> list[LogRow]:
    """The rows of a log, both halves of each line.

    Raises:
        ConfigError: it cannot be read, or holds no table of nccl-tests.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"The log {path} cannot be read: {error.strerror}. Give a file that nccl-tests wrote."
        ) from error
    rows = list(parse_log(text.splitlines()))
    if not rows:
        raise ConfigError(
            f"{path} holds no table of nccl-tests: no line of numbers below a header with size, count, type and time. "
            "Give what all_reduce_perf or another of its programs printed."
        )
    return rows


def parse_log(lines: Iterable[str]) -> Iterator[LogRow]:
    """The rows in `lines`; several programs' tables may follow each other."""
    columns: list[str] = []
    operation: str | None = None
    ranks: set[int] = set()
    table_seen = False
    for tagged in lines:
        line = _TAG.sub("", tagged)
        if program := _PROGRAM.search(line):
            operation = _OPERATIONS[program[1]]
        if rank := _RANK.match(line):
            if table_seen:
                ranks, table_seen = set(), False
            ranks.add(int(rank[1]))
        words = line.lstrip("#").split()
        if line.startswith("#") and {"size", "count", "type", "time"} <= set(words):
            columns, table_seen = words, True
        elif columns and _ROW.match(line):
            yield from _halves(line.split(), columns, operation, len(ranks) or None)


def _halves(words: list[str], columns: list[str], operation: str | None, world_size: int | None) -> Iterator[LogRow]:
    first = columns.index("time")
    named = dict(zip(columns[:first], words, strict=False))
    root = int(named.get("root", -1))
    for in_place, start in ((False, first), (True, first + _HALF)):
        half = words[start : start + _HALF]
        if len(half) < _HALF or half[0] == "N/A":
            continue
        time_us, algbw, busbw = map(float, half[:3])
        yield LogRow(
            operation=operation,
            dtype=_DTYPES.get(named["type"], named["type"]),
            reduction=_REDUCTIONS.get(named.get("redop", "")),
            root=root if root >= 0 else None,
            in_place=in_place,
            world_size=world_size,
            size_bytes=int(named["size"]),
            time_ms=time_us / 1e3,
            algbw_gb_per_sec=algbw,
            busbw_gb_per_sec=busbw,
            wrong=int(float(half[3])) if half[3] != "N/A" else None,
        )
