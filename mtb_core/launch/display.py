"""The one owner of the terminal: progress, the workers' lines and warnings, on stderr, never interleaved.

It runs in the launcher, or in the run's own process where that is the only one. On a terminal it shows a live bar
(rich, imported only then); elsewhere short plain lines, few enough for a CI log.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

import attrs

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: Without a terminal: no two progress lines closer than this (but the first and the last) …
PLAIN_MINIMUM_S = 2.0
#: … and one at least this often, besides one at every tenth of the run.
PLAIN_MAXIMUM_S = 30.0
#: On a terminal the bar is redrawn at most this often; a drawing takes 2 to 3 ms of whatever thread reports progress.
LIVE_MINIMUM_S = 0.25

_LINE_ENDS = re.compile(r"\r\n|\r|\n")
#: What would move the cursor or restyle the terminal: escape sequences, and control characters but the tab.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")


@attrs.define
class Progressing:
    """State of the running trial, from the messages of the sink ``console``."""

    first: int = 1
    last: int = 1
    trial: int = 0
    step: int = attrs.field(default=attrs.Factory(lambda self: self.first - 1, takes_self=True))
    loss: str = ""
    rate: str = ""
    eval_loss: str = ""
    metrics: str = ""
    warmup: bool = False
    wrong: str = ""
    started: float = 0.0

    @property
    def done(self) -> int:
        """Steps that have ended, of `total`."""
        return max(0, self.step - self.first + 1)

    @property
    def total(self) -> int:
        """Steps of this invocation."""
        return max(1, self.last - self.first + 1)

    @property
    def title(self) -> str:
        """``step 12/55``; from the second trial on it names the trial."""
        trial = f"trial {self.trial + 1} " if self.trial else ""
        return f"{trial}step {self.step}/{self.last}"

    def update(self, fields: Mapping[str, Any], now: float) -> None:
        """Take a ``step`` message in."""
        if not self.done:
            self.started = now
        self.step = int(fields["step"])
        self.loss = number(fields.get("loss"))
        rate = fields.get("tokens_per_sec")
        self.rate = self.rate if rate is None else f"{quantity(rate)} tokens/s"
        self.metrics = "  ".join(f"{name} {_figure(value)}" for name, value in (fields.get("metrics") or {}).items())
        self.warmup = bool(fields.get("warmup"))
        self.wrong = "update skipped" if fields.get("skipped") else "non-finite" if fields.get("nonfinite") else ""

    def describe(self, now: float) -> str:
        """Loss, further metrics, speed, what is special, and the time that remains."""
        parts = [
            f"loss {self.loss}" if self.loss else "",
            f"eval loss {self.eval_loss}" if self.eval_loss else "",
            self.metrics,
            self.rate,
            "warm-up" if self.warmup else "",
            self.wrong if self.loss != self.wrong else "",
            self._left(now),
        ]
        return "  ".join(part for part in parts if part)

    def _left(self, now: float) -> str:
        # The first step is left out: it is much slower than the others, and its start is not known here.
        if self.done < 2 or self.done >= self.total:
            return ""
        return f"{clock((now - self.started) / (self.done - 1) * (self.total - self.done))} left"


class Display:
    """Shows what happens to people, from any thread. A stream that is closed or fails ends the showing, never the run.

    Args:
        stream: where to; stderr by default.
        quiet: show warnings only.
        redirect: put what this process prints above the bar, too: for a run in this very process. Not for one that
            forks workers, which would inherit the redirection.
    """

    def __init__(self, stream: IO[str] | None = None, *, quiet: bool = False, redirect: bool = False) -> None:
        stream = sys.stderr if stream is None else stream
        self._stream: IO[str] | None = stream  # None: there is none (any more)
        self._live = not quiet and _is_terminal(stream)
        self._quiet = quiet
        self._redirect = redirect
        self._lock = threading.RLock()
        self._run = Progressing()
        self._bar: _Bar | None = None
        self._pace: _Pace = _Pace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def progress(self, fields: Mapping[str, Any]) -> None:
        """Take a message of the sink ``console`` in; see there for its fields. Messages of unknown kind are left out.

        ``{"event": "warning", "text": ..., "rank": ...}`` is a warning of that rank; shown also when quiet.
        """
        if fields.get("event") == "warning":
            rank = fields.get("rank")
            self.warning(f"{'' if rank is None else f'rank {rank}: '}{fields.get('text')}")
            return
        if self._quiet:
            return
        with self._lock:
            self._guarded(lambda stream: self._take(stream, fields))

    def line(self, rank: int, text: str) -> None:
        """A line that worker `rank` wrote; it appears whole, above the bar, as ``[rank N] text``."""
        if not self._quiet:
            self._write([f"[rank {rank}] {part}" for part in _LINE_ENDS.split(text.rstrip("\r\n"))])

    def message(self, text: str) -> None:
        """A line of the program itself."""
        if not self._quiet:
            self._write([text])

    def warning(self, text: str) -> None:
        """A warning; shown also when quiet."""
        self._write([f"warning: {text}"])

    def close(self) -> None:
        """Take the bar down; messages may still follow."""
        with self._lock:
            self._guarded(lambda _: self._stop_bar())

    def _write(self, lines: list[str]) -> None:
        with self._lock:
            self._guarded(lambda stream: self._emit(stream, lines))

    def _emit(self, stream: IO[str], lines: list[str]) -> None:
        if self._live:
            lines = [_CONTROL.sub("", line) for line in lines]
        if self._bar is not None:
            self._bar.above(lines)
        else:
            stream.write("".join(f"{line}\n" for line in lines))
            stream.flush()

    def _take(self, stream: IO[str], fields: Mapping[str, Any]) -> None:
        now, event = time.monotonic(), fields.get("event")
        if event == "start":
            self._start(stream, fields)
        elif event == "step":
            self._run.update(fields, now)
            if self._pace.due(self._run, now):
                self._show(stream, now)
        elif event == "eval":
            self._run.eval_loss = number(fields.get("eval_loss"))
            if self._pace.due(self._run, now, news=True):
                self._show(stream, now)
        elif event == "finish":
            if self._run.done and self._pace.shown != self._run.step:
                self._show(stream, now)
            self._stop_bar()

    def _start(self, stream: IO[str], fields: Mapping[str, Any]) -> None:
        self._stop_bar()
        self._run = Progressing(int(fields["first_step"]), int(fields["last_step"]), int(fields["trial"]))
        self._pace = _LivePace() if self._live else _Pace()
        if self._live:
            self._bar = _Bar(stream, self._run, redirect=self._redirect)

    def _show(self, stream: IO[str], now: float) -> None:
        self._pace.took(self._run, now)
        if self._bar is not None:
            self._bar.show(self._run, now)
        else:
            percent = self._run.done * 100 // self._run.total
            self._emit(stream, [f"{self._run.title} ({percent}%)  {self._run.describe(now)}"])

    def _stop_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()

    def _guarded(self, action: Callable[[IO[str]], None]) -> None:
        """Run `action`; if the stream turns out to be gone, show nothing any more."""
        if self._stream is None:
            return
        try:
            action(self._stream)
        except BlockingIOError:  # a terminal set to non-blocking, and full: this much is not shown
            pass
        except (OSError, ValueError) as error:
            # A closed Python file raises ValueError; any other ValueError is a defect.
            if isinstance(error, ValueError) and not self._stream.closed:
                raise
            _discard(self._stream)
            self._stream = None
            with contextlib.suppress(OSError, ValueError):
                self._stop_bar()


class _Pace:
    """Choice of the steps to show: the first, the last, those with something wrong, and some of those between."""

    def __init__(self) -> None:
        self.shown: int | None = None
        self._time = 0.0
        self._done = 0

    def due(self, run: Progressing, now: float, *, news: bool = False) -> bool:
        """True if the run is to be shown now; `news`: there is more to tell than one more step."""
        if self.shown is None or run.done >= run.total or run.wrong:
            return True
        news = news or run.done * 10 // run.total > self._done * 10 // run.total
        return now - self._time >= self._silence(news=news)

    def took(self, run: Progressing, now: float) -> None:
        """The run has been shown."""
        self.shown, self._time, self._done = run.step, now, run.done

    def _silence(self, *, news: bool) -> float:
        return PLAIN_MINIMUM_S if news else PLAIN_MAXIMUM_S


class _LivePace(_Pace):
    def _silence(self, *, news: bool) -> float:  # noqa: ARG002  (the bar shows everything)
        return LIVE_MINIMUM_S


class _Bar:
    """The live bar. It is redrawn when something changes: no thread of its own, so that workers can be forked."""

    def __init__(self, stream: IO[str], run: Progressing, *, redirect: bool) -> None:
        from rich.console import Console  # noqa: PLC0415  (imported where a terminal is)
        from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415

        self._console = Console(file=stream)
        self._progress: Progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}", markup=False),
            console=self._console,
            auto_refresh=False,
            redirect_stderr=redirect,
            redirect_stdout=redirect and _is_terminal(sys.stdout),  # what goes into a pipe stays there
            expand=True,
        )
        self._task: TaskID = self._progress.add_task(run.title, total=run.total, text="")
        self._progress.start()

    def show(self, run: Progressing, now: float) -> None:
        self._progress.update(self._task, completed=run.done, description=run.title, text=run.describe(now))
        self._progress.refresh()

    def above(self, lines: list[str]) -> None:
        self._console.print("\n".join(lines), markup=False, highlight=False, emoji=False, soft_wrap=True)

    def stop(self) -> None:
        self._progress.stop()


def _is_terminal(stream: IO[str] | None) -> bool:
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def _discard(stream: IO[str]) -> None:
    """Point a stream whose reader has gone to nowhere, or what others write to it later would fail."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError):  # not a file of the system, or closed altogether
        pass


def number(value: float | None) -> str:
    """A loss for people; None stands for a value that is not finite."""
    return "non-finite" if value is None else f"{value:.4f}"


def _figure(value: float | None) -> str:
    return "non-finite" if value is None else f"{value:.4g}"


def quantity(value: float) -> str:
    """A large number for people: ``950``, ``12.3k``, ``4.56M``, ``7.89G``: three or more digits that count."""
    for unit in ("", "k", "M"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000.0
    return f"{value:.3g}G" if value < 1000.0 else f"{value:.0f}G"


def clock(seconds: float) -> str:
    """A duration for people: ``M:SS`` or ``H:MM:SS``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
