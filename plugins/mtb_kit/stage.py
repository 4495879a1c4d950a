"""Records of an episode on each rank, and their writer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Mapping
from typing import Any

import attrs
import torch

from mtb_core.api.descriptions import load_reference
from mtb_core.api.hooks import hookimpl
from mtb_core.api.records import Phase, RunInfo, StepRecord
from mtb_core.api.strategy import Strategy
from mtb_core.api.values import Job, Plan, Prepared, State
from mtb_core.measure.collectives import Collective

#: A copy of a `Piece`: tensor, shape of the whole, offset.
Part = tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]


@attrs.frozen
class MicroTrace:
    """One micro-batch: the collectives issued between entering and leaving its sync context."""

    step: int
    index: int
    sync: bool
    collectives: tuple[Collective, ...]


@attrs.define
class RankTrace:
    """Record of one rank in an episode; plain values and tensors on the CPU.

    Attributes:
        states: by step, the parts of model and optimizer that this rank holds.
        records: one of each step.
        begun: the last step that was begun; 0: none.
        micros: each micro-batch that went through the hook; of episodes with the probe `Collectives`.
        collectives: of each step, from the first forward to the end of its optimizer step; of such episodes too.
        rates: learning rates that the optimizer's groups had when it stepped.
        notes: whatever probes have written down.
        result: the run's result as JSON; None where this rank did not get so far.
    """

    rank: int
    plan: Plan | None = None
    data_rank: int = 0
    states: dict[int, dict[str, list[Part]]] = attrs.field(factory=dict)
    scalars: dict[int, Mapping[str, Any]] = attrs.field(factory=dict)
    records: list[StepRecord] = attrs.field(factory=list)
    begun: int = 0
    micros: list[MicroTrace] = attrs.field(factory=list)
    collectives: dict[int, tuple[Collective, ...]] = attrs.field(factory=dict)
    rates: dict[int, list[float]] = attrs.field(factory=dict)
    notes: dict[str, Any] = attrs.field(factory=dict)
    result: dict[str, Any] | None = None

    @property
    def losses(self) -> list[float]:
        """Loss of every step."""
        return [r.loss for r in self.records]


class Stage:
    """Scene of an episode on one rank: the strategy under test and the run so far.

    Attributes:
        step: the step that is being taken; 0 before the first.
        prepared: from `mtb_prepare` on.
    """

    def __init__(self, rank: int, impl: str, states: tuple[int, ...]) -> None:
        self.trace = RankTrace(rank)
        self.states = states
        self.step = 0
        self.prepared: Prepared | None = None
        self._impl = impl
        self._strategy: Strategy | None = None
        self._interceptors: list[tuple[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = []

    @property
    def strategy(self) -> Strategy:
        """The strategy object of the current trial."""
        assert self._strategy is not None
        return self._strategy

    def intercept(self, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Have what ``make(method)`` gives called in place of the strategy's method `name`; both take `self` first."""
        self._interceptors.append((name, make))

    def make_strategy(self) -> Strategy:
        """Make the strategy that core gets, and remember it."""
        strategy: Strategy = load_reference(self._impl)()
        for name, make in self._interceptors:
            # The same object, of a subclass.
            own = type(strategy)
            method = inspect.getattr_static(own, name)
            replaced = functools.wraps(method)(make(method))  # pluggy looks at the arguments' names
            strategy.__class__ = type(own.__name__, (own,), {name: replaced})
        self._strategy = strategy
        return strategy

    def keep_state(self, step: int) -> None:
        """Copy what this rank holds of model and optimizer."""
        assert self.prepared is not None
        state: State = self.strategy.state(self.prepared)
        self.trace.states[step] = {
            key: [(p.tensor.detach().cpu().clone(), tuple(p.shape), tuple(p.offset)) for p in pieces]
            for key, pieces in state.pieces.items()
        }
        self.trace.scalars[step] = dict(state.scalars)


_stage: Stage | None = None


def enter(stage: Stage) -> None:
    """Make `stage` the one of this process."""
    global _stage  # noqa: PLW0603  (one episode a process; what core constructs by reference must find it)
    _stage = stage


def make_strategy() -> Strategy:
    """Stand-in for the strategy's class, called by core."""
    assert _stage is not None
    return _stage.make_strategy()


class Recorder:
    """The run plugin that fills a `RankTrace`."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._trace = stage.trace

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Generator[None, Prepared, Prepared]:
        """Note the plan and keep what was prepared."""
        self._trace.plan, self._trace.data_rank = job.plan, job.ctx.data_rank
        prepared = yield
        self._stage.prepared = prepared
        if isinstance(prepared.optimizer, torch.optim.Optimizer):  # an engine's own may only look like one
            prepared.optimizer.register_step_pre_hook(self._note_rates)
        return prepared

    def _note_rates(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        self._trace.rates[self._stage.step] = [float(group["lr"]) for group in optimizer.param_groups]

    @hookimpl
    def mtb_run_started(self, info: RunInfo) -> None:
        """Keep the state that the run starts from."""
        self._stage.step = info.first_step - 1
        if info.first_step - 1 in self._stage.states:
            self._stage.keep_state(info.first_step - 1)

    @hookimpl
    def mtb_phase(self, phase: Phase, step: int) -> None:
        """Keep the number of the step that begins."""
        if phase in ("step", "compile"):
            self._stage.step = self._trace.begun = step

    @hookimpl(wrapper=True)
    def mtb_optimizer_step(self, prepared: Prepared) -> Generator[None, bool, bool]:
        """Note the learning rates, also where the optimizer has no hooks."""
        self._note_rates(prepared.optimizer)
        return (yield)

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        """Keep the record, and the state where it was asked for."""
        self._trace.records.append(record)
        if record.global_step in self._stage.states:
            self._stage.keep_state(record.global_step)

    @hookimpl(wrapper=True)
    def mtb_close(self) -> Generator[None, None, None]:
        """Forget the model."""
        self._stage.prepared = None
        yield
