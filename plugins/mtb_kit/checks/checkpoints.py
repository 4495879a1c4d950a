"""Contents of checkpoints, and runs that go on from one as if they had never stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mtb_core.ckpt.loading import owner_of
from mtb_kit.checking import Skip, check
from mtb_kit.checks.parity import TOLERANCE, training
from mtb_kit.episodes import Episode, episode
from mtb_kit.lab import Lab, Run
from mtb_kit.probes_checkpoints import Draws
from mtb_kit.saved import checkpoint_of, described, opened, same_parts, stored
from mtb_kit.states import Mismatch, Whole, comparable, equal_bitwise, equal_within

#: Dropout, accumulation, clipping and a schedule, so that a resumed run has everything to get wrong.
EVENTFUL: Mapping[str, Any] = {
    "dropout": 0.2,
    "max_grad_norm": 0.5,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 1,
    "lr_decay_steps": 5,
}
#: The same without chance, for runs on other numbers of ranks.
PREDICTABLE: Mapping[str, Any] = {**EVENTFUL, "dropout": 0.0, "adam_eps": 1e-6}
#: Optimizer state that is compared with that of `single`: relative to the norm of each tensor.
MOMENT_TOLERANCE = 1e-4
#: Moments of a gradient that is zero but for rounding are noise; they are held against this part of the largest norm.
_FLOOR = 1e-3
#: The last step of every run here.
LAST = 4


def saving(lab: Lab, ranks: int, *, subject: bool = True) -> Run:
    """The uninterrupted run with `EVENTFUL` settings: a checkpoint after every step, every state kept."""
    return lab.done(
        episode(
            ranks,
            subject=subject,
            states=(0, 1, 2, 3, 4),
            probes=(Draws(),),
            **EVENTFUL,
            checkpoint_dir=str(lab.folder / f"eventful-{subject}-{ranks}"),
            save_every=1,
            keep_last=0,
            async_save=False,
        )
    )


def resumed(lab: Lab, ranks: int, step: int) -> Run:
    """The run that goes on from the checkpoint of `step` of `saving`."""
    path = checkpoint_of(saving(lab, ranks), step)
    states = tuple(range(step, LAST + 1))
    return lab.done(_go_on(ranks, path, states=states, probes=(Draws(),), **EVENTFUL))


def predictable(lab: Lab, ranks: int, *, subject: bool = True) -> Run:
    """The uninterrupted run with `PREDICTABLE` settings: a checkpoint after steps 2 and 4."""
    return lab.done(
        episode(
            ranks,
            subject=subject,
            states=(2, 4),
            **PREDICTABLE,
            checkpoint_dir=str(lab.folder / f"predictable-{subject}-{ranks}"),
            save_every=2,
            keep_last=0,
            async_save=False,
        )
    )


def _go_on(ranks: int, path: Any, *, subject: bool = True, **what: Any) -> Episode:
    return episode(ranks, subject=subject, **what, resume=str(path), steps=None, until_step=LAST)


@check(
    "checkpoints.keys",
    "A checkpoint has the keys that one of `single` has, for the model and for the optimizer.",
    mistake="names of a wrapper or of torch.compile got into the keys ('module.', '_orig_mod.'): state(prepared) must "
    "take names from prepared.core; or optimizer state was left out of it, or put there under names of its own; what is the strategy's alone "
    "belongs under 'strategy/NAME/…'",
)
def keys(lab: Lab, ranks: int) -> None:
    """See the title."""
    seen = opened(checkpoint_of(saving(lab, ranks), 1)).entries.keys()
    expected = opened(checkpoint_of(saving(lab, 1, subject=False), 1)).entries.keys()
    missing, extra = sorted(expected - seen), sorted(key for key in seen - expected if owner_of(key) is None)
    if missing or extra:
        found = [
            f"{len(names)} {word}: {', '.join(names[:4])}{'…' if len(names) > 4 else ''}"
            for names, word in ((missing, "missing"), (extra, "too many"))
            if names
        ]
        raise Mismatch(f"the {len(expected)} keys of `single`", "; ".join(found))


@check(
    "checkpoints.shapes",
    "Every tensor in a checkpoint has the whole shape and the dtype that it has with `single`.",
    mistake="padding or a rank's own part was saved as if it were the whole: Piece(tensor, shape, offset) takes the "
    "shape of the unsharded, unpadded tensor, which no number of ranks changes",
)
def shapes(lab: Lab, ranks: int) -> None:
    """Compared for the keys that both have; the others are `checkpoints.keys`' to name."""
    seen = opened(checkpoint_of(saving(lab, ranks), 1)).entries
    expected = opened(checkpoint_of(saving(lab, 1, subject=False), 1)).entries
    for key in sorted(seen.keys() & expected.keys()):
        if described(seen[key]) != described(expected[key]):
            raise Mismatch(f"'{key}' of {described(expected[key])}", described(seen[key]))


