"""What `fsdp` and `fsdp1` promise for which options, and what they refuse before any rank starts."""

from __future__ import annotations

import pytest

from mtb_core import ConfigError, TrainConfig, World, load_reference, parse_options
from mtb_fsdp.plugin import FSDP1Options, FSDPOptions, mtb_strategies, plan, plan_legacy


def planned(options: dict[str, object], ranks: int = 4, **settings: object):
    return plan(parse_options(FSDPOptions, options, owner="strategy 'fsdp'"), TrainConfig(**settings), World(ranks, 2))


def planned_legacy(options: dict[str, object], ranks: int = 4, **settings: str):
    parsed = parse_options(FSDP1Options, options, owner="strategy 'fsdp1'")
    return plan_legacy(parsed, TrainConfig(**settings), World(ranks, 2))


def test_every_rank_has_its_own_samples():
    """One data axis, or two with copies; auto synchronises at every micro-batch."""
    found = planned({})
    assert found.layout.axes == (("dp", 4),)
    assert (found.auto_sync, set(found.sync_modes)) == ("every", {"every", "last"})
    assert (found.exact, found.reduce_dtype, found.missing_gradients) == (True, "fp32", False)
    copies = planned({"hsdp": 2}, 6)
    assert copies.layout.axes == (("replicate", 2), ("shard", 3))
    assert [copies.layout.data_rank(rank) for rank in range(6)] == list(range(6))


@pytest.mark.parametrize(
    ("options", "precision", "exact", "dtype"),
    [
        ({}, "bf16", True, "fp32"),
        ({"param_dtype": "bf16"}, "bf16", True, "fp32"),
        ({"param_dtype": "fp32"}, "bf16", True, "fp32"),
        ({"param_dtype": "bf16"}, "fp32", False, "fp32"),
        ({"reduce_dtype": "bf16"}, "fp32", False, "bf16"),
    ],
)
def test_other_precision_than_asked_for_is_not_called_exact(options, precision, exact, dtype):
    """Gradients are summed in fp32 unless told otherwise, and the result tells."""
    found = planned(options, precision=precision)
    assert (found.exact, found.reduce_dtype) == (exact, dtype)


@pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False), (2, 2), ("2", 2), (False, False)])
def test_reshard_after_forward_is_true_false_or_a_number(text: object, value: object):
    """From the command line as from TOML."""
    assert parse_options(FSDPOptions, {"reshard_after_forward": text}, owner="fsdp").reshard is value


@pytest.mark.parametrize(
    ("options", "ranks", "text"),
    [
        ({"hsdp": 3}, 4, "valid: the divisors of the number of ranks, 1, 2, 4"),
        ({"hsdp": 0}, 4, "at least 1"),
        ({"reshard_after_forward": 3}, 4, "sharded over 4 ranks; valid: true, false, 2"),
        ({"reshard_after_forward": 2}, 2, r"valid: true, false \(no number divides 2 ranks\)"),
        ({"reshard_after_forward": 2, "hsdp": 2}, 4, r"sharded over 2 ranks"),
        ({"reshard_after_forward": "maybe"}, 4, "valid: true, false, or a number"),
        ({"reshard_after_forward": 2, "wrap": "root"}, 4, "set wrap=block"),
        ({"wrap": "auto-size"}, 4, "needed by wrap=auto-size"),
        ({"wrap_size": 100}, 4, "used by nothing else"),
        ({"wrap": "blocks"}, 4, "Did you mean 'block'"),
        ({"wrap": "root", "prefetch": 1}, 4, "set prefetch=0"),
        ({"param_dtype": "fp16"}, 4, "valid: auto, fp32, bf16"),
        ({"reshard_forward": True}, 4, "Did you mean 'reshard_after_forward'"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], ranks: int, text: str):
    """The message says what is valid."""
    with pytest.raises(ConfigError, match=text):
        planned(options, ranks)


def test_unused_parameters_are_allowed_where_asked_for():
    """With the option core does not look for missing gradients."""
    assert planned({"unused_parameters": "yes"}).missing_gradients


def test_fsdp1_plan():
    """As ddp where nothing is sharded, as fsdp otherwise; wrap_size belongs to auto-size."""
    assert planned_legacy({}).auto_sync == "every"
    assert planned_legacy({"sharding": "none"}).auto_sync == "last"
    with pytest.raises(ConfigError, match="strategy 'fsdp1' has wrap=auto-size and wrap_size=0"):
        planned_legacy({"wrap": "auto-size"})


def test_the_descriptions_lead_to_the_code():
    """The classes that the plugin names exist; only fsdp1 is legacy."""
    infos = {info.name: info for info in mtb_strategies()}
    assert {name: load_reference(info.impl).__name__ for name, info in infos.items()} == {
        "fsdp": "FSDPStrategy",
        "fsdp1": "FSDP1Strategy",
    }
    assert [name for name, info in infos.items() if info.legacy] == ["fsdp1"]


def test_legacy_adds_up_nothing_in_bf16():
    """Without a synchronisation FSDP1 adds up in the dtype of the computation, so bf16 synchronises every time."""
    found = planned_legacy({"sharding": "none"}, precision="bf16")
    assert (found.auto_sync, found.sync_modes) == ("every", ("every",))
    assert planned_legacy({"sharding": "none"}).auto_sync == "last"
