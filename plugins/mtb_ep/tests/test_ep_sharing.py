"""Ranks that share experts: what they send each other, experts of a user's own, and whom a bad gradient is blamed on."""

from __future__ import annotations

import pickle
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ep_states import TINY, trained, whole

from mtb_core import Job, Prepared, TrainConfig, hookimpl, run

MODELS = Path(__file__).parent / "ep_models.py"
#: Rows of float32 that one block of `TINY` sends through experts in a step on 2 ranks, per choice of a token.
TOKENS = TINY["global_batch_size"] // 2 * TINY["seq_length"]
ROW = TINY["d_model"] * 4
BLOCKS = TINY["n_layers"]


def under(nproc: int, **options: Any) -> dict[str, Any]:
    return {"strategy": "ep", "nproc": nproc, "strategy_opt": options}


@pytest.mark.parametrize(
    ("nproc", "options", "settings", "passes", "size"),
    [
        (2, {}, {}, 4, 4),
        pytest.param(4, {"ep": 2}, {}, 4, 4, marks=pytest.mark.slow),
        pytest.param(4, {}, {"grad_accum_steps": 2}, 4, 4, marks=pytest.mark.slow),
        pytest.param(2, {}, {"activation_checkpointing": True}, 6, 4, marks=pytest.mark.slow),
        pytest.param(2, {}, {"precision": "bf16"}, 4, 2, marks=pytest.mark.slow),
    ],
    ids=["ep2", "ep2-dp2", "ep4", "checkpointing", "bf16"],
)
def test_bytes_of_an_even_exchange(
    nproc: int, options: dict[str, Any], settings: dict[str, Any], passes: int, size: int, tmp_path: Path
) -> None:
    """Where every token goes to every expert, an all-to-all moves tokens x k rows, (ep - 1) / ep of them to others.

    There are four in a block and micro-batch: to the experts and back, and both once more for the gradients; with
    activation checkpointing the first two come twice.
    """
    moe = {"model_opt": {**TINY["model_opt"], "top_k": 4}}
    result, _ = trained(
        tmp_path / "run", **under(nproc, **options), **moe, **settings, warmup_steps=2, steps=1, save_every=0
    )
    ep, dp = options.get("ep", nproc), nproc // options.get("ep", nproc)
    micros = settings.get("grad_accum_steps", 1)
    rows = TINY["global_batch_size"] // nproc * TINY["seq_length"] * 4
    moved = passes * BLOCKS * rows * TINY["d_model"] * size
    calls, sizes = result.collectives_per_step, result.comm_bytes_per_step
    assert calls is not None
    assert sizes is not None
    assert calls["all_to_all"] == passes * BLOCKS * micros
    assert sizes["all_to_all"] == moved
    assert result.strategy_facts["all_to_all_bytes_per_step"] == moved * (ep - 1) // ep
    assert calls["all_gather"] == (passes // 2 - 1) * BLOCKS * micros
    assert sizes["all_gather"] == calls["all_gather"] * ep * 4 * 8
    assert calls["all_reduce"] == 1 + (2 * BLOCKS if dp > 1 else 0)
    experts = BLOCKS * 2 * 4 * TINY["d_model"] * 24
    assert sizes["all_reduce"] == 4 * (result.parameters - experts + (experts // ep if dp > 1 else 0))


def test_bytes_and_imbalance_of_crowded_experts(tmp_path: Path) -> None:
    """Where all tokens go to experts of rank 0, it sends the other's rows back, and computes twice the mean."""
    settings = {**under(2), "model": f"{MODELS}:crowded", "model_opt": {}, "warmup_steps": 2, "steps": 2}
    result, seen = trained(tmp_path / "run", **settings, save_every=0)
    assert result.strategy_facts == {
        "dp": 1,
        "ep": 2,
        "experts_per_rank": 2,
        "all_to_all_bytes_per_step": 2 * BLOCKS * TOKENS * 2 * ROW,
    }
    assert result.comm_bytes_per_step is not None
    assert result.comm_bytes_per_step["all_to_all"] == 4 * BLOCKS * 2 * TOKENS * 2 * ROW
    for record in seen[0].records:
        assert record.metrics["rank_imbalance"] == pytest.approx(2.0)
        assert record.metrics["load_imbalance"] == pytest.approx(2.0)
        assert record.metrics["router_entropy"] == pytest.approx(torch.tensor(4.0).log().item())


@pytest.mark.parametrize("how", [under(2), pytest.param(under(4, ep=2), marks=pytest.mark.slow)], ids=["ep2", "dp2"])
def test_experts_of_a_users_own(how: dict[str, Any], tmp_path: Path) -> None:
    """Experts with biases, tied and frozen parameters, of a model that fills itself, train as under `single`."""
    common = {"model": f"{MODELS}:own", "model_opt": {}, "optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.1}
    _, expected = trained(tmp_path / "single", strategy="single", **common, until_step=6)
    _, seen = trained(tmp_path / "ep", **how, **common, until_step=6, grad_accum_steps=2)
    wanted, found = whole([expected[0].ended]), whole([s.ended for s in seen])
    assert found.keys() == wanted.keys()
    assert "model/blocks.1.experts.weight" not in found
    for key, tensor in wanted.items():
        assert (found[key] - tensor).norm() <= 1e-5 * tensor.norm().clamp(min=1e-3), key
    assert seen[0].losses == pytest.approx(expected[0].losses, rel=1e-5)


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ("without", "needs a model with experts, and this one names none"),
        ("five", "5 experts cannot be shared by ep=2 ranks; valid: 1, 5"),
    ],
)
def test_models_that_are_refused(factory: str, text: str, tmp_path: Path) -> None:
    """The message says what is missing, or which degrees are valid."""
    settings = {**TINY, **under(2), "model": f"{MODELS}:{factory}", "model_opt": {}, "steps": 1}
    result = run(TrainConfig(**settings, run_dir=str(tmp_path / "run")), quiet=True)
    assert result.failure is not None
    assert text in result.failure["message"]


@pytest.mark.parametrize("how", [under(2), pytest.param(under(4, ep=2), marks=pytest.mark.slow)], ids=["ep2", "dp2"])
def test_the_rank_of_a_bad_gradient_is_named(how: dict[str, Any], tmp_path: Path) -> None:
    """Gradients that are infinite on rank 1 spoil the experts of rank 0 too, but it is rank 1 that is named."""
    settings = {**TINY, **how, "model": f"{MODELS}:spoiled", "model_opt": {}, "steps": 3}
    result = run(TrainConfig(**settings, run_dir=str(tmp_path / "run")), quiet=True)
    assert result.failure is not None
    assert (result.failure["kind"], result.failure["rank"], result.failure["step"]) == ("NonFinite", 1, 2)


class Order:
    """Notes, in order, when experts' gradients are sent in a step, and when the first layer has its gradient."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._events, self._rank = folder, [], -1

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Generator[None, Prepared, Prepared]:
        self._rank = job.ctx.rank
        plain = dist.all_reduce

        def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.dim() == 3:
                self._events.append("experts")
            return plain(tensor, *args, **kwargs)

        dist.all_reduce = noted
        prepared = yield
        first = next(prepared.core.parameters())
        first.register_post_accumulate_grad_hook(lambda _: self._events.append("first layer"))
        return prepared

    @hookimpl(wrapper=True)
    def mtb_close(self, prepared: Prepared) -> Generator[None, None, None]:
        (self._folder / f"{self._rank}.order").write_bytes(pickle.dumps(self._events))
        yield


def test_experts_are_summed_while_backward_runs(tmp_path: Path) -> None:
    """Every gradient of experts is on its way before backward has reached the first layer, once a step."""
    settings = {**TINY, **under(2, ep=1), "steps": 2, "grad_accum_steps": 2, "run_dir": str(tmp_path / "run")}
    result = run(TrainConfig(**settings), quiet=True, plugins={"order": partial(Order, tmp_path)})
    assert result.exit_reason == "done", result.failure
    for rank in range(2):
        events = pickle.loads((tmp_path / f"{rank}.order").read_bytes())
        assert events == ["first layer", *["experts"] * 2 * BLOCKS, "first layer"] * 2
