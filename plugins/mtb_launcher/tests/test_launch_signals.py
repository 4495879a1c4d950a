import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from multiprocessing.util import Finalize

import pytest

from mtb_core.launch import LaunchSpec
from mtb_core.ranks import signals
from mtb_core.tests.launching import Launcher, for_ever, gone, mark, read_mark, run_ranks, until_stopped, wait_until
from mtb_launcher import agent, launch


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGTERM, "stopped"), (signal.SIGUSR1, "stopped"), (signal.SIGINT, "interrupted")]
)
def test_stop_signals_are_passed_on(tmp_path, number, reason):
    """A stop signal at the launcher reaches every rank, which leaves by itself, and the outcome says why."""
    with Launcher(until_stopped, tmp_path) as launcher:
        workers = launcher.workers()
        os.kill(launcher.process.pid, number)
        out = launcher.outcome()
    name = signal.Signals(number).name
    assert (out.exit_reason, out.values, out.failure) == (reason, {0: name, 1: name}, None)
    assert all(gone(pid) for pid in workers)


def test_ctrl_c_at_the_terminal_comes_once(tmp_path):
    """SIGINT to the launcher's process group reaches ranks through the launcher only: they have their own groups."""
    with Launcher(until_stopped, tmp_path) as launcher:
        workers = launcher.workers()
        assert len({os.getpgid(pid) for pid in [launcher.process.pid, *workers]}) == 3
        os.killpg(launcher.process.pid, signal.SIGINT)
        assert launcher.outcome().exit_reason == "interrupted"


def test_repeated_sigterm_changes_nothing(tmp_path):
    """SIGTERM again and again is the same request."""
    with Launcher(until_stopped, tmp_path) as launcher:
        launcher.workers()
        for _ in range(3):
            os.kill(launcher.process.pid, signal.SIGTERM)
        out = launcher.outcome()
    assert (out.exit_reason, out.values) == ("stopped", {0: "SIGTERM", 1: "SIGTERM"})


def test_ranks_that_do_not_stop_show_where_they_are(tmp_path, monkeypatch):
    """Of ranks that hang after SIGTERM the stacks are in the logs, and a warning says where each is; they go on."""
    monkeypatch.setattr(agent, "SHOW_STACKS_S", 0.0)
    with Launcher(for_ever, tmp_path, on_warning=lambda text: mark(tmp_path / "warned", text)) as launcher:
        workers = launcher.workers()
        os.kill(launcher.process.pid, signal.SIGTERM)
        warning = read_mark(tmp_path / "warned")
        assert not any(gone(pid) for pid in workers)
    assert "SIGTERM came 0 s ago, and they have not agreed to stop" in warning
    for rank in range(2):
        assert f"rank {rank}: for_ever (launching.py:" in warning
        assert 'launching.py", line' in (tmp_path / f"rank_0000{rank}.log").read_text()


@pytest.mark.parametrize("restarts", [0, 2])
def test_a_second_sigterm_ends_ranks_that_hang(tmp_path, monkeypatch, restarts):
    """It is a failure, which says where each rank was; ranks are not started again."""
    monkeypatch.setattr(signals, "SAME_REQUEST_S", 0.0)
    with Launcher(for_ever, tmp_path, max_restarts=restarts) as launcher:
        workers = launcher.workers()
        while not launcher.ended():  # two that come before it looks are one signal
            os.kill(launcher.process.pid, signal.SIGTERM)
            time.sleep(0.01)
        out = launcher.outcome()
    assert (out.exit_reason, out.values, out.restarts) == ("failed", {}, 0)
    assert str(out.failure).startswith("All ranks failed: SIGTERM came 0 s ago")
    assert "rank 1: for_ever (launching.py:" in out.failure.message
    assert all(gone(pid) for pid in workers)


def holding(folder, worker):
    with worker.stop.holding():
        mark(folder / f"ready{worker.rank}", os.getpid())
        while not (folder / "saved").exists():
            time.sleep(0.005)
    mark(folder / f"free{worker.rank}")
    for_ever(folder, worker)


def test_a_save_is_not_cut_short(tmp_path, monkeypatch):
    """SIGTERM, as often as it comes, ends no ranks that save; it does afterwards."""
    monkeypatch.setattr(signals, "SAME_REQUEST_S", 0.0)
    monkeypatch.setattr(agent, "SHOW_STACKS_S", 0.0)
    with Launcher(holding, tmp_path, on_warning=lambda text: mark(tmp_path / "warned", text)) as launcher:
        workers = launcher.workers()
        while not (tmp_path / "warned").exists():
            os.kill(launcher.process.pid, signal.SIGTERM)
            time.sleep(0.05)
        assert read_mark(tmp_path / "warned").startswith("The ranks are saving a checkpoint")
        assert not any(gone(pid) for pid in workers)
        mark(tmp_path / "saved")
        for rank in range(2):
            read_mark(tmp_path / f"free{rank}")
        while not launcher.ended():
            os.kill(launcher.process.pid, signal.SIGTERM)
            time.sleep(0.05)
        assert launcher.outcome().exit_reason == "failed"


def interrupted_for_ever(folder, worker):
    mark(folder / f"ready{worker.rank}", os.getpid())
    while worker.stop.requested is None:
        time.sleep(0.005)
    mark(folder / f"asked{worker.rank}")
    while True:
        time.sleep(0.05)


