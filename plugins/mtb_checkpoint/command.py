"""``mtb checkpoint``: look at, verify, compare, prune and export checkpoints. No GPU, no process group, no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtb_core.api.errors import CheckFailed, ConfigError, RunFailed
from mtb_core.measure.outputs import check_output

if TYPE_CHECKING:
    from rich.table import Table

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+)([KMGT]?)", str(value).upper())
        if not match or not int(match[1]):
            self.fail(f"{value!r} is not a size; valid: a positive number of bytes, or 512K, 64M, 5G.", param, ctx)
        return int(match[1]) << (10 * " KMGT".index(match[2] or " "))


@click.group(name="checkpoint", help="List, show, verify, compare, prune and export checkpoints.", no_args_is_help=True)
def checkpoint() -> None:
    """Group of the commands below."""


@checkpoint.command(name="list", no_args_is_help=True)
@click.argument("folder", type=_FOLDER)
@_JSON
def list_command(folder: Path, as_json: bool) -> None:
    """List the checkpoints in FOLDER, a --checkpoint-dir."""
    from .summary import summarize_folder  # noqa: PLC0415  (help must not wait for what only work needs)

    found = summarize_folder(folder)
    if as_json:
        _print_json(found)
        return
    if not found["checkpoints"]:
        click.echo(f"There are no checkpoints in {folder}.")
        return
    table = _table("step", "ready", "size", "age", "strategy", "ranks", "deterministic", right=("step", "size", "age"))
    for row in found["checkpoints"]:
        _add_row(
            table,
            f"{row['step']}{' (latest)' if row['latest'] else ''}",
            "yes" if row["ready"] else "NO",
            _bytes(row["size_bytes"]),
            _age(row["age_s"]),
            str(row["strategy"] or "?"),
            str(row["world_size"] or "?"),
            {True: "yes", False: "no", None: "?"}[row["deterministic"]],
        )
    _print_table(table)
    for row in found["checkpoints"]:
        if row["problem"]:
            click.echo(_printable(f"{row['name']}: {row['problem']}"))


@checkpoint.command(name="show", no_args_is_help=True)
@click.argument("path", type=_FOLDER)
@_JSON
def show_command(path: Path, as_json: bool) -> None:
    """Show metadata and tensors of the checkpoint PATH."""
    from mtb_core.ckpt.opened import open_checkpoint  # noqa: PLC0415

    from .summary import describe  # noqa: PLC0415

    shown = describe(open_checkpoint(_one(path)))
    if as_json:
        _print_json(shown)
        return
    for name, value in shown["metadata"].items():
        text = str(value) if isinstance(value, str | int | float) else json.dumps(value)
        click.echo(f"{_printable(name):<24}{_printable(text)}")
    table = _table("tensor", "dtype", "shape", "placement", "size", right=("size",))
    for row in shown["tensors"]:
        shape = "x".join(map(str, row["shape"])) or "scalar"
        _add_row(table, row["name"], row["dtype"], shape, row["placement"], _bytes(row["size_bytes"]))
    _print_table(table)
    click.echo(f"{len(shown['tensors'])} tensors, {_bytes(shown['tensor_bytes'])}")


@checkpoint.command(name="verify", no_args_is_help=True)
@click.argument("left", type=_FOLDER)
@click.argument("right", type=_FOLDER, required=False)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0.0),
    help="Let each tensor differ by this times its largest value (two checkpoints of different world sizes).",
)
@_JSON
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the JSON document here too.")
def verify_command(left: Path, right: Path | None, tolerance: float | None, as_json: bool, output: Path | None) -> None:
    """Check that the checkpoint LEFT is undamaged; with RIGHT, whether both hold the same training state.

    Exit code 1 if not. The state is compared in global coordinates, so world sizes and strategies may differ.
    """
    from mtb_core.ckpt.layout import is_legacy  # noqa: PLC0415
    from mtb_core.ckpt.opened import open_checkpoint  # noqa: PLC0415

    from .export import refuse_in_checkpoint  # noqa: PLC0415
    from .verify import verify_checkpoint  # noqa: PLC0415

    if right is None and tolerance is not None:
        raise ConfigError("--tolerance is for the comparison of two checkpoints; name a second one, or leave it out.")
    if output is not None:
        refuse_in_checkpoint(output)
        check_output(output)
    paths = [_one(path, incomplete=True) for path in (left, right) if path is not None]
    # The older formats list no digests: alone there is nothing to verify them against, which is a failure too.
    checked = [verify_checkpoint(p) for p in paths if right is None or not is_legacy(p)]
    damaged = [c for c in checked if not c.ok]
    if right is None or damaged:
        result = checked[0].to_json() if right is None else _not_compared(left, right, [c.to_json() for c in damaged])
        _deliver(result, as_json, output)
        if damaged:
            listed = "; ".join(f"{d.path / p.file}: {p.problem}" for d in damaged for p in d.problems)
            raise CheckFailed(
                f"The checkpoint is damaged. {_printable(listed)}. Do not resume from it; take another one."
            )
        if not as_json:
            click.echo(f"{left}: step {checked[0].step}, {checked[0].files} files, all as they were published.")
        return
    from .compare import compare_checkpoints  # noqa: PLC0415

    result = compare_checkpoints(open_checkpoint(paths[0]), open_checkpoint(paths[1]), tolerance)
    _deliver(result, as_json, output)
    if not as_json:
        _print_comparison(result)
    if not result["matches"]:
        reasons = _printable("; ".join(result["reasons"]))
        raise CheckFailed(f"The two do not hold the same training state. {reasons}.")


@checkpoint.command(name="prune", no_args_is_help=True)
@click.argument("folder", type=_FOLDER)
@click.option("--keep-last", type=click.IntRange(min=1), required=True, help="READY checkpoints to keep.")
@click.option(
    "--keep-every", type=click.IntRange(min=0), default=0, help="Steps that are multiples of N stay for good."
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@_JSON
def prune_command(folder: Path, keep_last: int, keep_every: int, dry_run: bool, as_json: bool) -> None:
    """Remove old checkpoints in FOLDER; never the one that `latest` names, never an incomplete or foreign folder."""
    from mtb_core.ckpt.publish import prune  # noqa: PLC0415

    old = [path.name for path in prune(folder, keep_last=keep_last, keep_every=keep_every, dry_run=True)]
    gone = old if dry_run else [path.name for path in prune(folder, keep_last=keep_last, keep_every=keep_every)]
    if as_json:
        _print_json({"folder": str(folder), "removed": gone, "dry_run": dry_run})
    elif gone or not old:
        verb = "Would remove" if dry_run else "Removed"
        click.echo(f"{verb} {', '.join(gone)}." if gone else "Nothing to remove.")
    if left := [name for name in old if name not in gone]:
        raise RunFailed(f"{', '.join(left)} in {folder} could not be removed; the warnings say why.")


@checkpoint.command(name="export", no_args_is_help=True)
@click.argument("path", type=_FOLDER)
@click.option("--format", "kind", type=click.Choice(["safetensors"]), default="safetensors", show_default=True)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    metavar="PATH",
    help="A new file; with --max-shard-size, a new folder.",
)
@click.option("--max-shard-size", type=_Size(), metavar="SIZE", help="Spread over files of at most so many bytes (5G).")
def export_command(path: Path, kind: str, output: Path, max_shard_size: int | None) -> None:
    """Write the weights of the checkpoint PATH for use elsewhere."""
    from mtb_core.ckpt.opened import open_checkpoint  # noqa: PLC0415

    from .export import export_safetensors  # noqa: PLC0415

    assert kind == "safetensors"
    for written in export_safetensors(open_checkpoint(_one(path)), output, max_shard_size):
        click.echo(written)


def _one(path: Path, *, incomplete: bool = False) -> Path:
    """`path`, which must be one checkpoint and not a folder of them; a link to one stands for it."""
    from mtb_core.ckpt.catalog import followed, is_ready, list_steps  # noqa: PLC0415

    path = followed(path)
    steps = [found.path.name for found in list_steps(path)]
    if steps and not is_ready(path):
        raise ConfigError(f"{path} is a folder of checkpoints; name one of them: {', '.join(steps)}.")
    if not incomplete and not is_ready(path):
        msg = f"{path} is not a complete checkpoint; `mtb checkpoint verify {path}` says why."
        raise CheckFailed(msg)
    return path


def _not_compared(left: Path, right: Path, damaged: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "left": str(left),
        "right": str(right),
        "exact_match": False,
        "matches": False,
        "digests": None,
        "left_deterministic": None,
        "right_deterministic": None,
        "reasons": [f"{d['path']}/{p['file']}: {p['problem']}" for d in damaged for p in d["problems"]],
        "damaged": damaged,
    }


def _deliver(found: dict[str, Any], as_json: bool, output: Path | None) -> None:
    result = {"schema_version": 1, "benchmark": "checkpoint_verification", **found}
    if as_json:
        _print_json(result)
    if output is not None:
        from .export import writing  # noqa: PLC0415

        with writing(output):
            output.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _print_comparison(result: dict[str, Any]) -> None:
    table = _table("section", "exact", "differing", "largest difference", "first difference")
    for name, section in result["sections"].items():
        first = section["first_difference"] or {}
        place = f"{first.get('name', '')}{first.get('index', '')}"
        values = f": {first['left']} | {first['right']}" if "left" in first else ""
        largest = f"{section['max_abs']:.3g} (relative {section['max_rel']:.3g})" if section["max_abs"] else ""
        differing = str(section["differing"]) if section["differing"] else ""
        _add_row(table, name, "yes" if section["exact"] else "NO", differing, largest, place + values)
    _print_table(table)
    verdict = "the same, to the bit" if result["exact_match"] else "not the same to the bit"
    within = " (the same within the tolerance)" if result["matches"] and not result["exact_match"] else ""
    beside = (
        f" Not compared, for only one side has them: {', '.join(result['not_compared'])}."
        if result["not_compared"]
        else ""
    )
    click.echo(_printable(f"The two training states are {verdict}{within}.{beside}"))


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _add_row(table: Table, *cells: str) -> None:
    table.add_row(*map(_printable, cells))


def _printable(text: str) -> str:
    from mtb_core.ckpt.layout import shown  # noqa: PLC0415

    return shown(text)


def _print_table(table: Table) -> None:
    from rich.console import Console  # noqa: PLC0415

    Console(markup=False, highlight=False).print(table)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(seconds, 0):.0f} s"
