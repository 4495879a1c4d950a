"""Checks of the group ``checkpoints`` about resuming with other settings than the usual ones: bf16, SGD, buffers."""

from __future__ import annotations

from typing import Any

from mtb_kit.checking import check
from mtb_kit.checks.checkpoints import EVENTFUL
from mtb_kit.episodes import episode
from mtb_kit.lab import Lab
from mtb_kit.saved import checkpoint_of
from mtb_kit.states import equal_bitwise


def _goes_on_alike(lab: Lab, ranks: int, what: str, **settings: Any) -> None:
    """Three steps, and the third once more from the checkpoint of the second."""
    asked = {**EVENTFUL, **settings}
    saved = lab.done(
        episode(
            ranks,
            states=(2, 3),
            **asked,
            steps=3,
            checkpoint_dir=str(lab.folder / f"{what}-{ranks}"),
            save_every=2,
            keep_last=0,
            async_save=False,
        )
    )
    run = lab.done(
        episode(ranks, states=(2, 3), **asked, steps=None, until_step=3, resume=str(checkpoint_of(saved, 2)))
    )
    equal_bitwise(run.whole(2), saved.whole(2), f"the state with {what}, right after resuming from step 2")
    if lab.promises("exact_resume", ranks):
        equal_bitwise(run.whole(3), saved.whole(3), f"the state with {what}, a step after resuming from step 2")


@check(
    "checkpoints.bf16_resume",
    "With --precision bf16 a resumed run goes on from the fp32 weights that were saved, bit for bit.",
    mistake="fp32 masters are made anew from the bf16 weights in state_loaded: it must be the other way round",
    ranks="most",
    needs=("bf16",),
)
def bf16_resume(lab: Lab, ranks: int) -> None:
    """See the title."""
    _goes_on_alike(lab, ranks, "bf16", precision="bf16")


@check(
    "checkpoints.sgd_resume",
    "With SGD a resumed run goes on with the momentum that was saved, bit for bit.",
    mistake="what is saved, loaded or renewed knows the state of AdamW only: take every tensor that the optimizer keeps",
    ranks="most",
)
def sgd_resume(lab: Lab, ranks: int) -> None:
    """See the title."""
    _goes_on_alike(lab, ranks, "sgd", optimizer="sgd", momentum=0.9, learning_rate=0.1)


@check(
    "checkpoints.buffers",
    "A resumed run goes on with the buffers that were saved, bit for bit.",
    mistake="state(prepared) gave copies of buffers, so what was loaded went nowhere; or they are set anew in state_loaded",
    ranks="most",
    needs=("custom_models",),
)
def buffers(lab: Lab, ranks: int) -> None:
    """See the title."""
    _goes_on_alike(lab, ranks, "buffers", model="kit-buffers", dropout=0.0)
