from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
import time

import pytest

from mtb_core.launch import display as module
from mtb_core.launch.display import Display, clock, quantity

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True

    @property
    def text(self):
        return ESCAPES.sub("", self.getvalue())


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


class Clock:
    """A monotonic clock that goes on only when told."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


def start(first=1, last=10, trial=0):
    return {"event": "start", "first_step": first, "last_step": last, "trial": trial}


def step(number, loss=2.5, rate=12_345.0, **more):
    fields = {"event": "step", "step": number, "loss": loss, "tokens_per_sec": rate}
    return fields | {"warmup": False, "nonfinite": False, "skipped": False} | more


FINISH = {"event": "finish", "exit_reason": "done"}


def run(shown, numbers, clock=None, seconds=0.0, **more):
    for number in numbers:
        shown.progress(step(number, **more))
        if clock is not None:
            clock.now += seconds


def test_plain_lines_tell_step_loss_speed_and_time_left(monkeypatch):
    """Without a terminal a line holds all that the bar would."""
    ticks, stream = Clock(monkeypatch), io.StringIO()
    with Display(stream) as shown:
        shown.progress(start())
        run(shown, [1], ticks, 3.0, rate=None, warmup=True)
        run(shown, [2], ticks, 3.0)
        shown.progress({"event": "eval", "step": 2, "eval_loss": 3.25})
        run(shown, range(3, 11), ticks, 3.0)
        shown.progress(FINISH)
    lines = stream.getvalue().splitlines()
    assert lines[:3] == [
        "step 1/10 (10%)  loss 2.5000  warm-up",
        "step 2/10 (20%)  loss 2.5000  12.3k tokens/s  0:24 left",
        "step 2/10 (20%)  loss 2.5000  eval loss 3.2500  12.3k tokens/s  0:48 left",
    ]
    assert lines[-1] == "step 10/10 (100%)  loss 2.5000  eval loss 3.2500  12.3k tokens/s"


@pytest.mark.parametrize(
    ("steps", "seconds", "most"),
    [(10_000, 0.001, 8), (1_000, 0.1, 13), (10_000, 1.0, 345)],
    ids=["10 s", "100 s", "10000 s"],
)
def test_a_log_stays_short(monkeypatch, steps, seconds, most):
    """First, last, every tenth but not within 2 s, and otherwise one in 30 s."""
    ticks, stream = Clock(monkeypatch), io.StringIO()
    with Display(stream) as shown:
        shown.progress(start(last=steps))
        run(shown, range(1, steps + 1), ticks, seconds)
        shown.progress(FINISH)
    lines = stream.getvalue().splitlines()
    assert most * 0.6 <= len(lines) <= most
    assert lines[0].startswith("step 1/")
    assert lines[-1].startswith(f"step {steps}/{steps} (100%)")


def test_further_metrics_stand_beside_the_loss(monkeypatch):
    """Each by its name, also one that is not finite."""
    Clock(monkeypatch)
    stream = io.StringIO()
    with Display(stream) as shown:
        shown.progress(start())
        run(shown, [1], metrics={"aux": 0.12345, "odd": None})
    assert "loss 2.5000  aux 0.1235  odd non-finite  12.3k tokens/s" in stream.getvalue()


def test_what_is_wrong_is_always_shown(monkeypatch):
    """A step that is not finite, or was skipped, has its line however soon after another."""
    Clock(monkeypatch)
    stream = io.StringIO()
    with Display(stream) as shown:
        shown.progress(start())
        run(shown, [1, 2])
        shown.progress(step(3, loss=None, nonfinite=True))
        shown.progress(step(4, nonfinite=True, skipped=True))
        run(shown, [5])
    assert [line.split("  ")[:3] for line in stream.getvalue().splitlines()] == [
        ["step 1/10 (10%)", "loss 2.5000", "12.3k tokens/s"],
        ["step 3/10 (30%)", "loss non-finite", "12.3k tokens/s"],
        ["step 4/10 (40%)", "loss 2.5000", "12.3k tokens/s"],
    ]
    assert "update skipped" in stream.getvalue()


def test_a_run_that_stops_early_shows_its_last_step_once(monkeypatch):
    """The last step that was reported is shown at the end, if it was not already."""
    Clock(monkeypatch)
    stream = io.StringIO()
    shown = Display(stream)
    shown.progress(start(first=5, last=20, trial=1))
    run(shown, [5, 6, 7])
    shown.progress(FINISH)
    assert [line.partition("  ")[0] for line in stream.getvalue().splitlines()] == [
        "trial 2 step 5/20 (6%)",
        "trial 2 step 7/20 (18%)",
    ]


@pytest.mark.parametrize("quiet", [True, False])
def test_warnings_of_ranks_are_shown_also_when_quiet(quiet):
    """A warning among a rank's messages of progress names its rank, and --quiet does not hide it."""
    stream = io.StringIO()
    shown = Display(stream, quiet=quiet)
    shown.progress({"event": "warning", "text": "sink 'x' is switched off", "rank": 1})
    shown.progress({"event": "warning", "text": "of the run"})
    assert stream.getvalue() == "warning: rank 1: sink 'x' is switched off\nwarning: of the run\n"


