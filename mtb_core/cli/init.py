"""``mtb init``: a configuration to start from."""

from __future__ import annotations

from pathlib import Path

import click

from mtb_core.api import ConfigError
from mtb_core.config import starter_toml

#: What the starter file sets; small enough to finish in seconds on a laptop.
_PRESET = {"model": "gpt", "data": "synthetic", "steps": 50, "batch_size": 8, "seq_length": 128}


@click.command()
@click.argument("file", default="mtb.toml", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init(file: Path, force: bool) -> None:
    """Write a commented starter configuration to FILE (mtb.toml)."""
    text = starter_toml(_PRESET)
    try:
        with file.open("w" if force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        if file.is_file() and file.read_bytes() == text.encode():
            click.echo(f"{file} is there already, unchanged. Train with: mtb train --config {file}")
            return
        msg = f"{file} exists already; choose another name, or --force to overwrite it."
        raise ConfigError(msg) from None
    except OSError as error:
        msg = f"Cannot write {file}: {error.strerror}. Choose a file in a folder that exists and can be written to."
        raise ConfigError(msg) from error
    click.echo(f"Wrote {file}. Train with: mtb train --config {file}")
