"""Checks of the group ``checkpoints`` about saving itself: snapshots, crashes, the order of publication, damage."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mtb_checkpoint import verify_checkpoint
from mtb_core.api.errors import MtbError
from mtb_core.ckpt import catalog
from mtb_core.ckpt.layout import READY, step_name
from mtb_core.ckpt.publish import RANK_POINTS
from mtb_kit.checking import check
from mtb_kit.checks.checkpoints import EVENTFUL, saving
from mtb_kit.episodes import episode
from mtb_kit.lab import Lab, Run
from mtb_kit.probes_checkpoints import Draws, HoldWriter, KillInSave, WatchFolder, incompleteness, start_note
from mtb_kit.saved import checkpoint_of, opened, stored
from mtb_kit.states import Mismatch, Whole, equal_bitwise


def _held_up(lab: Lab, ranks: int) -> Run:
    """The run of `saving` with asynchronous saves after steps 2 and 4, of which the first is held up until step 4."""
    return lab.done(
        episode(
            ranks,
            states=(2, 4),
            probes=(Draws(), HoldWriter(4)),
            **EVENTFUL,
            checkpoint_dir=str(lab.folder / f"held-{ranks}"),
            save_every=2,
            keep_last=0,
            async_save=True,
        )
    )


@check(
    "checkpoints.snapshot",
    "An asynchronous checkpoint holds the step of its save, though training goes on before a byte is written.",
    mistake="what is saved shares memory with what is trained: pieces are copied by core when the save begins, so nothing "
    "in them may be filled in later, and nothing may keep core from copying",
    ranks="most",
)
def snapshot(lab: Lab, ranks: int) -> None:
    """The writer is held up until two more steps were taken."""
    run = _held_up(lab, ranks)
    for rank, trace in run.traces.items():
        if trace.notes.get("released") != 4:
            raise Mismatch(
                "a writer that is held up until step 4 was recorded",
                f"on rank {rank} it began after step {trace.notes.get('released')}",
            )
    if lab.promises("sums_gradients", ranks):
        equal_bitwise(stored(checkpoint_of(run, 2)), run.whole(2), "the checkpoint of step 2, written after step 4")


@check(
    "checkpoints.async_agrees",
    "Asynchronous and synchronous saves of a step hold the same tensors.",
    mistake="state(prepared) behaves differently while a save is in flight, or changes what it gives afterwards",
    ranks="most",
)
def async_agrees(lab: Lab, ranks: int) -> None:
    """Each against the state of its own run and, where runs repeat bit for bit, one against the other."""
    held, plain = _held_up(lab, ranks), saving(lab, ranks)
    for step in (2, 4):
        seen, expected = stored(checkpoint_of(held, step)), stored(checkpoint_of(plain, step))
        if lab.promises("sums_gradients", ranks):
            equal_bitwise(seen, held.whole(step), f"the asynchronous checkpoint of step {step}")
            equal_bitwise(expected, plain.whole(step), f"the synchronous checkpoint of step {step}")
        if lab.promises("exact_resume", ranks):
            equal_bitwise(seen, expected, f"the asynchronous checkpoint of step {step} against the synchronous one")


@check(
    "checkpoints.publish_order",
    "At every instant of a save, what bears the mark READY is complete: the mark comes after all that it stands for.",
    mistake="something other than core's publication writes into the folder of checkpoints, or the mark was written early",
    ranks="most",
)
def publish_order(lab: Lab, ranks: int) -> Mapping[str, Any]:
    """Watched on rank 0 at each of core's fault points."""
    folder = lab.folder / f"watched-{ranks}"
    asked = episode(ranks, probes=(WatchFolder(),), steps=3, checkpoint_dir=str(folder), save_every=1, async_save=False)
    run = lab.run(asked)
    # What was seen first: publication itself may have failed over it.
    looked: list[tuple[str, str, str]] = run.first.notes["publishing"] if 0 in run.traces else []
    for point, name, problem in looked:
        if problem:
            raise Mismatch(f"at '{point}', whatever is READY to be complete", f"{name}: {problem}")
        if name.startswith(".tmp-") and point in (*RANK_POINTS, "manifest-synced"):
            raise Mismatch("READY only after the manifest", f"at '{point}', {name} is READY")
    lab.done(asked)
    for step in (1, 2, 3):
        _verified(folder / step_name(step))
    return {"instants_watched": len(looked)}


def _verified(path: Path) -> None:
    integrity = verify_checkpoint(path)
    if not integrity.ok:
        first = integrity.problems[0]
        raise Mismatch(f"{path.name} to be complete", f"{first.file}: {first.problem}")


@check(
    "checkpoints.incomplete_refused",
    "A checkpoint without its mark, with a missing file or with a changed byte is refused before training.",
    mistake="the strategy loads something by its own means and goes on without it; all that a run resumes from must come "
    "through state(prepared), which core fills after checking every file",
    ranks="most",
)
def incomplete_refused(lab: Lab, ranks: int) -> None:
    """A copy of a checkpoint for each kind of damage."""
    whole = checkpoint_of(saving(lab, ranks), 1)
    for damage in (_without_mark, _without_file, _with_changed_byte):
        path = lab.folder / f"damaged{damage.__name__}-{ranks}" / whole.name
        if not path.exists():
            shutil.copytree(whole, path)
            damage(path)
        what = f"a checkpoint {damage.__name__.replace('_', ' ').strip()} to be refused"
        try:
            run = lab.run(episode(ranks, **EVENTFUL, resume=str(path), steps=None, until_step=2))
        except MtbError:
            continue  # before any rank was started
        if run.exit_reason != "failed":
            raise Mismatch(what, f"the run resumed from it and ended with '{run.exit_reason}'")
        trained = [rank for rank, trace in run.traces.items() if trace.begun]
        if trained:
            raise Mismatch(what, f"ranks {trained} had begun to train before it failed")


