"""The hook specifications: the whole contract between core and plugins.

There are two layers. *Discovery* hooks are implemented by plugin modules (functions marked with ``hookimpl``) and name
what exists; they run in every ``mtb`` process, import no torch and must be quick. *Run* hooks do the work; for each
trial of a run a manager is made with the strategy, the sinks and the run plugins. A "strategy" hook has exactly one
implementation, the method of the `Strategy`; run plugins may wrap it (``hookimpl(wrapper=True)``). "Observer" hooks
call every implementation, in registration order: run plugins, then sinks; they cannot be wrapped.

The order within a trial: ``mtb_worker_started``, ``mtb_prepare``, (``mtb_state``, loading, ``mtb_state_loaded``,)
``mtb_run_started``; in each step ``mtb_accumulate`` (which calls ``mtb_micro_batch`` and ``mtb_backward``),
``mtb_gradients``, ``mtb_optimizer_step``, ``mtb_step_recorded``; between steps ``mtb_evaluate`` and ``mtb_state``; at
the end ``mtb_result``, ``mtb_run_finished`` and ``mtb_close``.

A hook is append-only within one `PLUGIN_API` number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from .descriptions import (
    CommandInfo,
    DatasetInfo,
    DoctorCheck,
    EvidenceInfo,
    FormatInfo,
    LauncherInfo,
    ModelInfo,
    OptimizerInfo,
    RunPluginInfo,
    ScheduleInfo,
    SinkInfo,
    StrategyInfo,
)
from .records import Phase, RunInfo, StepRecord
from .values import Job, Prepared, RankContext, State
from .work import EvaluationWork, Loss, MicroBatch, Shards, StepWork

if TYPE_CHECKING:
    import torch

#: Version of the plugin API. A plugin module states the one it was written for: ``PLUGIN_API = 2``.
PLUGIN_API = 2

hookspec = pluggy.HookspecMarker("mtb")
hookimpl = pluggy.HookimplMarker("mtb")


class DiscoverySpecs:
    """Descriptions of what a plugin provides. Called once a process, without arguments; raise nothing."""

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
        """Objects that observe, wrap or act on runs, for ``--plugin-opt``."""

    @hookspec
    def mtb_models(self) -> Sequence[ModelInfo]:  # type: ignore[empty-body]
        """Models for ``--model``."""

    @hookspec
    def mtb_datasets(self) -> Sequence[DatasetInfo]:  # type: ignore[empty-body]
        """Data sets for ``--data`` and ``--eval-data``, beside paths."""

    @hookspec
    def mtb_optimizers(self) -> Sequence[OptimizerInfo]:  # type: ignore[empty-body]
        """Optimizers for ``--optimizer``."""

    @hookspec
    def mtb_schedules(self) -> Sequence[ScheduleInfo]:  # type: ignore[empty-body]
        """Learning-rate schedules for ``--lr-scheduler``."""

    @hookspec
    def mtb_checkpoint_formats(self) -> Sequence[FormatInfo]:  # type: ignore[empty-body]
        """Checkpoint formats, for ``--checkpoint-format`` and for whatever reads a checkpoint of that format."""

    @hookspec
    def mtb_launchers(self) -> Sequence[LauncherInfo]:  # type: ignore[empty-body]
        """Launchers for ``--launcher``."""

    @hookspec
    def mtb_evidence(self) -> Sequence[EvidenceInfo]:  # type: ignore[empty-body]
        """Evidence for every run: where its figures come from, and whether they hold. One of all plugins may have it."""

    @hookspec
    def mtb_doctor_checks(self) -> Sequence[DoctorCheck]:  # type: ignore[empty-body]
        """Checks of ``mtb doctor``."""


class StrategySpecs:
    """The work of the strategy; one implementation each, called on all ranks."""

    @hookspec(firstresult=True)
    def mtb_prepare(self, job: Job) -> Prepared:  # type: ignore[empty-body]
        """Build, shard, fill the weights, make the optimizer.

        Called once a trial, before data, on all ranks; collectives are allowed. Weights must come from
        ``job.materialize``, so that they depend on (seed, name) only, and the optimizer must be made after wrapping.
        May raise `RunFailed`.
        """

    @hookspec(firstresult=True)
    def mtb_accumulate(self, prepared: Prepared, work: StepWork) -> Loss:  # type: ignore[empty-body]
        """Run all forwards and backwards of a step; return this rank's loss and metrics, detached.

        Called once a step on all ranks, and once more to find out whose gradient is not finite. Afterwards every
        gradient must be the SUM of all ranks' and micro-batches' shares. The default goes through ``mtb_micro_batch``
        and ``mtb_backward``, one micro-batch after the other; a strategy that schedules otherwise need not call them.
        Core uses the answers of those ranks that count (`Layout.counts_loss`). An exception ends all ranks.
        """

    @hookspec(firstresult=True)
    def mtb_evaluate(self, prepared: Prepared, work: EvaluationWork) -> Loss | None:
        """Run all forwards of an evaluation; return this rank's loss, None without any batch.

        Called on all ranks, in evaluation mode and without gradients. Collectives are allowed.
        """

    @hookspec(firstresult=True)
    def mtb_all_sum(self, prepared: Prepared, vector: torch.Tensor) -> Callable[[], object]:  # type: ignore[empty-body]
        """Begin to sum `vector` over all ranks in place; return a function that waits for the end of it.

        This is the agreement of the ranks: loss, norm, tokens and votes, a few float64 numbers on the rank's device.
        Called once a step, before the first step, after going back to a checkpoint, and at the end of an evaluation;
        on all ranks alike, not on a single rank. A NaN of one rank must come out as NaN. Backward may run meanwhile.
        """

    @hookspec(firstresult=True)
    def mtb_micro_batch(self, prepared: Prepared, micro: MicroBatch) -> AbstractContextManager[None]:  # type: ignore[empty-body]
        """The sync context of one micro-batch: entered before forward, left after backward.

        Called by ``mtb_accumulate``: by its default ``accumulation`` times a step, on all ranks. Where ``micro.sync`` is false, gradients stay local until
        a later micro-batch of the step. Leaving it, also by an exception, restores the synchronising state.
        """

    @hookspec(firstresult=True)
    def mtb_backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        """Run backward of one micro-batch, inside its sync context. Called by ``mtb_accumulate``.

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
    def mtb_optimizer_step(self, prepared: Prepared, apply: bool) -> bool:  # type: ignore[empty-body]
        """Apply the optimizer if `apply`, and clear the gradients always; return True if it was applied.

        Called once a step on all ranks, with equal `apply`; the answers must be equal as well. A step that was not
        applied counts as skipped. A wrapper must return what it got (``return (yield)``); None is an error.
        """

    @hookspec(firstresult=True)
    def mtb_state(self, prepared: Prepared) -> State:  # type: ignore[empty-body]
        """Everything of model and optimizer that a checkpoint must hold, as live views in global coordinates.

        Called on all ranks before saving and before loading. Optimizer state that is made lazily must be created
        here, as zeros, so that loading has somewhere to go. No rank may gather what it does not hold. Run plugins read
        the weights through these views from step to step, so they must stay views of what the optimizer updates.
        """

    @hookspec(firstresult=True)
    def mtb_state_loaded(self, prepared: Prepared, state: State) -> None:
        """The pieces of `state` have been filled; renew what was derived from them. All ranks, collectives allowed.

        ``state.scalars`` are those that this strategy had saved; empty if the checkpoint is another strategy's. Pieces
        under ``strategy/NAME/…`` are as they were if the checkpoint has none of them.
        Called when a run resumes and when it goes back to a checkpoint.
        """

    @hookspec(firstresult=True)
    def mtb_close(self, prepared: Prepared) -> None:
        """The trial has ended, well or not; release what must not outlive the process group. No collectives.

        Core then drops its own references, waits for all ranks, and destroys the groups.
        """


