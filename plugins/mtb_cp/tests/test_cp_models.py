"""Strategy `cp` with models other than the built-in one, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cp_models
import pytest
import torch
from cp_states import trained, whole
from torch import Tensor, nn

from mtb_core import ConfigError, Layout, ModelSpec, RunFailed, TrainConfig, World, load_reference, run
from mtb_cp.attention import ContextAttention, share_attention
from mtb_cp.plugin import CPOptions, mtb_strategies, plan

MODELS = Path(__file__).parent / "cp_models.py"
OWN = {"model": f"{MODELS}:own", "vocab_size": cp_models.WORDS, "seq_length": cp_models.LENGTH}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"attention": "ring"}, marks=pytest.mark.slow),
        {"cp": 2, "data_parallel": "fsdp"},
        pytest.param({"cp": 1}, marks=pytest.mark.slow),
    ],
    ids=["ring", "fsdp", "cp1"],
)
def test_own_loss_shared_modules_and_own_initialisation(options: dict[str, Any], tmp_path: Path) -> None:
    """Every weight of a model that makes its own mean loss ends as under `single`, with SGD."""
    common = {**OWN, "optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.1, "until_step": 10}
    _, expected = trained(tmp_path / "single", strategy="single", **common)
    _, seen = trained(tmp_path / "cp", strategy="cp", nproc=4, strategy_opt=options, grad_accum_steps=2, **common)
    wanted, found = whole([expected[0].ended]), whole([s.ended for s in seen])
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert (found[key] - tensor).norm() <= 1e-5 * tensor.norm().clamp(min=1e-3), key
    assert seen[0].of("loss") == pytest.approx(expected[0].of("loss"), rel=1e-5)


def local(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    return cp_models.Meet()(q, k, v, dropout)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (ModelSpec(build=cp_models.Net), "no module for 'attention' and 'stem'"),
        (cp_models.spec(cp_models.Net(), {"stem": "stem"}), "no module for 'attention'"),
        (cp_models.spec(cp_models.Net(), {"meet": "attention"}), "no module for 'stem'"),
        (cp_models.spec(cp_models.Net(stem=cp_models.Deaf())), "forward of Deaf takes no keyword 'positions'"),
        (cp_models.spec(cp_models.Net(meet=cp_models.Weighted())), r"'blocks.0.meet' \(Weighted\) has parameters"),
    ],
)
def test_models_that_do_not_say_what_is_needed_are_refused(spec: ModelSpec, text: str) -> None:
    """The message says what is missing, and where."""
    with pytest.raises(ConfigError, match=text):
        share_attention(spec.build(), spec, local, [0, 3], "cpu")


@pytest.mark.parametrize(
    ("meet", "groups", "text"),
    [
        (cp_models.Scaled(), 2, r"'blocks.0.meet' \(Scaled\).* something else: another scale or mask"),
        (cp_models.Everywhere(), 2, "something else"),
        (cp_models.Meet(), 1, r"shapes \[1, 2, 4, 6\], \[1, 1, 4, 6\] and"),
    ],
)
def test_attention_of_another_kind_is_refused(meet: nn.Module, groups: int, text: str) -> None:
    """At its first call: what it does besides causal attention would be lost."""
    model = cp_models.Net(meet=meet, groups=groups)
    share_attention(model, cp_models.spec(model), local, [0, 1, 2, 3], "cpu")
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(RunFailed, match=text):
        model(tokens, tokens)


def test_what_is_given_to_a_model() -> None:
    """Its stem gets the positions, each of its attentions is replaced once, and it computes what it computed."""
    model, tokens = cp_models.Net(), torch.arange(8).view(2, 4)
    before = model(tokens, tokens)
    share_attention(model, cp_models.spec(model), local, [0, 1, 2, 3], "cpu")
    found = [m for m in model.modules() if type(m) in (ContextAttention, cp_models.Meet)]
    assert [type(m) for m in found] == [ContextAttention] * 2
    assert torch.equal(model(tokens, tokens), before)
    moved = cp_models.Net()
    share_attention(moved, cp_models.spec(moved), local, [4, 5, 6, 7], "cpu")
    with torch.no_grad():
        moved.stem.table[4:] = model.stem.table[:4]
        for name in ("words", "blocks", "head"):
            getattr(moved, name).load_state_dict(getattr(model, name).state_dict())
    assert torch.equal(moved(tokens, tokens), before)


def test_keys_are_cast_before_they_travel() -> None:
    """Under autocast attention over the ranks gets bf16, whatever the model computes queries and keys in."""
    seen = []

    def note(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        seen.extend(t.dtype for t in (q, k, v))
        return local(q, k, v, dropout)

    attention = ContextAttention("meet", cp_models.Meet(), note)
    with torch.autocast("cpu", torch.bfloat16):
        attention(*torch.randn(3, 1, 2, 4, 6), 0.0)
    assert seen == [torch.bfloat16] * 3


@pytest.mark.parametrize(
    ("factory", "text"), [("plain", "names no module for 'attention' and 'stem'"), ("scaled", "something else")]
)
def test_all_ranks_refuse_alike(factory: str, text: str, tmp_path: Path) -> None:
    """A run fails with the reason."""
    settings = {**OWN, "model": f"{MODELS}:{factory}"}
    config = TrainConfig(strategy="cp", nproc=2, **settings, device="cpu", steps=2, run_dir=str(tmp_path / "run"))
    result = run(config, quiet=True)
    assert result.exit_reason == "failed"
    assert text in (result.failure or {})["message"]


@pytest.mark.parametrize(
    ("options", "length", "text"),
    [
        ({"cp": 3}, 12, "cp=3 on 4 ranks; valid: the divisors of the number of ranks, 1, 2, 4"),
        ({"cp": 8}, 16, "cp=8 on 4 ranks"),
        (
            {},
            30,
            r"cuts a sequence into 8 equal parts, .* 30 is not a multiple of 8; nearest valid: 24 or 32\. .* cp\.$",
        ),
        ({"cp": 2}, 30, "nearest valid: 28 or 32.* or cp, or use balance=contiguous"),
        ({"balance": "contiguous"}, 30, "4 equal parts, .* nearest valid: 28 or 32"),
        ({}, 5, "nearest valid: 8"),
    ],
)
def test_what_cannot_be_cut_is_refused(options: dict[str, Any], length: int, text: str) -> None:
    """Before any rank starts, with the nearest numbers that are valid."""
    with pytest.raises(ConfigError, match=text):
        plan(CPOptions(**options), TrainConfig(seq_length=length), World(4, 4))


def test_the_plan() -> None:
    """Ranks 2k and 2k + 1 of cp=2 share samples, all ranks count tokens, and the first of a pair counts samples."""
    found = plan(CPOptions(cp=2), TrainConfig(seq_length=8), World(4, 4))
    assert found.layout == Layout((("dp", 2), ("cp", 2)), {"dp": "data", "cp": "tokens"})
    assert [found.layout.data_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [found.layout.counts_loss(rank) for rank in range(4)] == [True] * 4
    assert [found.layout.counts_samples(rank) for rank in range(4)] == [True, False, True, False]
    assert (found.auto_sync, found.sharded, found.custom_models) == ("last", False, False)
    sharded = plan(CPOptions(cp=1, data_parallel="fsdp"), TrainConfig(seq_length=7), World(4, 4))
    assert (sharded.auto_sync, sharded.sharded, sharded.custom_models) == ("every", True, True)


def test_the_description_leads_to_the_code() -> None:
    """The class that the plugin names exists."""
    (info,) = mtb_strategies()
    assert load_reference(info.impl).__name__ == "CPStrategy"
