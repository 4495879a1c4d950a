"""No rank holds the whole model, its optimizer state or, unless asked to, its gradients: counted in tensor bytes."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mtb_core import Job, MicroBatch, Prepared, TrainConfig, hookimpl
from mtb_core.model.gpt import gpt_spec
from mtb_kit.live import LiveBytes

from .whole import TINY, train

SIZE: dict[str, Any] = {"d_model": 36, "n_layers": 6, "vocab_size": 65}


class Memory:
    """Notes the peak while the model is built, what the optimizer holds, and what is kept between micro-batches."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._rank, self._noted = folder, -1, {"kept": 0}
        self._live = LiveBytes()

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Generator[None, Prepared, Prepared]:
        self._rank = job.ctx.rank
        with self._live:
            prepared = yield
        self._noted["construction"] = self._live.peak
        self._noted["built"] = self._live.now()
        return prepared

    @hookimpl(wrapper=True)
    def mtb_micro_batch(
        self, prepared: Prepared, micro: MicroBatch
    ) -> Generator[None, AbstractContextManager[None], AbstractContextManager[None]]:
        context = yield
        if micro.index == 1:
            self._noted["kept"] = self._settled()
        return _Both(context, self._live)

    def _settled(self) -> int:
        """What lives when gloo's threads have let go of what they sent, which is soon after the collective has ended."""
        lowest = self._live.now()
        for _ in range(50):
            time.sleep(0.01)
            lowest = min(lowest, self._live.now())
        return lowest

    @hookimpl(wrapper=True)
    def mtb_close(self, prepared: Prepared) -> Generator[None, None, None]:
        states = [v for state in prepared.optimizer.state.values() for k, v in state.items() if k != "step"]
        local = [getattr(v, "_local_tensor", v) for v in states]
        self._noted["optimizer"] = sum(t.untyped_storage().nbytes() for t in local)
        (self._folder / f"memory{self._rank}").write_text(json.dumps(self._noted))
        yield


class _Both(AbstractContextManager[None]):
    def __init__(self, first: AbstractContextManager[None], second: AbstractContextManager[Any]) -> None:
        self._first, self._second = first, second

    def __enter__(self) -> None:
        self._first.__enter__()
        self._second.__enter__()

    def __exit__(self, *error: object) -> None:
        self._second.__exit__(*error)
        self._first.__exit__(*error)


def measured(folder: Path, **settings: Any) -> list[dict[str, int]]:
    train(folder, **{**SIZE, "warmup_steps": 0, "steps": 2, **settings}, plugins={"memory": partial(Memory, folder)})
    return [json.loads((folder / f"memory{rank}").read_text()) for rank in range(settings.get("nproc", 1))]


def sizes() -> tuple[int, int, int, int]:
    """Bytes of all parameters, of the padding of their shards on 2 ranks, of a block, and of the largest parameter."""
    spec = gpt_spec(TrainConfig(**{**TINY, **SIZE}))
    with torch.device("meta"):
        module = spec.build()
    parameters = list(module.parameters())
    padding = sum(p[0].numel() * (p.shape[0] % 2) for p in parameters)
    block = sum(p.numel() for p in module.get_submodule(spec.blocks[0]).parameters())
    largest = max(p.numel() for p in parameters)
    return 4 * sum(p.numel() for p in parameters), 4 * padding, 4 * block, 4 * largest


@pytest.mark.parametrize(("strategy", "blocks"), [("fsdp", 1), ("fsdp1", 2)])
def test_construction_and_optimizer(strategy: str, blocks: int, tmp_path: Path) -> None:
    """At 2 ranks: half of the parameters, their padding, one block and one parameter at most; half of the moments.

    `fsdp1` makes a flat copy of the block that it is about to shard.
    """
    whole, padding, block, largest = sizes()
    bound = whole // 2 + padding + blocks * block + largest
    (single,) = measured(tmp_path / "single", strategy="single")
    assert single["construction"] >= whole > bound
    assert single["optimizer"] == 2 * whole
    for rank in measured(tmp_path / "sharded", strategy=strategy, nproc=2):
        assert whole // 2 - padding <= rank["construction"] <= bound
        assert whole - 2 * padding - 64 <= rank["optimizer"] <= whole + 2 * padding


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_last_keeps_whole_gradients(precision: str, tmp_path: Path) -> None:
    """Between micro-batches `every` keeps shards of gradients, `last` whole ones in fp32, and nothing else differs."""
    whole, padding, _, _ = sizes()
    kept = {}
    for mode in ("every", "last"):
        settings = {"nproc": 2, "grad_accum_steps": 2, "gradient_sync_mode": mode, "precision": precision}
        kept[mode] = measured(tmp_path / mode, strategy="fsdp", **settings)[0]["kept"]
    assert kept["last"] - kept["every"] == whole - (whole + padding) // 2
