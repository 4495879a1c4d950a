"""Probes that look at tensors: what a rank holds, what lives on, what gradients and buffers are made of."""

from __future__ import annotations

import gc
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import attrs
import torch

from mtb_core.api.hooks import hookimpl
from mtb_core.api.records import StepRecord
from mtb_core.api.values import Prepared
from mtb_core.api.work import Shards

from . import samples
from .episodes import Probe
from .stage import Stage

#: By so much tensors may seem to grow: a few scalars come and go.
ROOM = 1.01
#: A collective's tensors may be kept so long after it is done.
_SETTLE_S = 2.0


@attrs.frozen
class BufferMeans(Probe):
    """Notes under ``means`` what the model ``kit-buffers`` has averaged on this rank, forward by forward."""

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _BufferMeans(stage)


class _BufferMeans:
    def __init__(self, stage: Stage) -> None:
        self._notes = stage.trace.notes
        samples.MEANS.clear()

    @hookimpl
    def mtb_run_finished(self) -> None:
        self._notes["means"] = list(samples.MEANS)


@attrs.frozen
class GradientBits(Probe):
    """Notes under ``bf16_share`` the part of a step's gradient elements, other than 0, that are bf16 numbers.

    One number a step; only of gradients that are wider than bf16, and None where there are none.
    """

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _GradientBits(stage)


class _GradientBits:
    def __init__(self, stage: Stage) -> None:
        self._seen: list[float | None] = stage.trace.notes.setdefault("bf16_share", [])

    @hookimpl(wrapper=True)
    def mtb_gradients(self) -> Generator[None, Sequence[Shards], Sequence[Shards]]:
        shards = yield
        wide = [t.detach() for part in shards for t in part.tensors if t.dtype in (torch.float32, torch.float64)]
        some = sum(int(t.count_nonzero()) for t in wide)
        rounded = sum(int(((t == t.bfloat16()) & (t != 0)).sum()) for t in wide)
        self._seen.append(rounded / some if some else None)
        return shards


@attrs.frozen
class Held(Probe):
    """After `step`, notes under ``held`` the bytes of the storages behind parameters, gradients and optimizer state.

    A storage counts as a whole, once, however small the views of it are: ``optimizer`` those of the optimizer's
    state, ``all`` with those of parameters and gradients.
    """

    step: int

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _Held(stage, self.step)


class _Held:
    def __init__(self, stage: Stage, step: int) -> None:
        self._stage, self._step = stage, step

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        prepared = self._stage.prepared
        if record.global_step == self._step and prepared is not None:
            state = list(_optimizer_tensors(prepared))
            weights = list(_weights(prepared))
            grads = [p.grad for p in weights if p.grad is not None]
            self._stage.trace.notes["held"] = {
                "optimizer": storage_bytes(state),
                "all": storage_bytes([*state, *weights, *grads]),
            }


def _optimizer_tensors(prepared: Prepared) -> Iterator[torch.Tensor]:
    """Optimizer state, but for counters: whole tensors without dimensions are nobody's share."""
    for values in getattr(prepared.optimizer, "state", {}).values():
        if isinstance(values, dict):
            yield from (v for v in values.values() if isinstance(v, torch.Tensor) and v.dim())


def _weights(prepared: Prepared) -> Iterator[torch.Tensor]:
    yield from prepared.module.parameters()
    yield from prepared.core.parameters()
    for group in getattr(prepared.optimizer, "param_groups", ()):
        yield from group["params"]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each once; of distributed tensors this rank's part."""
    found: dict[int, int] = {}
    for tensor in tensors:
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@attrs.frozen
class Living(Probe):
    """After each of `steps`, notes under ``living`` the bytes of all floating-point tensors that Python can reach.

    Whole numbers are left out: batches that are loaded ahead would count.
    """

    fresh: ClassVar[bool] = True

    steps: tuple[int, ...]

    def observer(self, stage: Stage) -> object:
        """See the class."""
        return _Living(stage, self.steps)


class _Living:
    def __init__(self, stage: Stage, steps: tuple[int, ...]) -> None:
        self._seen: dict[int, int] = stage.trace.notes.setdefault("living", {})
        self._steps = steps

    @hookimpl
    def mtb_step_recorded(self, record: StepRecord) -> None:
        if record.global_step in self._steps:
            gc.collect()
            self._seen[record.global_step] = self._settled()

    def _settled(self) -> int:
        """Bytes now; where they are more than at first, as soon as threads of a backend have let go of what they sent."""
        most = ROOM * min(self._seen.values(), default=0)
        deadline = time.monotonic() + _SETTLE_S
        while (size := storage_bytes(_reachable())) > most > 0 and time.monotonic() < deadline:
            time.sleep(0.02)  # nothing tells when they do
        return size


def _reachable() -> Iterator[torch.Tensor]:
    for found in gc.get_objects():
        # Not isinstance, which has torch warn of some of its own objects. Distributed tensors have local ones.
        plain = issubclass(type(found), torch.Tensor) and not hasattr(found, "to_local")
        if plain and found.device.type != "meta" and found.layout == torch.strided and found.is_floating_point():
            yield found
