"""Parity with ``single`` on the same global batches: weights, gradients, norm, clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from mtb_kit.checking import Skip, check
from mtb_kit.checks.reductions import NO_REDUCTION, gradient_reductions, needs_data_ranks
from mtb_kit.episodes import Episode, Probe, episode
from mtb_kit.lab import Lab, Run
from mtb_kit.probes_collectives import Collectives
from mtb_kit.probes_tensors import GradientBits
from mtb_kit.states import Mismatch, Whole, assemble, equal_bitwise, equal_within

#: Losses, relative; weights, of the norm of each tensor. The sums of different numbers of ranks round differently.
TOLERANCE = 1e-5
#: For gradients, which are differences of weights here.
GRADIENT_TOLERANCE = 2e-5
#: bf16 has 8 bits of mantissa.
BF16_TOLERANCE = 2e-2

#: Micro-batches of a step, if the plan allows as many.
MICRO_BATCHES = 4
#: SGD with this learning rate and nothing else: the weights after a step are those before it minus the gradient.
PLAIN_SGD: Mapping[str, Any] = {"optimizer": "sgd", "learning_rate": 1.0, "weight_decay": 0.0, "steps": 2}


def training(ranks: int, *, subject: bool = True, **settings: Any) -> Episode:
    """AdamW with decay and a schedule, four steps, clipping active, every state kept."""
    return episode(
        ranks,
        subject=subject,
        states=(0, 1, 2, 3, 4),
        **{"adam_eps": 1e-6, "max_grad_norm": 0.5, "lr_scheduler": "cosine", "lr_warmup_steps": 2, **settings},
    )


def gradients(run: Run, step: int) -> Whole:
    """The gradient of `step` by parameter, from a run with `PLAIN_SGD`."""
    before, after = run.whole(step - 1), run.whole(step)
    return {key: before[key] - after[key] for key in before if key.startswith("model/")}


def sgd(ranks: int, *, subject: bool = True, counted: bool = False, **settings: Any) -> Episode:
    """Two steps of plain SGD, every state kept; with `counted`, every collective and the gradients' precision too."""
    probes: tuple[Probe, ...] = (Collectives(), GradientBits()) if counted else ()
    return episode(ranks, subject=subject, states=(0, 1, 2), **{**PLAIN_SGD, "probes": probes, **settings})


def in_mode(lab: Lab, ranks: int, mode: str) -> Run:
    """The two steps of `sgd` in more micro-batches and one sync mode, with every collective."""
    micro_batches = lab.micro_batches(ranks, MICRO_BATCHES)
    return lab.done(sgd(ranks, grad_accum_steps=micro_batches, gradient_sync_mode=mode, steps=2, counted=True))


def same_losses(run: Run, reference: Run, tolerance: float) -> float:
    """Every rank reports the reference's losses. Returns the largest relative difference.

    Raises:
        Mismatch: names rank and step.
    """
    worst = 0.0
    for rank, trace in run.traces.items():
        for step, (seen, expected) in enumerate(zip(trace.losses, reference.first.losses, strict=True), 1):
            apart = abs(seen - expected) / abs(expected)
            worst = max(worst, apart)
            if not apart <= tolerance:
                raise Mismatch(
                    f"losses within {tolerance:g} of those of `single`",
                    f"rank {rank} at step {step}: {seen:.9g}, `single` {expected:.9g} ({apart:.2g} apart)",
                )
    return worst


@check(
    "parity.initial_weights",
    "Weights before the first step equal those of `single`, bit for bit.",
    mistake="weights were filled by other means than job.materialize, or changed afterwards; they may depend on "
    "(seed, name) only, never on the rank or on the order of construction",
)
def initial_weights(lab: Lab, ranks: int) -> None:
    """See the title."""
    seen = _model(lab.done(training(ranks)).whole(0))
    expected = _model(lab.done(training(1, subject=False)).whole(0))
    equal_bitwise(seen, expected, "initial weights")


@check(
    "parity.losses",
    "The loss of every step equals that of `single` on the same global batch.",
    mistake="the training itself is different: look at the other parity checks that fail, the first one first",
    needs=("exact",),
)
def losses(lab: Lab, ranks: int) -> Mapping[str, Any]:
    """See the title."""
    run, reference = lab.done(training(ranks)), lab.done(training(1, subject=False))
    return {"relative_difference": same_losses(run, reference, TOLERANCE)}


