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
from torch import nn

from mtb_core import (
    Job,
    MicroBatch,
    MissingGradient,
    Piece,
    Prepared,
    Shards,
    State,
    Strategy,
    broadcast_buffers,
    fragment_pieces,
)

from .build import Built, build
from .engine import engine_settings, import_deepspeed, joined, make_engine, reach
from .options import DeepSpeedOptions, complete
from .private import ZeroParts, zero_parts
from .state import zero_state


@attrs.define
class _Engine:
    """The strategy's own values of a trial.

    Attributes:
        parts: None at stage 0, where parameters and optimizer are plain.
        frozen: pieces of the untrained parameters in fp32; `low`: their low-precision copies in the model.
        boundary: whether the present micro-batch ends with gradients that are reduced and complete.
        only_last: whether a reduction leaves out what only earlier micro-batches have used.
        used: parameters that the micro-batches which the next reduction covers have used.
        hides: whether one of these has a graph that does not show all of them.
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
    only_last: bool
    boundary: bool = True
    reduces: bool = True
    used: set[int] = attrs.field(factory=set)
    hides: bool = False


class DeepSpeedStrategy(Strategy):
    """ZeRO stages 0 to 3 through ``deepspeed.initialize``."""

    def prepare(self, job: Job) -> Prepared:
        """Fill the model, wrap it, and give the fp32 weights back what the cast to low precision has taken."""
        options: DeepSpeedOptions = complete(job.options, job.config)
        deepspeed = import_deepspeed(job.ctx.device)
        settings = engine_settings(options, job)
        with ExitStack() as stack:
            stack.enter_context(joined(deepspeed, job.ctx))
            built = build(job, deepspeed, settings)
            optimizer = job.optimizer.factory(built.groups, **job.optimizer.defaults)
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
                # It then reduces in hooks of the last micro-batch's backward, and there are none where that has no part.
                only_last=stage == 1 and bool(options.overlap_comm),
            )
        return Prepared(engine, core, optimizer, held)

    def micro_batch(self, prepared: Prepared, micro: MicroBatch) -> AbstractContextManager[None]:
        """The engine's accumulation boundary. Stages 2 and 3 reduce at every micro-batch and complete at the last."""
        return _accumulation(prepared.engine, micro)

    def backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        """The engine averages over ranks; the contract is their sum."""
        held: _Engine = prepared.engine
        found = reach(loss)
        if held.only_last:
            _forget_used(held)
        held.used |= found.parameters
        held.hides |= found.hides
        if held.reduces:
            missing = [name for key, name in held.trainable.items() if key not in held.used]
            if missing:
                raise _missing(missing, held)
            _forget_used(held)
        held.engine.backward(loss * held.ranks, scale_wrt_gas=False)
        held.engine.allreduce_gradients()

    def gradients(self, prepared: Prepared) -> Sequence[Shards]:
        """Every rank its own part, all parts in fp32; at stage 0 every rank the whole."""
        held: _Engine = prepared.engine
        if held.parts is not None:
            return [Shards(held.parts.gradients(), copies=1)]
        return [Shards([p.grad for p in prepared.trainable if p.grad is not None], copies=held.ranks)]

    def optimizer_step(self, prepared: Prepared, apply: bool) -> bool:
        """The engine's step; without it, its accumulators are emptied as well."""
        held: _Engine = prepared.engine
        if apply:
            held.engine.step()
        elif held.parts is not None:
            held.parts.clear()
        else:
            held.engine.zero_grad()
        _forget_used(held)
        return apply

    def state(self, prepared: Prepared) -> State:
        """See `mtb_deepspeed.state`. Buffers are those of rank 0."""
        held: _Engine = prepared.engine
        broadcast_buffers(buffer for _, buffer in held.buffers)
        if held.parts is None:
            return super().state(prepared)
        persistent = [(name, buffer) for name, buffer in held.buffers if name in held.persistent]
        return zero_state(held.parts, held.frozen, persistent)

    def state_loaded(self, prepared: Prepared, state: State) -> None:  # noqa: ARG002  (its pieces are views)
        """Copy the fp32 weights into the model's parameters, on all ranks."""
        held: _Engine = prepared.engine
        if held.parts is not None:
            with torch.no_grad():
                for low, full in held.low:
                    low.copy_(full)
            held.parts.publish()

    def close(self, prepared: Prepared) -> None:
        """Remove the engine's hooks, and let go of the process group."""
        held: _Engine = prepared.engine
        held.release()


@contextmanager
def _accumulation(held: _Engine, micro: MicroBatch) -> Iterator[None]:
    if micro.index == 0:
        broadcast_buffers(buffer for _, buffer in held.buffers)
    held.reduces = micro.sync or held.stage >= 2
    boundary = micro.sync if held.stage < 2 else micro.index == micro.count - 1
    held.engine.set_gradient_accumulation_boundary(boundary)
    try:
        yield
    finally:
        held.engine.set_gradient_accumulation_boundary(True)


def _forget_used(held: _Engine) -> None:
    held.used.clear()
    held.hides = False


def _missing(names: list[str], held: _Engine) -> MissingGradient:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    if held.hides:
        text = (
            f"The graph on rank {held.rank} shows no gradient for {shown}{more}: the model uses torch.utils.checkpoint "
            "with use_reentrant=True, which hides what is inside until backward comes to it, and strategy 'deepspeed' "
            "must know before. Use use_reentrant=False, or --activation-checkpointing in its place."
        )
        return MissingGradient(text, rank=held.rank)
    where = " in the last micro-batch of the step" if held.only_last else ""
    why = (
        "With stage=1 and overlap_comm=true DeepSpeed reduces only what the last micro-batch of a step uses; set "
        "overlap_comm=false, use it in each one"
        if held.only_last
        else "Strategy 'deepspeed' needs all of them on every rank, for it reduces gradients in common buckets. Use it in "
        "the loss"
    )
    return MissingGradient(
        f"No gradient on rank {held.rank} for {shown}{more}{where}: forward did not use it, or used it detached. {why}, "
        "freeze it with requires_grad_(False), or use strategy ddp with find_unused_parameters=true.",
        rank=held.rank,
    )


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
