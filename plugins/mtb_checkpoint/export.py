"""Weights of a checkpoint as safetensors, for plain PyTorch and everybody else; torch-free, streaming.

Unlike in the files of a checkpoint, weights are whole here, under their plain names, and nothing else is there.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mtb_core.api.errors import ConfigError
from mtb_core.ckpt.catalog import is_ready
from mtb_core.ckpt.dtypes import SAFETENSORS
from mtb_core.ckpt.layout import TEMPORARY, step_of
from mtb_core.ckpt.opened import Opened
from mtb_core.ckpt.safetensors import alignment_of, header_bytes
from mtb_core.ckpt.tensors import TensorFiles

_PREFIX = "model/"


def export_safetensors(opened: Opened, output: Path, most_bytes: int | None = None) -> list[Path]:
    """Write the weights (and persistent buffers) of a checkpoint under their plain names.

    Args:
        opened: the checkpoint; the digests of its files are checked first.
        output: a file ``….safetensors``; or, with `most_bytes`, a folder for files of at most that many bytes of
            tensors (a larger tensor gets a file of its own) and their index.

    Returns:
        The files written, each complete or not there at all.

    Raises:
        ConfigError: the output exists, is in a checkpoint or cannot be written, or a weight has a dtype that the format does not know.
        DamagedCheckpoint: the checkpoint is not what was published.
    """
    names = sorted(key for key in opened.entries if key.startswith(_PREFIX))
    for key in names:
        if opened.entries[key].dtype not in SAFETENSORS:
            msg = f"{key} is {opened.entries[key].dtype}, which the safetensors format does not know; it cannot be exported."
            raise ConfigError(msg)
    refuse_in_checkpoint(output)
    with writing(output):
        if output.exists() and (most_bytes is None or not output.is_dir() or any(output.iterdir())):
            raise ConfigError(f"--output {output} exists; name a new {'file' if most_bytes is None else 'folder'}.")
    if opened.manifest is not None:
        opened.check_files(sorted(opened.manifest.files))
    with opened.tensors() as stored:
        stored.check_all()
        with writing(output):
            if most_bytes is None:
                output.parent.mkdir(parents=True, exist_ok=True)
                _write(stored, names, output)
                return [output]
            return _write_sharded(stored, names, output, most_bytes)


def refuse_in_checkpoint(output: Path) -> None:
    """Refuse to write into a checkpoint's folder: with a file more it would not verify any more.

    Raises:
        ConfigError: `output` is, or would lie in, one.
    """
    real = Path(os.path.realpath(output))
    for place in (real, *real.parents):
        if step_of(place.name) is not None or is_ready(place):
            msg = (
                f"--output {output} lies in the checkpoint {place}, which must stay as it was published; name a place "
                "outside of it."
            )
            raise ConfigError(msg)


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Turn an `OSError` of writing what ``--output`` names into a `ConfigError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--output {output} cannot be written: {reason}. Name another place.") from error


def _write_sharded(stored: TensorFiles, names: Sequence[str], folder: Path, most_bytes: int) -> list[Path]:
    groups: list[list[str]] = [[]]
    filled = 0
    for key in names:
        size = stored.entries[key].nbytes
        if groups[-1] and filled + size > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(key)
        filled += size
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    where: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        path = folder / f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write(stored, group, path)
        written.append(path)
        where |= {key.removeprefix(_PREFIX): path.name for key in group}
    total = sum(stored.entries[key].nbytes for key in names)
    index = folder / "model.safetensors.index.json"
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2)
    _replace(index, lambda file: file.write(text.encode()))
    return [*written, index]


def _write(stored: TensorFiles, names: Sequence[str], path: Path) -> None:
    ordered = sorted(names, key=lambda key: -alignment_of(stored.entries[key].nbytes))
    described, end = {}, 0
    for key in ordered:
        entry, start = stored.entries[key], end
        end += entry.nbytes
        described[key.removeprefix(_PREFIX)] = {
            "dtype": SAFETENSORS[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [start, end],
        }
    header = header_bytes(described, {"format": "pt"})

    def body(file: Any) -> None:
        file.write(header)
        for key in ordered:
            for _, block in stored.blocks(key):
                file.write(block.data)

    _replace(path, body)


def _replace(path: Path, body: Any) -> None:
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            body(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
