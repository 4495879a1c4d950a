"""Communication of one optimizer step: counted on real collectives against theory, for `ddp` and `fsdp`.

Run ``python benchmarks/comm_theory.py``: it prints a table in Markdown and leaves with 1 if a row differs. Sizes are
those of a small model with a vocabulary that does not divide; every figure but the sizes is the same for larger ones.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mtb_core import TrainConfig, parse_options, run
from mtb_core.model.gpt import gpt_spec
from mtb_fsdp.plugin import FSDPOptions
from mtb_fsdp.theory import ELEMENT_BYTES, Traffic, ddp_step_traffic, step_traffic
from mtb_fsdp.units import choose_units, describe_units

MODEL: dict[str, Any] = {
    "seq_length": 8,
    "vocab_size": 65,
    "d_model": 32,
    "n_heads": 2,
    "n_layers": 4,
    "global_batch_size": 12,
    "warmup_steps": 2,  # counted in the last one
    "steps": 1,
    "device": "cpu",
}
ACCUMULATE = {"grad_accum_steps": 2}
CASES: list[dict[str, Any]] = [
    {"strategy": "ddp", "nproc": 2},
    {"strategy": "ddp", "nproc": 3, **ACCUMULATE, "gradient_sync_mode": "last"},
    {"strategy": "ddp", "nproc": 3, **ACCUMULATE, "gradient_sync_mode": "every"},
    {"strategy": "fsdp", "nproc": 2},
    {"strategy": "fsdp", "nproc": 3},
    {"strategy": "fsdp", "nproc": 2, "strategy_opt": {"reshard_after_forward": "false"}},
    {"strategy": "fsdp", "nproc": 4, "strategy_opt": {"reshard_after_forward": "2"}},
    {"strategy": "fsdp", "nproc": 2, "strategy_opt": {"wrap": "root"}},
    {"strategy": "fsdp", "nproc": 2, "strategy_opt": {"wrap": "auto-size", "wrap_size": 4000}},
    {"strategy": "fsdp", "nproc": 3, **ACCUMULATE, "gradient_sync_mode": "every"},
    {"strategy": "fsdp", "nproc": 3, **ACCUMULATE, "gradient_sync_mode": "last"},
    {"strategy": "fsdp", "nproc": 2, "precision": "bf16"},
    {"strategy": "fsdp", "nproc": 2, "strategy_opt": {"reduce_dtype": "bf16"}},
    {"strategy": "fsdp", "nproc": 4, "strategy_opt": {"hsdp": 2}},
]


def predicted(config: TrainConfig) -> tuple[dict[str, Traffic], dict[str, str]]:
    """Traffic of a step by kind, and the dtype in which each kind travels."""
    spec = gpt_spec(config)
    with torch.device("meta"):
        module = spec.build()
    micro_batches = config.grad_accum_steps or 1
    synchronised = 1 if config.gradient_sync_mode == "last" else micro_batches
    if config.strategy == "ddp":
        count = sum(p.numel() for p in module.parameters())
        return ddp_step_traffic(count, synchronised=synchronised), {"all_reduce": "fp32"}
    options = parse_options(FSDPOptions, config.strategy_opt, owner="strategy 'fsdp'")
    units = choose_units(module, spec.blocks, options.wrap, options.wrap_size)
    gathered = config.precision if options.param_dtype == "auto" else options.param_dtype
    traffic = step_traffic(
        describe_units(module, units, resharded=options.reshard is not False),
        shards=config.nproc // options.hsdp,
        copies=options.hsdp,
        micro_batches=micro_batches,
        synchronised=synchronised,
        param_dtype=gathered,
        reduce_dtype=options.reduce_dtype,
    )
    reduced = options.reduce_dtype
    return traffic, {"all_gather": gathered, "reduce_scatter": reduced, "all_reduce": reduced}


def counted(config: TrainConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Calls and bytes of a step by kind, without the run's own small all-reduce."""
    result = run(config, quiet=True)
    if result.exit_reason != "done":
        raise SystemExit(f"{config.strategy} did not run: {result.failure}")
    calls, sizes = dict(result.collectives_per_step or {}), dict(result.comm_bytes_per_step or {})
    for values in (calls, sizes):
        values.pop("agreement", None)
    return calls, sizes


def rows(case: dict[str, Any], folder: Path) -> Iterator[tuple[str, bool]]:
    """A table row for each kind, and whether counted and predicted are the same."""
    config = TrainConfig(**{**MODEL, **case, "run_dir": str(folder), "sink": ("jsonl",)})
    traffic, dtypes = predicted(config)
    calls, sizes = counted(config)
    options = [f"{k}={v}" for k, v in config.strategy_opt.items()]
    more = [f"{k}={v}" for k, v in case.items() if k not in ("strategy", "nproc", "strategy_opt")]
    for kind in sorted(traffic.keys() | calls.keys()):
        theory, dtype = traffic.get(kind, Traffic()), dtypes.get(kind, "fp32")
        seen = Traffic(calls.get(kind, 0), sizes.get(kind, 0) // ELEMENT_BYTES[dtype], sizes.get(kind, 0))
        cells = [
            config.strategy,
            str(config.nproc),
            " ".join(options + more) or "–",
            kind.replace("_", "-"),
            *(f"{a:,} / {b:,}" for a, b in zip(_values(seen), _values(theory), strict=True)),
        ]
        yield f"| {' | '.join(cells)} |", seen == theory


def _values(traffic: Traffic) -> tuple[int, int, int]:
    return traffic.calls, traffic.elements, traffic.bytes


def main() -> None:
    """Print the table."""
    print("| strategy | ranks | options | collective | calls counted / theory | elements | bytes |")
    print("|---|---|---|---|---|---|---|")
    equal = True
    with tempfile.TemporaryDirectory() as folder:
        for index, case in enumerate(CASES):
            for line, same in rows(case, Path(folder) / str(index)):
                print(line, flush=True)
                equal = equal and same
    sys.exit(not equal)


if __name__ == "__main__":
    main()
