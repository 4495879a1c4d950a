"""Model FLOPs and their utilisation."""

import attrs
import pytest

from mtb_core import TrainConfig
from mtb_core.measure.flops import device_peak_flops, mfu
from mtb_core.model.flops import CONVENTIONS, decoder_flops_per_token
from mtb_core.model.gpt import gpt_spec

CONFIG = TrainConfig(d_model=8, n_heads=2, n_layers=3, seq_length=16, vocab_size=50)


def by_hand():
    """Products of one sample, one by one; 2 FLOPs a multiply-add, backward twice the forward."""
    d, layers, length, vocabulary = 8, 3, 16, 50
    projections = 4 * length * d * d  # q, k, v, o
    mlp = length * d * 4 * d + length * 4 * d * d
    square = 2 * length * length * d  # q k^T and the product with v, over all heads
    head = length * d * vocabulary
    weights = layers * (projections + mlp) + head
    return {
        "palm": 3 * 2 * (weights + layers * square) / length,
        "causal": 3 * 2 * (weights + layers * square / 2) / length,
    }


def test_hand_computed():
    """The model's figures equal the sum over its matrix products."""
    assert gpt_spec(CONFIG).flops_per_token == by_hand()
    assert tuple(by_hand()) == CONVENTIONS


@pytest.mark.parametrize(
    "change",
    [
        {"activation_checkpointing": True},
        {"tie_embeddings": True},
        {"batch_size": 4},
        {"grad_accum_steps": 4},
        {"nproc": 2},
        {"precision": "bf16"},
    ],
)
def test_what_does_not_change_model_flops(change):
    """Recomputation, tying, batches, ranks and precision leave the FLOPs of a token as they are."""
    assert gpt_spec(attrs.evolve(CONFIG, **change)).flops_per_token == by_hand()


def test_embedding_lookup_does_not_count():
    """Only weights that are multiplied count; attention grows with length and depth."""
    assert decoder_flops_per_token(0, 2, 4, 8) == {"palm": 12.0 * 64, "causal": 6.0 * 64}
    assert decoder_flops_per_token(10, 0, 4, 8) == {"palm": 60.0, "causal": 60.0}


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 19.5e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12, 66.9e12),
        ("NVIDIA H100 PCIe", 756.5e12, 51.2e12),
        ("NVIDIA H100 NVL", 835.5e12, 60e12),
        ("NVIDIA H200", 989.4e12, 66.9e12),
        ("NVIDIA B200", 2250e12, 75e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362.05e12, 91.6e12),
    ],
)
def test_known_devices(name, bf16, fp32):
    """Names as the driver reports them give dense peaks."""
    assert device_peak_flops(name, "bf16") == pytest.approx(bf16)
    assert device_peak_flops(name, "fp32") == pytest.approx(fp32)


@pytest.mark.parametrize("name", ["cpu", "AMD EPYC", "NVIDIA L400", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""])
def test_unknown_devices_have_no_peak(name):
    """A device that is not known, or only a part of one, has no peak rather than a guess."""
    assert device_peak_flops(name, "bf16") is None


def test_mfu_is_per_device():
    """Twice the tokens on twice the devices is the same utilisation; what is not known is None."""
    assert mfu(1000.0, 1e9, 1e13, 1) == pytest.approx(0.1)
    assert mfu(2000.0, 1e9, 1e13, 2) == pytest.approx(0.1)
    assert mfu(1000.0, None, 1e13, 1) is None
    assert mfu(1000.0, 1e9, None, 1) is None