def _without_mark(path: Path) -> None:
    (path / READY).unlink()


def _without_file(path: Path) -> None:
    _largest_shard(path).unlink()


def _with_changed_byte(path: Path) -> None:
    shard = _largest_shard(path)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0x10
    shard.write_bytes(data)


def _largest_shard(path: Path) -> Path:
    """The largest file of tensors, whatever the checkpoint format."""
    checkpoint = opened(path)
    names = {chunk.file for entry in checkpoint.entries.values() for chunk in entry.chunks}
    return max((path / name for name in names), key=lambda p: p.stat().st_size)


@check(
    "checkpoints.crash",
    "Whichever rank is killed while it saves, the next run starts from a complete checkpoint.",
    mistake="files are written around core's publication, or what is needed to go on is kept outside of the checkpoint",
    ranks="fewest",
)
def crash(lab: Lab, ranks: int) -> Mapping[str, Any]:
    """One training, killed in the save of every step at another instant: before, between and after the parts of a save.

    Core's own tests go through all instants.
    """
    drills = list(_drills(ranks))
    right = lab.done(episode(ranks, states=tuple(range(len(drills) + 2)), dropout=0.2, steps=len(drills) + 1))
    exact = lab.promises("exact_resume", ranks)
    held = right if exact and lab.promises("sums_gradients", ranks) else None
    folder = lab.folder / f"crashes-{ranks}"
    newest = 0
    with _quiet():
        for number, drill in enumerate(drills):
            # To replace a checkpoint one must go back a step.
            start = newest - 1 if drill.point == "replaced-removed" else newest
            resume = "auto" if start == newest else str(folder / step_name(start))
            run = lab.run(_one_step(ranks, folder, resume, drill, asynchronous=number % 2 == 1))
            where = f"rank {drill.rank} killed at '{drill.point}' in the save of step {start + 1}"
            _was_killed(run, drill, start, where)
            newest = _what_is_left(folder, range(newest, max(newest, start + 1) + 1), held, where)
    last = lab.done(_one_step(ranks, folder, "auto", None, states=(newest, newest + 1)))
    if exact:
        for step in (newest, newest + 1):
            equal_bitwise(last.whole(step), right.whole(step), f"step {step} after {len(drills)} crashes")
    return {"crashes": len(drills), "steps_kept": newest}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that a crash leaves traces, which is what is wanted here."""
    logger = logging.getLogger("mtb.checkpoint")
    former = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(former)


#: Where the last rank is killed, and then rank 0, which publishes.
_LAST_RANK_AT = ("writing", "rank-synced")
_RANK_ZERO_AT = (
    "tensors-written",
    "agreed",
    "manifest-synced",
    "ready-synced",
    "renamed",
    "pruned",
    "replaced-removed",
)


def _drills(ranks: int) -> Iterator[KillInSave]:
    yield from (KillInSave(ranks - 1, point) for point in _LAST_RANK_AT)
    yield from (KillInSave(0, point) for point in _RANK_ZERO_AT)


def _one_step(
    ranks: int,
    folder: Path,
    resume: str,
    drill: KillInSave | None,
    *,
    asynchronous: bool = False,
    states: tuple[int, ...] = (),
) -> Any:
    return episode(
        ranks,
        states=states,
        probes=() if drill is None else (drill,),
        dropout=0.2,
        steps=1,
        checkpoint_dir=str(folder),
        resume=resume,
        save_every=1,
        keep_last=2,
        async_save=asynchronous,
    )


def _was_killed(run: Run, drill: KillInSave, start: int, where: str) -> None:
    failure = run.failure
    if failure is None or (failure.rank, failure.kind) != (drill.rank, "signal SIGKILL"):
        raise Mismatch(f"{where}, and nothing else, to be what ends the run", run.why())
    for rank in range(run.episode.ranks):
        note = start_note(run.folder / "run", rank)
        seen = int(note.read_text()) if note.exists() else None
        if seen != start:
            raise Mismatch(
                f"a start from step {start}, which was complete", f"rank {rank} started from {seen}; {where}"
            )


def _what_is_left(folder: Path, allowed: range, right: Run | None, where: str) -> int:
    """The step of the newest complete checkpoint (0: none), with everything READY verified."""
    for found in catalog.list_steps(folder):
        if found.ready:
            problem = incompleteness(found.path)
            if problem:
                raise Mismatch(f"whatever is READY to be complete, with {where}", f"{found.path.name}: {problem}")
    path = catalog.newest(folder)
    step = 0 if path is None else next(f.step for f in catalog.list_steps(folder) if f.path == path)
    if step not in allowed:
        raise Mismatch(f"a complete checkpoint of one of the steps {list(allowed)}, with {where}", f"step {step}")
    if path is not None and right is not None:
        held: Whole = stored(path)
        equal_bitwise(held, right.whole(step), f"the checkpoint of step {step} left with {where}")
    return step