@check(
    "checkpoints.optimizer_state",
    "A checkpoint holds the optimizer's moments and step counts, right in value and renewed by every step.",
    mistake="optimizer state was left out, saved before it exists, or copied once instead of read when saving; state("
    "prepared) must create missing moments and give live views of those that the optimizer uses",
)
def optimizer_state(lab: Lab, ranks: int) -> None:
    """AdamW with the settings of the parity checks; SGD with momentum."""
    adam, adam_reference = lab.done(training(ranks)), lab.done(training(1, subject=False))
    exact = lab.promises("exact", ranks)
    _moments(exact, adam, adam_reference, ("exp_avg", "exp_avg_sq", "step"), (1, 4))
    sgd: Mapping[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.1, "steps": 2, "states": (1, 2)}
    run, reference = lab.done(episode(ranks, **sgd)), lab.done(episode(1, subject=False, **sgd))
    _moments(exact, run, reference, ("momentum_buffer",), (1, 2))


def _moments(exact: bool, run: Run, reference: Run, kinds: tuple[str, ...], steps: tuple[int, int]) -> None:
    first, last = (run.whole(step) for step in steps)
    right = reference.whole(steps[1])
    for kind in kinds:
        names = [key for key in right if key.startswith("optim/") and key.endswith(f"/{kind}")]
        missing = [key for key in names if key not in last]
        if missing:
            raise Mismatch(f"'{kind}' of all {len(names)} trainable parameters", f"none for {', '.join(missing[:4])}")
        still = [key for key in names if torch.equal(first[key], last[key]) and right[key].any()]
        if still:
            raise Mismatch(f"'{kind}' that changes from step {steps[0]} to {steps[1]}", f"'{still[0]}' stayed the same")
        if exact:
            _close(last, right, names, f"'{kind}' after step {steps[1]}")


def _close(seen: Whole, expected: Whole, names: list[str], what: str) -> None:
    floor = _FLOOR * max(float(expected[key].double().norm()) for key in names)
    for key in names:
        if seen[key].shape != expected[key].shape:
            raise Mismatch(f"{what}: '{key}' of shape {list(expected[key].shape)}", f"{list(seen[key].shape)}")
        scale = max(float(expected[key].double().norm()), floor)
        apart = float((seen[key].double() - expected[key].double()).norm()) / scale
        if not apart <= MOMENT_TOLERANCE:
            norms = float(seen[key].double().norm()), float(expected[key].double().norm())
            raise Mismatch(
                f"{what} as with `single`, within {MOMENT_TOLERANCE:g}",
                f"'{key}' is {apart:.3g} apart: its norm is {norms[0]:.6g}, with `single` {norms[1]:.6g}",
            )


