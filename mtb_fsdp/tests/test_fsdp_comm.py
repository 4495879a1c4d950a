"""Communication of one step, counted on real collectives, is what arithmetic says: calls, elements, bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtb_core import Layout, TrainConfig, World, parse_options
from mtb_core.model.gpt import gpt_spec
from mtb_fsdp.plugin import FSDPOptions, plan
from mtb_fsdp.theory import ELEMENT_BYTES, Traffic, Unit, ddp_step_traffic, step_traffic
from mtb_fsdp.units import choose_units, describe_units

from .whole import TINY, train

CASES: dict[str, dict[str, Any]] = {
    "2": {"nproc": 2},
    "3": {"nproc": 3},
    "2-tied": {"nproc": 2, "tie_embeddings": True},
    "2-keep": {"nproc": 2, "strategy_opt": {"reshard_after_forward": False}},
    "3-keep-accumulate": {"nproc": 3, "grad_accum_steps": 2, "strategy_opt": {"reshard_after_forward": "false"}},
    "4-spread": {"nproc": 4, "strategy_opt": {"reshard_after_forward": 2}},
    "3-every": {"nproc": 3, "grad_accum_steps": 2, "gradient_sync_mode": "every"},
    "3-last": {"nproc": 3, "grad_accum_steps": 2, "gradient_sync_mode": "last"},
    "2-root": {"nproc": 2, "strategy_opt": {"wrap": "root"}},
    "3-size": {"nproc": 3, "strategy_opt": {"wrap": "auto-size", "wrap_size": 1200}},
    "2-bf16": {"nproc": 2, "precision": "bf16"},
    "2-bf16-gather-fp32": {"nproc": 2, "precision": "bf16", "strategy_opt": {"param_dtype": "fp32"}},
    "3-reduce-bf16": {"nproc": 3, "strategy_opt": {"reduce_dtype": "bf16"}},
    "4-hsdp": {"nproc": 4, "strategy_opt": {"hsdp": 2}},
    "2-hsdp-copies-only": {"nproc": 2, "strategy_opt": {"hsdp": 2}},
    "4-hsdp-last": {"nproc": 4, "grad_accum_steps": 3, "gradient_sync_mode": "last", "strategy_opt": {"hsdp": 2}},
    "2-prefetch": {"nproc": 2, "strategy_opt": {"prefetch": 2}},
    "2-offload": {"nproc": 2, "strategy_opt": {"cpu_offload": True}},
    "2-recompute": {"nproc": 2, "activation_checkpointing": True},
}


def predicted(config: TrainConfig) -> dict[str, Traffic]:
    options = parse_options(FSDPOptions, config.strategy_opt, owner="fsdp")
    spec = gpt_spec(config)
    with torch.device("meta"):
        module = spec.build()
    units = choose_units(module, spec.blocks, options.wrap, options.wrap_size)
    micro_batches = config.grad_accum_steps or 1
    return step_traffic(
        describe_units(module, units, resharded=options.reshard is not False),
        shards=config.nproc // options.hsdp,
        copies=options.hsdp,
        micro_batches=micro_batches,
        synchronised=1 if config.gradient_sync_mode == "last" else micro_batches,
        param_dtype=config.precision if options.param_dtype == "auto" else options.param_dtype,
        reduce_dtype=options.reduce_dtype,
    )


@pytest.mark.parametrize("case", CASES)
def test_counted_is_predicted(case: str, tmp_path: Path) -> None:
    """Of every kind of collective: as many calls and bytes as predicted, and no other kind."""
    settings = {"strategy": "fsdp", "warmup_steps": 2, "steps": 1, **CASES[case]}
    result, _ = train(tmp_path, **settings)
    expected = predicted(TrainConfig(**{**TINY, **settings}))
    calls, sizes = dict(result.collectives_per_step or {}), dict(result.comm_bytes_per_step or {})
    assert calls.pop("agreement") == 1
    del sizes["agreement"]
    assert calls == {kind: t.calls for kind, t in expected.items()}
    assert sizes == {kind: t.bytes for kind, t in expected.items()}


def test_ddp_counted_is_predicted(tmp_path: Path) -> None:
    """DDP all-reduces every gradient element once a step."""
    result, _ = train(tmp_path, strategy="ddp", nproc=2, warmup_steps=2, steps=1)
    expected = ddp_step_traffic(result.parameters)["all_reduce"]
    assert result.collectives_per_step == {"all_reduce": expected.calls, "agreement": 1}
    assert result.comm_bytes_per_step is not None
    assert result.comm_bytes_per_step["all_reduce"] == expected.bytes


def test_padding_and_frozen_parameters() -> None:
    """Each parameter is padded by itself to a multiple of the shards; a frozen one is gathered, not reduced."""
    units = [Unit(((5, 3), (2,)), (True, False), resharded=True), Unit(((1, 4),), (True,), resharded=False)]
    found = step_traffic(units, shards=3, micro_batches=2, synchronised=1, param_dtype="bf16")
    assert found["all_gather"] == Traffic(6, 4 * (18 + 3) + 2 * 12, 2 * (4 * (18 + 3) + 2 * 12))
    assert found["reduce_scatter"] == Traffic(2, 18 + 12, 4 * (18 + 12))
    assert found.keys() == {"all_gather", "reduce_scatter"}


def test_elements_and_bytes_go_together() -> None:
    """Bytes are elements times the size of the dtype of that kind."""
    units = [Unit(((4, 4),), (True,), resharded=True)]
    found = step_traffic(units, shards=2, copies=2, reduce_dtype="bf16")
    sizes = {"all_gather": "fp32", "reduce_scatter": "bf16", "all_reduce": "bf16"}
    assert found.keys() == sizes.keys()
    assert all(found[kind].bytes == found[kind].elements * ELEMENT_BYTES[dtype] for kind, dtype in sizes.items())
    assert found["all_reduce"].elements == 8


def test_a_single_rank_needs_no_collectives() -> None:
    """Without shards and copies nothing is sent, as the plan's layout says."""
    assert step_traffic([Unit(((4,),), (True,), resharded=True)], shards=1) == {}
    assert plan(FSDPOptions(), TrainConfig(), World(1, 1)).layout == Layout((("dp", 1),))