@check(
    "parity.gradients",
    "After the last micro-batch every gradient is the SUM over ranks and micro-batches of the ranks' shares.",
    mistake="backward(prepared, loss) must undo what the wrapper does to gradients: one that averages over n ranks needs "
    "the loss times n; gradients that are the same on all ranks but n times too small were averaged",
    needs=("exact",),
)
def summed_gradients(lab: Lab, ranks: int) -> Mapping[str, Any]:
    """See the title."""
    run, reference = lab.done(sgd(ranks)), lab.done(sgd(1, subject=False))
    worst = equal_within(gradients(run, 1), gradients(reference, 1), GRADIENT_TOLERANCE, "gradients of step 1")
    return {"relative_difference": worst}


@check(
    "parity.gradients_cleared",
    "Gradients of a step do not reach the next one.",
    mistake="optimizer_step(prepared, apply) must clear all gradients, also where apply is false",
    needs=("exact",),
)
def cleared(lab: Lab, ranks: int) -> None:
    """The second step's gradient alone moves the weights."""
    run, reference = lab.done(sgd(ranks)), lab.done(sgd(1, subject=False))
    equal_within(gradients(run, 2), gradients(reference, 2), 10 * GRADIENT_TOLERANCE, "gradients of step 2")


@check(
    "parity.token_weighting",
    "Every valid token counts alike, however tokens are spread over ranks and micro-batches.",
    mistake="a mean of means: the loss that a rank gets is its share of the global sum already; it must not be divided "
    "again by the rank's own tokens, by micro-batches or by ranks",
    needs=("exact",),
)
def token_weighting(lab: Lab, ranks: int) -> None:
    """See the title."""
    run = lab.done(sgd(ranks, data="kit-ragged"))
    reference = lab.done(sgd(1, subject=False, data="kit-ragged"))
    equal_within(gradients(run, 1), gradients(reference, 1), GRADIENT_TOLERANCE, "gradients over ragged samples")
    same_losses(run, reference, TOLERANCE)


@check(
    "parity.grad_norm",
    "The gradient norm that is reported is that of the whole gradient, on every rank.",
    mistake="gradients(prepared) must give this rank's local tensors with the right `copies`: the number of ranks that "
    "hold the same elements (1 for shards, the number of replicas for replicated parameters)",
    needs=("exact",),
)
def grad_norm(lab: Lab, ranks: int) -> None:
    """Compared with the norm of the gradient that moved the weights, and with `single`."""
    run, reference = lab.done(sgd(ranks)), lab.done(sgd(1, subject=False))
    actual = math.sqrt(sum(float(g.double().square().sum()) for g in gradients(run, 1).values()))
    for rank, trace in run.traces.items():
        for step, (record, other) in enumerate(zip(trace.records, reference.first.records, strict=True), 1):
            if not math.isclose(record.grad_norm, other.grad_norm, rel_tol=1e-4):
                own = f"; the weights were moved by a gradient of norm {actual:.9g}" if step == 1 else ""
                raise Mismatch(
                    f"a gradient norm of {other.grad_norm:.9g} at step {step}, as `single` has",
                    f"{record.grad_norm:.9g} on rank {rank}, {record.grad_norm / other.grad_norm:.4g} times as much{own}",
                )


@check(
    "parity.clipping",
    "Clipping scales the whole gradient to the limit, once a step, after everything was summed.",
    mistake="clipping is core's and must not be repeated by the strategy, nor per micro-batch; the tensors that "
    "gradients(prepared) gives must be the live ones that the optimizer uses, for they are scaled in place",
    needs=("exact", "clipping"),
)
def clipping(lab: Lab, ranks: int) -> None:
    """The gradient that moved the weights has the limit's norm and the direction of that of `single`."""
    limit = 0.05
    run = lab.done(sgd(ranks, max_grad_norm=limit))
    reference = lab.done(sgd(1, subject=False, max_grad_norm=limit))
    if not all(record.clipped for record in run.first.records):
        raise Mismatch(
            f"clipping at a norm of {limit}", f"norms {[r.grad_norm for r in run.first.records]}, not clipped"
        )
    seen = gradients(run, 1)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in seen.values()))
    if not math.isclose(norm, limit, rel_tol=1e-3):
        raise Mismatch(f"a clipped gradient of norm {limit}", f"the weights were moved by one of norm {norm:.6g}")
    equal_within(seen, gradients(reference, 1), 1e-4, "clipped gradients")


@check(
    "parity.weights",
    "Weights after every step equal those of `single`, per tensor, within rounding.",
    mistake="if gradients and norm are right, the optimizer is not: it must be made by job.make_optimizer over the "
    "parameters as they are after wrapping, with its groups, and step once",
    needs=("exact",),
)
def weights(lab: Lab, ranks: int) -> Mapping[str, Any]:
    """See the title."""
    run, reference = lab.done(training(ranks)), lab.done(training(1, subject=False))
    worst = 0.0
    for step in (1, 4):
        seen, expected = _model(run.whole(step)), _model(reference.whole(step))
        worst = max(worst, equal_within(seen, expected, TOLERANCE, f"weights after step {step}"))
    return {"relative_difference": worst}