@check(
    "checkpoints.restored_state",
    "Right after resuming, model and optimizer are what was saved, bit for bit.",
    mistake="state(prepared) gave copies, so what was loaded went nowhere; or state_loaded did not renew what is derived "
    "from the pieces (fp32 masters, flat buffers, ties), or did renew what it should have left alone",
)
def restored_state(lab: Lab, ranks: int) -> None:
    """Resumed from two steps; what was saved is what the ranks held then, and what the files hold."""
    saved = saving(lab, ranks)
    for step in (1, 3):
        run = resumed(lab, ranks, step)
        if lab.promises("sums_gradients", ranks):
            equal_bitwise(stored(checkpoint_of(saved, step)), saved.whole(step), f"the checkpoint of step {step}")
        equal_bitwise(run.whole(step), saved.whole(step), f"the state after resuming from step {step}")
        for rank, trace in run.traces.items():
            same_parts(trace.states[step], saved.traces[rank].states[step], f"rank {rank}, resumed from step {step}")
            if dict(trace.scalars[step]) != dict(saved.traces[rank].scalars[step]):
                raise Mismatch(
                    f"scalars {dict(saved.traces[rank].scalars[step])}, as saved after step {step}",
                    f"{dict(trace.scalars[step])} on rank {rank}",
                )


@check(
    "checkpoints.learning_rate",
    "After resuming, the optimizer steps with the learning rates of the uninterrupted run.",
    mistake="the schedule was stepped again, or started anew: core writes param_groups[*]['lr'] before each step, and a "
    "strategy must not keep or advance a schedule of its own",
)
def learning_rate(lab: Lab, ranks: int) -> None:
    """The rates that the optimizer had when it stepped."""
    right = {step: rates[0] for step, rates in saving(lab, 1, subject=False).first.rates.items()}
    for start, run in ((0, saving(lab, ranks)), (1, resumed(lab, ranks, 1)), (3, resumed(lab, ranks, 3))):
        where = f"in the run resumed from step {start}" if start else "in the uninterrupted run"
        for rank, trace in run.traces.items():
            for step in range(start + 1, LAST + 1):
                rates = trace.rates.get(step, [])
                if set(rates) != {right[step]}:
                    raise Mismatch(
                        f"a learning rate of {right[step]:.9g} at step {step}, {where}", f"{rates} on rank {rank}"
                    )


@check(
    "checkpoints.random_state",
    "Random streams go on after resuming where they were, and ranks with different data draw differently.",
    mistake="generators are seeded in the strategy; they are core's: each rank has streams of its own, saved and put back "
    "per rank",
)
def random_state(lab: Lab, ranks: int) -> None:
    """Draws of torch, numpy and python after every step."""
    saved = saving(lab, ranks)
    for start in (1, 3):
        for rank, trace in resumed(lab, ranks, start).traces.items():
            for step in range(start + 1, LAST + 1):
                for stream, value in saved.traces[rank].notes["draws"][step].items():
                    seen = trace.notes["draws"][step][stream]
                    if seen != value:
                        raise Mismatch(
                            f"{value!r} from {stream} on rank {rank} after step {step}, as without interruption",
                            f"{seen!r} in the run resumed from step {start}",
                        )
    seen_by: dict[float, int] = {}
    for rank, trace in saved.traces.items():
        other = seen_by.setdefault(trace.notes["draws"][1]["torch"], rank)
        if saved.traces[other].data_rank != trace.data_rank:
            raise Mismatch("different random numbers on ranks with different data", f"ranks {other} and {rank} agree")


@check(
    "checkpoints.exact_resume",
    "A resumed run is the uninterrupted one, bit for bit: losses, weights and optimizer, on every rank.",
    mistake="something that later steps depend on is not in the checkpoint, or sums are taken in another order after a "
    "fresh start (buckets that are rebuilt after the first step); if that cannot be, plan exact_resume=False",
    needs=("exact_resume",),
)
def exact_resume(lab: Lab, ranks: int) -> None:
    """From step 1 and from step 3, with dropout, accumulation, clipping and a schedule."""
    saved = saving(lab, ranks)
    for start in (1, 3):
        for rank, trace in resumed(lab, ranks, start).traces.items():
            whole = saved.traces[rank]
            for record, right in zip(trace.records, whole.records[start:], strict=True):
                for name in ("global_step", "loss", "grad_norm", "samples_seen", "tokens_seen"):
                    if getattr(record, name) != getattr(right, name):
                        raise Mismatch(
                            f"{name} {getattr(right, name)!r} at step {right.global_step} on rank {rank}",
                            f"{getattr(record, name)!r} in the run resumed from step {start}",
                        )
            for step in range(start + 1, LAST + 1):
                what = f"rank {rank} at step {step}, resumed from step {start}"
                same_parts(trace.states[step], whole.states[step], what)