def test_second_ctrl_c_ends_at_once(tmp_path):
    """A second Ctrl-C kills ranks that do not leave."""
    with Launcher(interrupted_for_ever, tmp_path) as launcher:
        workers = launcher.workers()
        os.kill(launcher.process.pid, signal.SIGINT)
        wait_until(lambda: all((tmp_path / f"asked{r}").exists() for r in range(2)))
        os.kill(launcher.process.pid, signal.SIGINT)
        out = launcher.outcome()
    assert (out.exit_reason, out.values, out.failure) == ("interrupted", {}, None)
    assert all(gone(pid) for pid in workers)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_no_rank_survives_the_launcher(tmp_path, number):
    """When the launcher is killed, by whatever signal, the system ends its ranks."""
    with Launcher(for_ever, tmp_path) as launcher:
        workers = launcher.workers()
        os.kill(launcher.process.pid, number)
        launcher.process.join()
        wait_until(lambda: all(gone(pid) for pid in workers))


def test_signal_to_one_rank(tmp_path):
    """A stop signal at a single rank is in the outcome too, although the launcher got none."""
    with Launcher(until_stopped, tmp_path) as launcher:
        for pid in launcher.workers():
            os.kill(pid, signal.SIGUSR1)
        out = launcher.outcome()
    assert out.exit_reason == "stopped"


def fails_when_stopped(folder, worker):
    until_stopped(folder, worker)
    raise ValueError("while stopping")


def test_a_stop_before_ranks_are_started(tmp_path, monkeypatch):
    """None is: also where launchers of several nodes would wait for each other."""
    begin = agent.Agent.__init__

    def begin_and_stop(self, *arguments):
        begin(self, *arguments)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(agent.Agent, "__init__", begin_and_stop)
    out = run_ranks(until_stopped, tmp_path, tmp_path)
    assert (out.exit_reason, out.values, out.failure) == ("stopped", {}, None)
    assert list(tmp_path.iterdir()) == []


def test_no_restart_after_a_stop(tmp_path):
    """A failure while stopping is reported and does not start ranks again."""
    with Launcher(fails_when_stopped, tmp_path, max_restarts=3) as launcher:
        launcher.workers()
        os.kill(launcher.process.pid, signal.SIGTERM)
        out = launcher.outcome()
    assert (out.exit_reason, out.failure.message, out.restarts) == ("failed", "while stopping", 0)


def signalled_at_the_end(_payload, worker):
    Finalize(None, os.kill, (os.getpid(), signal.SIGTERM), exitpriority=0)
    return worker.rank


def test_a_stop_after_the_end_is_no_failure(tmp_path):
    """A signal that comes when a rank has handed over its result and is leaving changes nothing."""
    out = launch(LaunchSpec(entry=signalled_at_the_end, nproc=2, log_dir=tmp_path, start_method="spawn"))
    assert (out.exit_reason, out.values, out.failure) == ("done", {0: 0, 1: 1}, None)


SPAWNED = """
import os, sys, time
from pathlib import Path
from mtb_core.launch import LaunchSpec
from mtb_launcher import launch

def load(where):
    if where == sys.argv[1]:
        Path(f"loading{os.getpid()}").touch()
        while not Path("go").exists():
            time.sleep(0.01)

class Payload:
    def __reduce__(self):
        return load, ("payload",)

def until_stopped(_payload, worker):
    Path(f"ready{worker.rank}").touch()
    while worker.stop.requested is None:
        time.sleep(0.005)
    return worker.stop.requested

if __name__ == "__mp_main__":
    load("main")
if __name__ == "__main__":
    out = launch(LaunchSpec(entry=until_stopped, payload=Payload(), nproc=2, log_dir=Path("logs"), start_method="spawn"))
    print(out.exit_reason, sorted(out.values.items()), out.failure)
"""


@contextmanager
def spawning(folder, where):
    """A launcher whose spawned ranks wait for the mark ``go`` in their start; with the ranks' process ids."""
    (folder / "script.py").write_text(SPAWNED)
    command = [sys.executable, "script.py", where]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            wait_until(lambda: launcher.poll() is not None or len(loading(folder)) == 2)
            assert launcher.poll() is None
            yield launcher, loading(folder)
        finally:
            launcher.kill()
            mark(folder / "go")


def loading(folder):
    return [int(path.name.removeprefix("loading")) for path in folder.glob("loading*")]


@pytest.mark.parametrize("where", ["main", "payload"])
def test_a_stop_while_ranks_are_spawned(tmp_path, where):
    """A stop signal while ranks still import their modules is not lost and kills none of them."""
    with spawning(tmp_path, where) as (launcher, ranks):
        launcher.send_signal(signal.SIGTERM)
        for rank in ranks:  # as a signal to the whole group would
            os.kill(rank, signal.SIGTERM)
        mark(tmp_path / "go")
        assert launcher.communicate() == ("stopped [(0, 'SIGTERM'), (1, 'SIGTERM')] None\n", "")


@pytest.mark.parametrize("where", ["main", "payload"])
def test_no_spawned_rank_survives_a_launcher_killed_at_their_start(tmp_path, where):
    """Ranks end with the launcher also before their entry runs; in the main module's import, when that is over."""
    with spawning(tmp_path, where) as (launcher, ranks):
        launcher.kill()
        launcher.wait()
        if where == "main":
            mark(tmp_path / "go")
        wait_until(lambda: all(gone(pid) for pid in ranks))
        assert not list(tmp_path.glob("ready*"))


def test_handlers_come_back(tmp_path):
    """After a launch this process has the handlers that it had before."""
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    run_ranks(lambda _p, _w: None, tmp_path)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == before
