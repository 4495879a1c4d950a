"""For tests of strategy `tp`: the settings of a small training, and what ranks hold of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtb_core import Result
from mtb_kit.held import RankHeld, run_held, whole

__all__ = ["TINY", "RankHeld", "trained", "whole"]

TINY: dict[str, Any] = {
    "seq_length": 8,
    "vocab_size": 64,
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
