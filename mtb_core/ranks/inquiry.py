"""Do all ranks miss what this one misses? Asked through the store, where collectives could hang.

A rank that lacks something the others communicate about must not communicate otherwise than they expect. If all
lack it, all may go on alike. The others may be late, or wait inside a collective already: so on each rank a thread
looks for questions now and then, and says so where its rank has what is missing elsewhere.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

    from mtb_core.api.values import RankContext

#: How often a rank looks for questions of others, seconds.
LOOK_EVERY_S = 0.25
#: How long a rank waits for the others to say anything, seconds.
PATIENCE_S = 60.0


class Answer(Enum):
    """Answer of the ranks, in words for a message about a value that this rank misses."""

    ALL = "other ranks miss it too"
    SOME = "other ranks have it"
    SILENT = f"other ranks have not said within {PATIENCE_S:.0f} s that they miss it too"


class Inquiry:
    """Questions of one kind in one trial. Every rank makes it, in the same order as the other ranks do.

    It ends when the owner of `has` is dropped; until then a thread of it reads the store a few times a second.

    Args:
        name: of the kind.
        has: a bound method, called on the thread: whether this rank surely has ``what`` at its occurrence ``number``,
            or has passed that point without missing it. False also where it is not there yet.
    """

    def __init__(self, ctx: RankContext, name: str, has: Callable[[int, str], bool]) -> None:
        self._store = ctx.store if ctx.world_size > 1 else None
        self._world_size = ctx.world_size
        self._mine: set[str] = set()
        if self._store is None:
            return
        # The store outlives a trial, and all trials count alike: ranks agree on how often each has come here.
        trial = self._store.add(f"mtb/inquiry/{name}/rank/{ctx.rank}", 1)
        self._prefix = f"mtb/inquiry/{name}/{trial}/"
        self._has = weakref.WeakMethod(has)
        self._ended = threading.Event()
        # A connection of its own: one that waits for something lets nobody else in.
        store = self._store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        thread = threading.Thread(target=self._answer, args=(store,), name=f"mtb-{name}", daemon=True)
        # At the latest when the interpreter ends: a thread inside the store's client must not outlive it.
        weakref.finalize(has.__self__, _end, self._ended, thread)  # type: ignore[attr-defined]
        thread.start()

    def all_miss(self, number: int, what: str) -> Answer:
        """Say that this rank misses ``what`` at occurrence ``number``, and wait for what the others say.

        Each occurrence can be asked about once. With one rank the answer is ALL.
        """
        if self._store is None:
            return Answer.ALL
        question = f"{number} {what}"
        self._mine.add(question)
        missing, having = f"{self._prefix}missing/{question}", f"{self._prefix}having/{question}"
        if self._store.add(missing, 1) == 1:
            index = self._store.add(self._prefix + "asked", 1)
            self._store.set(f"{self._prefix}question/{index}", question)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            # In this order: whoever has passed the point after all missed it may say so, and is overruled.
            some = self._store.add(having, 0) > 0
            if self._store.add(missing, 0) >= self._world_size:
                return Answer.ALL
            if some:
                return Answer.SOME
            if time.monotonic() > deadline:
                return Answer.SILENT
            time.sleep(0.02)

    def _answer(self, store: Store) -> None:
        seen = 0
        open_questions: set[str] = set()
        while not self._ended.wait(LOOK_EVERY_S):
            try:
                asked = store.add(self._prefix + "asked", 0)
                for index in range(seen + 1, asked + 1):
                    open_questions.add(store.get(f"{self._prefix}question/{index}").decode())
                seen = asked
                open_questions -= self._mine
                # Only where there is something to answer: whoever holds the owner when a trial ends would free its
                # parameters on this thread, while the process group is being destroyed.
                has = self._has() if open_questions else None
                for question in [q for q in open_questions if has is not None and has(*_split(q))]:
                    store.add(f"{self._prefix}having/{question}", 1)
                    open_questions.discard(question)
                del has  # or this thread would keep its owner alive
            except Exception:  # noqa: BLE001  (the store may be gone with the rank that hosted it)
                return


def _split(question: str) -> tuple[int, str]:
    number, _, what = question.partition(" ")
    return int(number), what


def _end(ended: threading.Event, thread: threading.Thread) -> None:
    ended.set()
    if thread is not threading.current_thread():
        thread.join(timeout=1.0)
