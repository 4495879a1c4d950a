"""Two commits of this repository train side by side, and everything they say is compared to the bit.

    .venv/bin/python benchmarks/side_by_side.py BASE [HEAD]

HEAD is the working tree if it is not named. Exits with 1 if anything differs; times are only shown. See
docs/benchmarks.md for what is compared and how.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import attrs
from bitwise import Trained, compare, digests, judge, read_evaluations, read_records
from in_turns import step_times
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from sides import Side, Unusable, commit, install, working_tree

REPOSITORY = Path(__file__).resolve().parent.parent
#: Columns in which a difference may show.
COLUMNS = ("losses", "norms", "counts", "eval", "state")
#: For all configurations; those of a configuration come later on the command line, and count.
COMMON = (
    "--quiet --device cpu --sink jsonl --warmup-steps 2 --batch-size 2 --seq-length 16 --d-model 32 --n-heads 2 "
    "--n-layers 2 --learning-rate 3e-3"
)
SAVING = "--save-every 1000000 --checkpoint-dir checkpoints"  # at the end only
#: Samples of the training data, 16 bytes each: every few steps an epoch ends with a batch that is shorter.
SAMPLES = 21
#: Bytes of the evaluation data: no multiple of a sample, nor of what two or three ranks take at a time.
EVALUATION_BYTES = 615


@attrs.frozen
class Configuration:
    """A training: its options; `parts` is 2 where it stops half-way and another invocation resumes it."""

    name: str
    options: str = ""
    parts: int = 1

    def command(self, part: int, steps: int) -> list[str]:
        """Arguments of ``mtb`` for one part of the training, which writes to the folder ``run-PART``."""
        until = steps if part == self.parts else steps // 2
        resume = ["--resume", "latest"] if part > 1 else []
        return [*self._arguments(until), *SAVING.split(), "--run-dir", f"run-{part}", *resume]

    def endless(self) -> list[str]:
        """The same without an end and without checkpoints; ``--run-dir`` is missing."""
        return self._arguments(10**9)

    def _arguments(self, until: int) -> list[str]:
        return [
            "train",
            *COMMON.split(),
            "--data",
            "../../train.txt",
            *self.options.split(),
            "--until-step",
            str(until),
        ]


_DDP2 = "--strategy ddp --nproc 2"
_FSDP2 = "--strategy fsdp --nproc 2"
_EVALUATE = "--eval-data ../../evaluation.txt --eval-every 5"
_COSINE = "--lr-scheduler cosine --lr-warmup-steps 3 --lr-decay-steps 40"
CONFIGURATIONS = (
    Configuration("single"),
    Configuration("single-accumulate", "--grad-accum-steps 3 --max-grad-norm 0.5"),
    Configuration(
        "single-sgd-synthetic",
        f"--data synthetic --vocab-size 64 --optimizer sgd --momentum 0.9 --tie-embeddings --qk-norm {_COSINE}",
    ),
    Configuration("single-resume", f"--dropout 0.1 {_COSINE} {_EVALUATE}", parts=2),
    Configuration("ddp-2", _DDP2),
    Configuration("ddp-2-every", f"{_DDP2} --grad-accum-steps 3 --gradient-sync-mode every"),
    Configuration("ddp-2-last", f"{_DDP2} --grad-accum-steps 3 --gradient-sync-mode last"),
    Configuration("ddp-2-bf16", f"{_DDP2} --precision bf16"),
    Configuration("ddp-3", "--strategy ddp --nproc 3"),
    Configuration("ddp-2-zero1", f"{_DDP2} --strategy-opt zero1=true"),
    Configuration("ddp-2-clip", f"{_DDP2} --max-grad-norm 0.5 {_COSINE}"),
    Configuration("ddp-2-recompute", f"{_DDP2} --activation-checkpointing --grad-accum-steps 2"),
    Configuration("ddp-2-resume-dropout", f"{_DDP2} --dropout 0.1", parts=2),
    Configuration("ddp-3-evaluation", f"--strategy ddp --nproc 3 {_EVALUATE}"),
    Configuration("fsdp-2", _FSDP2),
    Configuration("fsdp-2-accumulate-bf16", f"{_FSDP2} --grad-accum-steps 3 --precision bf16"),
    Configuration("fsdp-2-resume", f"{_FSDP2} {_EVALUATE}", parts=2),
    Configuration("fsdp1-2", "--strategy fsdp1 --nproc 2"),
    Configuration("deepspeed-2-stage1", "--strategy deepspeed --nproc 2 --strategy-opt stage=1"),
    Configuration("deepspeed-2-stage2-bf16", "--strategy deepspeed --nproc 2 --strategy-opt stage=2 --precision bf16"),
    Configuration("deepspeed-2-stage3", "--strategy deepspeed --nproc 2 --strategy-opt stage=3 --max-grad-norm 0.5"),
    Configuration("tp-2", "--strategy tp --nproc 2 --strategy-opt tp=2"),
    Configuration("tp-2-ddp-2", f"--strategy tp --nproc 4 --strategy-opt tp=2 {_EVALUATE}"),
    Configuration("tp-2-fsdp-2", "--strategy tp --nproc 4 --strategy-opt tp=2 --strategy-opt data_parallel=fsdp"),
)


@attrs.frozen
class Times:
    """Of one training: all of its commands (s), and the start-up (s), which ends with the first step."""

    seconds: float
    startup_s: float


@attrs.frozen
class Outcome:
    """What one side made of a configuration; `checkpoint` is its last one."""

    trained: Trained
    times: Times
    checkpoint: Path


@attrs.define
class Row:
    """A configuration in the table.

    Attributes:
        differences: by column; None: equal.
        not_compared: parts of the checkpoints that only one side has.
        failed: why there was nothing to compare.
        times, weights: of each side, by its name.
        step_ms: median step times in the windows of each side, by its name.
        not_timed: why there are none.
    """

    configuration: Configuration
    differences: dict[str, str | None] = attrs.field(factory=dict)
    not_compared: str | None = None
    failed: str | None = None
    evaluated: bool = False
    times: dict[str, Times] = attrs.field(factory=dict)
    weights: dict[str, Mapping[str, str]] = attrs.field(factory=dict)
    step_ms: dict[str, list[float]] = attrs.field(factory=dict)
    not_timed: str | None = None

    @property
    def equal(self) -> bool:
        """Whether both sides ended, and nothing differs."""
        return self.failed is None and not any(self.differences.values())

    @property
    def startup_ratio(self) -> float | None:
        """Head's start-up over base's."""
        return self.times["head"].startup_s / self.times["base"].startup_s if self.times else None

    @property
    def step_ratio(self) -> float | None:
        """Head's step time over base's: the median over pairs of windows."""
        if not self.step_ms:
            return None
        return statistics.median(h / b for b, h in zip(self.step_ms["base"], self.step_ms["head"], strict=True))

    def to_json(self, steps: int) -> dict[str, Any]:
        """All that is known of it."""
        commands = [["mtb", *self.configuration.command(part + 1, steps)] for part in range(self.configuration.parts)]
        return {
            "name": self.configuration.name,
            "commands": commands,
            "equal": self.equal,
            "failed": self.failed,
            "differences": {column: text for column, text in self.differences.items() if text},
            "not_compared": self.not_compared,
            "weights_sha256": self.weights,
            "times": {name: attrs.asdict(times) for name, times in self.times.items()},
            "window_step_ms": self.step_ms,
            "step_time_ratio": self.step_ratio,
            "startup_ratio": self.startup_ratio,
        }


def train(side: Side, configuration: Configuration, steps: int, folder: Path, timeout_s: float) -> Outcome:
    """Train one configuration on one side in the new `folder`.

    Raises:
        Unusable: a command failed, or left what cannot be read.
    """
    folder.mkdir(parents=True)
    parts = range(1, configuration.parts + 1)
    ran = [side.document(configuration.command(part, steps), folder, timeout_s)[1] for part in parts]
    runs = [folder / f"run-{part}" for part in parts]
    listed, _ = side.document(["checkpoint", "list", "checkpoints", "--json"], folder, timeout_s)
    try:
        records = read_records(runs)
        evaluations = read_evaluations(runs)
        last = max(json.loads(listed)["checkpoints"], key=lambda found: found["step"])["name"]
        side.document(
            ["checkpoint", "export", f"checkpoints/{last}", "--output", "weights.safetensors"], folder, timeout_s
        )
        weights = digests(folder / "weights.safetensors")
        first = next(iter(records.values()))
        times = Times(
            seconds=sum(one.seconds for one in ran),
            startup_s=datetime.fromisoformat(first[0]["time"]).timestamp() - ran[0].started,
        )
    except (OSError, ValueError, KeyError) as error:
        raise Unusable(f"{side.name}: {type(error).__name__}: {error}") from error
    return Outcome(Trained(records, evaluations, weights), times, folder / "checkpoints" / last)


def compare_checkpoints(
    readers: Sequence[Side], base: Path, head: Path, timeout_s: float
) -> tuple[str | None, str | None]:
    """The whole state in two checkpoints, as `judge` has it, by the first of the `readers` that reads both.

    Each side has read its own before, so what fails here is a format that the other does not know.
    """
    said = []
    for side in readers:
        ran = side.mtb(["checkpoint", "verify", str(base), str(head), "--json"], base.parent, timeout_s)
        with contextlib.suppress(ValueError):
            verified = json.loads(ran.stdout)
            if "sections" in verified:
                return judge(verified)
        said.append(f"{side.name} says: {' '.join(ran.stderr.split())}")
    return None, f"the checkpoints but for their weights, since neither side reads both. {'; '.join(said)}"


def run_row(
    configuration: Configuration, order: Sequence[Side], steps: int, timed: bool, folder: Path, timeout_s: float
) -> Row:
    """Train one configuration on both sides, in this `order`, and compare; `timed`: take the times of further steps."""
    row = Row(configuration, dict.fromkeys(COLUMNS))
    try:
        done = {side.name: train(side, configuration, steps, folder / side.name, timeout_s) for side in order}
    except Unusable as error:
        row.failed = str(error)
        return row
    base, head = done["base"], done["head"]
    readers = sorted(order, key=lambda side: side.name)  # base comes first: what it says was trusted before
    state, row.not_compared = compare_checkpoints(readers, base.checkpoint, head.checkpoint, timeout_s)
    row.differences = compare(base.trained, head.trained)
    row.differences["state"] = "; ".join(filter(None, (row.differences["state"], state))) or None
    row.evaluated = base.trained.evaluated or head.trained.evaluated
    row.times = {name: outcome.times for name, outcome in done.items()}
    row.weights = {name: outcome.trained.weights for name, outcome in done.items()}
    if timed:
        try:
            row.step_ms = step_times(order, configuration.endless(), folder / "base", timeout_s)
        except Unusable as error:
            row.not_timed = str(error)
    return row


def table(rows: Sequence[Row], sides: Sequence[Side], steps: int) -> Table:
    """What is printed at the end."""
    shown = Table(title=escape(f"base: {sides[0].label}, head: {sides[1].label}"), title_justify="left")
    for title in ("configuration", "steps", *COLUMNS, "base s", "head s", "step time", "start-up"):
        shown.add_column(title, justify="left" if title in ("configuration", *COLUMNS) else "right", no_wrap=True)
    for row in rows:
        if row.failed is not None:
            shown.add_row(row.configuration.name, str(steps), "FAILED")
            continue
        cells = {column: "DIFFER" if text else "equal" for column, text in row.differences.items()}
        if not row.evaluated and not row.differences["eval"]:
            cells["eval"] = "-"
        if row.not_compared and not row.differences["state"]:
            cells["state"] = "in part"
        seconds = (f"{row.times[name].seconds:.1f}" for name in ("base", "head"))
        ratios = ("-" if ratio is None else f"{ratio:.2f}" for ratio in (row.step_ratio, row.startup_ratio))
        shown.add_row(row.configuration.name, str(steps), *cells.values(), *seconds, *ratios)
    return shown


def report(rows: Sequence[Row], sides: Sequence[Side], steps: int) -> None:
    """Print the table, and below it what differs."""
    console = Console(width=150) if not sys.stdout.isatty() else Console()
    console.print(table(rows, sides, steps))
    for row in rows:
        texts = {"failed": row.failed, **row.differences, "not compared": row.not_compared, "not timed": row.not_timed}
        for what, text in texts.items():
            if text:
                console.print(f"{row.configuration.name}: {what}: {text}", markup=False, highlight=False)
    for what, ratios in (("step time", [r.step_ratio for r in rows]), ("start-up", [r.startup_ratio for r in rows])):
        known = [ratio for ratio in ratios if ratio is not None]
        if known:
            text = f"{what}, head over base: median of all {statistics.median(known):.2f}, {min(known):.2f} to {max(known):.2f}"
            console.print(text, highlight=False)
    console.print(f"{sum(row.equal for row in rows)} of {len(rows)} configurations equal to the bit", highlight=False)


def write_data(folder: Path) -> None:
    """Text to train on and to evaluate on."""
    prose = "a small core defines hooks and every kind of parallelism is a plugin that is tried on real ranks"
    words = prose.split()
    text = " ".join(f"{words[i * i % len(words)]} {words[i * 7 % len(words)]} {i}" for i in range(200))
    (folder / "train.txt").write_text(text[: SAMPLES * 16 - 5], encoding="utf-8")
    (folder / "evaluation.txt").write_text(text[-EVALUATION_BYTES:], encoding="utf-8")


def main() -> int:
    given = _parse()
    chosen = [c for c in CONFIGURATIONS if not given.only or c.name in given.only]
    if given.list:
        for configuration in chosen:
            print(f"{configuration.name:<26}{configuration.options}{'; resumed' if configuration.parts > 1 else ''}")
        return 0
    progress = Console(stderr=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="mtb-side-by-side-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        runs = folder if given.keep is None else given.keep.resolve()
        try:
            runs.mkdir(parents=True, exist_ok=True)
            write_data(runs)
            trees = {
                "base": commit(REPOSITORY, given.base),
                "head": commit(REPOSITORY, given.head) if given.head else working_tree(REPOSITORY, folder / "git"),
            }
            sides = []
            for side, tree in trees.items():
                progress.print(f"{side}: installing {tree.label}", markup=False)
                sides.append(install(side, REPOSITORY, tree, folder / side))
        except Unusable as error:
            progress.print(f"error: {error}", markup=False)
            return 2
        rows = []
        for number, configuration in enumerate(chosen, 1):
            progress.print(f"{number}/{len(chosen)} {configuration.name}", markup=False, end=" ")
            order = sides if number % 2 else sides[::-1]
            where = runs / configuration.name
            rows.append(run_row(configuration, order, given.steps, not given.no_times, where, given.timeout))
            progress.print("equal" if rows[-1].equal else "FAILED" if rows[-1].failed else "DIFFERENT")
        report(rows, sides, given.steps)
        equal = all(row.equal for row in rows)
        if given.json is not None:
            document = {
                "base": sides[0].label,
                "head": sides[1].label,
                "steps": given.steps,
                "equal": equal,
                "configurations": [row.to_json(given.steps) for row in rows],
            }
            given.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        return 0 if equal else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", nargs="?", help="a commit")
    parser.add_argument("head", metavar="HEAD", nargs="?", help="another one [the working tree]")
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="a configuration; may be repeated")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of each training [12]")
    parser.add_argument("--no-times", action="store_true", help="leave the time of a step out, which takes a third")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="for one command [300]")
    parser.add_argument("--list", action="store_true", help="show the configurations, and run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was found here")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="leave the runs of both sides here, in a new folder each"
    )
    given = parser.parse_args()
    names = [c.name for c in CONFIGURATIONS]
    unknown = [name for name in given.only if name not in names]
    if unknown:
        parser.error(f"--only {unknown[0]} is no configuration; valid: {', '.join(names)}")
    if given.base is None and not given.list:
        parser.error("name BASE, a commit to compare with")
    if given.steps < 6:
        parser.error(f"--steps {given.steps} is too few; at least 6, for a resumed training makes the half of them")
    return given


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the temporary folder goes then, too
    try:
        code = main()
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
