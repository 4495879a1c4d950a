"""Strategy `tp` with models other than the built-in one, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
from tp_states import trained, whole

from mtb_core import ConfigError, Layout, TrainConfig, World, load_reference, run
from mtb_tp.plugin import TPOptions, degrees, mtb_commands, mtb_strategies, plan

MODELS = Path(__file__).parent / "tp_models.py"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True, "vocab_parallel_loss": True},
        {"tp": 2, "data_parallel": "fsdp", "sequence_parallel": True},
    ],
    ids=["ddp", "all", "fsdp-sequence"],
)
def test_biases_frozen_layers_and_own_initialisation(options: dict[str, Any], tmp_path: Path) -> None:
    """Every weight of a model with biases and frozen ones, that fills itself, ends as under `single`, with SGD."""
    common = {"model": f"{MODELS}:biased", "optimizer": "sgd", "momentum": 0.9, "learning_rate": 0.1, "until_step": 10}
    _, expected = trained(tmp_path / "single", strategy="single", **common)
    settings = {"strategy": "tp", "nproc": 4, "strategy_opt": options, "grad_accum_steps": 2}
    _, seen = trained(tmp_path / "tp", **settings, **common)
    wanted, found = whole([expected[0].ended]), whole([s.ended for s in seen])
    assert found.keys() == wanted.keys()
    assert "optim/blocks.0.up.weight/momentum_buffer" not in found
    for key, tensor in wanted.items():
        assert (found[key] - tensor).norm() <= 1e-5 * tensor.norm().clamp(min=1e-3), key
    assert seen[0].losses == pytest.approx(expected[0].losses, rel=1e-5)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("factory", "options", "text"),
    [
        ("no_plan", {}, "no tensor_parallel with roles 'colwise' and 'rowwise'"),
        ("no_stem", {"sequence_parallel": True}, "no module the role 'stem'"),
        ("no_stem", {"vocab_parallel_loss": True}, "no module the role 'head'"),
        ("odd", {}, "9 outputs of 'blocks.0.up' cannot be shared by tp=2 ranks; valid: 1, 3, 9"),
        ("own_loss", {"vocab_parallel_loss": True}, "brings a loss of its own"),
        ("not_linear", {}, "'blocks.0.up', which is Sequential"),
        ("careless", {}, "Dropout on activations that ranks share must be an nn.Dropout with the role 'dropout'"),
    ],
)
def test_models_that_cannot_be_split_are_refused(
    factory: str, options: dict[str, Any], text: str, tmp_path: Path
) -> None:
    """All ranks refuse alike; the message says what is missing."""
    config = TrainConfig(
        strategy="tp",
        nproc=2,
        strategy_opt=options,
        model=f"{MODELS}:{factory}",
        vocab_size=64,
        seq_length=8,
        device="cpu",
        run_dir=str(tmp_path / "run"),
    )
    result = run(config, quiet=True)
    assert result.exit_reason == "failed"
    assert result.failure is not None
    assert text in result.failure["message"]


@pytest.mark.parametrize(
    ("options", "settings", "text"),
    [
        ({"tp": 3}, {}, "tp=3, but there are 4 ranks; .* one of 1, 2, 4"),
        ({"tp": 2, "dp": 1}, {}, "tp=2 and dp=1, but there are 4 ranks"),
        ({"dp": 8}, {}, "dp=8"),
        ({"tp": 4}, {"n_heads": 2}, r"2 attention heads \(--n-heads\) cannot be shared by tp=4 ranks; valid: 1, 2\."),
        ({"tp": 4, "sequence_parallel": True}, {"seq_length": 6}, "6 positions .* valid: 1, 2, 3, 6"),
        ({"tp": 4, "vocab_parallel_loss": True}, {"vocab_size": 63}, "Pad it: --vocab-size 64"),
    ],
)
def test_degrees_that_cannot_be_are_refused(options: dict[str, Any], settings: dict[str, Any], text: str) -> None:
    """Before any rank starts, with the degrees that are valid."""
    config = TrainConfig(**{"n_heads": 4, "d_model": 16, "seq_length": 8, "vocab_size": 64, **settings})
    with pytest.raises(ConfigError, match=text):
        plan(TPOptions(**options), config, World(4, 4))


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, (1, 6)), ({"tp": 2}, (3, 2)), ({"dp": 2}, (2, 3)), ({"tp": 3, "dp": 2}, (2, 3)), ({"tp": 1}, (6, 1))],
)
def test_degrees_follow_from_each_other(options: dict[str, Any], expected: tuple[int, int]) -> None:
    """What is not given is what the ranks leave; without any option all ranks share layers."""
    assert degrees(TPOptions(**options), 6) == expected


def test_the_layout_puts_sharing_ranks_side_by_side() -> None:
    """Ranks 2k and 2k + 1 of tp=2 see the same samples."""
    config = attrs.evolve(TrainConfig(), n_heads=4)
    layout = plan(TPOptions(tp=2), config, World(4, 4)).layout
    assert layout == Layout((("dp", 2), ("tp", 2)))
    assert [layout.data_rank(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_the_descriptions_lead_to_the_code() -> None:
    """The class and the command that the plugin names exist."""
    (info,), (command,) = mtb_strategies(), mtb_commands()
    assert load_reference(info.impl).__name__ == "TPStrategy"
    assert set(load_reference(command.impl).commands) == {"check", "mlp", "sequence"}


@pytest.mark.timeout(60)
def test_vocabulary_of_the_data_is_checked_too(tmp_path: Path) -> None:
    """Where the vocabulary comes from the data, one that cannot be shared is refused all the same."""
    data = tmp_path / "text"
    data.write_bytes(bytes(range(97, 123)) * 20)
    values: dict[str, Any] = {"nproc": 3, "n_heads": 3, "d_model": 12, "seq_length": 8, "data": str(data)}
    config = TrainConfig(
        strategy="tp",
        strategy_opt={"vocab_parallel_loss": True},
        device="cpu",
        run_dir=str(tmp_path / "run"),
        **values,
    )
    result = run(config, quiet=True)
    assert result.failure is not None
    assert "256 words of the vocabulary" in result.failure["message"]
