"""How long it takes until something happens: the command line, and the first step of a two-rank DDP run.

    .venv-bench/bin/python benchmarks/startup.py [--quick]

See docs/benchmarks.md for what is measured and how.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mtb_bench.conductor import Conductor
from mtb_bench.contender import command
from mtb_bench.tables import ratios, show, spread
from mtb_bench.workload import sizes, write_data

BIN = Path(sys.executable).parent
MTB = str(BIN / "mtb")

COMMANDS = {
    "python -c 'import click, pluggy, attrs'": [sys.executable, "-c", "import click, pluggy, attrs"],
    "mtb --help": [MTB, "--help"],
    "mtb plugins list": [MTB, "plugins", "list"],
    "mtb train --help": [MTB, "train", "--help"],
}

NO_SHIM = {"MTB_NO_DYNAMO_SHIM": "1"}


def train_command(data: Path) -> list[str]:
    """`mtb train` with the sizes of the bare loop, one step."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in sizes().items()]
    run = ["--strategy=ddp", "--nproc=2", "--steps=1", "--warmup-steps=0", "--sink=gate"]
    return [MTB, "train", *run, f"--data={data}", *options]


def wall_s(argv: Sequence[str]) -> float:
    """Wall time of a command that has to succeed."""
    started = time.monotonic()
    done = subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stderr.decode()}")
    return time.monotonic() - started


def first_step_s(name: str, argv: Sequence[str], env: Mapping[str, str]) -> float:
    """From the start of a command to the end of the first step on the last of its two ranks."""
    with Conductor({name: argv}, nproc=2, windows=[1], env=env) as conductor:
        return conductor.warm_after_s(name)


def interleaved(title: str, tasks: Mapping[str, Callable[[], float]], rounds: int) -> None:
    """Run all tasks in every round; print medians and ratios to the first task. A first round is thrown away."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(rounds + 1):
        for name, task in tasks.items():
            seconds = task()
            if turn:
                times[name].append(seconds)
    base = times[next(iter(tasks))]
    rows = [(name, f"{spread(seen).median * 1e3:.0f}", str(ratios(seen, base))) for name, seen in times.items()]
    show(title, ["what", "ms", "ratio to the first"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: a first look only")
    parser.add_argument("--rounds", type=int, default=21, help="of the commands [21]")
    parser.add_argument("--train-rounds", type=int, default=9, help="of the training runs [9]")
    given = parser.parse_args()
    if given.quick:
        given.rounds, given.train_rounds = 5, 3

    tasks = {name: (lambda argv=argv: wall_s(argv)) for name, argv in COMMANDS.items()}
    interleaved("Command line, wall time", tasks, given.rounds)

    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data.txt"
        write_data(data)
        env = {"MTB_BENCH_DATA": str(data)}
        ours = train_command(data)
        runs = {
            "torchrun, loop by hand": lambda: first_step_s("bare", command("bare", 2), env),
            "mtb train": lambda: first_step_s("mtb", ours, env),
            "mtb train, shim off": lambda: first_step_s("mtb", ours, {**env, **NO_SHIM}),
        }
        interleaved("From the command to the end of the first step, DDP, two ranks", runs, given.train_rounds)


if __name__ == "__main__":
    main()
