"""What strategy `pp` plans and refuses before ranks start, how it cuts models, and how bubbles are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pp_models import BLOCKS, CHAIN, Net
from torch import nn

from mtb_core import ConfigError, ModelSpec, TrainConfig, World
from mtb_core.config import resolve
from mtb_core.model.gpt import GPT, gpt_spec
from mtb_pp.bubble import Action, by_formula, simulated
from mtb_pp.cutting import Part, cut, together
from mtb_pp.plugin import PPOptions, mtb_strategies, plan
from mtb_pp.shapes import outputs

(INFO,) = mtb_strategies()


def resolved(ranks: int, options: dict[str, Any], **settings: Any) -> Any:
    config = TrainConfig(strategy="pp", strategy_opt=options, **{"n_layers": 8, "vocab_size": 64, **settings})
    return resolve(config, INFO, World(ranks, ranks))


def test_stages_are_the_outer_axis() -> None:
    """Ranks of one pipeline are far apart, its data-parallel copies near; only the last stage counts the loss."""
    found = plan(PPOptions(pp=2), TrainConfig(), World(6, 6))
    assert found.layout.axes == (("pp", 2), ("dp", 3))
    assert [found.layout.data_rank(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [found.layout.counts_loss(rank) for rank in range(6)] == [False] * 3 + [True] * 3
    assert found.options == PPOptions(pp=2, virtual=1)
    assert plan(found.options, TrainConfig(), World(6, 6)) == found


@pytest.mark.parametrize(
    ("ranks", "options", "settings", "message"),
    [
        (4, {"pp": 3}, {}, r"pp=3 on 4 ranks; valid: the divisors of the number of ranks, 1, 2, 4\."),
        (4, {}, {"n_layers": 3}, r"pp=4, but the model has 3 blocks \(--n-layers\), .* valid on 4 ranks: pp=1, 2\."),
        (
            4,
            {"schedule": "interleaved", "virtual": 3},
            {"grad_accum_steps": 4},
            r"pp=4 with 3 stages on each rank, but the model has 8 blocks .* each of the 12 stages .*: pp=1, 2\.",
        ),
        (2, {"virtual": 2}, {}, "schedule=1f1b with virtual=2; valid: schedule=interleaved"),
        (2, {"schedule": "interleaved", "virtual": 1}, {}, "schedule=interleaved with virtual=1; valid"),
        (1, {"schedule": "interleaved"}, {}, "schedule=interleaved with pp=1"),
        (2, {}, {}, "1 micro-batch a step is not possible .* it needs at least 2: --grad-accum-steps 2"),
        (4, {}, {"batch_size": 2, "global_batch_size": 6}, "3 micro-batches .* at least 4"),
        (2, {"schedule": "interleaved"}, {"grad_accum_steps": 5}, "5 micro-batches a step.*--grad-accum-steps 4 or 6"),
        (
            2,
            {"schedule": "interleaved"},
            {"batch_size": 2, "global_batch_size": 14},
            "7 micro-batches a step.*--grad-accum-steps 6 or 8",
        ),
    ],
)
def test_what_cannot_be_is_refused(ranks: int, options: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    """Each with the values that can."""
    with pytest.raises(ConfigError, match=message):
        resolved(ranks, options, **settings)


def test_sync_modes() -> None:
    """Like strategies `ddp` and `fsdp` over the data-parallel ranks; a single pipeline has nothing to synchronise."""
    accumulating = {"grad_accum_steps": 4}
    assert resolved(4, {"pp": 2}, **accumulating).sync_mode == "last"
    assert resolved(4, {"pp": 2, "data_parallel": "fsdp"}, **accumulating).sync_mode == "every"
    assert resolved(4, {"data_parallel": "fsdp"}, **accumulating).sync_mode == "last"


def whole(n_layers: int = 5, **settings: Any) -> tuple[nn.Module, ModelSpec]:
    spec = gpt_spec(TrainConfig(n_layers=n_layers, d_model=8, n_heads=2, seq_length=4, vocab_size=11, **settings))
    with torch.device("meta"):
        return spec.build(), spec


def test_blocks_are_spread_evenly() -> None:
    """Earlier stages have one more; the stem goes with the first block, norm and output layer with the last."""
    model, spec = whole()
    found = cut(model, spec, pp=2, virtual=1, world=2)
    assert found.parts == (
        ("tokens", "positions", "drop", "blocks.0", "blocks.1", "blocks.2"),
        ("blocks.3", "blocks.4", "norm", "head"),
    )
    assert sum(found.sizes) == sum(p.numel() for p in model.parameters())
    thirds = cut(model, spec, pp=3, virtual=1, world=3)
    assert [sum(n in spec.blocks for n in part) for part in thirds.parts] == [2, 2, 1]
    without = cut(model, ModelSpec(spec.build, chain=spec.chain), pp=9, virtual=1, world=9)
    assert without.parts[:2] == (("tokens",), ("positions", "drop"))


def test_parts_have_the_names_of_the_model() -> None:
    """Together they have every parameter once; a tied one has its first name on each stage that holds it."""
    model, spec = whole(tie_embeddings=True)
    found = cut(model, spec, pp=3, virtual=1, world=3)
    assert dict(found.tied) == {"tokens.weight": (0, 2)}
    parts = [Part(model, names, None) for names in found.parts]
    names = [[name for name, _ in part.named_parameters()] for part in parts]
    assert "tokens.weight" in names[0]
    assert "tokens.weight" in names[2]
    assert "head.weight" not in names[2]
    assert parts[2].get_submodule("head").weight is model.get_parameter("tokens.weight")
    assert sorted({*names[0], *names[1], *names[2]}) == sorted(name for name, _ in model.named_parameters())
    assert [name for name, _ in parts[0].named_parameters()] == names[0]


def test_first_names_are_those_of_the_model() -> None:
    """Also of a parameter that is tied within a stage whose chain has the model's modules in another order."""
    model = nn.ModuleDict({"late": nn.Linear(3, 3), "early": nn.Linear(3, 3)})
    model["late"].weight = model["early"].weight
    part = Part(model, ("early", "late"), None)
    assert [name for name, _ in part.named_parameters()] == [name for name, _ in model.named_parameters()]


