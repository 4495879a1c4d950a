"""torch's elastic agent with worker processes of our own: the one place that touches its inside."""

from __future__ import annotations

import os
import signal
import time
import uuid
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events import Event, EventSource

from mtb_core import World
from mtb_core.launch import Failure, first_cause, rank_log

from .child import STACKS_SIGNAL, Gate, Start
from .logs import innermost_calls
from .meeting import OneNode, many_nodes
from .processes import WorkerProcess, pick_method, wait_for_news

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from mtb_core.launch import LaunchSpec

    from .elastic import LauncherSignals

#: How often logs and progress are looked at, and other nodes asked after.
TICK_S = 0.1
#: After a failure the other ranks may leave by themselves for so long; then they are killed.
GRACE_S = 3.0
#: Ranks that were asked to stop and have not agreed on it for so long show where they are. Longer than most steps,
#: shorter than what batch systems wait before they kill (30 s).
SHOW_STACKS_S = 10.0
#: Ranks that are asked for their stacks may write for so long.
STACKS_S = 2.0
#: A killed process is gone at once, unless the system holds it (a device that does not answer).
END_S = 1.0


class Agent(SimpleElasticAgent):
    """Runs the workers of one node.

    Attributes:
        values: what workers returned, by global rank.
        failures: of the last attempt.
        stop_seen: name of a stop signal that a worker got, from whomever.
        restarts: how often workers were started again after a failure.
        began: whether workers were started at all.
    """

    def __init__(self, spec: LaunchSpec, signals: LauncherSignals) -> None:
        self._method = pick_method(spec.start_method, spec.nproc, spec.max_nodes)
        if spec.max_nodes == 1:
            meeting: Any = OneNode()
        else:
            assert spec.rdzv_endpoint is not None
            meeting = many_nodes(spec.rdzv_endpoint, spec.min_nodes, spec.max_nodes)
        super().__init__(
            WorkerSpec(
                role="mtb",
                local_world_size=spec.nproc,
                rdzv_handler=meeting,
                entrypoint=spec.entry,
                max_restarts=spec.max_restarts,
                monitor_interval=1e-6,  # `_monitor_workers` itself waits, and wakes up at once when something happens
            )
        )
        self._launch = spec
        self._signals = signals
        self._meeting = meeting
        self._workers: list[WorkerProcess] = []
        self.values: dict[int, Any] = {}
        self.failures: list[Failure] = []
        self.stop_seen: str | None = None
        self.restarts = 0
        self.began = False
        self._stacks_shown = False

    def leave(self) -> None:
        """Tell other nodes that this one has ended."""
        self._meeting.shutdown()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        with self._signals.breaking():
            self._signals.raise_first()  # it came before there was anything to break off
            super()._rendezvous(worker_group)

    def _exit_barrier(self) -> None:
        with self._signals.breaking():
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        store, first = worker_group.store, worker_group.workers[0]
        assert store is not None
        if worker_group.group_rank == 0:
            store.set("mtb/attempt", uuid.uuid4().hex)
        attempt = store.get("mtb/attempt").decode()
        self.began = True
        world = World(first.world_size, self._launch.nproc)
        # The answer from the store says that its thread, too, is done with this process's own connection.
        gate = Gate() if self._method == "fork" else None

        def start(worker: Any, report: Connection, progress: Connection) -> Start:
            return Start(
                entry=self._launch.entry,
                payload=self._launch.payload,
                rank=worker.global_rank,
                local_rank=worker.local_rank,
                world=world,
                restarts=self.restarts,
                attempt=attempt,
                environment=self._environment(worker_group, worker),
                launcher=os.getpid(),
                gate=gate,
                log=rank_log(self._launch.log_dir, worker.global_rank),
                report=report,
                progress=progress,
            )

        try:
            for worker in worker_group.workers:
                self._workers.append(WorkerProcess(partial(start, worker), self._method))
        finally:
            if gate is not None:
                gate.open(len(self._workers))
        return {index: worker.process.pid for index, worker in enumerate(self._workers)}

    def _environment(self, group: WorkerGroup, worker: Any) -> dict[str, str]:
        """The variables that torchrun sets too, for code that reads them."""
        return {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(self._launch.nproc),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self._launch.max_restarts),
            "TORCHELASTIC_RUN_ID": self._meeting.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(self._meeting.use_agent_store),
        }

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # noqa: ARG002  (torch's signature)
        self._wait(TICK_S)
        if self._signals.killing:
            self._remaining_restarts = 0
            return RunResult(WorkerState.FAILED)
        if any(worker.failure is not None for worker in self._workers):
            self._await_the_others()
            self._after_failure()
            return RunResult(WorkerState.FAILED)
        if all(worker.done for worker in self._workers):
            self.failures = []
            return RunResult(WorkerState.SUCCEEDED, return_values=dict(self.values))
        if self._signals.first is not None and self._must_end():
            self._remaining_restarts = 0
            return RunResult(WorkerState.FAILED)
        return RunResult(WorkerState.HEALTHY)

    def _wait(self, timeout: float) -> None:
        """Wait for news and take in all there is: signals, reports, progress, lines of the logs."""
        wait_for_news(self._workers, self._signals.wake, timeout)
        for number in self._signals.take():
            for worker in self._workers:
                worker.signal(number)
        for worker in self._workers:
            worker.poll()
            if self._launch.on_progress is not None:
                for fields in worker.progress():
                    self._launch.on_progress(fields)
            if self._launch.on_line is not None:
                for line in worker.lines():
                    self._launch.on_line(worker.rank, line)
            if worker.report is not None:
                self.stop_seen = self.stop_seen or worker.report.stop
                if worker.report.failure is None:
                    self.values[worker.rank] = worker.report.value

    def _must_end(self) -> bool:
        """True if workers that were asked to stop are to be ended instead; warns if they do not stop."""
        insisted, self._signals.insisting = self._signals.insisting, False
        if any(worker.held and not worker.exited for worker in self._workers):
            if insisted:
                self._warn(
                    "The ranks are saving a checkpoint, or have agreed to stop and are about to leave; SIGTERM does not "
                    "end them in that. Ctrl-C twice does."
                )
            return False
        waited = time.monotonic() - self._signals.asked_at
        if not insisted and (self._stacks_shown or waited < SHOW_STACKS_S):
            return False
        self._stacks_shown = True
        where = self._show_stacks()
        asked = f"{self._signals.first} came {waited:.0f} s ago, and they have not agreed to stop"
        if insisted:
            text = f"{asked}; a second SIGTERM ended them, without a checkpoint of this moment. {where}"
            self.failures = [Failure(None, "NotStopped", text, expected=True, agreed=True)]
        else:
            self._warn(
                f"The ranks go on: {asked}. They do so at the end of a step; unless steps take that long, one hangs. "
                f"{where} SIGTERM once more, or Ctrl-C twice, ends them."
            )
        return insisted

    def _show_stacks(self) -> str:
        """Have all workers write their stacks to their logs; returns where each of them is."""
        asked = [worker for worker in self._workers if not worker.exited]
        logs = {worker.rank: rank_log(self._launch.log_dir, worker.rank) for worker in asked}
        ends = {rank: log.stat().st_size if log.exists() else 0 for rank, log in logs.items()}
        for worker in asked:
            worker.signal(STACKS_SIGNAL)
        deadline = time.monotonic() + STACKS_S
        former: dict[int, str] = {}
        while time.monotonic() < deadline:
            self._wait(0)
            time.sleep(TICK_S)
            written = {rank: _text_from(log, ends[rank]) for rank, log in logs.items()}
            if written == former and all(innermost_calls(text) for text in written.values()):
                break
            former = written
        self._wait(0)
        calls = {rank: innermost_calls(text) or "does not answer" for rank, text in former.items()}
        listed = "; ".join(f"rank {rank}: {call}" for rank, call in sorted(calls.items()))
        return f"Where they are: {listed}. All of their stacks are in their logs."

    def _warn(self, text: str) -> None:
        if self._launch.on_warning is not None:
            self._launch.on_warning(text)

    def _await_the_others(self) -> None:
        """After a failure, let the other workers report theirs; what has not left in time is killed."""
        deadline = time.monotonic() + GRACE_S
        while not all(worker.exited for worker in self._workers):
            if time.monotonic() > deadline or self._signals.killing:
                break
            self._wait(TICK_S)
        self._end_workers()
        self._wait(0)

    def _after_failure(self) -> None:
        self.failures = [worker.failure for worker in self._workers if worker.failure is not None]
        if self._signals.first is not None or self.stop_seen is not None:
            self._remaining_restarts = 0  # it was to end anyway
        if self._remaining_restarts > 0:
            self.restarts += 1
            self.values.clear()
            cause = first_cause(self.failures)
            if self._launch.on_restart is not None and cause is not None:
                self._launch.on_restart(cause, self.restarts)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 0) -> None:  # noqa: ARG002
        """End what is left at once: workers that were to leave in order have done so before."""
        self._end_workers()
        for worker in self._workers:
            self._keep_traceback(worker)
            worker.close()
        self._workers.clear()

    def _keep_traceback(self, worker: WorkerProcess) -> None:
        """At the end of the rank's log, where it is not in the way of the message for people."""
        if worker.failure is None or not worker.failure.traceback:
            return
        log = rank_log(self._launch.log_dir, worker.rank)
        # A message may hold surrogates, from a file's name that is no UTF-8.
        with suppress(OSError), log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(worker.failure.traceback)
        if self._launch.debug and self._launch.on_line is not None:
            for line in worker.failure.traceback.splitlines():
                self._launch.on_line(worker.rank, line)

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.process.join(END_S)

    def _construct_event(self, state: str, source: EventSource, *_args: Any, **_kwargs: Any) -> Event:
        """An event without the host's name, which torch would look up for each one; nobody reads them here."""
        return Event(f"torchelastic.worker.status.{state}", source)


def _text_from(log: Path, start: int) -> str:
    """Text of `log` from byte `start` on."""
    try:
        with log.open("rb") as file:
            file.seek(start)
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
