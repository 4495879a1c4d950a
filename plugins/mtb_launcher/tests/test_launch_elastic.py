import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from mtb_core.api import ConfigError, RunFailed
from mtb_core.launch import LaunchSpec
from mtb_core.ranks.context import open_ranks
from mtb_core.tests.launching import for_ever, gone, mark, plan_for, read_mark, reduce, run_ranks
from mtb_launcher import launch, meeting, processes


def identity(payload, worker):
    return (payload, worker.rank, worker.local_rank, worker.world.size, worker.launched_by, worker.restarts)


def test_values_come_back_by_global_rank(tmp_path):
    """What the entry returns on each rank is in the outcome, and every rank knows who it is."""
    out = run_ranks(identity, tmp_path, {"a": 1})
    assert out.exit_reason == "done"
    assert out.failure is None
    assert out.values == {r: ({"a": 1}, r, r, 2, "mtb", 0) for r in range(2)}


def begun(_payload, _worker):
    return time.monotonic()


def test_no_forked_rank_begins_before_the_last_is_there(tmp_path, monkeypatch):
    """A rank that connects while others are forked leaves them with locks that nobody will release."""
    started = []

    def start_late(process):
        if started:
            time.sleep(0.3)
        started.append(time.monotonic())
        start_quietly(process)

    start_quietly = processes._start_quietly
    monkeypatch.setattr(processes, "_start_quietly", start_late)
    out = launch(LaunchSpec(entry=begun, nproc=3, log_dir=tmp_path, start_method="fork"))
    assert len(started) == 3
    assert min(out.values.values()) > started[-1]


def test_torch_tells_no_logger_about_launching(tmp_path, caplog):
    """Neither torch's messages nor its records of events reach those who listen to every logger, as pytest does."""
    run_ranks(identity, tmp_path)  # makes torch's logger
    events = logging.getLogger("torchelastic-events-null")
    events.addHandler(caplog.handler)  # as pytest does with loggers that do not propagate
    try:
        run_ranks(identity, tmp_path)
    finally:
        events.removeHandler(caplog.handler)
    assert caplog.records == []
    assert not events.disabled


def test_large_values_do_not_block(tmp_path):
    """A value larger than a pipe's buffer comes back whole."""
    out = run_ranks(lambda _p, _w: b"x" * 5_000_000, tmp_path)
    assert [len(out.values[r]) for r in range(2)] == [5_000_000] * 2


def fail(how, worker):
    with open_ranks(worker, plan_for(2), device="cpu") as ctx:
        everybody = __import__("torch").ones(1)
        dist.all_reduce(everybody)
        if worker.rank == 1:
            match how:
                case "raise":
                    raise ValueError("boom-r1")
                case "raise unspeakable":
                    raise ValueError("boom-\udcff")
                case "sys.exit(0)":
                    sys.exit(0)
                case "sys.exit":
                    sys.exit(3)
                case "_exit":
                    os._exit(5)
                case "segv":
                    os.kill(os.getpid(), signal.SIGSEGV)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(everybody)
    return ctx.rank


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("raise", "ValueError", "Rank 1 failed: ValueError: boom-r1"),
        ("sys.exit(0)", "exit code 0", "Rank 1 left with exit code 0."),
        ("sys.exit", "exit code 3", "Rank 1 left with exit code 3"),
        ("_exit", "exit code 5", "Rank 1 left with exit code 5"),
        ("segv", "signal SIGSEGV", "Rank 1 died by SIGSEGV"),
        ("kill", "signal SIGKILL", "Rank 1 died by SIGKILL"),
    ],
)
def test_first_failure_is_named(tmp_path, how, kind, text):
    """The rank that failed first is named with how it failed, not the rank that lost its peer because of that."""
    out = run_ranks(fail, tmp_path, how)
    assert out.exit_reason == "failed"
    assert (out.failure.rank, out.failure.kind, out.failure.secondary) == (1, kind, False)
    assert str(out.failure).startswith(text)
    assert "boom-r1" not in (tmp_path / "rank_00000.log").read_text().partition("Traceback")[0]