def test_a_warning_stands_above_the_bar(terminal):
    """With a live bar a rank's warning has a line of its own."""
    with Display(terminal) as shown:
        shown.progress(start())
        shown.progress({"event": "warning", "text": "sink 'x' is switched off", "rank": 0})
        run(shown, [1])
    assert "warning: rank 0: sink 'x' is switched off\n" in terminal.text


def test_lines_of_workers_carry_their_rank_line_by_line():
    """Also where one message holds several lines, or a carriage return."""
    stream = io.StringIO()
    shown = Display(stream)
    shown.line(1, "one\ntwo\r\n")
    shown.line(0, "50%\r100%\n")
    shown.line(2, "[bold]not markup[/] \x1b[31mred\x1b[0m")
    shown.warning("sink 'x' is switched off")
    shown.message("bye")
    assert stream.getvalue().splitlines() == [
        "[rank 1] one",
        "[rank 1] two",
        "[rank 0] 50%",
        "[rank 0] 100%",
        "[rank 2] [bold]not markup[/] \x1b[31mred\x1b[0m",
        "warning: sink 'x' is switched off",
        "bye",
    ]


class Piecewise(io.StringIO):
    """A stream that lets other threads in between the pieces of what it is given."""

    def write(self, text):
        for at in range(0, len(text), 50):
            super().write(text[at : at + 50])
            time.sleep(0)  # gives the interpreter to another thread
        return len(text)


class PiecewiseTerminal(Piecewise, Terminal):
    pass


@pytest.mark.parametrize("stream_type", [Piecewise, PiecewiseTerminal])
def test_threads_never_mix_their_lines(terminal, stream_type):
    """Lines from several threads, during progress, come out whole and in each thread's order."""
    stream = stream_type()
    with Display(stream) as shown:
        shown.progress(start(last=50))
        threads = [
            threading.Thread(target=lambda rank=rank: [shown.line(rank, f"{n:03d} " + "x" * 200) for n in range(25)])
            for rank in range(4)
        ]
        for thread in threads:
            thread.start()
        run(shown, range(1, 51))
        for thread in threads:
            thread.join()
    for rank in range(4):
        found = re.findall(rf"\[rank {rank}\] (\d\d\d) x{{200}}\r?\n", ESCAPES.sub("", stream.getvalue()))
        assert found == [f"{n:03d}" for n in range(25)]


def test_a_terminal_gets_a_bar_with_everything_in_it(terminal, monkeypatch):
    """Step, loss, speed, warm-up, evaluation and time left; redrawn at most four times a second."""
    ticks = Clock(monkeypatch)
    with Display(terminal) as shown:
        shown.progress(start(last=100))
        run(shown, range(1, 100), ticks, 0.0625, warmup=True)
        shown.progress({"event": "eval", "step": 99, "eval_loss": 3.5})
        run(shown, [100], loss=1.25)
        shown.progress(FINISH)
    for part in ("step 1/100", "loss 2.5000", "12.3k tokens/s", "warm-up", "0:05 left", "eval loss 3.5000"):
        assert part in terminal.text
    assert "step 100/100" in terminal.text.splitlines()[-1]
    assert "loss 1.2500" in terminal.text.splitlines()[-1]
    assert 25 <= len(set(re.findall(r"step \d+/100", terminal.text))) <= 28


