"""The hook specifications: the whole contract between core and plugins.

Two layers. *Discovery* hooks are implemented by plugin modules (functions marked with ``hookimpl``) and say what
exists; they run in every ``mtb`` process, import no torch and must be quick. *Run* hooks say what happens; for each
trial of a run a manager is made with the strategy, the sinks and the run plugins. "Strategy" hooks have exactly one
implementation, the method of the `Strategy`; others may wrap them (``hookimpl(wrapper=True)``). "Observer" hooks
call every implementation, in registration order: run plugins, then sinks; they cannot be wrapped.

A hook is append-only within one `PLUGIN_API` number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from .descriptions import (
    CommandInfo,
    DatasetInfo,
    DoctorCheck,
    FormatInfo,
    ModelInfo,
    RunPluginInfo,
    SinkInfo,
    StrategyInfo,
)
from .records import RunInfo, StepRecord
from .values import Job, MicroBatch, Prepared, Shards, State

if TYPE_CHECKING:
    import torch

#: Version of the plugin API. A plugin module states the one it was written for: ``PLUGIN_API = 1``.
PLUGIN_API = 1

hookspec = pluggy.HookspecMarker("mtb")
hookimpl = pluggy.HookimplMarker("mtb")


class DiscoverySpecs:
    """What exists. Called once a process, without arguments; raises nothing."""

    @hookspec
    def mtb_strategies(self) -> Sequence[StrategyInfo]:  # type: ignore[empty-body]
        """Strategies for ``--strategy``."""

    @hookspec
    def mtb_commands(self) -> Sequence[CommandInfo]:  # type: ignore[empty-body]
        """Commands of ``mtb``."""

    @hookspec
    def mtb_sinks(self) -> Sequence[SinkInfo]:  # type: ignore[empty-body]
        """Sinks for ``--sink``."""

    @hookspec
    def mtb_run_plugins(self) -> Sequence[RunPluginInfo]:  # type: ignore[empty-body]
        """Objects that observe or wrap every run's hooks while the plugin is enabled."""

    @hookspec
    def mtb_models(self) -> Sequence[ModelInfo]:  # type: ignore[empty-body]
        """Models for ``--model``."""

    @hookspec
    def mtb_datasets(self) -> Sequence[DatasetInfo]:  # type: ignore[empty-body]
        """Data sets for ``--data`` and ``--eval-data``, beside paths."""

    @hookspec
    def mtb_checkpoint_formats(self) -> Sequence[FormatInfo]:  # type: ignore[empty-body]
        """Checkpoint formats, for ``--checkpoint-format`` and for whatever reads a checkpoint of that format."""

    @hookspec
    def mtb_doctor_checks(self) -> Sequence[DoctorCheck]:  # type: ignore[empty-body]
        """Checks of ``mtb doctor``."""


class StrategySpecs:
    """What the strategy does; one implementation each, all ranks."""

    @hookspec(firstresult=True)
    def mtb_prepare(self, job: Job) -> Prepared:  # type: ignore[empty-body]
        """Build, shard, fill the weights, make the optimizer.

        Called once a trial, before data, on all ranks; collectives are allowed. Weights must come from
        ``job.materialize``, so that they depend on (seed, name) only, and the optimizer must be made after wrapping.
        May raise `RunFailed`.
        """

    @hookspec(firstresult=True)
    def mtb_micro_batch(self, prepared: Prepared, micro: MicroBatch) -> AbstractContextManager[None]:  # type: ignore[empty-body]
        """The sync context of one micro-batch: entered before forward, left after backward.

        Called ``accumulation`` times a step on all ranks. Where ``micro.sync`` is false, gradients stay local until
        a later micro-batch of the step. Leaving it, also by an exception, restores the synchronising state.
        """

    @hookspec(firstresult=True)
    def mtb_backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        """Run backward of one micro-batch, inside its sync context.

        `loss` is a scalar, this rank's share: sum over its valid tokens divided by the number of valid tokens of the
        whole global batch. After the last micro-batch, every gradient must be the SUM of all ranks' and
        micro-batches' shares (a data-parallel wrapper that averages multiplies by its size here).
        """

    @hookspec(firstresult=True)
    def mtb_gradients(self, prepared: Prepared) -> Sequence[Shards]:  # type: ignore[empty-body]
        """This rank's gradients, for the global norm, the finite check and clipping (in place), which are core's.

        Called once a step on all ranks, after the last backward. No collectives.
        """

    @hookspec(firstresult=True)
    def mtb_optimizer_step(self, prepared: Prepared, apply: bool) -> None:
        """Apply the optimizer if `apply`; clear the gradients always.

        Called once a step on all ranks, with equal `apply`.
        """

    @hookspec(firstresult=True)
    def mtb_state(self, prepared: Prepared) -> State:  # type: ignore[empty-body]
        """Everything of model and optimizer that a checkpoint must hold, as live views in global coordinates.

        Called on all ranks before saving and before loading. Optimizer state that is made lazily must be created
        here, as zeros, so that loading has somewhere to go. No rank may gather what it does not hold.
        """

    @hookspec(firstresult=True)
    def mtb_state_loaded(self, prepared: Prepared, state: State) -> None:
        """The pieces of `state` have been filled; renew what was derived from them. All ranks, collectives allowed."""

    @hookspec(firstresult=True)
    def mtb_close(self, prepared: Prepared) -> None:
        """The trial has ended, well or not; release what must not outlive the process group. No collectives.

        Core then drops its own references, waits for all ranks, and destroys the groups.
        """


class ObserverSpecs:
    """What is reported.

    Called on all ranks; an exception in a sink switches that sink off with one warning, one in
    a run plugin ends the run. Must not block, must not run collectives.

    A sink that was switched off is still told ``mtb_run_finished``, so that it can release what it holds.
    """

    @hookspec
    def mtb_run_started(self, info: RunInfo) -> None:
        """A trial is prepared and about to take its first step; once a trial."""

    @hookspec
    def mtb_step_recorded(self, record: StepRecord) -> None:
        """Metric reporting: a step has ended; once a step, outside the timed part."""

    @hookspec
    def mtb_evaluated(self, global_step: int, loss: float, samples: int) -> None:
        """An evaluation has ended: mean `loss` over the valid tokens of `samples` samples, each seen once."""

    @hookspec
    def mtb_checkpoint_published(self, path: Path, step: int) -> None:
        """The checkpoint of `step` is complete and durable at `path`.

        Called on each rank when that rank has learnt it: at a step boundary, or at the end. By then later steps may
        have been taken.
        """

    @hookspec
    def mtb_fault_point(self, name: str) -> None:
        """Saving has reached the point `name` (see `mtb_core.ckpt.publish`); for fault drills.

        Called on the rank that is there, perhaps in the saver's thread. An exception fails the save, also one of a
        sink's.
        """

    @hookspec
    def mtb_plugin_state(self) -> Mapping[str, Any] | None:
        """What this sink or run plugin wants saved in a checkpoint: JSON values, equal on all ranks; None: nothing.

        Called once a save.
        """

    @hookspec
    def mtb_plugin_state_loaded(self, state: Mapping[str, Any]) -> None:
        """The run resumes; `state` is what this plugin, under the same name, had saved. Before `mtb_run_started`."""

    @hookspec
    def mtb_run_finished(self, exit_reason: str) -> None:
        """The trial has ended, with the result's ``exit_reason``; once a trial, also after a failure."""


class RunSpecs(StrategySpecs, ObserverSpecs):
    """All run hooks."""
