"""Strategy `tp` with models other than the built-in one, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
import tp_models
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils.parametrizations import weight_norm
from tp_states import trained, whole

from mtb_core import ConfigError, Layout, ModelSpec, RunFailed, TrainConfig, World, load_reference, run
from mtb_tp.plugin import TPOptions, degrees, mtb_commands, mtb_strategies, plan
from mtb_tp.sharding import parallelize, roles_of
from mtb_tp.vocab import check_words

MODELS = Path(__file__).parent / "tp_models.py"


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        pytest.param("biased", {"tp": 2}, marks=pytest.mark.slow),
        ("biased", {"tp": 2, "sequence_parallel": True, "vocab_parallel_loss": True}),
        pytest.param("biased", {"tp": 2, "data_parallel": "fsdp", "sequence_parallel": True}, marks=pytest.mark.slow),
        ("scalar", {"tp": 2, "data_parallel": "fsdp"}),
    ],
    ids=["ddp", "all", "fsdp-sequence", "fsdp-scalar"],
)
def test_models_of_ones_own_end_as_under_single(factory: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Every weight of a model with biases and frozen ones, that fills itself, ends as under `single`, with SGD.

    A parameter without dimensions, which FSDP cannot shard, does too.
    """
    common = {
        "model": f"{MODELS}:{factory}",
        "optimizer": "sgd",
        "momentum": 0.9,
        "learning_rate": 0.1,
        "until_step": 10,
    }
    _, expected = trained(tmp_path / "single", strategy="single", **common)
    settings = {"strategy": "tp", "nproc": 4, "strategy_opt": options, "grad_accum_steps": 2}
    _, seen = trained(tmp_path / "tp", **settings, **common)
    wanted, found = whole([expected[0].ended]), whole([s.ended for s in seen])
    assert found.keys() == wanted.keys()
    assert "optim/blocks.0.up.weight/momentum_buffer" not in found
    for key, tensor in wanted.items():
        assert (found[key] - tensor).norm() <= 1e-5 * tensor.norm().clamp(min=1e-3), key
    assert seen[0].losses == pytest.approx(expected[0].losses, rel=1e-5)


@pytest.mark.parametrize(
    ("factory", "options", "text"),
    [
        ("no_plan", {}, "no role function with roles 'colwise' and 'rowwise'"),
        ("no_stem", {"sequence_parallel": True}, "no module the role 'stem'"),
        ("no_stem", {"vocab_parallel_loss": True}, "no module the role 'head'"),
        ("own_loss", {"vocab_parallel_loss": True}, "brings a loss of its own"),
    ],
)
def test_plans_that_lack_what_an_option_needs_are_refused(factory: str, options: dict[str, Any], text: str) -> None:
    """The message says what is missing."""
    made = getattr(tp_models, factory)(TrainConfig())
    spec = made if isinstance(made, ModelSpec) else ModelSpec(build=lambda: made)
    with pytest.raises(ConfigError, match=text):
        roles_of(spec.build(), spec, TPOptions(**options))


class _Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 10


def _patched() -> nn.Linear:
    layer = nn.Linear(12, 20)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    ("place", "make", "text"),
    [
        ("blocks.0.up", lambda: nn.Sequential(nn.Linear(12, 20)), "'blocks.0.up', which is Sequential"),
        ("blocks.0.up", lambda: _Scaled(12, 20), "'colwise' to 'blocks.0.up', which is _Scaled and has a forward"),
        ("blocks.1.down", _patched, "'rowwise' to 'blocks.1.down', which is Linear and has a forward"),
        ("head", lambda: weight_norm(nn.Linear(12, 64)), "'head' to 'head', which is ParametrizedLinear and has"),
        ("words", lambda: nn.Embedding(64, 12, max_norm=0.1), "an embedding with max_norm, .* to 'words'"),
        ("words", lambda: nn.Embedding(64, 12, scale_grad_by_freq=True), "with scale_grad_by_freq, .* to 'words'"),
        ("words", lambda: nn.Embedding(64, 12, sparse=True), "with sparse, .* to 'words'"),
    ],
)
def test_layers_of_their_own_kind_are_refused(place: str, make: Callable[[], nn.Module], text: str) -> None:
    """What a layer does besides the product or look-up would be lost when it is split; the message names it."""
    spec, options = tp_models.biased(TrainConfig()), TPOptions(vocab_parallel_loss=True)
    model = spec.build()
    model.set_submodule(place, make())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(ConfigError, match=text):
            parallelize(model, mesh, roles_of(model, spec, options), spec.blocks, options)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("words", [torch.tensor([3, 64]), torch.tensor([-1])])
def test_words_outside_of_the_vocabulary_are_refused(words: torch.Tensor) -> None:
    """No rank has them, so each would take them for another's; -100 is a target that does not count, but no token."""
    for what in ("tokens", "targets"):
        with pytest.raises(RunFailed, match=rf"saw the {what} .* outside of range\(64\)"):
            check_words(words, 64, what)
    check_words(torch.tensor([0, 63, -100]), 64, "targets")
    with pytest.raises(RunFailed):
        check_words(torch.tensor([-100]), 64, "tokens")


@pytest.mark.parametrize(
    ("factory", "options", "text"),
    [
        ("odd", {}, "9 outputs of 'blocks.0.up' cannot be shared by tp=2 ranks; valid: 1, 3, 9"),
        ("careless", {}, "Dropout on activations that ranks share must be an nn.Dropout with the role 'dropout'"),
        ("hidden", {}, "different gradients of it"),
        ("uneven", {}, "'extra.weight' in common, but in forward rank 1 of the group used it and rank 0 did not"),
        ("uneven_norm", {"sequence_parallel": True}, "'extra.norm.weight' in common, but in forward rank 1"),
        ("alpha_dropout", {}, "'blocks.0.drop', which is AlphaDropout and drops in its own way"),
        ("dropout_twice", {}, "The dropout 'blocks.0.drop' was called twice in one forward"),
        ("few_words", {"vocab_parallel_loss": True}, "'words' has 32 words, but the vocabulary of the data has 64"),
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
        warmup_steps=0,
        steps=3,
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