@check(
    "checkpoints.resharding",
    "What so many ranks have saved can be resumed on another number of ranks, model and optimizer exactly.",
    mistake="pieces are not in global coordinates, or something with the number of ranks in it was saved; if that cannot "
    "be, plan resharding=False",
)
def resharding(lab: Lab, ranks: int) -> None:
    """Resumed on the next of the declared numbers of ranks; the next steps are those of the uninterrupted run.

    Where the plan does not promise it, the run must be refused before any rank starts.
    """
    sizes = sorted(lab.world_sizes)
    if len(sizes) == 1:
        raise Skip("one number of ranks is declared")
    target = sizes[(sizes.index(ranks) + 1) % len(sizes)]
    saved = predictable(lab, ranks)
    if not lab.promises("resharding", target):
        again: Mapping[str, Any] = {**PREDICTABLE, "resume": str(checkpoint_of(saved, 2)), "steps": None}
        if not lab.refusal(target, **again, until_step=LAST):
            raise Mismatch(f"a refusal to resume on {target} ranks, which the plan does not promise", "it was accepted")
        raise Skip("not promised: resharding; it is refused, as it must be")
    exact = lab.promises("exact", ranks)
    run = lab.done(_go_on(target, checkpoint_of(saved, 2), states=(2, 4), **PREDICTABLE))
    _goes_on(exact, run, saved, f"on {target} ranks what {ranks} had saved")


@check(
    "checkpoints.interchange",
    "Checkpoints go into `single` and come from `single`, model and optimizer exactly.",
    mistake="keys, shapes or values in a checkpoint are the strategy's own (see checkpoints.keys and .shapes); or "
    "state_loaded relies on something that only its own checkpoints hold",
    needs=("resharding",),
)
def interchange(lab: Lab, ranks: int) -> None:
    """Both ways; the next steps are those of the uninterrupted run."""
    exact = lab.promises("exact", ranks)
    own = predictable(lab, ranks)
    run = lab.done(_go_on(1, checkpoint_of(own, 2), subject=False, states=(2, 4), **PREDICTABLE))
    _goes_on(exact, run, own, "with `single` what this strategy had saved")
    reference = predictable(lab, 1, subject=False)
    run = lab.done(_go_on(ranks, checkpoint_of(reference, 2), states=(2, 4), **PREDICTABLE))
    _goes_on(exact, run, reference, "what `single` had saved")


def _goes_on(exact: bool, run: Run, saved: Run, what: str) -> None:
    """`run`, resumed from step 2 of `saved`, has its state bit for bit and goes on as `saved` did, up to rounding."""
    equal_bitwise(*comparable(run.whole(2), saved.whole(2)), f"the state after resuming {what}")
    if not exact:
        return
    for rank, trace in run.traces.items():
        for record, right in zip(trace.records, saved.first.records[2:], strict=True):
            if not abs(record.loss - right.loss) <= TOLERANCE * abs(right.loss):
                raise Mismatch(
                    f"a loss of {right.loss:.9g} at step {right.global_step}, having resumed {what}",
                    f"{record.loss:.9g} on rank {rank}",
                )
    model = [{k: t for k, t in whole.items() if k.startswith("model/")} for whole in (run.whole(4), saved.whole(4))]
    equal_within(model[0], model[1], TOLERANCE, f"weights after step 4, having resumed {what}")
