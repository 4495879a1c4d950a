"""Finished rows outlive a rank, and never cost a run that is well."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from mtb_comm.kept import Kept, cause_of, first_line, kept_file, read_kept, warned
from mtb_comm.points import CommRequest
from mtb_comm.running import measure_all
from mtb_core import RunFailed

REQUEST = CommRequest(operations=("all_reduce",), sizes=(64, 256), iterations=2, warmup=0)


@attrs.frozen
class Full:
    """In place of a temporary folder: a device that is always full, as a file in it."""

    def __enter__(self):
        return Path("/dev/full")

    def __exit__(self, *_):
        return None


def test_rows_come_back():
    """Written rows are read again; a last line that was cut and a missing file give no row."""
    with kept_file() as path:
        assert path is not None
        assert read_kept(path) == read_kept(None) == []
        kept = Kept(path, lambda _fields: None)
        kept.write({"a": 1})
        kept.write({"b": 2})
        with path.open("a") as file:
            file.write('{"c": ')
        assert read_kept(path) == [{"a": 1}, {"b": 2}]
    assert not path.parent.exists()


def test_a_full_disk_is_told_once(capsys):
    """After the first failed write nothing more is tried, and the message is a warning on stderr."""
    told = []
    kept = Kept(Path("/dev/full"), told.append)
    kept.write({"a": 1})
    kept.write({"b": 2})
    (fields,) = told
    assert warned(fields)
    assert not warned({"event": "row"})
    assert "mtb: warning: finished rows are no longer kept" in capsys.readouterr().err


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_full_disk_does_not_end_a_run(monkeypatch, capsys, nproc):
    """All rows are measured though none can be kept; one warning says so, also when quiet."""
    monkeypatch.setattr("mtb_comm.running.kept_file", Full)
    document = measure_all(REQUEST, nproc=nproc, device="cpu", quiet=True)
    assert document["exit_reason"] == "done", document["failure"]
    assert [row["status"] for row in document["results"]] == ["ok", "ok"]
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_no_folder_at_all(monkeypatch, capsys):
    """If the folder cannot be made, nothing is kept."""

    def full(**_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryDirectory", full)
    with kept_file() as path:
        assert path is None
    assert "No space left" in capsys.readouterr().err


def test_causes():
    """A rank's error keeps its rank, and of torch's long messages the first line is enough."""
    assert str(cause_of(RunFailed("it broke", rank=3))) == "Rank 3 failed: it broke"
    assert first_line("DefaultCPUAllocator: not enough memory\nException raised from ...\nframe #0") == (
        "DefaultCPUAllocator: not enough memory"
    )
