"""Model `moe` trains alike under every strategy, and strategy `ep` trains what `single` trains, on any degrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ep_states import TINY, RankHeld, trained, whole

from mtb_core import Result

OPTIMIZERS = {
    "adamw": {"optimizer": "adamw", "adam_eps": 1e-6, "learning_rate": 1e-3},
    "sgd": {"optimizer": "sgd", "learning_rate": 0.1},
}
CAPACITY = {"model_opt": {**TINY["model_opt"], "capacity_factor": 1.0}}
ONE = {"model_opt": {**TINY["model_opt"], "top_k": 1}}
TIED = {"tie_embeddings": True, "qk_norm": True}


def under(strategy: str, nproc: int, options: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    return {"strategy": strategy, "nproc": nproc, "strategy_opt": options or {}, **settings}


#: (settings that decide what is trained, how it is trained)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "single-accumulate": ({}, under("single", 1, grad_accum_steps=4)),
    "ep2": ({}, under("ep", 2, grad_accum_steps=2)),
    "ep4": ({}, under("ep", 4)),
    "ep2-dp2": ({}, under("ep", 4, {"ep": 2}, grad_accum_steps=2)),
    "ep2-dp2-every": ({}, under("ep", 4, {"ep": 2}, grad_accum_steps=2, gradient_sync_mode="every")),
    "ep2-dp2-checkpointing": ({}, under("ep", 4, {"ep": 2}, grad_accum_steps=2, activation_checkpointing=True)),
    "ep1-dp2": ({}, under("ep", 2, {"ep": 1}, grad_accum_steps=2)),
    "ep1-dp1": ({}, under("ep", 1, grad_accum_steps=2)),
    "ep2-capacity": (CAPACITY, under("ep", 2, grad_accum_steps=2)),
    "ep2-dp2-capacity-tied": ({**CAPACITY, **TIED}, under("ep", 4, {"ep": 2}, grad_accum_steps=2)),
    "ep4-one": (ONE, under("ep", 4)),
    "ddp2": ({}, under("ddp", 2, grad_accum_steps=2)),
    "ddp2-capacity": (CAPACITY, under("ddp", 2, activation_checkpointing=True)),
    "fsdp2": ({}, under("fsdp", 2, grad_accum_steps=2)),
    "fsdp3-checkpointing": ({"global_batch_size": 12}, under("fsdp", 3, activation_checkpointing=True)),
    "deepspeed1": ({}, under("deepspeed", 2, {"stage": 1}, grad_accum_steps=2)),
    "deepspeed3": (CAPACITY, under("deepspeed", 2, {"stage": 3})),
    "tp2": ({**CAPACITY, **TIED}, under("tp", 2, grad_accum_steps=2)),
}
FAST = {("ep2-capacity", "adamw"), ("ep2-dp2", "sgd")}

_references: dict[str, RankHeld] = {}


def reference(folder: Path, **settings: Any) -> RankHeld:
    """`single`, in one micro-batch a step."""
    key = repr(sorted(settings.items()))
    if key not in _references:
        _references[key] = trained(folder, strategy="single", **settings)[1][0]
    return _references[key]


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [
        pytest.param(case, optimizer, marks=() if (case, optimizer) in FAST else pytest.mark.slow)
        for optimizer in OPTIMIZERS
        for case in CASES
    ],
)
def test_parity(case: str, optimizer: str, tmp_path: Path) -> None:
    """Losses and the router's figures over 20 steps agree to 1e-5, weights to 1e-5 of their norm."""
    model, how = CASES[case]
    common = {**model, **OPTIMIZERS[optimizer], "until_step": 20}
    expected = reference(tmp_path / "single", **common)
    result, seen = trained(tmp_path / "case", **how, **common)
    compared(result, seen, expected)


