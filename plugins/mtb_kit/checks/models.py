"""Models with something special: modes, frozen, unused and tied parameters, odd dimensions, buffers, recomputation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from mtb_kit.checking import Skip, check
from mtb_kit.checks.parity import TOLERANCE, gradients, same_losses, sgd, training
from mtb_kit.episodes import episode
from mtb_kit.lab import Lab, Run
from mtb_kit.probes import Forwards, Modes
from mtb_kit.probes_tensors import BufferMeans
from mtb_kit.states import Mismatch, comparable, equal_bitwise, equal_within, same_keys

#: What weight decay takes from a weight in four steps, with some room.
DECAY = 2e-3
#: A norm at which every gradient is clipped.
_LIMIT = 0.05
_TIED: Mapping[str, Any] = {"tie_embeddings": True, "max_grad_norm": _LIMIT}
#: Of 23 ragged samples, so that some batches are padded and some have nothing to predict.
_EVALUATION: Mapping[str, Any] = {"eval_data": "kit-ragged-23", "eval_every": 2}


@check(
    "models.mode",
    "Every module is in train mode in training, in eval mode in evaluation, and evaluation changes nothing.",
    mistake="the module that is called must pass train() and eval() on to all others; wrappers that rebuild or copy "
    "modules forget it",
)
def mode(lab: Lab, ranks: int) -> None:
    """Every forward is watched; losses and weights with evaluation equal those without, bit for bit."""
    run = lab.done(training(ranks, probes=(Modes(),), dropout=0.1, **_EVALUATION))
    for rank, trace in run.traces.items():
        for where, expected in (("training", {True}), ("evaluation", {False})):
            seen = trace.notes["modes"][where]
            if seen != expected:
                what = "no forward of the module" if not seen else f"modules whose `training` is {sorted(seen)}"
                raise Mismatch(f"only modules with training = {expected} in {where}", f"{what} on rank {rank}")
    plain = lab.done(training(ranks, dropout=0.1))
    equal_bitwise(run.whole(4), plain.whole(4), "the state after four steps with evaluations between them")


@check(
    "models.evaluation",
    "The evaluation loss equals that of `single`.",
    mistake="forward in eval mode must work without the sync context and without gradients, with the weights as they are; "
    "evaluate must take every batch, and padding, whose targets are all ignored, must not count",
    needs=("exact",),
)
def evaluation(lab: Lab, ranks: int) -> None:
    """After four steps, over all samples of a short data set, which are shared out in batches of other sizes."""
    seen = lab.done(training(ranks, **_EVALUATION)).result
    expected = lab.done(training(1, subject=False, **_EVALUATION)).result
    if not math.isclose(seen["eval_loss"], expected["eval_loss"], rel_tol=TOLERANCE):
        raise Mismatch(f"an evaluation loss of {expected['eval_loss']:.9g}", f"{seen['eval_loss']:.9g}")
    if seen["eval_samples"] != expected["eval_samples"]:
        raise Mismatch(f"{expected['eval_samples']} samples evaluated", f"{seen['eval_samples']}")


@check(
    "models.extra",
    "An auxiliary loss is trained on and not reported; metrics of the loss are means over tokens, as with `single`.",
    mistake="backward runs on work's share times Loss.objective, which is the sum and the auxiliary loss; both are sums "
    "over tokens, and neither may be scaled by ranks or micro-batches. Loss.plus adds up metrics",
    needs=("exact",),
)
def extra(lab: Lab, ranks: int) -> None:
    """State after four steps, losses and metrics; or a refusal that names the loss.

    With a model of the kit's, unless `StrategyConformance.settings` name one.
    """
    asked: dict[str, Any] = {"data": "kit-ragged", **({} if "model" in lab.settings else {"model": "kit-extra"})}
    run = lab.run(training(ranks, **asked))
    if run.exit_reason != "done":
        told = run.why()
        if "loss" not in told or "Traceback" in told:
            raise Mismatch("training, or a message that names the model's loss", told)
        return
    reference = lab.done(training(1, subject=False, **asked))
    same_losses(run, reference, TOLERANCE)
    for rank, trace in run.traces.items():
        for record, right in zip(trace.records, reference.first.records, strict=True):
            for name, expected in right.metrics.items():
                seen = record.metrics.get(name)
                if seen is None or not math.isclose(seen, expected, rel_tol=TOLERANCE):
                    step = right.global_step
                    raise Mismatch(f"the metric '{name}' {expected:.9g} at step {step}", f"{seen} on rank {rank}")
    same_state(run, reference, 4)


@check(
    "models.frozen",
    "Parameters that do not require gradients stay as they are; the others train as in `single`.",
    mistake="a flat or sharded view must not mix frozen and trained parameters, nor weight decay reach frozen ones",
    needs=("custom_models",),
)
def frozen(lab: Lab, ranks: int) -> None:
    """Weight decay, momentum and clipping are active."""
    run = lab.done(training(ranks, model="kit-frozen"))
    before, after = run.whole(0), run.whole(4)
    still = [k for k in before if k.startswith("model/") and (".0." in k or k == "model/out.bias")]
    equal_bitwise({k: after[k] for k in still}, {k: before[k] for k in still}, "frozen parameters")
    if lab.promises("exact", ranks):
        reference = lab.done(training(1, subject=False, model="kit-frozen"))
        same_state(run, reference, 4)


@check(
    "models.unused",
    "A parameter that forward never uses either trains as in `single` or ends all ranks, named.",
    mistake="a wrapper that waits for every gradient hangs or stops with an error of its own; Plan.missing_gradients "
    "says whether the strategy copes with it",
    needs=("custom_models",),
)
def unused(lab: Lab, ranks: int) -> None:
    """By the plan: copes or is refused at the first step, on all ranks."""
    run = lab.run(training(ranks, model="kit-unused"))
    if lab.plan(ranks).missing_gradients:
        before, after = lab.done(run.episode).whole(0), run.whole(4)
        for key in (k for k in before if k.startswith("model/")):
            if "idle" not in key and torch.equal(before[key], after[key]):
                raise Mismatch("parameters that are used to be trained", f"'{key}' did not change")
            if "idle" in key and not torch.allclose(after[key], before[key], rtol=DECAY, atol=0):
                raise Mismatch("parameters that are not used to change by weight decay at most", f"'{key}' was trained")
        return
    failure = run.failure.kind if run.failure is not None else (run.result.get("failure") or {}).get("kind")
    if failure != "MissingGradient" or "idle" not in run.why():
        raise Mismatch("all ranks to end with MissingGradient that names 'idle.weight'", run.why())


@check(
    "models.tied",
    "A parameter that two layers share is trained as one: its gradient is the sum of both uses.",
    mistake="wrapping, sharding or `to_empty` has separated the two; materialize keeps ties, code of your own must too",
    needs=("exact", "tied_weights"),
)
def tied(lab: Lab, ranks: int) -> None:
    """Compared with `single`; the state names it once."""
    run, reference = lab.done(sgd(ranks, **_TIED)), lab.done(sgd(1, subject=False, **_TIED))
    same_state(run, reference, 2)


@check(
    "models.norm",
    "Gradient norm and clipping count a shared parameter once, and frozen ones not at all.",
    mistake="gradients(prepared) lists a tied parameter under both of its names, or something of parameters that are not "
    "trained: take prepared.trainable, or parameters() without remove_duplicate=False",
    ranks="most",
    needs=("exact", "clipping"),
)
def norm(lab: Lab, ranks: int) -> None:
    """The norms that are reported, and the clipped gradient that moved the weights, with tied and with frozen ones."""
    kinds: dict[str, Mapping[str, Any]] = {}
    if lab.promises("tied_weights", ranks):
        kinds["tied"] = _TIED
    if lab.promises("custom_models", ranks):
        kinds["frozen"] = {"model": "kit-frozen", "max_grad_norm": _LIMIT}
    if not kinds:
        raise Skip("neither tied nor custom models are declared")
    for kind, settings in kinds.items():
        run, reference = lab.done(sgd(ranks, **settings)), lab.done(sgd(1, subject=False, **settings))
        expected = reference.first.records[0].grad_norm
        for rank, trace in run.traces.items():
            seen = trace.records[0].grad_norm
            if not math.isclose(seen, expected, rel_tol=1e-4):
                raise Mismatch(
                    f"a gradient norm of {expected:.9g} with {kind} parameters, as `single` has",
                    f"{seen:.9g} on rank {rank}",
                )
        equal_within(gradients(run, 1), gradients(reference, 1), 1e-4, f"clipped gradients with {kind} parameters")


@check(
    "models.tied_resume",
    "A shared parameter is still shared after a resume.",
    mistake="loading replaced one of the two by a new tensor; fill the pieces in place",
    needs=("exact", "tied_weights"),
)
def tied_resume(lab: Lab, ranks: int) -> None:
    """Two steps, a resume, and one more, against three steps of `single`."""
    name = f"tied-{ranks}"
    settings: dict[str, Any] = {"tie_embeddings": True, "adam_eps": 1e-6, "checkpoint_dir": str(lab.folder / name)}
    lab.done(episode(ranks, steps=2, save_every=2, **settings))
    resumed = lab.done(
        episode(ranks, states=(3,), until_step=3, steps=None, resume="latest", warmup_steps=0, **settings)
    )
    reference = lab.done(episode(1, subject=False, states=(3,), steps=3, tie_embeddings=True, adam_eps=1e-6))
    same_state(resumed, reference, 3)


@check(
    "models.odd_dimensions",
    "Dimensions that ranks do not divide, parameters of one element and ranks with empty shards train as in `single`.",
    mistake="`chunk`, `numel // world_size` and views of empty tensors lose or invent elements",
    needs=("exact", "custom_models"),
)
def odd_dimensions(lab: Lab, ranks: int) -> None:
    """Model and optimizer state after four steps."""
    run, reference = lab.done(training(ranks, model="kit-odd")), lab.done(training(1, subject=False, model="kit-odd"))
    same_losses(run, reference, TOLERANCE)
    same_state(run, reference, 4)


@check(
    "models.scalar",
    "A parameter without dimensions trains as in `single`, or all ranks end with a message that names it.",
    mistake="a 0-d tensor has no dimension to shard along: keep it whole, or refuse it by name",
    needs=("exact", "custom_models"),
)
def scalar(lab: Lab, ranks: int) -> None:
    """See the title."""
    run = lab.run(training(ranks, model="kit-scalar"))
    if run.exit_reason != "done":
        told = run.why()
        if "'scale'" not in told or "Traceback" in told:
            raise Mismatch("training, or a message that names 'scale'", told)
        return
    same_state(run, lab.done(training(1, subject=False, model="kit-scalar")), 4)


@check(
    "models.buffers",
    "Persistent buffers are part of the state, the same on all ranks where they are saved; others are not.",
    mistake="each rank's forward changes its own buffers: bring them into agreement before they are saved (rank 0's, "
    "as DistributedDataParallel does, or their mean)",
    needs=("custom_models",),
)
def buffers(lab: Lab, ranks: int) -> None:
    """Assembling the state compares the ranks' copies; whichever rank's is kept, or their mean, counts and bounds hold."""
    run = lab.done(training(ranks, model="kit-buffers", probes=(BufferMeans(),)))
    start = lab.done(training(1, subject=False, model="kit-buffers")).whole(0)
    for step in (0, 1, 4):
        whole = run.whole(step)
        same_keys(*comparable(whole, start), f"state with buffers after step {step}")
    equal_bitwise(_buffers(run.whole(0)), _buffers(start), "buffers before the first step")
    if torch.equal(run.whole(4)["model/running"], start["model/running"]):
        raise Mismatch("buffers that forward has changed", "'model/running' is as it was at the start")
    for step in (1, 4):
        calls, forwards = int(run.whole(step)["model/calls"]), step * lab.micro_batches(ranks, 2)
        if calls != forwards:
            raise Mismatch(f"'model/calls' to be {forwards} after step {step}, the forwards of one rank", f"{calls}")
    least, most = _running_bounds(run)
    seen = run.whole(4)["model/running"]
    if (seen < least).any() or (seen > most).any():
        raise Mismatch(
            f"'model/running' between {least.tolist()} and {most.tolist()}, as the samples of the ranks give it",
            f"{seen.tolist()}",
        )


def _running_bounds(run: Run) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and most that ``running`` can be, whichever ranks its averages were taken from, with room for rounding."""
    by_rank = torch.stack([torch.stack(trace.notes["means"]) for trace in run.traces.values()])
    least = most = torch.zeros(by_rank.shape[-1])
    for low, high in zip(by_rank.amin(0), by_rank.amax(0), strict=True):
        least, most = least.lerp(low, 0.5), most.lerp(high, 0.5)
    return least - TOLERANCE, most + TOLERANCE


