"""Cross-entropy of logits that are split over ranks by vocabulary, without ever gathering them."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mtb_core import RunFailed

#: Targets that do not count.
IGNORE_LABEL = -100


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[target] of each position; see `vocab_parallel_cross_entropy`.

    The maximum, the sum of exponentials and the target's logit are each found locally and reduced over ranks: three
    small all-reduces of one number a position. The gradient, softmax minus one-hot, is local.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        largest = logits.amax(dim=-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        shifted = logits - largest.unsqueeze(-1)
        exponentials = shifted.exp()
        local = targets - first
        here = (local >= 0) & (local < logits.shape[-1])
        index = local.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        own = shifted.gather(-1, index).squeeze(-1) * here
        sums = torch.stack([exponentials.sum(dim=-1), own])
        dist.all_reduce(sums, group=group)
        total, target_logit = sums.unbind()
        counts = targets != IGNORE_LABEL
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), index, here, counts)
        losses: Tensor = (total.log() - target_logit) * counts
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, index, here, counts = ctx.saved_tensors
        gradient = softmax.clone()
        gradient.scatter_add_(-1, index, -here.unsqueeze(-1).to(gradient.dtype))
        return gradient * (grads[0] * counts).unsqueeze(-1), None, None, None


def check_words(words: Tensor, size: int, what: str) -> None:
    """Refuse `words` that no rank has: each would take them for those of another one.

    On CUDA the check is made on the device, as torch's own is: an assertion there ends the process.

    Raises:
        RunFailed: some are outside of ``range(size)``; -100 is a target that does not count.
    """
    inside = ((words >= 0) & (words < size)) | ((words == IGNORE_LABEL) if what == "targets" else False)
    if words.is_cuda:
        torch._assert_async(inside.all(), f"{what} outside of the vocabulary")  # noqa: SLF001
    elif not bool(inside.all()):
        raise RunFailed(
            f"The model has a vocabulary of {size} words, split over ranks, but saw the {what} "
            f"{words[~inside][:4].tolist()}, which are outside of range({size}). Give the model as many words as the "
            "data has."
        )


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
    """Loss of each position, fp32, zero where the target is -100; equal on all ranks of `group`.

    Args:
        logits: this rank's part, [..., V / ranks].
        targets: int64 [...], of the whole vocabulary, equal on all ranks.
        first: the word at which this rank's part begins.
        group: the ranks that share the vocabulary.

    Raises:
        RunFailed: a target is outside of the vocabulary.

    Formula: Megatron-LM, Shoeybi et al. 2019, section 3.
    """
    check_words(targets, logits.shape[-1] * group.size(), "targets")
    losses: Tensor = _VocabParallelCrossEntropy.apply(logits.float(), targets, first, group)  # type: ignore[no-untyped-call]
    return losses


def with_own_loss(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Let `model`, whose forward gives a part of the logits, take the targets and return the mean loss instead."""
    kind: Any = type(model)
    model.__class__ = _losing(kind)
    model.__dict__["_mtb_vocab_group"] = group
    return model


@functools.cache
def _losing(base: Any) -> type[nn.Module]:
    def forward(self: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = base.forward(self, tokens)
        group = self.__dict__["_mtb_vocab_group"]
        first = group.rank() * logits.shape[-1]
        losses = vocab_parallel_cross_entropy(logits, targets, first, group)
        return losses.sum() / (targets != IGNORE_LABEL).sum()

    names = {"forward": forward, "__module__": base.__module__, "__doc__": base.__doc__}
    changed: type[nn.Module] = type(base.__name__, (base,), names)
    return changed
