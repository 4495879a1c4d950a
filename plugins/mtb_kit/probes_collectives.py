"""The probe that watches the collectives of each step."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator

import attrs

from mtb_core.api.hooks import hookimpl
from mtb_core.api.work import Loss, MicroBatch
from mtb_core.measure.collectives import CountCollectives

from .episodes import Probe
from .stage import MicroTrace, Stage


@attrs.frozen
class Collectives(Probe):
    """Fills `RankTrace.collectives` and `RankTrace.micros`. It slows every operator down, so few episodes have it."""

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _Collectives(stage)


_Context = contextlib.AbstractContextManager[None]


class _Collectives:
    def __init__(self, stage: Stage) -> None:
        self._stage, self._trace = stage, stage.trace
        self._counter: CountCollectives | None = None

    @hookimpl(wrapper=True)
    def mtb_accumulate(self) -> Generator[None, Loss, Loss]:
        self._end()  # a step whose gradients are not finite is done once more
        self._counter = CountCollectives()
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        return (yield)

    @hookimpl(wrapper=True)
    def mtb_micro_batch(self, micro: MicroBatch) -> Generator[None, _Context, _Context]:
        context = yield
        return self._watched(context, micro)

    @contextlib.contextmanager
    def _watched(self, context: _Context, micro: MicroBatch) -> Iterator[None]:
        counter = self._counter
        before = 0 if counter is None else len(counter.seen)
        with context:
            yield
        seen = () if counter is None else tuple(counter.seen[before:])
        self._trace.micros.append(MicroTrace(self._stage.step, micro.index, micro.sync, seen))

    @hookimpl(wrapper=True)
    def mtb_optimizer_step(self) -> Generator[None, bool, bool]:
        applied = yield
        self._end()
        return applied

    @hookimpl(wrapper=True)
    def mtb_close(self) -> Generator[None, None, None]:
        self._end()  # a step that failed
        yield

    def _end(self) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._trace.collectives[self._stage.step] = tuple(self._counter.seen)
            self._counter = None