def test_stages_of_one_rank_together() -> None:
    """Several parts make one module with the names of all; those of one container come together."""
    model, spec = whole(4, tie_embeddings=True)
    found = cut(model, spec, pp=2, virtual=2, world=2)
    ranks = [together([Part(model, found.parts[stage], None) for stage in stages]) for stages in ((0, 2), (1, 3))]
    held = [[name for name, _ in rank.named_parameters()] for rank in ranks]
    assert {name.split(".")[1] for name in held[0] if name.startswith("blocks")} == {"0", "2"}
    assert {name.split(".")[1] for name in held[1] if name.startswith("blocks")} == {"1", "3"}
    assert "tokens.weight" in held[0]
    assert "tokens.weight" in held[1]
    assert {*held[0], *held[1]} == {name for name, _ in model.named_parameters()}


def test_a_parameter_of_two_stages_on_one_rank() -> None:
    """Data-parallel wrappers of both would reduce it; it is refused by name."""
    net = Net()
    net.blocks = nn.ModuleList([net.blocks[0]] * BLOCKS)
    spec = ModelSpec(build=lambda: net, blocks=tuple(f"blocks.{i}" for i in range(BLOCKS)), chain=CHAIN)
    assert dict(cut(net, spec, pp=3, virtual=1, world=3).tied).keys() == {
        f"blocks.0.{name}" for name, _ in net.blocks[0].named_parameters()
    }
    four = nn.ModuleList([net.blocks[0]] * 4)
    net.blocks = four
    names = tuple(f"blocks.{i}" for i in range(4))
    with pytest.raises(
        ConfigError, match=r"'blocks\.0\.up\.weight' is shared by stages 0, 1, 2, 3, of which two are on"
    ):
        cut(net, ModelSpec(spec.build, blocks=names, chain=("words", *names, "head")), pp=2, virtual=2, world=2)


def _count(module: Any, args: Any, output: Any) -> None:
    module.calls += 1


def test_shapes_are_found_without_computing() -> None:
    """On tensors without memory; under autocast with the dtypes that it gives; buffers and the random state stay."""
    model, spec = whole(dropout=0.5)
    net = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 5), nn.BatchNorm1d(6), nn.Linear(5, 2))
    net[1].calls = 0
    net[1].register_forward_hook(_count)
    state = torch.get_rng_state()
    found = cut(model, spec, pp=3, virtual=1, world=3)
    sent = outputs(model, found.parts, (2, 4), torch.device("cpu"), bf16=False)
    assert [(tuple(x.shape), x.dtype, x.device.type) for x in sent] == [((2, 4, 8), torch.float32, "meta")] * 2
    parts = (("0", "1"), ("2",), ("3",))
    sent = outputs(net, parts, (2, 6), torch.device("cpu"), bf16=True)
    assert [(tuple(x.shape), x.dtype) for x in sent] == [((2, 6, 5), torch.bfloat16)] * 2
    assert int(net[2].num_batches_tracked) == 0
    assert net[1].calls == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(model, GPT)
    assert model.tokens.weight.is_meta


def in_order(text: str, stage: int) -> list[Action]:
    """``"F0 F1 B0 B1"`` of one stage."""
    return [Action(word[0], stage, int(word[1:])) for word in text.split()]  # type: ignore[arg-type]


def test_bubbles_of_orders_by_hand() -> None:
    """Two stages, two micro-batches: a third of the time in either order; one stage never waits; a deadlock is told."""
    gpipe = [in_order("F0 F1 B0 B1", 0), in_order("F0 F1 B0 B1", 1)]
    one_by_one = [in_order("F0 F1 B0 B1", 0), in_order("F0 B0 F1 B1", 1)]
    naive = [in_order("F0 B0 F1 B1", 0), in_order("F0 B0 F1 B1", 1)]
    assert simulated(gpipe, 2) == simulated(one_by_one, 2) == by_formula(2, 2) == pytest.approx(1 / 3)
    assert simulated(naive, 2) == 0.5
    assert simulated([in_order("F0 B0", 0)], 1) == by_formula(1, 7) == 0.0
    with pytest.raises(ValueError, match="never ends"):
        simulated([in_order("B0 F0", 0), in_order("F0 B0", 1)], 2)
