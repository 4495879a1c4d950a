"""Keeping training undisturbed by all else that a run does: random streams, modes of modules, buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from mtb_core.ranks.rng import capture_rng, restore_rng


@contextmanager
def streams_kept(device: str = "cpu") -> Iterator[None]:
    """Give torch's (the CPU's, and that of a CUDA `device`), numpy's and python's random streams back as they were."""
    state = capture_rng(device)
    try:
        yield
    finally:
        restore_rng(state, device)


@contextmanager
def undisturbed(module: nn.Module, device: str) -> Iterator[None]:
    """Have `module` in eval mode, then put back each module's own mode, every buffer, and the random streams.

    A buffer counts as changed if another tensor has taken its place, or if it was written to.
    """
    modes = [(part, part.training) for part in module.modules()]
    buffers = [
        (part, name, buffer, buffer._version, buffer.detach().clone())  # noqa: SLF001  (torch's name for it)
        for part, _ in modes
        for name, buffer in part._buffers.items()  # noqa: SLF001  (of this module alone, by name)
        if buffer is not None
    ]
    with streams_kept(device):
        module.eval()
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training
            with torch.no_grad():
                for part, name, buffer, version, kept in buffers:
                    part._buffers[name] = buffer  # noqa: SLF001
                    if buffer._version != version:  # noqa: SLF001
                        buffer.copy_(kept)
