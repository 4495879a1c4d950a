"""`mtb sweep --formal`: one clean revision, published whole or not at all, nothing else removed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mtb_core import ConfigError, MtbError, RunFailed
from mtb_report.results import read_record
from mtb_report.sweep import formal, runner
from mtb_report.sweep.command import sweep
from mtb_report.training import Attempt

FILE = "name = 's'\n[base]\nsteps = 2\n[matrix]\nbatch_size = [1, 2]\n"


class Checkout:
    """What provenance says, and trainings that say the same in their results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.revision, self.dirty = "aaaa", False
        self.asked: list[int] = []
        self.status = "success"
        self.before: Callable[[int], None] = lambda _number: None

    def origin(self, _argv: Any) -> dict[str, Any]:
        return {"git_revision": self.revision, "git_dirty": self.dirty, "build_revision": None}

    def train(self, folder: Path, settings: dict[str, Any], *, timeout_s: float | None = None) -> Attempt:
        self.asked.append(settings["batch_size"])
        self.before(len(self.asked))
        file = folder / "run" / "result.json"
        file.parent.mkdir(parents=True)
        row = {"step_time_ms": 1.0, "tokens_per_sec": 1.0}
        kind = {"schema_version": 1, "benchmark": "training", "exit_reason": "done"}
        file.write_text(json.dumps({**kind, **row, "repeats": [row], "provenance": self.origin(())}))
        return Attempt(
            status=self.status, failure_type=None, reason=None, exit_code=0, command="c", log_digest="d", seconds=1.0,
            result=read_record(file),
        )  # fmt: skip

    def sweep(self, *words: str) -> Result:
        """The command, on a folder `out`."""
        file = self.folder / "s.toml"
        file.write_text(FILE)
        out = str(self.folder / "out")
        return CliRunner().invoke(
            sweep, [str(file), "--formal", "--run-dir", out, "--quiet", *words], standalone_mode=False
        )

    def revisions(self) -> set[str]:
        return {read_record(f).provenance["git_revision"] for f in (self.folder / "out").rglob("result.json")}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """A clean one on a quiet machine."""
    made = Checkout(tmp_path)
    monkeypatch.setattr(formal, "provenance", made.origin)
    monkeypatch.setattr(runner, "provenance", made.origin)
    monkeypatch.setattr(runner, "train", made.train)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    return made


def test_a_formal_sweep_replaces_what_was_published(checkout: Checkout) -> None:
    """As a whole, where every cell succeeded; nothing else is left or touched."""
    beside = checkout.folder / "out.replaced"
    beside.mkdir()
    assert checkout.sweep().exception is None
    (checkout.folder / "out" / "old").touch()
    checkout.revision = "bbbb"
    assert checkout.sweep().exception is None
    assert checkout.revisions() == {"bbbb"}
    assert sorted(p.name for p in checkout.folder.iterdir()) == ["out", "out.replaced", "s.toml"]
    assert sorted(p.name for p in (checkout.folder / "out").iterdir()) == ["cells", "sweep.json"]


@pytest.mark.parametrize("status", ["oom", "partial", "failed"])
def test_a_formal_sweep_with_a_failure_replaces_nothing(checkout: Checkout, status: str) -> None:
    """Not even for one cell of many; the rest are in the folder beside it."""
    assert checkout.sweep().exception is None
    checkout.revision = "bbbb"

    def last(number: int) -> None:
        checkout.status = status if number == 4 else "success"

    checkout.before = last
    done = checkout.sweep()
    assert isinstance(done.exception, RunFailed)
    assert "Not published" in str(done.exception)
    assert checkout.revisions() == {"aaaa"}
    assert (checkout.folder / "out.unpublished" / "sweep.json").exists()


def test_a_folder_of_other_things_is_never_replaced(checkout: Checkout) -> None:
    """Refused before a cell is run: a folder with anything else, or another sweep."""
    out = checkout.folder / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    done = checkout.sweep()
    assert isinstance(done.exception, ConfigError)
    assert "not empty" in str(done.exception)
    assert checkout.asked == []
    assert [p.name for p in out.iterdir()] == ["thesis.tex"]


def test_a_folder_that_was_filled_meanwhile_is_not_replaced(checkout: Checkout) -> None:
    """What came while the sweep ran stays, and where the results are is said."""
    out = checkout.folder / "out"

    def fill(_number: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "thesis.tex").touch()

    checkout.before = fill
    done = checkout.sweep()
    assert isinstance(done.exception, MtbError)
    assert "out.unpublished" in str(done.exception)
    assert [p.name for p in out.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("change", [{"revision": "bbbb"}, {"dirty": True}, {"dirty": None}])
@pytest.mark.parametrize("back", [False, True])
def test_code_that_changed_meanwhile_is_not_published(checkout: Checkout, change: dict[str, Any], back: bool) -> None:
    """Each result and the end must be of the revision of the start, without changed files, also if it came back."""

    def edit(number: int) -> None:
        made = change if number == 1 or not back else {"revision": "aaaa", "dirty": False}
        for name, value in made.items():
            setattr(checkout, name, value)

    checkout.before = edit
    done = checkout.sweep()
    assert isinstance(done.exception, RunFailed)
    assert "code changed" in str(done.exception)
    assert not (checkout.folder / "out").exists()


def test_cells_of_another_revision_are_run_again(checkout: Checkout) -> None:
    """An interrupted formal sweep that goes on after a commit measures everything anew."""

    def interrupt(number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    checkout.before = interrupt
    assert checkout.sweep().exception is not None
    checkout.before = lambda _number: None
    checkout.revision = "bbbb"
    assert checkout.sweep().exception is None
    assert len(checkout.asked) == 4
    assert checkout.revisions() == {"bbbb"}
    cells = json.loads((checkout.folder / "out" / "sweep.json").read_text())["cells"]
    assert {row["git_revision"] for row in cells} == {"bbbb"}


def test_cells_of_the_same_revision_are_kept(checkout: Checkout) -> None:
    """Going on runs nothing twice."""

    def interrupt(number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    checkout.before = interrupt
    assert checkout.sweep().exception is not None
    assert checkout.sweep().exception is None
    assert len(checkout.asked) == 3


@pytest.mark.parametrize(("dirty", "words"), [(True, "tracked files differ"), (None, "is not known")])
def test_formal_is_refused_on_a_changed_tree(checkout: Checkout, dirty: Any, words: str) -> None:
    """Before any cell is run; also where it is not known whether it is changed."""
    checkout.dirty = dirty
    done = checkout.sweep()
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)
    assert checkout.asked == []
