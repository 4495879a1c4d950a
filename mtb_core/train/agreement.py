"""The one small all-reduce of a step, in which the ranks agree on everything that they must know together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import attrs
import torch

from mtb_core.api.control import Control, Requests
from mtb_core.api.errors import RunFailed
from mtb_core.api.values import Job, Prepared
from mtb_core.api.work import Loss
from mtb_core.measure.collectives import counted_as
from mtb_core.ranks.agree import same_on_all
from mtb_core.ranks.signals import StopFlag
from mtb_core.registry.run_hooks import Hooks


@attrs.frozen
class Votes:
    """The numbers that are summed over the ranks, in this order; the figures for the record follow them.

    Attributes:
        loss_sum: over valid tokens.
        norm_squared: of the gradients; 0 where the ranks agreed before they were known.
        next_valid: valid tokens of the next global batch.
        stopped: ranks that were asked to stop by a signal; `interrupted`: those by Ctrl-C among them.
        save_failed: ranks on which the checkpoint in the making has failed.
        finish, stop, skip, save, back: ranks whose run plugins ask for it, see `Control`.
        partial: ranks that hold gradients which not all ranks hold.
        unapplied: ranks that left out the last update; 0 or all, unless a plugin is wrong.
    """

    loss_sum: float
    norm_squared: float
    next_valid: float
    stopped: float
    interrupted: float
    save_failed: float
    finish: float
    stop: float
    skip: float
    save: float
    back: float
    partial: float
    unapplied: float


_VOTES = len(attrs.fields(Votes))


@attrs.frozen
class Agreed:
    """The outcome, equal on all ranks.

    Attributes:
        votes: summed over the ranks.
        own: the requests that this rank brought.
        model_metrics: figures of model and strategy by name, summed over tokens and ranks.
        plugin_metrics: figures of run plugins by name, the mean over the ranks.
    """

    votes: Votes
    own: Requests
    model_metrics: Mapping[str, float]
    plugin_metrics: Mapping[str, float]


class Agreement:
    """Agrees once a step: `begin` on all ranks, `end` on all ranks. All sums are float64, so that a NaN stays one.

    Args:
        control: the requests of this rank's run plugins.
        stop: raised by signals.
        save_vote: gives this rank's vote on the checkpoint in the making.

    Raises:
        RunFailed: two figures for the record have one name, or the ranks have figures of different names.
    """

    def __init__(
        self,
        job: Job,
        hooks: Hooks,
        prepared: Prepared,
        *,
        control: Control,
        stop: StopFlag,
        save_vote: Callable[[], float],
    ) -> None:
        self._hooks, self._prepared, self._control, self._stop, self._save_vote = (
            hooks,
            prepared,
            control,
            stop,
            save_vote,
        )
        self._ranks, self._device, self._counts = job.ctx.world_size, torch.device(job.ctx.device), job.ctx.counts_loss
        self._model_names = (*job.model.metrics, *job.plan.metrics)
        self._plugin_names = tuple(hooks.step_metrics())
        if hooks.gives_step_metrics:
            same_on_all(job.ctx, "the step metrics of run plugins", self._plugin_names)
        names = [*self._model_names, *self._plugin_names]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise RunFailed(f"Two of model, strategy and run plugins give the metric '{twice[0]}'; rename one.")
        self._pending: tuple[Callable[[], list[float]], Requests] | None = None

    @property
    def begun(self) -> bool:
        """True between `begin` and `end`."""
        return self._pending is not None

    def begin(
        self,
        loss: Loss | None,
        next_valid: int,
        *,
        norm_squared: torch.Tensor | float = 0.0,
        partial: bool = True,
        applied: bool = True,
    ) -> None:
        """Send this rank's numbers. `loss` is None where no step is behind them: then no request is taken."""
        requested = self._stop.requested
        own = Requests() if loss is None else self._control.take()
        given: Loss | None = loss if self._counts else None
        numbers = Votes(  # of scalars on the device until they are sent
            loss_sum=cast("float", 0.0 if given is None else given.sum),
            norm_squared=cast("float", norm_squared),
            next_valid=float(next_valid) if self._counts else 0.0,
            stopped=float(requested is not None),
            interrupted=float(requested == "SIGINT"),
            save_failed=self._save_vote(),
            finish=float(own.finish is not None),
            stop=float(own.stop is not None),
            skip=float(own.skip is not None),
            save=float(own.save),
            back=float(own.back is not None),
            partial=float(partial),
            unapplied=float(not applied),
        )
        vector = [getattr(numbers, name) for name in _NAMES] + self._figures(given, first=loss is None)
        self._pending = (self._send(vector), own)

    def end(self) -> Agreed:
        """Wait for the sums. Waits for the device too."""
        assert self._pending is not None
        wait, own = self._pending
        self._pending = None
        sums = wait()
        model, plugins = sums[_VOTES : _VOTES + len(self._model_names)], sums[_VOTES + len(self._model_names) :]
        return Agreed(
            Votes(*sums[:_VOTES]),
            own,
            dict(zip(self._model_names, model, strict=True)),
            {name: total / self._ranks for name, total in zip(self._plugin_names, plugins, strict=True)},
        )

    def sum(self, vector: torch.Tensor) -> None:
        """Sum `vector` over all ranks, in place."""
        if self._ranks > 1:
            self._hooks.all_sum(self._prepared, vector)()

    def _figures(self, loss: Loss | None, *, first: bool) -> list[float]:
        metrics = {} if loss is None else loss.metrics
        if metrics and (unknown := metrics.keys() - set(self._model_names)):
            raise RunFailed(
                f"The loss has the metric '{min(unknown)}', which neither ModelSpec.metrics nor Plan.metrics declares; "
                f"declared: {', '.join(self._model_names) or 'none'}."
            )
        figures = [metrics.get(name, 0.0) for name in self._model_names]
        if self._plugin_names:
            found = {} if first else self._hooks.step_metrics()
            if not first and found.keys() != set(self._plugin_names):
                raise RunFailed(
                    f"Run plugins gave the step metrics {', '.join(found) or 'none'}, but before the first step "
                    f"{', '.join(self._plugin_names)}; the names must stay the same."
                )
            figures += [found.get(name, 0.0) for name in self._plugin_names]
        return cast("list[float]", figures)

    def _send(self, vector: list[float]) -> Callable[[], list[float]]:
        if self._device.type == "cpu":
            values = [float(v) for v in vector]
            if self._ranks == 1:
                return lambda: values
            tensor = torch.tensor(values, dtype=torch.float64)
        else:
            parts = [torch.as_tensor(v, dtype=torch.float64, device=self._device) for v in vector]
            tensor = torch.stack(parts)
            if self._ranks == 1:
                return tensor.tolist
        with counted_as("agreement"):
            wait = self._hooks.all_sum(self._prepared, tensor)

        def received() -> list[float]:
            wait()
            found: list[float] = tensor.tolist()
            return found

        return received


_NAMES = tuple(field.name for field in attrs.fields(Votes))