class ObserverSpecs:
    """Reports to sinks and run plugins.

    Called on all ranks; an exception in a sink switches that sink off with one warning, one in
    a run plugin ends the run. Must not block, must not run collectives.

    A sink that was switched off is still told ``mtb_run_finished``, so that it can release what it holds.
    """

    @hookspec
    def mtb_worker_started(self, ctx: RankContext, folder: Path) -> None:
        """The rank is up and its process group open; the first hook of a trial. `folder` is the run's."""

    @hookspec
    def mtb_phase(self, phase: Phase, step: int) -> None:
        """The rank enters `phase`; `step` is the step that it is at. Called at each change of phase, and for each step.

        A phase lasts until the next one begins. A watchdog can so tell a long save from a hang.
        """

    @hookspec
    def mtb_run_started(self, info: RunInfo) -> None:
        """A trial is prepared and about to take its first step; once a trial.

        ``info.control`` lets a run plugin act on the run.
        """

    @hookspec
    def mtb_step_metrics(self) -> Mapping[str, float] | None:
        """Figures of this plugin for the step's record, by name; the mean over all ranks is recorded.

        Called once before the first step, to learn the names, and then once a step on all ranks, at the step's
        agreement. The names must stay the same and be the same on all ranks; None: no figures. Run plugins only.
        """

    @hookspec
    def mtb_before_update(self, step: int, loss: float, grad_norm: float) -> str | None:
        """A reason to leave out the update of `step`; None: none.

        Called once a step on all ranks, before clipping and optimizer, where `loss` and `grad_norm` are finite. They are
        equal on all ranks, and so must be the answers. A step whose update is left out consumes its batch and counts
        as skipped. Run plugins only.
        """

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
    def mtb_plugin_state(self, state: State) -> State | Mapping[str, Any] | None:
        """The state of this sink or run plugin for a checkpoint; None: there is none.

        Called on all ranks before the first step, also where nothing is saved, for each save, and before loading. JSON
        values must be equal on all ranks. A plugin that has tensors returns a `State`: its pieces are saved like those
        of the strategy and filled in place on loading. `state` is the strategy's, so that such pieces can be made in
        the shape of the model's; its pieces follow the weights from step to step until the next call.
        """

    @hookspec
    def mtb_plugin_state_loaded(self, state: Mapping[str, Any]) -> None:
        """The run resumes or goes back; `state` holds the JSON values that this plugin, under the same name, had saved.

        Its pieces, if it has any, have been filled. Called before ``mtb_run_started`` where a run resumes. Not called
        where the checkpoint holds nothing of this plugin, because it was not part of the run then: its pieces are as it
        gave them, and a warning says that it begins anew. The state of a plugin that is not part of the run is left alone.
        """

    @hookspec
    def mtb_result(self) -> Mapping[str, Any] | None:
        """JSON values for the result, under ``plugin_results`` and this plugin's name; None: nothing.

        Called on all ranks at the end of a trial; the answer of rank 0 is recorded.
        """

    @hookspec
    def mtb_run_finished(self, exit_reason: str) -> None:
        """The trial has ended, with the result's ``exit_reason``; once a trial, also after a failure."""


class RunSpecs(StrategySpecs, ObserverSpecs):
    """All run hooks."""
