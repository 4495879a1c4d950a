"""What `ddp` promises for which options, and what it refuses before any rank starts."""

from __future__ import annotations

import pytest

from mtb_core import ConfigError, TrainConfig, World, load_reference, parse_options
from mtb_ddp.plugin import DDPOptions, mtb_strategies, plan


def planned(options: dict[str, object], **settings: object):
    return plan(parse_options(DDPOptions, options, owner="strategy 'ddp'"), TrainConfig(**settings), World(4, 2))


def test_every_rank_has_its_own_samples():
    """The layout is one data-parallel axis over all ranks; auto synchronises at the last micro-batch only."""
    found = planned({})
    assert found.layout.axes == (("dp", 4),)
    assert [found.layout.data_rank(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert found.auto_sync == "last"
    assert set(found.sync_modes) == {"every", "last"}
    assert (found.exact, found.reduce_dtype, found.missing_gradients) == (True, "fp32", False)


@pytest.mark.parametrize(("hook", "dtype"), [("fp16", "fp16"), ("bf16", "bf16"), ("powersgd", "fp32")])
def test_compression_is_not_called_exact(hook: str, dtype: str):
    """A communication hook changes the numbers, and the dtype on the wire is stated."""
    found = planned({"comm_hook": hook})
    assert (found.exact, found.reduce_dtype) == (False, dtype)


@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_unused_parameters_are_allowed_where_ddp_copes(option: str):
    """With either option core does not look for missing gradients."""
    assert planned({option: "true"}).missing_gradients


@pytest.mark.parametrize(
    ("options", "settings", "text"),
    [
        ({"static_graph": True, "find_unused_parameters": True}, {}, "set one of them"),
        ({"comm_hook": "powersgd", "static_graph": True}, {}, "drop one of them"),
        ({"comm_hook": "bf16"}, {"gradient_sync_mode": "every", "grad_accum_steps": 2}, "valid: auto, last"),
        ({"comm_hook": "bf16", "static_graph": True}, {"grad_accum_steps": 2}, "valid: auto, last"),
        ({"comm_hook": "bf61"}, {}, "Did you mean 'bf16'"),
        ({"bucket_cap_mb": 0}, {}, "at least 1"),
        ({"bucket_cap": 1}, {}, "Did you mean 'bucket_cap_mb'"),
        ({"zero1": "maybe"}, {}, "true or false"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], settings: dict[str, object], text: str):
    """The message says what is valid."""
    with pytest.raises(ConfigError, match=text):
        planned(options, **settings)


def test_the_description_leads_to_the_code():
    """The class that the plugin names exists."""
    (info,) = mtb_strategies()
    assert load_reference(info.impl).__name__ == "DDPStrategy"
    assert info.options is DDPOptions
