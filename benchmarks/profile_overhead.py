"""What profiling costs: the same steps without a profiler, recorded, and recorded with allocations.

    .venv/bin/python benchmarks/profile_overhead.py [--nproc 2] [--rounds 5] [--steps 20]

Each round runs the three in a new random order, in processes of their own; ratios are taken within a round. Only steps
that were recorded count, and of the plain run the same ones; writing the traces is outside of steps. Also: what a range
costs while nobody records, which is what a timed run pays. See docs/profile.md.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import timeit
from pathlib import Path
from statistics import median

from mtb_core import TrainConfig, run
from mtb_profile.run_command import profile_run
from mtb_profile.schedule import Schedule

WARMUP = 3
KINDS = ("plain", "recorded", "with allocations")


def one(kind: str, nproc: int, steps: int) -> dict[str, float]:
    """Median step time of rank 0 over the recorded steps, ms, and the size of its trace, MiB."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        plan = Schedule(wait=1, warmup=1, active=steps, memory=kind == "with allocations")
        config = TrainConfig(
            strategy="ddp" if nproc > 1 else "single",
            nproc=nproc,
            steps=plan.steps,
            warmup_steps=WARMUP,
            d_model=128,
            seq_length=64,
            device="cpu",
            run_dir=str(folder),
        )
        result = run(config, quiet=True) if kind == "plain" else profile_run(config, plan, quiet=True)[0]
        result.check()
        lines = (folder / "metrics" / "rank_00000.jsonl").read_text(encoding="utf-8").splitlines()
        times = [json.loads(line)["step_time_ms"] for line in lines][WARMUP + plan.wait + plan.warmup :]
        trace = folder / "trace" / "rank_00000.json.gz"
        return {"ms": median(times), "mib": trace.stat().st_size / 2**20 if trace.exists() else 0.0}


def unseen_range_us() -> float:
    """Microseconds that a named range takes while no profiler looks."""
    from mtb_core.measure.ranges import named_range

    def enter() -> None:
        with named_range("x"):
            pass

    return min(timeit.repeat(enter, number=10_000, repeat=5)) / 10_000 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    order = random.Random(0)
    rows: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(given.rounds):
        for kind in order.sample(KINDS, len(KINDS)):
            rows[kind].append(one(kind, given.nproc, given.steps))
    for kind, found in rows.items():
        ratios = sorted(a["ms"] / b["ms"] for a, b in zip(found, rows["plain"], strict=True))
        size = median(r["mib"] for r in found)
        print(
            f"{kind:<17} step {median(r['ms'] for r in found):8.2f} ms; of plain: median {median(ratios):.2f}, from "
            f"{ratios[0]:.2f} to {ratios[-1]:.2f}; trace {size:.2f} MiB a rank"
        )
    print(f"a range that nobody sees: {unseen_range_us():.2f} us")


if __name__ == "__main__":
    main()
