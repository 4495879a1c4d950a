"""The same training under every strategy: losses over 20 steps against those of ``single``; ``make parity``.

One configuration, fp32, no dropout, the same global batch; only the strategy, its options and the number of ranks differ.
Exits with 1 if a strategy's losses differ from those of ``single`` by more than 1e-5 of their value.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from mtb_core import ConfigError, Result, TrainConfig, run

TOLERANCE = 1e-5
CONFIG: dict[str, Any] = {
    "device": "cpu",
    "seq_length": 32,
    "vocab_size": 96,
    "d_model": 48,
    "n_heads": 4,
    "n_layers": 2,
    "global_batch_size": 16,
    "grad_accum_steps": 2,
    "learning_rate": 2e-3,
    "max_grad_norm": 1.0,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 4,
    "lr_decay_steps": 40,
    "warmup_steps": 3,  # collectives are counted in the last of them, when all that is done once is done
    "steps": 17,
    "sink": ("jsonl",),
}


@attrs.frozen
class Entry:
    """A row of the table."""

    strategy: str
    nproc: int
    options: dict[str, Any] = attrs.field(factory=dict)

    @property
    def name(self) -> str:
        """As it is shown."""
        return " ".join([self.strategy, *(f"{k}={v}" for k, v in self.options.items())])


ENTRIES = (
    Entry("single", 1),
    Entry("ddp", 2),
    Entry("ddp", 4),
    Entry("ddp", 2, {"zero1": True}),
    Entry("fsdp", 2),
    Entry("fsdp", 4),
    Entry("fsdp", 2, {"reshard_after_forward": "false"}),
    Entry("fsdp1", 2),
    *(Entry("deepspeed", 2, {"stage": stage}) for stage in (0, 1, 2, 3)),
    Entry("deepspeed", 4, {"stage": 3}),
    Entry("tp", 2, {"tp": 2}),
    Entry("tp", 4, {"tp": 2}),
    Entry("tp", 4, {"tp": 2, "data_parallel": "fsdp"}),
)


def main() -> int:
    """Run all and print the table."""
    console = Console(width=150) if not sys.stdout.isatty() else Console()
    table = Table(title="Losses against `single`, fp32, 20 steps, the same global batch")
    for title in ("strategy", "ranks", "last loss", "largest relative difference", "collectives a step", "verdict"):
        table.add_column(title, justify="left" if title in ("strategy", "verdict") else "right")
    reference: list[float] = []
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="mtb-parity-") as folder:
        for number, entry in enumerate(ENTRIES):
            Console(stderr=True).print(f"{entry.name} on {entry.nproc} ranks …")
            where = Path(folder) / str(number)
            try:
                result = _run(entry, where)
            except ConfigError as error:
                result = None
                why = str(error)
            else:
                why = "" if result.exit_reason == "done" else f"{result.exit_reason}: {result.failure}"
            if result is None or why:
                wrong += 1
                table.add_row(entry.name, str(entry.nproc), "-", "-", "-", f"failed: {why}")
                continue
            losses = _losses(where)
            if entry.strategy == "single":
                reference = losses
            if not reference:
                wrong += 1
                table.add_row(entry.name, str(entry.nproc), f"{losses[-1]:.6f}", "-", "-", "no reference")
                continue
            apart = max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))
            right = apart <= TOLERANCE
            wrong += not right
            counted = ", ".join(f"{kind} {n}" for kind, n in (result.collectives_per_step or {}).items())
            row = (f"{losses[-1]:.6f}", f"{apart:.1e}", counted or "none", "equal" if right else "DIFFERENT")
            table.add_row(entry.name, str(entry.nproc), *row)
    console.print(table)
    console.print(f"tolerance {TOLERANCE:g}; {wrong} of {len(ENTRIES)} outside")
    return 1 if wrong else 0


def _run(entry: Entry, where: Path) -> Result:
    config = TrainConfig(
        **CONFIG, strategy=entry.strategy, nproc=entry.nproc, strategy_opt=entry.options, run_dir=str(where)
    )
    return run(config, quiet=True)


def _losses(where: Path) -> list[float]:
    lines = (where / "metrics" / "rank_00000.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


if __name__ == "__main__":
    sys.exit(main())
