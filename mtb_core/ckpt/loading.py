"""Filling a training's state from a checkpoint, on all ranks together."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from mtb_core.api.errors import RunFailed
from mtb_core.api.values import Piece, RankContext, State
from mtb_core.ranks.buffers import without_repeats
from mtb_core.ranks.rng import reseed, restore_rng
from mtb_core.registry.discovery import Registry

from . import files
from .dtypes import carrier
from .group import SaverGroup
from .layout import PLUGINS, RNG_FOLDER, dump_json
from .opened import Opened, open_checkpoint, read_rng
from .tensors import TensorFiles

log = logging.getLogger("mtb.checkpoint")

#: How many names an error lists of each kind.
_MOST_NAMES = 20


@attrs.frozen
class Loaded:
    """A checkpoint's values and sections, without the tensors.

    Attributes:
        values: the manifest's values (``step``, ``config``, ``samples_seen``, …).
        sections: content of ``state.json``: ``train_state``, ``scheduler``, ``data``, ``scalars``, …
        rng: this rank's random state; None where there is none for it (another world size, format 1).
        deterministic: whether the continuation is that of the uninterrupted run, to the bit.
        determinism_reason: why not.
    """

    path: Path
    version: int
    values: Mapping[str, Any]
    sections: Mapping[str, Any]
    rng: Mapping[str, Any] | None
    origin: Sequence[Mapping[str, Any] | None]
    deterministic: bool
    determinism_reason: str | None

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        return int(self.values["step"])

    def restore_random(self, ctx: RankContext) -> None:
        """Put back this rank's random state or, where there is none for it, seed its streams by the rule for that."""
        if self.rng is not None:
            restore_rng(self.rng, ctx.device)
        else:
            reseed(self.origin, step=self.step, world_size=ctx.world_size, rank=ctx.rank, device=ctx.device)


def load_checkpoint(
    path: Path,
    state: State,
    ctx: RankContext,
    group: SaverGroup,
    *,
    allow_missing_rng: bool,
    registry: Registry | None,
) -> Loaded:
    """See `CheckpointManager.load`."""
    what = f"The checkpoint {path} cannot be resumed"
    advice = f"Resume from another one; `mtb checkpoint verify {path}` lists everything that is wrong with it."
    opened = group.agreed(what, lambda: open_checkpoint(path, registry), advice=advice)
    everyone = group.gather((files.digest_bytes(dump_json(dict(opened.values))), [*state.pieces]))
    if any(digest != everyone[0][0] for digest, _ in everyone):
        raise RunFailed(f"{what}: the ranks see different files there; all ranks need one shared folder.")
    wanted = {key for _, keys in everyone for key in keys}
    apart = group.agreed(what, lambda: check_keys(opened, state, wanted))
    group.agreed(what, lambda: _check_share(opened, ctx, random_too=not allow_missing_rng), advice=advice)
    rng, origin, reason = _random_state(opened, ctx, group, allow_missing=allow_missing_rng)
    group.agreed(what, lambda: _fill(opened, state), advice=advice)
    owners = ", ".join(sorted(owner for owner in apart if not owner.startswith(f"{PLUGINS}/")))
    if owners:
        left_out = f"only one side has state of {owners}"
        reason = "; ".join(filter(None, [reason, left_out]))
        if ctx.rank == 0:
            log.warning("Not a deterministic continuation: %s.", left_out)
    for owner in sorted(apart & {owner_of(key) for key in opened.entries}) if ctx.rank == 0 else ():
        log.warning("%s has tensors of %s, which is not part of this run; they are left alone.", path, owner)
    values, stated = opened.values, (bool(opened.values["deterministic"]), opened.values["determinism_reason"])
    deterministic, why = (False, reason) if reason else stated
    return Loaded(path, opened.version, values, opened.sections, rng, origin, deterministic, why)


