"""For all tests: signals do what they do at a terminal, and no thread is left behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

#: A thread that was told to end may take so long, seconds.
ENDING_S = 5.0


def pytest_configure() -> None:
    """Under nohup and in the background of a script they are ignored, and programs that tests start inherit that."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Ranks are forked from a process without other threads, and else spawned, which takes seconds in every later test."""
    before = set(threading.enumerate())
    yield
    others = [thread for thread in threading.enumerate() if thread not in before]
    for thread in others:
        thread.join(ENDING_S)
    left = [thread.name for thread in others if thread.is_alive()]
    assert not left, f"the test has left threads: {left}"