def test_a_traceback_that_is_no_utf8_is_kept(tmp_path):
    """What a message holds that UTF-8 cannot say is spelt out in the log."""
    out = run_ranks(fail, tmp_path, "raise unspeakable")
    assert out.failure.message == "boom-\udcff"
    assert "ValueError: boom-\\udcff" in (tmp_path / "rank_00001.log").read_text(encoding="utf-8")


def test_a_file_in_place_of_the_logs(tmp_path):
    """Where there can be no folder for logs, the message names it and says what to do, and nothing is started."""
    (tmp_path / "logs").write_text("")
    with pytest.raises(ConfigError, match=r"logs for the ranks' logs cannot be made: File exists\..*--run-dir"):
        run_ranks(identity, tmp_path / "logs")


def one_fails_one_hangs(folder, worker):
    mark(folder / f"pid{worker.rank}", os.getpid())
    if worker.rank == 1:
        read_mark(folder / "pid0")
        raise ValueError("boom-r1")
    while True:
        time.sleep(0.05)


def test_nobody_is_left_after_a_failure(tmp_path):
    """A rank that does not leave by itself after another one failed is ended, and launch returns."""
    out = run_ranks(one_fails_one_hangs, tmp_path, tmp_path)
    assert out.failure.message == "boom-r1"
    assert all(gone(int(read_mark(tmp_path / f"pid{r}"))) for r in range(2))


def fail_twice(_payload, worker):
    if worker.restarts < 2 and worker.rank == 0:
        raise ValueError(f"attempt {worker.restarts}")
    return worker.restarts


def test_failures_use_up_restarts(tmp_path):
    """All ranks start again after a failure, as often as allowed, and each restart is announced with its cause."""
    seen = []
    out = run_ranks(fail_twice, tmp_path, max_restarts=2, on_restart=lambda f, n: seen.append((f.message, n)))
    assert (out.exit_reason, out.values, out.restarts) == ("done", {0: 2, 1: 2}, 2)
    assert seen == [("attempt 0", 1), ("attempt 1", 2)]
    out = run_ranks(fail_twice, tmp_path, max_restarts=1)
    assert (out.exit_reason, out.failure.message, out.restarts) == ("failed", "attempt 1", 1)


def write_lines(_payload, worker):
    for i in range(500):
        print(f"{worker.rank}:{i:04d}:" + "ab" * 97)
    os.write(1, b"from C\n")
    sys.stderr.write("no newline at the end")


def test_lines_are_whole_and_know_their_rank(tmp_path):
    """Long lines at a high rate arrive whole, in order, with their rank; so does an unfinished last one."""
    lines = {0: [], 1: []}
    out = run_ranks(write_lines, tmp_path, on_line=lambda rank, line: lines[rank].append(line))
    assert out.exit_reason == "done"
    for rank in range(2):
        expected = [f"{rank}:{i:04d}:" + "ab" * 97 for i in range(500)] + ["from C", "no newline at the end"]
        assert lines[rank] == expected
        assert (tmp_path / f"rank_{rank:05d}.log").read_text().splitlines() == expected


def much_progress(_payload, worker):
    for i in range(20000):
        worker.progress({"rank": worker.rank, "i": i, "text": "x" * 100})
    worker.progress({"text": "x" * 10000})
    return "done"


def test_progress_never_blocks(tmp_path):
    """Progress arrives as sent as long as there is room; too much of it is dropped, and the rank goes on."""
    seen = []
    out = run_ranks(much_progress, tmp_path, on_progress=seen.append)
    assert out.values == {0: "done", 1: "done"}
    assert {"rank": 0, "i": 0, "text": "x" * 100} in seen
    assert all(len(fields) == 3 for fields in seen)
    assert run_ranks(much_progress, tmp_path).values == {0: "done", 1: "done"}  # nobody reads