def compared(result: Result, seen: list[RankHeld], expected: RankHeld) -> None:
    """A training against that of `single`."""
    assert expected.records[0].clipped
    start, end = whole([s.started for s in seen]), whole([s.ended for s in seen])
    wanted_start, wanted_end = whole([expected.started]), whole([expected.ended])
    for key, tensor in wanted_start.items():
        if key.startswith("model/"):
            assert torch.equal(start[key], tensor), key
            assert not torch.equal(wanted_end[key], tensor), key
            assert (end[key] - wanted_end[key]).norm() / wanted_end[key].norm() <= 1e-5, key
    for rank in seen:
        assert rank.losses == pytest.approx(expected.losses, rel=1e-5)
        assert [r.grad_norm for r in rank.records] == pytest.approx([r.grad_norm for r in expected.records], rel=1e-4)
        for record, wanted in zip(rank.records, expected.records, strict=True):
            assert {n: record.metrics[n] for n in wanted.metrics} == pytest.approx(wanted.metrics, rel=1e-5, abs=1e-7)
            assert record.tokens_seen == wanted.tokens_seen
    assert result.parameters == sum(t.numel() for k, t in wanted_end.items() if k.startswith("model/"))


#: 21 samples of 8 bytes, so that every third batch of 8 is padded, and of some micro-batches no token counts.
TEXT = "".join(chr(97 + i * i % 23) for i in range(21 * 8 + 1))
#: 11 samples: the last batches of an evaluation are padded on some ranks and empty on others.
EVALUATION = "".join(chr(97 + i * i % 19) for i in range(11 * 8 + 1))


@pytest.mark.parametrize(
    ("nproc", "options", "settings"),
    [
        (2, {"ep": 2}, {"grad_accum_steps": 4}),
        pytest.param(4, {"ep": 2}, {"grad_accum_steps": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"ep": 4}, {"activation_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_ragged_batches_and_evaluation(
    nproc: int, options: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Where ranks have different numbers of tokens that count, down to none, all is weighted by them."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "eval.txt").write_text(EVALUATION)
    data = {"data": str(tmp_path / "text.txt"), "eval_data": str(tmp_path / "eval.txt"), "vocab_size": None}
    common = {**CAPACITY, **OPTIMIZERS["sgd"], **data, "until_step": 6, "eval_every": 3}
    alone, expected = trained(tmp_path / "single", strategy="single", **common)
    assert len({r.valid_tokens for r in expected[0].records}) > 1
    result, seen = trained(tmp_path / "ep", **under("ep", nproc, options), **settings, **common)
    compared(result, seen, expected[0])
    assert result.eval_loss == pytest.approx(alone.eval_loss, rel=1e-5)
    assert result.eval_samples == alone.eval_samples == 11


@pytest.mark.parametrize(
    "how",
    [
        under("ep", 4, {"ep": 2}, grad_accum_steps=2),
        pytest.param(under("fsdp", 2), marks=pytest.mark.slow),
        pytest.param(under("deepspeed", 2), marks=pytest.mark.slow),
    ],
    ids=["ep", "fsdp", "deepspeed"],
)
def test_bf16(how: dict[str, Any], tmp_path: Path) -> None:
    """In bf16 losses stay within 2e-2 of those of `single` in bf16."""
    common = {"precision": "bf16", "until_step": 10}
    expected = reference(tmp_path / "single", **common)
    _, seen = trained(tmp_path / "case", **how, **common)
    whole([s.ended for s in seen])
    assert seen[0].losses == pytest.approx(expected.losses, rel=2e-2)


@pytest.mark.slow
@pytest.mark.timeout(550)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's compiler warns, and hides it where warnings are no errors
def test_compiled_blocks(tmp_path: Path) -> None:
    """With `--compile` the experts, whose rows differ from step to step, stay out of it, and losses are the same."""
    common = {**OPTIMIZERS["adamw"], "until_step": 5}
    expected = reference(tmp_path / "single", **common)
    _, seen = trained(tmp_path / "ep", **under("ep", 2), **common, compile=True)
    assert seen[0].losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.slow
def test_auxiliary_losses_train(tmp_path: Path) -> None:
    """The weight of the balance lowers it, and the reported loss is without it."""
    routed = {}
    for weight in (0.0, 3.0):
        options = {**TINY["model_opt"], "aux_loss": weight, "z_loss": 0.0}
        settings = {**under("ep", 2), "model_opt": options, "until_step": 60, "learning_rate": 1e-2}
        routed[weight] = trained(tmp_path / str(weight), **settings)[1][0].records
    assert routed[3.0][-1].metrics["aux_loss"] < routed[0.0][-1].metrics["aux_loss"] - 0.01
    assert routed[3.0][0].loss == pytest.approx(routed[0.0][0].loss, rel=1e-6)
