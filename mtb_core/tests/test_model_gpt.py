"""The built-in GPT."""

import math

import pytest
import torch

from mtb_core import ConfigError, TrainConfig
from mtb_core.model.gpt import GPT, gpt_spec
from mtb_core.model.loss import loss_sum
from mtb_core.model.services import build_module, materialize

SMALL = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64, "seq_length": 16}


def make(seed=0, **settings):
    config = TrainConfig(**{**SMALL, **settings})
    spec = gpt_spec(config)
    return spec, materialize(build_module(spec, seed, "cpu"), spec, seed, "cpu")


@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    "size",
    [
        {},
        {"d_model": 64, "vocab_size": 256, "seq_length": 64},
        {"d_model": 64, "n_layers": 8, "vocab_size": 1000},
        {"d_model": 512, "n_heads": 8, "vocab_size": 256},
        {"d_model": 24, "n_heads": 2, "vocab_size": 16},
    ],
)
def test_first_loss_is_close_to_ln_vocabulary(size, qk_norm, tie_embeddings):
    """The first loss is within 2% of ln(vocabulary), for random targets and for inputs that repeat themselves."""
    for seed in range(3):
        spec, model = make(seed, qk_norm=qk_norm, tie_embeddings=tie_embeddings, **size)
        length = model.positions.weight.shape[0]
        inputs, targets = torch.randint(
            0, spec.vocab_size, (2, 8, length), generator=torch.Generator().manual_seed(seed)
        )
        for wanted in (targets, inputs):
            loss = loss_sum(spec, model(inputs), wanted, wanted.numel()).item() / wanted.numel()
            assert loss == pytest.approx(math.log(spec.vocab_size), rel=0.02)


def test_attention_is_causal():
    """Changing a token changes no logits before it, and some from it on."""
    _, model = make(qk_norm=True)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :9], before[:, :9])
    assert not torch.allclose(after[:, 9:], before[:, 9:])


def test_shapes_and_length():
    """Any length up to the number of positions works; a longer one is refused with both numbers."""
    _, model = make()
    assert model(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 5, 64)
    with pytest.raises(ValueError, match=r"16 positions.*17 tokens"):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_tied_embeddings_are_one_parameter():
    """Tying is identity: one parameter, listed once, fewer weights by exactly the output layer."""
    _, plain = make()
    _, tied = make(tie_embeddings=True)
    assert tied.head.weight is tied.tokens.weight
    assert "head.weight" not in dict(tied.named_parameters())
    count = [sum(p.numel() for p in m.parameters()) for m in (plain, tied)]
    assert count[0] - count[1] == 32 * 64


def test_qk_norm_bounds_attention_logits():
    """With QK-norm the output does not depend on the scale of the query projection; without it, it does."""
    tokens = torch.arange(16)[None] % 64
    for qk_norm in (True, False):
        _, model = make(qk_norm=qk_norm)
        with torch.no_grad():
            before = model(tokens)
            for block in model.blocks:
                block.q.weight.mul_(50.0)
            after = model(tokens)
        assert torch.allclose(before, after, atol=1e-4) == qk_norm


def test_dropout_is_active_in_training_only():
    """Dropout makes two training passes differ and leaves evaluation deterministic."""
    _, model = make(dropout=0.5)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_residual_projections_are_scaled_by_depth():
    """Matrices that write to the residual stream start smaller by sqrt(2 L) than the others."""
    _, model = make(d_model=128, n_layers=8)
    block = model.blocks[3]
    assert block.up.weight.std().item() == pytest.approx(0.5 / math.sqrt(128), rel=0.05)
    assert block.down.weight.std().item() == pytest.approx(0.5 / math.sqrt(128) / 4, rel=0.05)
    assert block.o.weight.std().item() == pytest.approx(0.5 / math.sqrt(128) / 4, rel=0.05)


def test_spec_names_what_strategies_need():
    """Blocks exist under their names, and each of their layers has its role under tensor parallelism."""
    spec, model = make(n_layers=3)
    assert spec.blocks == ("blocks.0", "blocks.1", "blocks.2")
    roles = {name: role for name, _ in model.named_modules() if (role := spec.role(name))}
    assert {name: role for name, role in roles.items() if "blocks" not in name} == {
        "tokens": "embedding",
        "positions": "stem",
        "drop": "dropout",
        "norm": "norm",
        "head": "head",
    }
    assert {name.removeprefix("blocks.1."): role for name, role in roles.items() if "blocks.1" in name} == {
        "norm1": "norm",
        "q": "colwise",
        "attention": "attention",
        "k": "colwise",
        "v": "colwise",
        "o": "rowwise",
        "drop1": "dropout",
        "norm2": "norm",
        "up": "colwise",
        "down": "rowwise",
        "drop2": "dropout",
    }
    assert len(roles) == 5 + 3 * 11


def test_vocabulary_must_be_known():
    """Without a vocabulary the model is refused, saying what to set."""
    with pytest.raises(ConfigError, match="--vocab-size"):
        gpt_spec(TrainConfig())


def test_module_can_be_built_by_hand():
    """GPT is a plain module that also works without a configuration."""
    model = GPT(vocab_size=10, seq_length=4, d_model=8, n_heads=2, n_layers=1)
    assert model.blocks[0].head_dim == 4