def same_state(run: Run, reference: Run, step: int) -> None:
    """Weights within the tolerance of training, moments of the optimizer within ten times that.

    Raises:
        Mismatch: names the tensor that differs most.
    """
    seen, expected = comparable(run.whole(step), reference.whole(step))
    same_keys(seen, expected, f"state after step {step}")
    for kind, tolerance in (("model/", TOLERANCE), ("optim/", 10 * TOLERANCE)):
        own, other = ({k: t for k, t in whole.items() if k.startswith(kind)} for whole in (seen, expected))
        what = "weights" if kind == "model/" else "optimizer state"
        equal_within(own, other, tolerance, f"{what} after step {step}")


def _buffers(whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: whole[key] for key in ("model/running", "model/calls")}


@check(
    "models.sharded",
    "No rank holds all of the model, nor all of its optimizer state.",
    mistake="Plan.sharded (or the declaration) promises less memory per rank than there is: shard, or do not declare it",
    ranks="several",
    needs=("sharded",),
)
def sharded(lab: Lab, ranks: int) -> Mapping[str, Any]:
    """Counted in elements of the state; the largest rank may hold four fifths at most."""
    if not lab.plan(ranks).sharded:
        return {"largest_share": 1.0}
    run = lab.done(training(ranks))
    figures = {}
    for kind in ("model/", "optim/"):
        total = sum(t.numel() for key, t in run.whole(4).items() if key.startswith(kind))
        held = [
            sum(t.numel() for key, parts in trace.states[4].items() if key.startswith(kind) for t, _, _ in parts)
            for trace in run.traces.values()
        ]
        figures[f"largest_share_{kind[:-1]}"] = max(held) / total
        if max(held) > 0.8 * total:
            raise Mismatch(
                f"at most 80% of the {total} elements of {kind[:-1]} on a rank of {ranks}", f"{max(held)} on one"
            )
    return figures


@check(
    "models.activation_checkpointing",
    "Activations are recomputed where that is asked for, and it gives the same bits, dropout included.",
    mistake="the second forward of a block must see the random state and the weights of the first; where there is none, "
    "job.in_place was forgotten",
)
def activation_checkpointing(lab: Lab, ranks: int) -> None:
    """State after four steps, and the number of forwards of all modules, with and without it."""
    watched: dict[str, Any] = {"dropout": 0.1, "probes": (Forwards(),)}
    with_it = lab.done(training(ranks, activation_checkpointing=True, **watched))
    without = lab.done(training(ranks, **watched))
    equal_bitwise(with_it.whole(4), without.whole(4), "state with activation checkpointing")
    for rank, trace in with_it.traces.items():
        seen, once = trace.notes["forwards"], without.traces[rank].notes["forwards"]
        if seen <= once:
            raise Mismatch(f"more than the {once} forwards of modules without recomputation", f"{seen} on rank {rank}")
