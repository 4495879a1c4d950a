"""``mtb profile analyze``: from paths to tables, a JSON document, a timeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from mtb_core import ConfigError, check_output, dumps, write_json

from .analysis import Analysis, analyze
from .document import document
from .losses import Losses, Work, find_losses
from .setting import Setting, setting_of
from .tables import analysis_tables, show
from .timeline import as_svg, as_text, find_timeline
from .verdict import Verdict, judge
from .windows import WINDOWS, Window

#: Names of traces in a folder, the more telling ones first.
_PATTERNS = ("rank*.json*", "*.pt.trace.json*", "*trace*.json*", "*.json*")


@attrs.frozen
class Wanted:
    """What to show of an analysis, and where."""

    window: Window | None = None
    mfu: bool = False
    work: Work = attrs.field(factory=Work)
    timeline: bool = False
    step: int | None = None
    svg: Path | None = None
    setting: Setting = attrs.field(factory=Setting)


@attrs.frozen(eq=False)
class Found:
    """An analysis with all that was asked of it."""

    analysis: Analysis
    verdict: Verdict
    losses: Losses | None
    timeline: str | None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return document(self.analysis, self.verdict, self.losses)

    def show(self) -> None:
        """As tables on stdout."""
        parts = analysis_tables(self.analysis, self.verdict, self.losses)
        show(parts)
        if self.timeline is not None:
            click.echo(f"\n{self.timeline}")


def find(paths: Sequence[Path], wanted: Wanted) -> Found:
    """Analyse and write the picture.

    Raises:
        ConfigError: see `mtb_profile.analysis.analyze`.
    """
    analysis = analyze(paths, wanted.window)
    losses = find_losses(analysis, wanted.work) if wanted.mfu else None
    timeline = None
    if wanted.timeline or wanted.svg is not None:
        chosen = find_timeline(analysis, wanted.step)
        timeline = as_text(chosen) if wanted.timeline else None
        if wanted.svg is not None:
            write_text(wanted.svg, as_svg(chosen), "--svg")
    return Found(analysis, judge(analysis, wanted.setting), losses, timeline)


def write_text(path: Path, text: str, option: str) -> None:
    """Write a file that an option names.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, option, error) from error


def _unwritable(path: Path, option: str, error: OSError) -> ConfigError:
    return ConfigError(f"{option} {path} cannot be written: {error.strerror} (errno {error.errno}); name another file.")


@click.command("analyze")
@click.argument("paths", nargs=-1, required=True, metavar="DIR|FILES", type=click.Path(path_type=Path))
@click.option(
    "--window",
    metavar="|".join(WINDOWS),
    help="What of a trace counts: all of it, what its steps launched, or that without the last step. [default: steps, "
    "where there are any]",
)
@click.option("--mfu", is_flag=True, help="Split the step from the ideal to the measured into seven losses.")
@click.option(
    "--flops-per-step",
    type=float,
    metavar="X",
    help="Model FLOPs of a step's global batch, for --mfu. [default: the run's own]",
)
@click.option(
    "--peak-tflops", type=float, metavar="X", help="Peak TFLOP/s of one device, for --mfu. [default: the run's own]"
)
@click.option("--show-collectives", is_flag=True, help="Draw one step's collectives per rank.")
@click.option("--svg", type=click.Path(path_type=Path), metavar="FILE", help="Write that drawing as SVG.")
@click.option("--step", type=int, metavar="N", help="The step to draw. [default: the middle one]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the JSON document here too.")
def analyze_command(
    paths: tuple[Path, ...],
    window: str | None,
    mfu: bool,
    flops_per_step: float | None,
    peak_tflops: float | None,
    show_collectives: bool,
    svg: Path | None,
    step: int | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Analyse PyTorch traces: a run's folder, a folder of traces, or one file for each rank.

    Says for each rank how much is computation, communication, exposed communication, copying and idling; who comes last
    to collectives; which rank holds the others up, in which phase, by how much; and what bounds the run.
    """
    if window is not None and window not in WINDOWS:
        raise ConfigError(f"--window is {window!r}; valid: {', '.join(WINDOWS)}.")
    for option, value in (("--flops-per-step", flops_per_step), ("--peak-tflops", peak_tflops)):
        # The peak is multiplied by 1e12 further down, and must be a number still.
        if value is not None and not 0 < value < 1e290:
            raise ConfigError(f"{option} is {value:g}; it must be above 0 and finite.")
    for option, file in (("--output", output), ("--svg", svg)):
        if file is not None:
            check_output(file, option, inputs=paths)
    result = _result_of(paths[0]) if len(paths) == 1 else {}
    work = _work(result, flops_per_step, peak_tflops)
    wanted = Wanted(window, mfu, work, show_collectives, step, svg, setting_of(result))
    found = find(find_traces(paths), wanted)
    if output is not None:
        try:
            write_json(output, found.document())
        except OSError as error:
            raise _unwritable(output, "--output", error) from error
    if as_json:
        click.echo(dumps(found.document(), indent=2))
    else:
        found.show()


def find_traces(paths: Sequence[Path]) -> list[Path]:
    """The trace files that `paths` name: files as they are, of a folder those that look like traces.

    Raises:
        ConfigError: a path does not exist, or a folder holds no trace.
    """
    out: list[Path] = []
    for path in paths:
        if path.is_dir():
            folder = path / "trace" if (path / "trace").is_dir() else path
            out += _in_folder(folder)
        elif path.exists():
            out.append(path)
        else:
            raise ConfigError(f"There is no {path}; name a run's folder, a folder of traces, or trace files.")
    return out


def _in_folder(folder: Path) -> list[Path]:
    for pattern in _PATTERNS:
        found = sorted(p for p in folder.glob(pattern) if p.is_file() and p.name.endswith((".json", ".json.gz")))
        if found:
            return found
    raise ConfigError(f"The folder {folder} holds no trace; valid: files *.json or *.json.gz in Chrome's trace format.")


def _work(result: dict[str, Any], flops_per_step: float | None, peak_tflops: float | None) -> Work:
    """What a step had to do: as given, or as the run's own result says."""
    work = work_of(result)
    return attrs.evolve(
        work,
        flops_per_step=flops_per_step or work.flops_per_step,
        peak_flops=peak_tflops * 1e12 if peak_tflops else work.peak_flops,
    )


def _result_of(path: Path) -> dict[str, Any]:
    for folder in (path, path.parent):
        try:
            result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return result if isinstance(result, dict) else {}
    return {}


def work_of(result: dict[str, Any]) -> Work:
    """FLOPs of a step, and the peak, as a run's ``result.json`` implies them."""
    try:
        flops = result["model_flops_per_token"]
        tokens = result["global_batch_size"] * result["config"]["seq_length"]
        rate, mfu, devices = result["tokens_per_sec"], result["mfu"], result["world_size"]
        return Work(
            None if flops is None else flops * tokens,
            None if not mfu or flops is None else rate * flops / (mfu * devices),
            devices,
            result["activation_checkpointing"],
        )
    except (KeyError, TypeError, ArithmeticError):
        return Work()
