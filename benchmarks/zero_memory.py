"""Tensor bytes that a rank holds under DeepSpeed's ZeRO, a parameter of the model, against the paper's figures.

    python benchmarks/zero_memory.py [--ranks 2 4] [--stages 1 2 3]

Parameters, gradients (the most that is there after a backward, over two micro-batches), and optimizer state (fp32
weights and AdamW's two moments) are measured on every rank by unique storages, and the largest rank is shown. What is
needed for a moment only is left out: buckets (``reduce_bucket_size`` elements, twice with ``overlap_comm``),
gathered parameters of stage 3, activations.

With N ranks, P bytes for a parameter and G for its gradient (Rajbhandari et al., ZeRO, arXiv:1910.02054, section 3):
P + G + 12/N at stage 1, P + (G + 12)/N at stage 2, (P + G + 12)/N at stage 3. In bf16 P is 2, and G 2 or, where
gradients are accumulated in fp32, 4. In fp32 both are 4, and the fp32 weights are held once more.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mtb_core import Job, Prepared, TrainConfig, hookimpl, run

#: Many small layers, so that a parameter that two ranks share is a small part of what each has.
MODEL: dict[str, Any] = {"d_model": 32, "n_heads": 1, "n_layers": 48, "vocab_size": 64, "seq_length": 4}
KINDS = ("parameters", "gradients", "optimizer")


class Weigh:
    """Writes the most bytes of each kind that its rank has held after a backward."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._rank = folder, -1
        self._most = dict.fromkeys(KINDS, 0)

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Generator[None, Prepared, Prepared]:
        """Learn the rank."""
        self._rank = job.ctx.rank
        return (yield)

    @hookimpl(wrapper=True)
    def mtb_backward(self, prepared: Prepared) -> Generator[None, None, None]:
        """Weigh."""
        yield
        for kind, tensors in prepared.engine.parts.held().items():
            self._most[kind] = max(self._most[kind], unique_bytes(tensors))

    @hookimpl
    def mtb_run_finished(self) -> None:
        """Hand over."""
        (self._folder / f"{self._rank}.pickle").write_bytes(pickle.dumps(self._most))


def unique_bytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(stage: int, ranks: int, precision: str, accumulate: str) -> dict[str, float]:
    """Bytes a parameter by kind, of the rank that holds most."""
    options: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 50_000}
    if stage == 3:
        options |= {"param_persistence_threshold": 0, "max_live_parameters": 0, "prefetch_bucket_size": 0}
    if precision == "bf16":
        options["grad_accum_dtype"] = accumulate
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            **MODEL,
            strategy="deepspeed",
            strategy_opt=options,
            nproc=ranks,
            precision=precision,
            batch_size=1,
            grad_accum_steps=2,
            steps=2,
            warmup_steps=0,
            device="cpu",
            run_dir=f"{folder}/run",
            sink=("jsonl",),
        )
        result = run(config, quiet=True, plugins={"weigh": partial(Weigh, Path(folder))}).check()
        found = [pickle.loads(path.read_bytes()) for path in Path(folder).glob("*.pickle")]
    return {kind: max(rank[kind] for rank in found) / result.parameters for kind in KINDS}


def theory(stage: int, ranks: int, precision: str, accumulate: str) -> dict[str, float]:
    """Bytes a parameter by kind, see above."""
    parameter = 2 if precision == "bf16" else 4
    gradient = 2 if accumulate == "bf16" else 4
    return {
        "parameters": parameter / (ranks if stage == 3 else 1),
        "gradients": gradient / (ranks if stage >= 2 else 1),
        "optimizer": 12 / ranks,
    }


def main(argv: list[str]) -> int:
    """Print the table; 1 if anything is off by more than 5%."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    asked = parser.parse_args(argv)
    print("| precision, gradients | stage | ranks | parameters | gradients | optimizer | all | theory | off |")
    print("|---|---|---|---|---|---|---|---|---|")
    worst = 0.0
    for precision, accumulate in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")):
        for stage in asked.stages:
            if (precision, accumulate, stage) == ("bf16", "fp32", 1):
                continue  # not supported
            for ranks in asked.ranks:
                found = measure(stage, ranks, precision, accumulate)
                expected = theory(stage, ranks, precision, accumulate)
                whole, ideal = sum(found.values()), sum(expected.values())
                off = whole / ideal - 1
                worst = max(worst, abs(off))
                cells = " | ".join(f"{found[kind]:.2f} ({expected[kind]:.2f})" for kind in KINDS)
                print(
                    f"| {precision}, {accumulate} | {stage} | {ranks} | {cells} | {whole:.2f} | {ideal:.2f} | {off:+.1%} |",
                    flush=True,
                )
    return int(worst > 0.05)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
