"""ZeRO's state in global coordinates, so that any number of ranks and any strategy can resume from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from mtb_core import Piece, State, create_missing_state, fragment_pieces

from .private import ZeroParts


def create_moments(parts: ZeroParts) -> None:
    """Make optimizer state that is made lazily, as zeros.

    Torch's optimizer holds a flat tensor only while it updates it at stage 3, so it is handed to it for the occasion.
    """
    groups = parts.optimizer.param_groups
    held = [group["params"] for group in groups]
    try:
        for index, group in enumerate(groups):
            group["params"] = [flat for owner, flat in parts.flats() if owner == index]
        create_missing_state(parts.optimizer)
    finally:
        for group, params in zip(groups, held, strict=True):
            group["params"] = params


def zero_state(parts: ZeroParts, frozen: dict[str, list[Piece]], buffers: Iterable[tuple[str, torch.Tensor]]) -> State:
    """Weights in fp32, optimizer state, and buffers; this rank's parts as live views.

    `frozen` are the pieces of parameters that are not trained.
    """
    create_moments(parts)
    pieces: dict[str, list[Piece]] = {f"model/{name}": list(held) for name, held in frozen.items()}
    for fragment in parts.fragments():
        name, shape, start = fragment.name, fragment.shape, fragment.start
        pieces[f"model/{name}"] = fragment_pieces(fragment.of(fragment.flat), shape, start)
        values: dict[str, Any] = parts.optimizer.state.get(fragment.flat, {})
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                continue
            one_for_all = value.dim() == 0  # the step: every parameter of a flat tensor has the same
            pieces[f"optim/{name}/{key}"] = (
                [Piece(value.detach(), (), ())] if one_for_all else fragment_pieces(fragment.of(value), shape, start)
            )
    for name, buffer in buffers:
        pieces[f"model/{name}"] = [Piece(buffer.detach(), tuple(buffer.shape), (0,) * buffer.dim())]
    return State(pieces)