@check(
    "parity.replicas",
    "Ranks that hold the same elements hold the same bits, after every step.",
    mistake="a branch on the rank in what must be alike: reduction, optimizer step, buffers; or an update that "
    "was applied before the reduction",
    ranks="several",
    needs=("sums_gradients",),
)
def replicas(lab: Lab, ranks: int) -> None:
    """Assembling a state compares all copies."""
    run = lab.done(training(ranks))
    for step in (0, 1, 2, 3, 4):
        assemble(run.traces, step)


@check(
    "parity.accumulation",
    "The same global batch gives the same gradient however many micro-batches it is split into.",
    mistake="each micro-batch must ADD to the gradients, without dividing by their number",
    needs=("exact", "accumulation"),
)
def accumulation(lab: Lab, ranks: int) -> None:
    """See the title."""
    reference = lab.done(sgd(1, subject=False))
    one = lab.micro_batches(ranks, 1)
    runs = {
        one: lab.done(sgd(ranks, grad_accum_steps=one)),
        lab.micro_batches(ranks, MICRO_BATCHES): in_mode(lab, ranks, lab.plan(ranks).auto_sync),
    }
    for micro_batches, run in runs.items():
        equal_within(
            gradients(run, 1),
            gradients(reference, 1),
            GRADIENT_TOLERANCE,
            f"gradients of {micro_batches} micro-batches",
        )


@check(
    "parity.bf16",
    "With --precision bf16 losses stay within 2e-2 of those of `single` with it, and are not those of fp32.",
    mistake="more than forward and backward is in bf16: sums over ranks, the optimizer or the loss; where losses are those "
    "of fp32, job.in_place (or mixed precision of the strategy's own) was forgotten",
    needs=("exact", "bf16"),
)
def bf16(lab: Lab, ranks: int) -> Mapping[str, Any]:
    """See the title."""
    run = lab.done(training(ranks, precision="bf16"))
    reference = lab.done(training(1, subject=False, precision="bf16"))
    if run.first.losses == lab.done(training(ranks)).first.losses:
        raise Mismatch("losses with the rounding of bf16", "to the last bit those of --precision fp32")
    return {"relative_difference": same_losses(run, reference, BF16_TOLERANCE)}


@check(
    "parity.master_weights",
    "With --precision bf16 the weights that are trained and saved are fp32.",
    mistake="parameters were converted to bf16: updates smaller than 1/256 of a weight are then lost; use autocast "
    "(job.in_place) or mixed precision that keeps fp32 masters, and save those",
    needs=("bf16",),
)
def master_weights(lab: Lab, ranks: int) -> None:
    """Saved weights are fp32 and use the bits that bf16 does not have."""
    state = _model(lab.done(training(ranks, precision="bf16")).whole(4))
    for key, tensor in state.items():
        if not tensor.is_floating_point():
            continue
        if tensor.dtype != torch.float32:
            raise Mismatch(f"'{key}' in float32", f"{tensor.dtype}")
        if tensor.dim() > 1 and torch.equal(tensor, tensor.bfloat16().float()):
            raise Mismatch(f"a trained '{key}' with fp32 precision", "every element is a bf16 number")


@check(
    "parity.reduce_dtype",
    "Gradients are summed over ranks in the dtype that the plan declares.",
    mistake="Plan.reduce_dtype says otherwise than what is sent: declare it, or reduce in fp32",
    ranks="several",
    needs=("sums_gradients",),
)
def reduce_dtype(lab: Lab, ranks: int) -> None:
    """The dtype of every reduction between ranks with different data."""
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
    needs_data_ranks(lab, ranks)
    found = 0
    for precision in ("fp32", "bf16") if lab.promises("bf16", ranks) else ("fp32",):
        declared = lab.plan(ranks, precision=precision)
        lower = sgd(ranks, precision="bf16", counted=True)
        run = lab.done(lower) if precision == "bf16" else in_mode(lab, ranks, declared.auto_sync)
        for trace in run.traces.values():
            for seen in gradient_reductions(run, trace, 1):
                found += 1
                if seen.dtype != names[declared.reduce_dtype]:
                    raise Mismatch(
                        f"gradients summed in {declared.reduce_dtype}, as Plan.reduce_dtype says",
                        f"{seen.kind} of {seen.elements} elements in {seen.dtype}",
                    )
    if not found:
        raise Skip(NO_REDUCTION)


def _model(whole: Whole) -> Whole:
    return {key: tensor for key, tensor in whole.items() if key.startswith("model/")}