def test_on_a_terminal_workers_cannot_steer_it(terminal):
    """Markup stays text; escape sequences and control characters of workers are left out."""
    with Display(terminal) as shown:
        shown.progress(start())
        shown.line(1, "[bold]a[/] \x1b[2Jb\x1b]0;title\x07c\x08d\te :smile:")
        shown.progress(FINISH)
        shown.line(1, "after \x1b[2J")
    assert "[rank 1] [bold]a[/] bcd" in terminal.text
    assert ":smile:" in terminal.text
    assert "\x1b[2J" not in terminal.getvalue()
    assert "\x08" not in terminal.getvalue()


def test_a_bar_starts_no_thread_and_leaves_the_standard_streams_alone(terminal, capsys):
    """Workers are forked while it is up."""
    before, streams = threading.active_count(), (sys.stdout, sys.stderr)
    with Display(terminal) as shown:
        shown.progress(start())
        run(shown, [1])
        assert threading.active_count() == before
        assert (sys.stdout, sys.stderr) == streams


def test_with_redirect_prints_go_above_the_bar_and_pipes_stay_pipes(terminal, capsys):
    """Stderr of this process is taken while the bar is up, and given back; stdout is no terminal here."""
    streams = sys.stdout, sys.stderr
    with Display(terminal, redirect=True) as shown:
        shown.progress(start())
        print("for a pipe")
        print("above the bar", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == streams
    assert "above the bar\n" in terminal.text.replace("\r", "")
    assert capsys.readouterr() == ("for a pipe\n", "")


def test_quiet_shows_warnings_only():
    """Progress, messages and the workers' lines are left out."""
    stream = io.StringIO()
    with Display(stream, quiet=True) as shown:
        shown.progress(start())
        run(shown, [1])
        shown.line(0, "line")
        shown.message("message")
        shown.warning("careful")
    assert stream.getvalue() == "warning: careful\n"


def test_a_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
    """No escape sequence reaches what cannot understand it."""
    monkeypatch.setenv("TERM", "dumb")
    with Display(terminal) as shown:
        shown.progress(start())
        run(shown, [1])
    assert terminal.getvalue() == "step 1/10 (10%)  loss 2.5000  12.3k tokens/s\n"


class Broken(Terminal):
    """A terminal that goes away after `left` writes."""

    left = 3

    def write(self, text):
        self.left -= 1
        if self.left < 0:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("left", range(6))
def test_a_terminal_that_goes_away_ends_the_showing_only(terminal, left):
    """Whenever it happens: nothing is raised, the standard streams are given back, nothing more is written."""
    streams = sys.stdout, sys.stderr
    stream = Broken()
    stream.left = left
    with Display(stream, redirect=True) as shown:
        shown.progress(start())
        run(shown, range(1, 6))
        shown.line(0, "hello")
        shown.progress(FINISH)
    assert (sys.stdout, sys.stderr) == streams


def test_a_closed_stream_is_no_error():
    """A process may have closed its stderr, or have none."""
    stream = io.StringIO()
    stream.close()
    with Display(stream) as shown:
        shown.progress(start())
        run(shown, [1])
        shown.warning("nobody hears")


PROGRAM = """
import sys
from mtb_core.launch.display import Display
if sys.argv[1] == "none":
    sys.stderr = None
with Display() as shown:
    shown.progress({"event": "start", "first_step": 1, "last_step": 5, "trial": 0})
    for _ in range(1000):
        shown.line(0, "x" * 200)
if sys.stderr is not None:
    print("later", file=sys.stderr)
print("done")
"""


@pytest.mark.parametrize("kind", ["reader gone", "none"])
def test_a_process_whose_stderr_has_no_reader_ends_well(kind):
    """The exit code stays 0, and what the process writes to stderr later does not fail either."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, kind], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stderr.close()
        assert process.stdout.read() == "done\n"
    assert process.returncode == 0


def test_rich_is_imported_for_a_terminal_only():
    """A log file costs no import of rich."""
    program = "import sys, io\nfrom mtb_core.launch.display import Display\nDisplay(io.StringIO()).progress({'event': 'start', 'first_step': 1, 'last_step': 2, 'trial': 0})\nprint('rich' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=240)
    assert done.stdout == "False False\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950.4, "950"), (999.6, "1k"), (12_345, "12.3k"), (1.5e6, "1.5M"), (7.891e9, "7.89G"), (3e13, "30000G")],
)
def test_quantities_are_short(value, text):
    """Three digits and a unit."""
    assert quantity(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3725, "1:02:05")])
def test_durations_read_like_a_clock(seconds, text):
    """M:SS, and H:MM:SS from an hour on."""
    assert clock(seconds) == text
