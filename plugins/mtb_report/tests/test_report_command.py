"""`mtb report` and `mtb explain` from the command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mtb_core import ConfigError
from mtb_report.report.command import explain, report
from mtb_report.report.watch import snapshot, watch, write_text

SAMPLES = Path(__file__).parent / "test_report_samples"
NEWER = str(SAMPLES / "newer")


def invoke(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(report, list(words), standalone_mode=False, catch_exceptions=False)
    return done.return_value, done.stdout


@pytest.mark.parametrize(
    ("name", "begin"), [("r.html", "<!DOCTYPE html>"), ("r.md", "# Mine"), ("r.txt", "Mine\n"), ("r", "Mine\n")]
)
def test_the_name_of_the_file_tells_the_format(name: str, begin: str, tmp_path: Path) -> None:
    """Format follows --output's name, and stdout stays empty."""
    code, out = invoke(NEWER, "--output", str(tmp_path / "new" / name), "--title", "Mine")
    assert (code, out) == (0, "")
    assert (tmp_path / "new" / name).read_text(encoding="utf-8").startswith(begin)


def test_formats_on_stdout() -> None:
    """Without --output the terminal's is printed; --format chooses another."""
    assert invoke(NEWER)[1].startswith("MiniTrainBench report\n")
    assert invoke(NEWER, "--format", "md")[1].startswith("# MiniTrainBench report\n")
    assert "\x1b" not in invoke(NEWER)[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "No results are named"),
        (["/nowhere"], "/nowhere does not exist"),
        ([str(SAMPLES / "newer/ddp-w2/metrics")], "There are no results in"),
        ([NEWER, "--watch", NEWER], "--watch needs --output"),
        (["--watch", __file__, "--output", "x.html"], "is no folder"),
        ([NEWER, "--output", NEWER], "is a folder"),
        ([NEWER, "--output", "/proc/x/y.md"], "cannot be written"),
    ],
)
def test_wrong_usage(words: list[str], said: str) -> None:
    """Each mistake is refused in words, with exit code 2."""
    with pytest.raises(ConfigError, match=said):
        invoke(*words)


def test_a_broken_file_in_a_folder_is_named_in_the_report(tmp_path: Path) -> None:
    """What cannot be read is listed with the reason and does not stop the rest."""
    shutil.copytree(SAMPLES / "newer/ddp-w2", tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/result.json").write_text('{"benchmark": "training", "loss": NaN}')
    out = invoke(str(tmp_path), "--format", "md")[1]
    assert "1 file without a section" in out
    assert "NaN is not JSON" in out
    assert "| ddp ×2 |" in out


def test_files_are_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails leaves the old report and no rubbish; a link stays a link."""
    target, link = tmp_path / "r.html", tmp_path / "link.html"
    write_text(target, "old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"

    def full(self: Path, to: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_text(target, "half")
    assert target.read_text() == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.html", "r.html"]


def test_watch_writes_again_when_something_changed_and_only_then(tmp_path: Path) -> None:
    """A new result, a changed one and a removed one each lead to one report; quiet waits to none, the report itself to none."""
    result, other = tmp_path / "a.json", tmp_path / "b.json"
    own = tmp_path / "report.json"
    result.write_text("{}")
    writes: list[int] = []
    steps = iter([
        lambda: None,
        lambda: other.write_text("{}"),
        lambda: None,
        lambda: result.write_text('{"x": 1}'),
        lambda: os.utime(other, (0, 0)),  # a clock that was set back
        other.unlink,
        lambda: (tmp_path / "notes.txt").write_text("x"),
    ])  # fmt: skip
    counts = []

    def write() -> None:
        writes.append(1)
        own.write_text("x" * len(writes))

    def wait() -> None:
        counts.append(len(writes))
        step = next(steps, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    with pytest.raises(KeyboardInterrupt):
        watch([tmp_path], write, without=own, wait=wait)
    assert counts == [1, 1, 2, 2, 3, 4, 5, 5]


def test_a_file_that_vanishes_while_it_is_looked_at_is_passed_over(tmp_path: Path) -> None:
    """A dangling link is like a file that was just removed."""
    (tmp_path / "x.json").symlink_to(tmp_path / "gone.json")
    assert snapshot([tmp_path]) == {}


def test_watch_ends_cleanly_on_ctrl_c(tmp_path: Path) -> None:
    """An empty folder is waited for; a result that appears is reported; after Ctrl-C the page is final, exit code 0."""
    folder, page = tmp_path / "runs", tmp_path / "report.html"
    folder.mkdir()
    command = [sys.executable, "-m", "mtb_core", "report", "--watch", str(folder), "--output", str(page)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert "Ctrl-C ends" in process.stderr.readline()
            assert 'http-equiv="refresh"' in page.read_text(encoding="utf-8")
            shutil.copytree(SAMPLES / "newer/ddp-w2", folder / "ddp-w2")
            assert "written again" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
            assert process.wait() == 0
        finally:
            process.kill()
    assert said.endswith("is final.\n")
    assert "Traceback" not in said
    text = page.read_text(encoding="utf-8")
    assert 'http-equiv="refresh"' not in text
    assert "ddp ×2" in text


def test_help_and_a_reader_that_leaves(tmp_path: Path) -> None:
    """The help needs no results; a pipe closed by its reader is no traceback."""
    run = [sys.executable, "-m", "mtb_core", "report"]
    helped = subprocess.run([*run, "--help"], capture_output=True, text=True, check=True)
    assert "--watch" in helped.stdout
    done = subprocess.run(
        f"{sys.executable} -m mtb_core report {NEWER} | head -1", shell=True, capture_output=True, text=True, check=True
    )
    assert done.stdout == "MiniTrainBench report\n"
    assert "Traceback" not in done.stderr


def test_explain_prints_a_page(tmp_path: Path) -> None:
    """Three headed parts, no line wider than asked, the same to a file."""
    words = [str(SAMPLES / "newer/ddp-w2"), "--width", "60"]
    done = CliRunner().invoke(explain, words, standalone_mode=False, catch_exceptions=False)
    assert done.return_value == 0
    assert [line for line in done.stdout.splitlines() if line.startswith("What ")] == [
        "What it says",
        "What is unusual",
        "What to measure next",
    ]
    assert max(map(len, done.stdout.splitlines())) <= 60
    CliRunner().invoke(
        explain, [*words, "--output", str(tmp_path / "x.txt")], standalone_mode=False, catch_exceptions=False
    )
    assert (tmp_path / "x.txt").read_text(encoding="utf-8") == done.stdout


def test_explain_refuses_what_is_no_result(tmp_path: Path) -> None:
    """A file without a benchmark, and one with values of the wrong kind, are refused in words."""
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no result"):
        CliRunner().invoke(explain, [str(tmp_path / "x.json")], standalone_mode=False, catch_exceptions=False)
    raw = json.loads((SAMPLES / "newer/ddp-w2/result.json").read_text())
    (tmp_path / "y.json").write_text(json.dumps({**raw, "parameters": "many"}))
    with pytest.raises(ConfigError, match="'parameters' is 'many'"):
        CliRunner().invoke(explain, [str(tmp_path / "y.json")], standalone_mode=False, catch_exceptions=False)
