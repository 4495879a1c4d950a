"""What is sent in a step, counted on real collectives, and what is allocated to save and load."""

from __future__ import annotations

import pickle
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtb_core import Job, Prepared, Result, State, TrainConfig, hookimpl, run

TINY: dict[str, Any] = {
    "strategy": "deepspeed",
    "nproc": 2,
    "seq_length": 8,
    "vocab_size": 64,
    "d_model": 16,
    "n_heads": 2,
    "n_layers": 2,
    "global_batch_size": 8,
    "warmup_steps": 3,
    "steps": 1,
    "device": "cpu",
    "sink": ("jsonl",),
}
STAGE_3 = {
    "stage": 3,
    "param_persistence_threshold": 0,
    "max_live_parameters": 0,
    "max_reuse_distance": 0,
    "prefetch_bucket_size": 0,
}


def trained(folder: Path, **settings: Any) -> Result:
    """A short run, which must succeed."""
    result = run(TrainConfig(**{**TINY, **settings, "run_dir": str(folder / "run")}), quiet=True)
    assert result.exit_reason == "done", result.failure
    return result


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_bytes_of_stages_0_to_2(stage: int, accumulation: int, tmp_path: Path) -> None:
    """Gradients: one all-reduce a step, at stage 2 one a micro-batch. Weights: one all-gather a step from stage 1 on."""
    result = trained(tmp_path, strategy_opt={"stage": stage}, grad_accum_steps=accumulation)
    sent = dict(result.comm_bytes_per_step or {})
    del sent["agreement"]
    reductions = accumulation if stage == 2 else 1
    expected = {"all_reduce": reductions * 4 * result.parameters}
    if stage:
        expected["all_gather"] = 4 * result.parameters
    assert sent == pytest.approx(expected, rel=1e-2)  # padding
    assert result.synchronized_microbatches_per_step == reductions


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2)])
def test_bytes_of_stage_3(precision: str, size: int, tmp_path: Path) -> None:
    """A micro-batch gathers the weights twice, for forward and backward, and reduce-scatters the gradients once."""
    result = trained(tmp_path, strategy_opt=STAGE_3, grad_accum_steps=2, precision=precision)
    sent = result.comm_bytes_per_step or {}
    assert sent["all_gather"] == pytest.approx(2 * 2 * size * result.parameters, rel=1e-2)
    assert sent["reduce_scatter"] == pytest.approx(2 * size * result.parameters, rel=1e-2)
    assert set(sent) <= {"all_gather", "reduce_scatter", "agreement", "all_reduce"}
    assert sent.get("all_reduce", 0) < 100  # DeepSpeed's own norm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "gathers"),
    [
        ({}, 1),  # all parameters are small, and stay gathered till they are updated
        ({"param_persistence_threshold": 0}, 2),
        ({"param_persistence_threshold": 0, "max_reuse_distance": 0}, 2),
        ({"param_persistence_threshold": 0, "prefetch_bucket_size": 0}, 2),
        ({"param_persistence_threshold": 0, "max_reuse_distance": 0, "max_live_parameters": 0}, 4),
        ({"param_persistence_threshold": 0, "max_reuse_distance": 0, "prefetch_bucket_size": 0}, 4),
    ],
    ids=str,
)
def test_what_saves_gathering(options: dict[str, int], gathers: int, tmp_path: Path) -> None:
    """In a step of two micro-batches weights are gathered four times, twice or once, by what keeps them."""
    result = trained(tmp_path, strategy_opt={"stage": 3, **options}, grad_accum_steps=2)
    sent = result.comm_bytes_per_step or {}
    assert sent["all_gather"] == pytest.approx(gathers * 4 * result.parameters, rel=2e-2)


class Allocations(TorchDispatchMode):
    """Bytes of all storages that operators make inside, whether they are freed again or not."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs or {}))}
        made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _tensors(result)}
        self.bytes += sum(size for key, size in made.items() if key not in given)
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, list | tuple) else []


class Watch:
    """Counts what a rank allocates from asking for its state until that is published, or loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._rank = folder, -1
        self._mode: Allocations | None = None
        self._found: dict[str, int] = {}

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Generator[None, Prepared, Prepared]:
        self._rank = job.ctx.rank
        return (yield)

    @hookimpl(wrapper=True)
    def mtb_state(self, prepared: Prepared) -> Generator[None, State, State]:
        self._stop("preflight")
        state = yield
        pieces = [piece.tensor for key in state.pieces for piece in state.pieces[key]]
        self._found["shard"] = sum(tensor.numel() * tensor.element_size() for tensor in pieces)
        self._mode = Allocations()
        self._mode.__enter__()
        return state

    @hookimpl(wrapper=True)
    def mtb_state_loaded(self, prepared: Prepared, state: State) -> Generator[None, None, None]:
        yield
        self._stop("load")

    @hookimpl
    def mtb_checkpoint_published(self) -> None:
        self._stop("save")

    @hookimpl
    def mtb_run_finished(self) -> None:
        (self._folder / f"{self._rank}.pickle").write_bytes(pickle.dumps(self._found))

    def _stop(self, name: str) -> None:
        if self._mode is not None:
            mode, self._mode = self._mode, None
            mode.__exit__(None, None, None)
            self._found[name] = mode.bytes


@pytest.mark.parametrize("options", [{"stage": 1}, {"stage": 2}, STAGE_3], ids=str)
def test_no_rank_gathers_the_state(options: dict[str, Any], tmp_path: Path) -> None:
    """To save and to load, a rank allocates less than 1.2 of its own part plus one parameter, all told."""
    settings = {**TINY, "nproc": 3, "global_batch_size": 6, "async_save": False, "strategy_opt": options}
    settings |= {"checkpoint_dir": str(tmp_path / "checkpoints"), "save_every": 2, "warmup_steps": 0, "d_model": 32}
    largest = 4 * 4 * 32 * 32
    for leg, more in enumerate([{"steps": 2}, {"steps": 2, "resume": "latest"}]):
        folder = tmp_path / str(leg)
        folder.mkdir()
        config = TrainConfig(**{**settings, **more, "run_dir": str(folder / "run")})
        result = run(config, quiet=True, plugins={"watch": partial(Watch, folder)})
        assert result.exit_reason == "done", result.failure
        for rank in range(3):
            found = pickle.loads((folder / f"{rank}.pickle").read_bytes())
            assert found["shard"] < 0.4 * 12 * result.parameters
            for what in ("save", "load")[: leg + 1]:
                assert found[what] < 1.2 * found["shard"] + largest, (what, found)
