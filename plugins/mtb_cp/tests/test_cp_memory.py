"""Activations that ranks save for backward where they share sequences, as autograd has them."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from mtb_core import Loss, Prepared, TrainConfig, hookimpl, run

LENGTH, WIDTH, LAYERS = 512, 32, 2


class SavedForBackward:
    """Counts the bytes of all storages that the first step's forward saves, but for those of parameters."""

    def __init__(self) -> None:
        self._largest = 0

    @hookimpl(wrapper=True)
    def mtb_accumulate(self, prepared: Prepared) -> Generator[None, Loss, Loss]:
        own = {p.untyped_storage().data_ptr() for p in prepared.trainable}
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = yield
        self._largest = max(self._largest, sum(saved.values()))
        return loss

    @hookimpl
    def mtb_result(self) -> dict[str, int]:
        return {"bytes": self._largest}


def saved(folder: Path, ranks: int, **options: Any) -> int:
    """Bytes on rank 0 in a step of one sample."""
    config = TrainConfig(
        strategy="cp" if options else "single",
        strategy_opt=options,
        nproc=ranks,
        seq_length=LENGTH,
        vocab_size=64,
        d_model=WIDTH,
        n_heads=2,
        n_layers=LAYERS,
        global_batch_size=1,
        warmup_steps=0,
        steps=2,
        device="cpu",
        run_dir=str(folder / "-".join([str(ranks), *options.values()])),
    )
    result = run(config, quiet=True, plugins={"saved": SavedForBackward})
    assert result.exit_reason == "done", result.failure
    found: int = next(iter(result.plugin_results.values()))["bytes"]
    return found


@pytest.mark.slow
def test_activations_are_shared(tmp_path: Path) -> None:
    """A rank of a ring saves its share. Gathered attention saves more, exactly as documented.

    That is keys and values of other ranks in each layer, the result of each part beside the joined one, and one mask.
    """
    alone = saved(tmp_path, 1)
    for ranks in (2, 4):
        ring, gather = (saved(tmp_path, ranks, attention=name) for name in ("ring", "gather"))
        assert ring <= 1.02 * alone / ranks
        activation, part = LENGTH * WIDTH * 4, LENGTH // (2 * ranks)
        others, results, mask = 2 * activation * (ranks - 1) // ranks, activation // ranks, part * LENGTH * 4
        assert gather - ring == pytest.approx(LAYERS * (others + results) + mask, rel=0.02)