def test_two_launches_at_once(tmp_path):
    """Several runs on one machine do not get in each other's way; launching works from other threads."""
    outcomes = {}
    threads = [
        threading.Thread(
            target=lambda n=n: outcomes.update({n: run_ranks(reduce, tmp_path / str(n), start_method="auto")})
        )
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [outcomes[n].values for n in range(2)] == [{0: 2.0, 1: 2.0}] * 2


def test_two_nodes(tmp_path):
    """Launchers of two nodes meet at an endpoint and their ranks form one world."""
    port = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port  # free again at once
    outcomes = {}

    def node(n):
        outcomes[n] = run_ranks(
            reduce,
            tmp_path / str(n),
            nproc=1,
            min_nodes=2,
            max_nodes=2,
            rdzv_endpoint=f"127.0.0.1:{port}",
            start_method="auto",
        )

    threads = [threading.Thread(target=node, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = {**outcomes[0].values, **outcomes[1].values}
    assert values == {0: 2.0, 1: 2.0}


def test_a_lost_store_is_not_a_meeting_that_failed(tmp_path, monkeypatch):
    """Once ranks have begun, what is wrong is that the node which hosts the store has ended."""

    def waiting(_self):
        raise RendezvousConnectionError("gone")

    monkeypatch.setattr(meeting.OneNode, "num_nodes_waiting", waiting)
    with pytest.raises(RunFailed, match="This node lost the others"):
        run_ranks(for_ever, tmp_path, tmp_path)


def test_host_name_is_not_needed(tmp_path, monkeypatch):
    """On one node everything goes over the loopback address, so a host name without address does not matter."""
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    monkeypatch.setattr("socket.getfqdn", lambda *_: pytest.fail("the host name was looked up"))
    assert run_ranks(reduce, tmp_path).values == {0: 2.0, 1: 2.0}


SPAWNED = """
from pathlib import Path
from mtb_launcher import meeting, processes
from mtb_core.launch import LaunchSpec
from mtb_launcher import launch

def entry(payload, worker):
    import sys
    sys.stderr.write("hello from spawn\\n")
    return [payload, worker.rank, worker.world.size]

if __name__ == "__main__":
    out = launch(LaunchSpec(entry=entry, payload="p", nproc=2, log_dir=Path("logs"), start_method="spawn"))
    assert out.values == {0: ["p", 0, 2], 1: ["p", 1, 2]}, out
"""


def test_spawn(tmp_path):
    """Workers can be spawned instead of forked."""
    (tmp_path / "script.py").write_text(SPAWNED)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "hello from spawn" in (tmp_path / "logs/rank_00001.log").read_text()


def ddp_step(_payload, worker):
    import torch

    from mtb_core.ranks.dynamo import avoid_dynamo_import

    avoid_dynamo_import()
    with open_ranks(worker, plan_for(2), device="cpu"):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        del model
    return True


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ends_are_clean(tmp_path):
    """A hundred starts and stops of two ranks with a DDP model end without a hang."""
    for _ in range(100):
        assert run_ranks(ddp_step, tmp_path).values == {0: True, 1: True}


def test_callback_error_ends_the_ranks(tmp_path):
    """An exception in the launcher's callback ends the ranks and comes out."""

    def broken(_rank, line):
        raise KeyError(line)

    with pytest.raises(KeyError, match="ready"):
        launch(
            LaunchSpec(
                entry=ready_for_ever, payload=tmp_path, nproc=2, log_dir=tmp_path, start_method="fork", on_line=broken
            )
        )
    assert gone(int(read_mark(tmp_path / "pid0")))


def ready_for_ever(folder, worker):
    mark(folder / f"pid{worker.rank}", os.getpid())
    read_mark(folder / "pid0")
    print("ready")
    while True:
        time.sleep(0.05)
