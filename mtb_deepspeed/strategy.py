"""Strategy ``deepspeed``: DeepSpeed's engine inside the Trainer's hooks.

The engine owns backward, the reduction of gradients, the optimizer step and the state; batches, schedule, norm,
clipping, metrics and checkpoints are core's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import nn

from mtb_core import Job, MicroBatch, MissingGradient, Piece, Prepared, Shards, State, Strategy, fragment_pieces

from .build import Built, build
from .engine import engine_settings, import_deepspeed, joined, make_engine, used_parameters
from .options import DeepSpeedOptions, settled
from .private import ZeroParts, zero_parts
from .state import zero_state


@attrs.define
class _Engine:
    """What the strategy keeps for a trial.

    Attributes:
        parts: None at stage 0, where parameters and optimizer are plain.
        frozen: pieces of the untrained parameters in fp32; `low`: their low-precision copies in the model.
        boundary: whether the present micro-batch ends with gradients that are reduced and complete.
        used: parameters that the micro-batches since the last reduction have used.
    """

    engine: Any
    ranks: int
    rank: int
    stage: int
    parts: ZeroParts | None
    trainable: dict[int, str]
    frozen: dict[str, list[Piece]]
    low: list[tuple[torch.Tensor, torch.Tensor]]
    buffers: list[tuple[str, torch.Tensor]]
    persistent: frozenset[str]
    release: Callable[[], None]
    boundary: bool = True
    reduces: bool = True
    used: set[int] = attrs.field(factory=set)


class DeepSpeedStrategy(Strategy):
    """ZeRO stages 0 to 3 through ``deepspeed.initialize``."""

    def prepare(self, job: Job) -> Prepared:
        """Fill the model, wrap it, and give the fp32 weights back what the cast to low precision has taken."""
        options: DeepSpeedOptions = settled(job.options, job.config)
        deepspeed = import_deepspeed(job.ctx.device)
        settings = engine_settings(options, job)
        with ExitStack() as stack:
            stack.enter_context(joined(deepspeed, job.ctx))
            built = build(job, deepspeed, settings)
            optimizer = job.make_optimizer(built.module)
            engine = make_engine(deepspeed, built.module, optimizer, settings)
            stack.callback(engine.destroy)
            stage = int(options.stage or 0)
            parts = zero_parts(engine, stage, job.ctx.rank)
            frozen, low = _frozen(parts, built) if parts is not None else ({}, [])
            if parts is not None:
                _restore_precision(parts, built)
            core: nn.Module = engine.module
            held = _Engine(
                engine,
                ranks=job.ctx.layout.data_size,
                rank=job.ctx.rank,
                stage=stage,
                parts=parts,
                trainable={id(p): name for name, p in core.named_parameters() if p.requires_grad},
                frozen=frozen,
                low=low,
                buffers=list(core.named_buffers()),
                persistent=frozenset(core.state_dict(keep_vars=True).keys()),
                release=stack.pop_all().close,
            )
        return Prepared(engine, core, optimizer, held)

    def micro_batch(self, prepared: Prepared, micro: MicroBatch) -> AbstractContextManager[None]:
        """The engine's accumulation boundary. Stages 2 and 3 reduce at every micro-batch and complete at the last."""
        return _accumulation(prepared.engine, micro)

    def backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        """The engine averages over ranks; the contract is their sum."""
        held: _Engine = prepared.engine
        held.used |= used_parameters(loss)
        if held.reduces:
            missing = [name for key, name in held.trainable.items() if key not in held.used]
            held.used.clear()
            if missing:
                raise _missing(missing, held.rank)
        held.engine.backward(loss * held.ranks, scale_wrt_gas=False)
        held.engine.allreduce_gradients()

    def gradients(self, prepared: Prepared) -> Sequence[Shards]:
        """Every rank its own part, all parts in fp32; at stage 0 every rank the whole."""
        held: _Engine = prepared.engine
        if held.parts is not None:
            return [Shards(held.parts.gradients(), copies=1)]
        return [Shards([p.grad for p in prepared.trainable if p.grad is not None], copies=held.ranks)]

    def optimizer_step(self, prepared: Prepared, apply: bool) -> None:
        """The engine's step; without it, its accumulators are emptied as well."""
        held: _Engine = prepared.engine
        if apply:
            held.engine.step()
        elif held.parts is not None:
            held.parts.clear()
        else:
            held.engine.zero_grad()
        held.used.clear()

    def state(self, prepared: Prepared) -> State:
        """See `mtb_deepspeed.state`. Buffers are those of rank 0."""
        held: _Engine = prepared.engine
        _share_buffers(held)
        if held.parts is None:
            return super().state(prepared)
        persistent = [(name, buffer) for name, buffer in held.buffers if name in held.persistent]
        return zero_state(held.parts, held.frozen, persistent)

    def state_loaded(self, prepared: Prepared, state: State) -> None:  # noqa: ARG002  (its pieces are views)
        """Copy the fp32 weights into the model's parameters, on all ranks."""
        held: _Engine = prepared.engine
        if held.parts is not None:
            held.parts.publish()
            with torch.no_grad():
                for low, full in held.low:
                    low.copy_(full)

    def close(self, prepared: Prepared) -> None:
        """Remove the engine's hooks, and let go of the process group."""
        held: _Engine = prepared.engine
        held.release()


@contextmanager
def _accumulation(held: _Engine, micro: MicroBatch) -> Iterator[None]:
    if micro.index == 0:
        _share_buffers(held)
    held.reduces = micro.sync or held.stage >= 2
    boundary = micro.sync if held.stage < 2 else micro.index == micro.count - 1
    held.engine.set_gradient_accumulation_boundary(boundary)
    try:
        yield
    finally:
        held.engine.set_gradient_accumulation_boundary(True)


def _missing(names: list[str], rank: int) -> MissingGradient:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return MissingGradient(
        f"No gradient on rank {rank} for {shown}{more}: forward did not use it, or used it detached. Strategy "
        "'deepspeed' needs all of them on every rank, for it reduces gradients in common buckets. Use it in the loss, "
        "freeze it with requires_grad_(False), or use strategy ddp with find_unused_parameters=true.",
        rank=rank,
    )


def _share_buffers(held: _Engine) -> None:
    """Every rank goes on with the buffers of rank 0, so that there is one model."""
    for _, buffer in held.buffers:
        dist.broadcast(buffer, src=0)


def _restore_precision(parts: ZeroParts, built: Built) -> None:
    """Give the fp32 weights the values that the model had before it was cast."""
    with torch.no_grad():
        for fragment in parts.fragments():
            full = built.weights.get(fragment.name)
            if full is not None:
                start = fragment.start - full.start
                fragment.of(fragment.flat).copy_(full.flat.narrow(0, start, fragment.numel))


def _frozen(parts: ZeroParts, built: Built) -> tuple[dict[str, list[Piece]], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Pieces of what is not trained, in fp32 also where the model holds it in bf16, with the pairs to keep alike."""
    pieces, low = {}, []
    for name, shape, start, held in parts.frozen():
        kept = held
        if name in built.weights:
            full = built.weights[name]
            kept = full.flat.narrow(0, start - full.start, held.numel()).clone()
            low.append((held, kept))
        pieces[name] = fragment_pieces(kept, shape, start)
    return pieces, low