def check_keys(opened: Opened, state: State, wanted: set[str]) -> set[str]:
    """Refuse a checkpoint whose tensors are not exactly those that the training has.

    A strategy and a run plugin may have tensors of their own (``strategy/NAME/…``, ``plugins/NAME/…``). If one of the two
    sides has nothing at all of the same owner, they are left alone: a run plugin that is new in this training begins
    with its tensors as they are, and those of one that is not part of it any more are not loaded.

    Args:
        opened: the checkpoint.
        state: this rank's pieces.
        wanted: the keys of all ranks.

    Returns:
        The owners of tensors that only one side has.

    Raises:
        RunFailed: lists what is missing, unexpected, of another shape or of another dtype.
    """
    problems = []
    stored = opened.entries.keys()
    there, here = ({owner for key in keys if (owner := owner_of(key))} for keys in (stored, wanted))
    # A run plugin whose JSON values were saved was part of the run, so its tensors must be there as well.
    took_part = {f"{PLUGINS}/{name}" for name in opened.sections.get("plugins") or {}}
    apart = {owner for owner in there ^ here if owner in there or owner not in took_part}
    missing, unexpected = (
        sorted(key for key in keys if owner_of(key) not in apart) for keys in (wanted - stored, stored - wanted)
    )
    if missing:
        problems.append(f"missing in it: {_names(missing)}")
    if unexpected:
        problems.append(f"in it but not in this training: {_names(unexpected)}")
    shapes, dtypes = [], []
    for key, pieces in state.pieces.items():
        entry = opened.entries.get(key)
        for piece in pieces if entry is not None else ():
            assert entry is not None
            dtype = str(piece.tensor.dtype).removeprefix("torch.")
            if tuple(piece.shape) != entry.shape:
                shapes.append(f"{key} (stored {list(entry.shape)}, here {list(piece.shape)})")
            elif dtype != entry.dtype:
                dtypes.append(f"{key} (stored {entry.dtype}, here {dtype})")
    if shapes:
        problems.append(f"of another shape: {_names(shapes)}")
    if dtypes:
        problems.append(f"of another dtype: {_names(dtypes)}")
    if problems:
        raise RunFailed(
            f"its tensors do not fit this training: {'; '.join(problems)}. The model, the optimizer and the precision "
            "must be those that it was saved with"
        )
    return apart


def owner_of(key: str) -> str | None:
    """``strategy/NAME`` or ``plugins/NAME``, whose tensor `key` is; None: the model's, the optimizer's or a loop's."""
    kind, _, rest = key.partition("/")
    name, _, own = rest.partition("/")
    return f"{kind}/{name}" if kind in {"strategy", PLUGINS} and own else None


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _check_share(opened: Opened, ctx: RankContext, *, random_too: bool) -> None:
    """Digests of this rank's share of the files, so that each file is read once for it in all."""
    if opened.manifest is not None:
        names = [name for name in sorted(opened.manifest.files) if random_too or not name.startswith(RNG_FOLDER + "/")]
        opened.check_files(names[ctx.rank :: ctx.world_size])


def _random_state(
    opened: Opened, ctx: RankContext, group: SaverGroup, *, allow_missing: bool
) -> tuple[Mapping[str, Any] | None, Sequence[Mapping[str, Any] | None], str | None]:
    """(this rank's random state, what to seed anew from, why the continuation is not deterministic)."""
    same_world = opened.world_size == ctx.world_size
    if opened.version == 1:
        return None, [None], "checkpoints of format 1 hold no random state"
    what = f"The checkpoint {opened.path} cannot be resumed"
    try:
        state = group.agreed(what, lambda: read_rng(opened, ctx.rank if same_world else 0))
    except RunFailed as error:
        if not allow_missing:
            raise RunFailed(
                f"{error} Its random state can be given up with --allow-missing-rng; the run then does not continue bit "
                "for bit.",
                rank=error.rank,
            ) from error
        if ctx.rank == 0:
            log.warning("%s Going on without it, with streams seeded anew.", error)
        return None, [None], "the random state was missing or damaged, and streams were seeded anew"
    if same_world:
        return state, [], None
    reason = (
        f"resumed on {ctx.world_size} ranks what {opened.world_size} had saved: random streams were seeded anew and "
        "sums over ranks are taken in another order"
    )
    if ctx.rank == 0:
        log.warning("Not a deterministic continuation: %s.", reason)
    return None, [state], reason


def _fill(opened: Opened, state: State) -> None:
    with opened.tensors() as stored, torch.no_grad():
        for key, pieces in state.pieces.items():
            for piece in pieces if key in opened.entries else ():  # see `check_keys`
                _fill_piece(stored, key, piece)


def _fill_piece(stored: TensorFiles, key: str, piece: Piece) -> None:
    tensor = piece.tensor
    if not tensor.numel():
        return
    dtype = str(tensor.dtype).removeprefix("torch.")
    direct = tensor.device.type == "cpu" and tensor.is_contiguous()
    target = tensor if direct else torch.empty(tensor.shape, dtype=tensor.dtype)
    flat = target.reshape(-1).view(torch.uint8).numpy().view(carrier(dtype))
    stored.read(key, tuple(piece.offset), tuple(tensor.shape), flat.reshape(tuple(tensor.shape)))
    if direct:
        return
    alone = without_repeats(tensor)
    source = target[tuple(slice(size) for size in alone.shape)]
    if alone.shape != tensor.shape:
        repeated = source.expand(target.shape).reshape(-1)
        if not torch.equal(repeated.view(torch.uint8), target.reshape(-1).view(torch.uint8)):
            raise RunFailed(
                f"{key} differs in it along a dimension that is here made by expand(), with one element for all; "
                "make it a tensor of its own in the model (clone())"
            )
    alone.copy_(source)
