"""Reading whole checkpoints back, and comparing what ranks hold part by part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from mtb_core.ckpt.dtypes import carrier
from mtb_core.ckpt.entries import TensorEntry
from mtb_core.ckpt.layout import DamagedCheckpoint, step_name
from mtb_core.ckpt.opened import Opened, open_checkpoint

from .lab import Run
from .stage import Part
from .states import Mismatch, Whole


def checkpoint_of(run: Run, step: int) -> Path:
    """The folder in which `run` has published the checkpoint of `step`."""
    settings = dict(run.episode.settings)
    return Path(settings["checkpoint_dir"]) / step_name(step)


def opened(path: Path) -> Opened:
    """The checkpoint at `path`.

    Raises:
        Mismatch: it cannot be read.
    """
    try:
        return open_checkpoint(path)
    except DamagedCheckpoint as error:
        raise Mismatch("a checkpoint that is complete", str(error)) from error


def stored(path: Path) -> Whole:
    """Every tensor of the checkpoint at `path`, whole.

    Raises:
        Mismatch: it cannot be read.
    """
    checkpoint = opened(path)
    try:
        with checkpoint.tensors() as files:
            out: Whole = {}
            for key, entry in checkpoint.entries.items():
                out[key] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
                if out[key].numel():
                    flat = out[key].reshape(-1).view(torch.uint8).numpy().view(carrier(entry.dtype))
                    files.read(key, (0,) * len(entry.shape), entry.shape, flat.reshape(entry.shape))
            return out
    except DamagedCheckpoint as error:
        raise Mismatch("a checkpoint whose tensors can be read", str(error)) from error


def described(entry: TensorEntry) -> str:
    """Shape and dtype for people."""
    return f"{entry.dtype} {list(entry.shape)}"


def same_parts(seen: Mapping[str, list[Part]], expected: Mapping[str, list[Part]], what: str) -> None:
    """Compare two ranks' parts: keys, places, bits.

    Raises:
        Mismatch: names the first tensor that differs.
    """
    if seen.keys() != expected.keys():
        apart = sorted(seen.keys() ^ expected.keys())
        raise Mismatch(f"{what}: the same tensors", f"only one side has {', '.join(apart[:4])}")
    for key, parts in expected.items():
        if [part[1:] for part in seen[key]] != [part[1:] for part in parts]:
            raise Mismatch(f"{what}: the same parts of '{key}'", "other offsets or shapes")
        for (one, _, _), (other, _, _) in zip(seen[key], parts, strict=True):
            if not torch.equal(one, other):
                apart_by = float((one.double() - other.double()).abs().max())
                raise Mismatch(f"{what}: the same bits in '{key}'", f"a difference of up to {apart_by:.3g}")
