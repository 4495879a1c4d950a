"""The order in which strategy `pp` works: its schedules, and when it communicates over data-parallel ranks."""

from __future__ import annotations

import pickle
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pp_states import TINY

from mtb_core import Job, Prepared, Result, TrainConfig, hookimpl, run


class Watch:
    """Writes down, in order: forwards (F) and backwards (B) of this rank's first block, and buckets that are reduced."""

    def __init__(self, folder: Path, buckets: bool) -> None:
        self._folder, self._buckets, self._events, self._rank = folder, buckets, [], -1

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Generator[None, Prepared, Prepared]:
        prepared = yield
        self._rank = job.ctx.rank
        blocks = [m for n, m in prepared.core.named_modules() if n in job.model.blocks]
        blocks[0].register_forward_hook(self._after_forward)
        first = next(prepared.core.parameters())
        first.register_post_accumulate_grad_hook(lambda _: self._events.append("first layer"))
        if self._buckets:
            assert job.ctx.mesh is not None
            group = job.ctx.mesh["dp"].get_group()
            wrapped: Any = prepared.module[0]  # type: ignore[index]
            wrapped.register_comm_hook(None, lambda _, bucket: self._reduce(bucket, group))
        return prepared

    def _after_forward(self, module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        self._events.append("F")
        output.register_hook(lambda _: self._events.append("B"))

    def _reduce(self, bucket: torch.distributed.GradBucket, group: torch.distributed.ProcessGroup) -> Any:
        self._events.append(bucket.index())
        reduced = torch.distributed.all_reduce(bucket.buffer().div_(2), group=group, async_op=True).get_future()
        return reduced.then(lambda done: done.value()[0])

    @hookimpl(wrapper=True)
    def mtb_close(self, prepared: Prepared) -> Generator[None, None, None]:
        (self._folder / f"{self._rank}.pickle").write_bytes(pickle.dumps(self._events))
        yield


def watched(folder: Path, *, buckets: bool = False, **settings: Any) -> tuple[Result, list[list[Any]]]:
    """The result of one step, and the events of each rank."""
    values = {**TINY, "strategy": "pp", "grad_accum_steps": 4, "steps": 1, "optimizer": "sgd", **settings}
    config = TrainConfig(**values, run_dir=str(folder / "run"))
    result = run(config, quiet=True, plugins={"watch": partial(Watch, folder, buckets)})
    assert result.exit_reason == "done", result.failure
    return result, [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(config.nproc)]


@pytest.mark.parametrize(
    ("options", "orders", "share"),
    [
        ({"schedule": "1f1b"}, ["FFBFBFBB", "FBFBFBFB"], 1 / 5),
        pytest.param({"schedule": "gpipe"}, ["FFFFBBBB", "FFFFBBBB"], 1 / 5, marks=pytest.mark.slow),
        pytest.param({"schedule": "interleaved"}, ["FFFFBBBB", "FFFBFBBB"], 1 / 9, marks=pytest.mark.slow),
    ],
    ids=["1f1b", "gpipe", "interleaved"],
)
def test_schedules(options: dict[str, Any], orders: list[str], share: float, tmp_path: Path) -> None:
    """The first block's forwards and backwards come in the schedule's order, whose bubble is that of the formula."""
    result, events = watched(tmp_path, nproc=2, strategy_opt=options)
    seen = ["".join(e for e in rank if e in ("F", "B")) for rank in events]
    assert seen == orders
    bubble = result.strategy_facts["bubble"]
    assert bubble["simulated"] == pytest.approx(share)
    assert bubble["by_formula"] == pytest.approx(share)
    assert result.strategy_facts["micro_batches"] == 4
    assert [stage["parameters"] > 0 for stage in result.strategy_facts["stages"]] == [True] * (4 if share < 0.2 else 2)


@pytest.mark.parametrize("mode", ["last", pytest.param("every", marks=pytest.mark.slow)])
def test_buckets_are_reduced_while_backward_runs(mode: str, tmp_path: Path) -> None:
    """Copies of a stage begin to sum gradients before backward has reached its first layer.

    In the last backward of a step only, or in every one.
    """
    large = {"d_model": 128, "nproc": 4, "strategy_opt": {"pp": 2}, "gradient_sync_mode": mode}
    _, events = watched(tmp_path, buckets=True, **large)
    for rank in events:
        backwards = "".join("r" if isinstance(e, int) else "l" if e == "first layer" else "" for e in rank)
        one = backwards[-3:]
        assert one == "rlr", "the first of two buckets is on its way before the first layer has its gradient"
        assert backwards == (one * 4 if mode == "every" else "lll" + one)


@pytest.mark.parametrize(
    ("mode", "precision"), [("last", "bf16"), pytest.param("every", "fp32", marks=pytest.mark.slow)]
)
def test_shards_of_a_stage_are_summed_as_asked(mode: str, precision: str, tmp_path: Path) -> None:
    """FSDP2 sums each element of this stage's gradients once a step, or once a micro-batch; and gathers for each one.

    Sums are in fp32, activations travel in the precision in which they are computed.
    """
    result, _ = watched(
        tmp_path,
        nproc=4,
        strategy_opt={"pp": 2, "data_parallel": "fsdp"},
        gradient_sync_mode=mode,
        precision=precision,
        warmup_steps=2,
    )
    times = 4 if mode == "every" else 1
    units = 3  # two blocks, and what is around them
    assert result.collectives_per_step == {
        "all_gather": 4 * (2 * units - 1),  # the outer unit stays gathered between its forward and backward
        "reduce_scatter": times * units,
        "send": 4,
        "recv": 4,
        "agreement": 1,
    }
    elements = result.strategy_facts["stages"][0]["parameters"]
    assert (result.comm_bytes_per_step or {})["reduce_scatter"] == times * elements * 4
    size = 2 if precision == "bf16" else 4
    assert (result.comm_bytes_per_step or {})["send"] == 4 * size * TINY["seq_length"] * TINY["d_model"]
