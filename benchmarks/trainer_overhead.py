"""What a trainer costs on top of the model: a small GPT, every contender with the same model code and data.

    .venv-bench/bin/python benchmarks/trainer_overhead.py [--quick] [--nproc 1 2]

See docs/benchmarks.md for what is measured and how.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path

from mtb_bench.conductor import Conductor, Window
from mtb_bench.contender import CONTENDERS, command
from mtb_bench.tables import ratios, show, spread
from mtb_bench.workload import write_data

BASES = {"bare": "by hand", "bare_fused": "fused", "bare_guarded": "guarded"}


def measure(
    names: list[str], *, nproc: int, lives: int, rounds: int, steps: int, warmup: int, data: Path
) -> dict[str, list[Window]]:
    """Windows of every contender: `rounds` for each of `lives` fresh sets of processes, in a new order every round."""
    windows: dict[str, list[Window]] = {name: [] for name in names}
    order = random.Random(0)
    for life in range(lives):
        print(f"nproc {nproc}: life {life + 1} of {lives}", file=sys.stderr)
        plan = [warmup, *[steps] * rounds]
        commands = {name: command(name, nproc) for name in order.sample(names, len(names))}
        with Conductor(commands, nproc=nproc, windows=plan, env={"MTB_BENCH_DATA": str(data)}) as conductor:
            for _ in range(rounds):
                for name in order.sample(names, len(names)):
                    windows[name].append(conductor.window(name, steps))
    return windows


def report(title: str, windows: dict[str, list[Window]]) -> None:
    """Print times per step, and ratios to each base."""
    wall = {name: [w.wall_ms for w in measured] for name, measured in windows.items()}
    cpu = {name: [w.cpu_ms for w in measured] for name, measured in windows.items()}
    bases = [base for base in BASES if base in windows]
    columns = ["contender", "wall ms", "CPU ms"]
    for base in bases:
        columns += [f"wall / {BASES[base]}", "fastest", "CPU"]
    rows = []
    for name in windows:
        row = [CONTENDERS[name].label, f"{spread(wall[name]).median:.2f}", f"{spread(cpu[name]).median:.2f}"]
        for base in bases:
            row += [
                str(ratios(wall[name], wall[base])),
                f"{min(wall[name]) / min(wall[base]):.2f}",
                f"{ratios(cpu[name], cpu[base]).median:.2f}",
            ]
        rows.append(row)
    show(title, columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, nargs="+", default=[1, 2], help="numbers of ranks [1 2]")
    parser.add_argument("--quick", action="store_true", help="few, short rounds: a first look only")
    parser.add_argument("--lives", type=int, default=5, help="fresh sets of processes [5]")
    parser.add_argument("--rounds", type=int, default=8, help="windows of every contender in each life [8]")
    parser.add_argument("--steps", type=int, default=60, help="steps of a window [60]")
    parser.add_argument("--warmup", type=int, default=40, help="steps before the first window [40]")
    parser.add_argument("--only", nargs="+", choices=[*CONTENDERS], metavar="NAME", help=", ".join(CONTENDERS))
    parser.add_argument("--output", type=Path, help="write the windows as JSON here")
    given = parser.parse_args()
    if given.quick:
        given.lives, given.rounds, given.steps, given.warmup = 2, 5, 30, 20
    names = given.only or [*CONTENDERS]
    raw = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.txt"
        write_data(data)
        for nproc in given.nproc:
            windows = measure(
                names,
                nproc=nproc,
                lives=given.lives,
                rounds=given.rounds,
                steps=given.steps,
                warmup=given.warmup,
                data=data,
            )
            ranks = "one process" if nproc == 1 else f"DDP, {nproc} ranks, gloo"
            report(f"Trainer overhead, {ranks}: time per step; ratios as median [quartiles]", windows)
            raw[str(nproc)] = {
                n: {"wall_ms": [w.wall_ms for w in m], "cpu_ms": [w.cpu_ms for w in m]} for n, m in windows.items()
            }
    if given.output:
        given.output.write_text(json.dumps(raw))


if __name__ == "__main__":
    main()
