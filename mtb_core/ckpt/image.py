"""The bytes of a file of tensors, made once: each save only copies tensors into their places in it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from .entries import Part
from .storage import FileLayout


@attrs.frozen
class Image:
    """One file of one rank.

    Attributes:
        name: of the file.
        buffer: its bytes, uint8; pinned where tensors live on a CUDA device.
        parts: which of the rank's parts are in it, by their index.
        targets: views into `buffer`, one for each of those parts.
    """

    name: str
    buffer: torch.Tensor
    parts: Sequence[int]
    targets: Sequence[torch.Tensor]

    def stage(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors of its parts, in order, into the image; returns when they may change again."""
        if not tensors:
            return
        torch._foreach_copy_(list(self.targets), list(tensors), non_blocking=True)
        for device in {t.device for t in tensors if t.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def view(self) -> memoryview:
        """The file's bytes."""
        data: memoryview = self.buffer.numpy().data
        return data


def make_image(layout: FileLayout, parts: Sequence[Part], *, pinned: bool) -> Image:
    """Allocate a file for its part of `parts`; all its memory is touched here, not in a save."""
    buffer = torch.empty(layout.size, dtype=torch.uint8, pin_memory=pinned).zero_()
    for at, data in layout.fixed:
        buffer[at : at + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    targets = []
    for index, slot in layout.slots.items():
        part = parts[index]
        raw = buffer[slot.elements : slot.elements + part.nbytes]
        targets.append(raw.view(getattr(torch, part.dtype)).view(part.sizes))
    return Image(layout.name, buffer, tuple(layout.slots), targets)
