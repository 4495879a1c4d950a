"""Sink ``csv``: one table per rank, for spreadsheets and data frames."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, TextIO

import attrs

from mtb_core import NoOptions, RunInfo, StepRecord, hookimpl

if TYPE_CHECKING:
    from _csv import Writer

COLUMNS = tuple(field.name for field in attrs.fields(StepRecord))


class CsvSink:
    """Appends a row per step to ``metrics/rank_00000.csv`` in the run's folder, on every rank.

    Columns are the fields of `StepRecord`. Floats are written so that reading them gives the same bits, non-finite
    ones as ``nan``, ``inf`` and ``-inf``; booleans are ``true`` and ``false``; a value that was not measured is empty.
    A row goes to the operating system at once. The second trial of ``--repeat`` is in ``metrics/trial_001/``, and so
    on. A run resumed in the same folder goes on in the same file.
    """

    def __init__(self, options: NoOptions) -> None:  # noqa: ARG002  (sinks are made with their options)
        self._file: TextIO | None = None
        self._writer: Writer | None = None

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        """Open the table; a new one gets its header."""
        folder = info.folder / "metrics"
        if info.trial:
            folder /= f"trial_{info.trial:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        # Line-buffered: a row is whole or absent, whenever the process is killed.
        self._file = (folder / f"rank_{info.ctx.rank:05d}.csv").open("a", encoding="utf-8", newline="", buffering=1)
        self._writer = csv.writer(self._file, lineterminator="\n")
        if self._file.tell() == 0:
            self._writer.writerow(COLUMNS)

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        """Append the row."""
        if self._writer is not None:
            self._writer.writerow([_cell(getattr(record, name)) for name in COLUMNS])

    @hookimpl
    def mtb_run_finished(self) -> None:
        """Close the table."""
        file, self._file, self._writer = self._file, None, None
        if file is not None:
            file.close()


def _cell(value: object) -> object:
    if value is True or value is False:
        return "true" if value else "false"
    return value
