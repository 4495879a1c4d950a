import os
import signal
import threading

import pytest

from mtb_core.api.errors import RunFailed
from mtb_core.ranks import signals
from mtb_core.ranks.signals import STOP_SIGNALS, StopFlag


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_sets_the_flag(number):
    """A stop signal is noted by name, and nothing else happens."""
    with StopFlag().catching() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == signal.Signals(number).name


def test_first_request_stays():
    """Later signals change nothing."""
    with StopFlag().catching() as stop:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop.requested == "SIGUSR1"


def test_a_second_sigterm_ends_a_process_alone(monkeypatch, capsys):
    """Its stack is shown. Delivered twice at once, in a save, or once the first is heeded, it changes nothing."""
    with StopFlag().catching(second_interrupt=True):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(signals, "SAME_REQUEST_S", 0.0)
    with StopFlag().catching(second_interrupt=True) as stop:
        with stop.holding():
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(RunFailed, match="ended without a checkpoint"):
            os.kill(os.getpid(), signal.SIGTERM)
        assert "test_a_second_sigterm_ends_a_process_alone" in capsys.readouterr().err
        stop.heed()
        os.kill(os.getpid(), signal.SIGTERM)


def test_holds_are_told():
    """Whoever could end the process learns when it must not and when it may; nested holds are one, heeding stays."""
    told = []
    stop = StopFlag(told.append)
    with stop.holding(), stop.holding():
        assert told == [True]
    assert told == [True, False]
    stop.heed()
    with stop.holding():
        pass
    assert told == [True, False, True]


def test_handlers_come_back_after_an_exception():
    """The former handlers are back after the block, also when it fails."""
    before = [signal.getsignal(n) for n in STOP_SIGNALS]
    with pytest.raises(ValueError, match="x"), StopFlag().catching():
        raise ValueError("x")
    assert [signal.getsignal(n) for n in STOP_SIGNALS] == before


def test_other_threads_leave_handlers_alone():
    """Outside the main thread no handler is set, and the flag can still be set by hand."""
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with StopFlag().catching() as stop:
            seen.append(signal.getsignal(signal.SIGTERM))
            stop.request("SIGTERM")
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before, "SIGTERM"]
