"""Checks of the group ``parity`` about bf16: what must keep the precision of fp32."""

from __future__ import annotations

import torch

from mtb_kit.checking import Skip, check
from mtb_kit.checks.parity import sgd, training
from mtb_kit.lab import Lab
from mtb_kit.states import Mismatch


@check(
    "parity.bf16_moments",
    "With --precision bf16 the optimizer's moments are fp32.",
    mistake="the optimizer was made over bf16 parameters, or its state is converted between steps: a moment in bf16 no "
    "longer moves where a gradient is 1/256 of it",
    needs=("bf16",),
)
def bf16_moments(lab: Lab, ranks: int) -> None:
    """Saved moments are fp32 and use the bits that bf16 does not have."""
    for key, tensor in lab.done(training(ranks, precision="bf16")).whole(4).items():
        if not key.startswith("optim/") or not tensor.dim():
            continue
        if tensor.dtype != torch.float32:
            raise Mismatch(f"'{key}' in float32", f"{tensor.dtype}")
        if tensor.any() and torch.equal(tensor, tensor.bfloat16().float()):
            raise Mismatch(f"'{key}' with fp32 precision", "every element is a bf16 number")


@check(
    "parity.bf16_gradients",
    "With --precision bf16 gradients are added up in fp32, over micro-batches and over ranks.",
    mistake="gradients are kept or accumulated in bf16: each micro-batch's is one, but their sum must not be rounded again",
    needs=("bf16", "accumulation"),
)
def bf16_gradients(lab: Lab, ranks: int) -> None:
    """The sum of two micro-batches has bits that bf16 has not; only where the plan sums over ranks in fp32."""
    declared = lab.plan(ranks, precision="bf16").reduce_dtype
    if declared != "fp32":
        raise Skip(f"the plan sums gradients in {declared}")
    run = lab.done(sgd(ranks, precision="bf16", counted=True))
    noted = {rank: trace.notes["bf16_share"] for rank, trace in run.traces.items()}
    for step in (1, 2):
        shares = {rank: own[step - 1] for rank, own in noted.items() if own[step - 1] is not None}
        if not shares:
            raise Mismatch(f"gradients of step {step} wider than bf16", "no rank has any")
        for rank, share in shares.items():
            if share == 1.0:
                seen = f"on rank {rank} every element is a bf16 number"
                raise Mismatch(f"gradients of step {step} with fp32 precision", seen)
