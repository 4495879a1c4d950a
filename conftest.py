"""For all tests: signals do what they do at a terminal."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Under nohup and in the background of a script they are ignored, and programs that tests start inherit that."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
