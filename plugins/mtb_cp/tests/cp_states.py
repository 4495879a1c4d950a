"""For tests of strategy `cp`: the settings of a small training, and what ranks hold of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from mtb_core import Result
from mtb_kit.held import RankHeld, run_held, whole

__all__ = ["TINY", "RankHeld", "text", "trained", "whole"]

#: 22 samples and one with 5 targets, in an order of its own each epoch; the last step of an epoch has 7 samples.
TEXT_BYTES = 22 * 16 + 6
TINY: dict[str, Any] = {
    "seq_length": 16,
    "vocab_size": 256,
    "d_model": 16,
    "n_heads": 2,
    "n_layers": 2,
    "global_batch_size": 8,
    "learning_rate": 3e-3,
    "max_grad_norm": 0.5,
    "warmup_steps": 0,
    "device": "cpu",
}


def trained(folder: Path, **settings: Any) -> tuple[Result, list[RankHeld]]:
    """Run `settings` over `TINY`, with a checkpoint at the end; the result and each rank's view."""
    return run_held(folder, {**TINY, **settings})


def text(folder: Path) -> str:
    """A file of random bytes; the last of its samples is short."""
    path = folder / "text.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(random.Random(0).randbytes(TEXT_BYTES).replace(b"\0", b"1"))
    return str(path)
