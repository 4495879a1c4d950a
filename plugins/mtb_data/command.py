"""``mtb data``: make and inspect token files."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mtb_core import CheckFailed


@click.group(name="data", help="Prepare and inspect training data.", no_args_is_help=True)
def data() -> None:
    """Group of the commands below."""


@data.command(name="prepare", no_args_is_help=True)
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--output", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Folder to write the file into."
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="tokenizer.json of Hugging Face's tokenizers. [default: every byte is a token]",
)
def prepare_command(files: tuple[Path, ...], output: Path, tokenizer: Path | None) -> None:
    """Write FILES as one memory-mapped token file, for `mtb train --data DIR`.

    Of a folder, all text files below it are taken; hidden, empty and binary files and caches are left out.
    """
    from rich.console import Console  # noqa: PLC0415  (help must not wait for what only the work needs)
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    from .prepare import prepare  # noqa: PLC0415

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        header = prepare(
            files, output, tokenizer, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    click.echo(
        f"{output}: {header.tokens:,} tokens of {header.documents:,} document{'s' * (header.documents != 1)}, "
        f"vocabulary {header.vocab_size:,} ({header.tokenizer}), {header.dtype}\n"
        f"Train on it: mtb train --data {output}"
    )


@data.command(name="info", no_args_is_help=True)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def info_command(path: Path, as_json: bool) -> None:
    """Show what PATH holds: a token file or its folder, a text file, or a folder of texts.

    The digest of a token file is checked; exit code 1 if it does not match.
    """
    from .info import describe_path  # noqa: PLC0415  (needs numpy)

    values = describe_path(path)
    if as_json:
        click.echo(json.dumps(values, indent=2, allow_nan=False))
    else:
        width = max(map(len, values))
        for name, value in values.items():
            click.echo(f"{name:<{width}}  {_shown(value)}")
    if values.get("digest_ok") is False:
        msg = (
            f"The tokens in {values['path']} are not those its header was written for: their digest differs from "
            f"{values['digest']}. The file is damaged: copy it again, or prepare it anew with `mtb data prepare`."
        )
        raise CheckFailed(msg)


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
