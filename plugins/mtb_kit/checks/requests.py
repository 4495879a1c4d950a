"""Checks of the group ``failures`` about requests of run plugins: one rank asks, and all ranks act alike."""

from __future__ import annotations

from mtb_core.ckpt import catalog
from mtb_kit.checking import check
from mtb_kit.checks.checkpoints import PREDICTABLE
from mtb_kit.episodes import episode
from mtb_kit.lab import Lab, Run
from mtb_kit.probes_requests import Asks
from mtb_kit.states import Mismatch, equal_bitwise

#: Steps of the requests. The end saves too, so it comes later than the step after the one that is to be saved.
_SKIPPED, _SAVED, _LAST = 1, 2, 4


@check(
    "failures.requests",
    "What a run plugin asks for on one rank (to skip, to save, to finish) all ranks do, after the same step.",
    mistake="all_sum(prepared, vector) must give the sum over all ranks on all of them: votes are part of it; or "
    "optimizer_step(prepared, apply=False) is not left out",
)
def requests(lab: Lab, ranks: int) -> None:
    """The last rank asks, in three steps of eight."""
    folder = lab.folder / f"requests-{ranks}"
    asked = Asks(ranks - 1, ((_SKIPPED, "skip"), (_SAVED, "save"), (_LAST, "finish")))
    run = lab.done(episode(ranks, states=(0, 1), probes=(asked,), steps=8, checkpoint_dir=str(folder)))
    for rank, trace in run.traces.items():
        steps = [record.global_step for record in trace.records]
        # A request reaches the agreement of the step during which it was made, or of the next one.
        if len(steps) not in (_LAST, _LAST + 1) or steps != [r.global_step for r in run.first.records]:
            raise Mismatch(
                f"an end after step {_LAST} or the next one, on all ranks", f"rank {rank} took steps {steps}"
            )
        skipped = [record.global_step for record in trace.records if record.skipped]
        if skipped not in ([_SKIPPED], [_SKIPPED + 1]) or skipped != _skipped(run):
            raise Mismatch(f"step {_SKIPPED} or the next one to be skipped, on all ranks", f"rank {rank}: {skipped}")
    if _skipped(run) == [_SKIPPED]:
        equal_bitwise(run.whole(1), run.whole(0), "the state after a skipped step")
    saved = [found.step for found in catalog.list_steps(folder) if found.ready]
    if not set(saved) & {_SAVED, _SAVED + 1}:
        raise Mismatch(f"a checkpoint of step {_SAVED} or the next one", f"checkpoints of steps {saved}")
    if not run.result["stop_reason"]:
        raise Mismatch("the words of the rank that asked as 'stop_reason'", f"{run.result['stop_reason']}")


def _skipped(run: Run) -> list[int]:
    return [record.global_step for record in run.first.records if record.skipped]


@check(
    "failures.roll_back",
    "Going back to a checkpoint, asked for on one rank, gives the state and the data of then on all ranks.",
    mistake="state_loaded(prepared, state) must work in the middle of a run too: what is derived from the pieces, and "
    "what the strategy keeps beside them, must be as after a resume",
)
def roll_back(lab: Lab, ranks: int) -> None:
    """Back from step 3 to the checkpoint before it, and on: the end is that of the run without it, bit for bit."""
    settings = {**PREDICTABLE, "save_every": 1, "keep_last": 0, "async_save": False}
    asked = Asks(ranks - 1, ((3, "roll_back"),))
    folder, exact = str(lab.folder / f"back-{ranks}"), lab.promises("exact_resume", ranks)
    run = lab.done(episode(ranks, states=(4,), probes=(asked,), checkpoint_dir=folder, **settings))
    for rank, trace in run.traces.items():
        steps = [record.global_step for record in trace.records]
        back = next((i for i in range(1, len(steps)) if steps[i] <= steps[i - 1]), None)
        if back is None or steps != [r.global_step for r in run.first.records] or steps[-1] != 4:
            raise Mismatch("all ranks to go back and take steps again", f"rank {rank} took steps {steps}")
        names = ("samples_seen", "tokens_seen", *(("loss",) if exact else ()))
        again = {record.global_step: record for record in trace.records[back:]}
        for record in trace.records[:back]:
            for name in names if record.global_step in again else ():
                before, after = (getattr(r, name) for r in (record, again[record.global_step]))
                if after != before:
                    step = record.global_step
                    raise Mismatch(f"{name} {before} again in step {step} on rank {rank}", f"{after} after going back")
    if exact:
        whole = lab.done(episode(ranks, states=(4,), **PREDICTABLE)).whole(4)
        equal_bitwise(run.whole(4), whole, "the state after going back and taking the steps again")
