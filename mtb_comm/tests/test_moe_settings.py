"""Invalid settings are refused when they are made, and the message says what is valid."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mtb_comm.moe.settings import RouteSettings, as_fields
from mtb_core import ConfigError


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tokens_per_rank": 0}, "--tokens-per-rank is 0.*at least 1"),
        ({"num_experts": -1}, "--num-experts is -1"),
        ({"iters": 0}, "--iters"),
        ({"warmup": -1}, "--warmup"),
        ({"zipf_s": math.nan}, "--zipf-s is nan"),
        ({"aux_weight": math.inf}, "--aux-weight is inf"),
        ({"top_k": 9}, "valid: 1 to 8"),
        ({"capacity_factor": 0.0}, "above 0 and at most 1e\\+06.*--dropless"),
        ({"capacity_factor": math.nan}, "--capacity-factor is nan"),
        ({"capacity_factor": math.inf}, "--capacity-factor is inf"),
        ({"overflow": "bounce"}, "valid: drop, residual, next"),
        ({"gate": "relu"}, "valid: softmax, sigmoid"),
        ({"dtype": "fp8"}, "valid: fp32, bf16, fp64"),
        ({"routing": "expert", "capacity_factor": None}, "--dropless has no"),
        ({"routing": "expert", "overflow": "next"}, "leave --overflow out"),
        ({"distribution": "hot", "hot_share": 1.5}, "valid: 0 to 1"),
        ({"distribution": "counts"}, "was not given"),
        ({"counts": (1.0,) * 8}, "belong together"),
        ({"distribution": "learned"}, "belong together"),
        ({"data": "x"}, "belong together"),
        ({"distribution": "counts", "counts": (1.0, 2.0)}, "has 2 numbers for 8 experts"),
        ({"distribution": "counts", "counts": (0.0,) * 8}, "one above 0"),
        ({"distribution": "counts", "counts": (-1.0,) + (1.0,) * 7}, "at least 0"),
        ({"distribution": "counts", "counts": (9.0,) + (1.0,) * 7, "top_k": 2}, "expert 0 56.2%.*at most 50.0%"),
    ],
)
def test_refused(given: dict[str, Any], text: str):
    """One paragraph with the value seen and what is valid."""
    with pytest.raises(ConfigError, match=text):
        RouteSettings(**given)


def test_fields_say_only_what_applies():
    """A setting that has no part in the point is null, and no path of the machine is told."""
    fields = as_fields(RouteSettings(distribution="zipf", zipf_s=0.5))
    assert (fields["zipf_s"], fields["hot_share"], fields["router_steps"]) == (0.5, None, None)
    assert fields["overflow"] == "drop"
    assert as_fields(RouteSettings(capacity_factor=None))["overflow"] is None
    assert "data" not in fields
