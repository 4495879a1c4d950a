"""Mistakes in the sync context, in what gradients are scaled by, in their norm and in clipping."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist

from mtb_core import Shards
from mtb_core.train import trainer

from .catalogue import SHARDED, mistake
from .right import Replicated, Sharded


@mistake("sync.count")
class SyncAroundBackwardOnly(Replicated):
    """The sync context spans backward only, when forward has read the flag already."""

    def micro_batch(self, prepared, micro):
        self._sync = micro.sync
        return contextlib.nullcontext()

    def backward(self, prepared, loss):
        with contextlib.nullcontext() if self._sync else self._unsynchronised(prepared):
            super().backward(prepared, loss)


@mistake("sync.count")
class SyncModeIgnored(Replicated):
    """Every micro-batch is synchronised, whatever micro.sync says."""

    def micro_batch(self, prepared, micro):
        return contextlib.nullcontext()


@mistake("sync.restored")
class NotRestoredAfterException(Replicated):
    """An exception in an unsynchronised micro-batch leaves synchronisation switched off."""

    @contextlib.contextmanager
    def _unsynchronised(self, prepared):
        prepared.module.synchronise = False
        yield
        prepared.module.synchronise = True


@mistake("sync.gradients")
class OnlyTheLastIsSummed(Replicated):
    """Gradients of unsynchronised micro-batches are thrown away before the last one is summed."""

    def backward(self, prepared, loss):
        if prepared.module.armed:
            for parameter in prepared.trainable:
                parameter.grad = None
        super().backward(prepared, loss)


@mistake("parity.gradients")
class DividedTwice(Replicated):
    """The loss, a share of the global mean already, is divided by the world size once more."""

    def backward(self, prepared, loss):
        super().backward(prepared, loss / dist.get_world_size())


@mistake("parity.accumulation")
class DividedByMicroBatches(Replicated):
    """The loss, a share of the global mean already, is divided by the number of micro-batches."""

    def backward(self, prepared, loss):
        super().backward(prepared, loss / prepared.engine.accumulation)


@mistake("parity.token_weighting")
class MeanOfMeans(Replicated):
    """Each micro-batch's loss is its own mean, whatever number of tokens it has; patches core's loss."""

    def prepare(self, job):
        own = trainer.LossFunction.__call__

        def mean(self, module, inputs, targets, valid):
            return own(self, module, inputs, targets, valid) * (targets.numel() / max(valid, 1))

        trainer.LossFunction.__call__ = mean
        return super().prepare(job)


@mistake("parity.grad_norm", right=SHARDED)
class NormOfOneShard(Sharded):
    """Only the first rank's shards enter the norm."""

    def gradients(self, prepared):
        (shards,) = super().gradients(prepared)
        return [shards] if dist.get_rank() == 0 else [Shards([], 1)]


@mistake("parity.grad_norm")
class ReplicatedCountedTwice(Replicated):
    """Gradients that every rank holds enter the norm once for each of them."""

    def gradients(self, prepared):
        return [Shards(shards.tensors, copies=1) for shards in super().gradients(prepared)]


@mistake("parity.clipping")
class ClippedPerMicroBatch(Replicated):
    """Each micro-batch's gradients are clipped, besides those of the step."""

    def backward(self, prepared, loss):
        super().backward(prepared, loss)
        if limit := prepared.engine.config.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(prepared.trainable, limit)


@mistake("parity.clipping")
class CopiesAreClipped(Replicated):
    """What is given for clipping are copies of the gradients, so that clipping has no effect."""

    def gradients(self, prepared):
        (shards,) = super().gradients(prepared)
        return [Shards([gradient.clone() for gradient in shards.tensors], shards.copies)]


@mistake("parity.reduce_dtype")
class ReducedInBf16(Replicated):
    """Gradients travel in bf16, though the plan declares fp32."""

    def _reduce(self, prepared):
        for parameter in prepared.trainable:
            sent = parameter.grad.bfloat16()
            dist.all_reduce(sent)
            parameter.grad = sent.float() / dist.get_world_size()


@mistake("sync.volume")
class AveragedTwice(Replicated):
    """Every gradient is averaged a second time, which changes nothing but the traffic."""

    def _reduce(self, prepared):
        super()._reduce(prepared)
        super()._reduce(prepared)


@mistake("models.norm")
class TiedCountedTwice(Replicated):
    """The gradient of a shared parameter is given under each of its names."""

    def gradients(self, prepared):
        named = prepared.core.named_parameters(remove_duplicate=False)
        return [Shards([p.grad for _, p in named if p.grad is not None], copies=dist.get_world_size())]


@mistake("models.norm")
class FrozenInNorm(Replicated):
    """The norm is taken over parameters that are not trained as well."""

    def gradients(self, prepared):
        frozen = [p.detach().clone() for p in prepared.core.parameters() if not p.requires_grad]
        return [*super().gradients(prepared), Shards(frozen, copies=dist.get_world_size())]


@mistake("parity.bf16_gradients")
class AccumulatedInBf16(Replicated):
    """With bf16, what was added up is rounded to bf16 after every micro-batch."""

    def backward(self, prepared, loss):
        super().backward(prepared, loss)
        if prepared.engine.config.precision == "bf16":
            for parameter in prepared.trainable:
                parameter.grad.copy_(parameter.grad.bfloat16())
