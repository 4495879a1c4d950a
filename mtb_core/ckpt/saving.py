"""The two halves of a save: the snapshot, taken while training waits, and the writing, which may run beside it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from mtb_core.api.errors import RunFailed
from mtb_core.api.values import Piece, RankContext, State

from . import files, publish
from .entries import Chunk, Part, TensorEntry
from .group import SaverGroup, text_of
from .image import Image, make_image
from .layout import README, RNG_FOLDER, STATE, dump_json, rng_name
from .manifest import FORMAT_VERSION, UNSAID, FileEntry, Manifest, check_sections, check_values
from .plan import assign
from .publish import Workspace
from .readme import readme_text
from .storage import Storage, chunk_of, laid_out


@attrs.frozen
class Request:
    """One call of `CheckpointManager.save`: all that it saves besides the tensors."""

    step: int
    meta: Mapping[str, Any]
    sections: Mapping[str, Any]
    rng: Mapping[str, Any]
    attachments: Mapping[str, Path]


@attrs.frozen
class Snapshot:
    """Everything that one save writes, independent of the running training; `trouble`: it is not complete."""

    step: int
    workspace: Workspace
    meta: Mapping[str, Any]
    state_json: bytes
    rng_json: bytes
    attachments: Mapping[str, tuple[Path, int]]
    trouble: str | None


@attrs.frozen
class _Prepared:
    """Division of the writing among ranks, and the buffers for it. A state of other shapes gets a new one.

    Attributes:
        mine: which of its pieces this rank writes, by their index.
        images: its files, whose parts are indices of `mine`.
        index: content of the index files; on rank 0.
    """

    described: Sequence[tuple[Any, ...]]
    mine: Sequence[int]
    images: Sequence[Image]
    index: Mapping[str, bytes]


class Saver:
    """Writes and publishes the snapshots of one rank, one at a time.

    Args:
        storage: the checkpoint format; `meta` are its name and origin, for the manifest.
    """

    def __init__(
        self,
        folder: Path,
        ctx: RankContext,
        group: SaverGroup,
        *,
        keep_last: int,
        keep_every: int,
        fault_point: Callable[[str], None],
        storage: Storage,
        meta: Mapping[str, Any],
    ) -> None:
        self._folder, self._ctx, self._group = folder, ctx, group
        self._storage, self._meta = storage, meta
        self._keep_last, self._keep_every = keep_last, keep_every
        self._fault_point = fault_point
        self._prepared: _Prepared | None = None

    def prepare(self, state: State) -> None:
        """Decide who writes what, and allocate the buffers for it. All ranks."""
        flat = _flatten(state)
        parts = [Part(key, _dtype(p), tuple(p.shape), tuple(p.offset), tuple(p.tensor.shape)) for key, p in flat]
        everyone = self._group.gather(parts)
        try:
            chosen = assign(everyone, self._storage.dtypes)[
                self._ctx.rank
            ]  # the same computation, with the same outcome, on all ranks
        except ValueError as error:
            raise RunFailed(f"The state of the training cannot be saved: {error}.") from error
        mine, pinned = [parts[i] for i in chosen], any(piece.tensor.is_cuda for _, piece in flat)
        images: list[Image] = []

        def build() -> list[tuple[Part, Chunk]]:
            self._prepared = None  # the old buffers are let go first
            layouts = laid_out(self._storage, mine, self._ctx.rank)
            images.extend(make_image(layout, mine, pinned=pinned) for layout in layouts)
            return [
                (mine[i], chunk_of(mine[i], layout, slot)) for layout in layouts for i, slot in layout.slots.items()
            ]

        placed = self._group.together("The buffers for checkpoints could not be made", build)

        def describe() -> Mapping[str, bytes]:
            if self._ctx.rank:
                return {}
            index = self._storage.index(_entries([item for items in placed for item in items]))
            if set(index) != set(self._storage.index_files):
                raise ValueError(f"the checkpoint format wrote the index files {sorted(index)}")
            return index

        index = self._group.agreed("The index of checkpoints could not be made", describe)
        self._prepared = _Prepared(_describe(flat), chosen, images, index)

    def snapshot(self, request: Request, state: State) -> Snapshot:
        """Agree on the save, and copy all that it needs. All ranks; raises on all or none."""
        flat = _flatten(state)
        changed = self._prepared is None or self._prepared.described != _describe(flat)
        workspace: Workspace | None = None

        def begin() -> tuple[str | None, bool, dict[str, str]]:
            nonlocal workspace
            check_sections(request.sections, request.step)
            values = {"step": request.step, **request.meta, **request.sections}
            digests = {key: files.digest_bytes(dump_json(value)) for key, value in values.items()}
            if self._ctx.rank == 0:
                workspace = Workspace.create(self._folder, request.step)
            return None if workspace is None else workspace.path.name, changed, digests

        what = f"The checkpoint of step {request.step} was not saved"
        try:
            everyone = self._group.together(what, begin)
            _same_on_all(what, [digests for _, _, digests in everyone])
            if any(other for _, other, _ in everyone):
                self.prepare(state)
        except BaseException:
            if workspace is not None:
                workspace.discard()
            raise
        if workspace is None:
            workspace = Workspace(self._folder / str(everyone[0][0]))
        state_json, rng_json, attachments, trouble = b"", b"", {}, None
        try:
            if self._ctx.rank:
                workspace.enter()
            assert self._prepared is not None
            tensors = [flat[i][1].tensor for i in self._prepared.mine]
            for image in self._prepared.images:
                image.stage([tensors[i] for i in image.parts])
            state_json, rng_json = dump_json(request.sections), dump_json(request.rng)
            attachments = {n: (source, source.stat().st_size) for n, source in request.attachments.items()}
            self._fault_point("staged")
        except Exception as error:  # noqa: BLE001  (told to the other ranks when all have written)
            trouble = text_of(error)
        meta = {**request.meta, **self._meta, "format_version": FORMAT_VERSION, "step": request.step}
        meta["world_size"] = self._ctx.world_size
        return Snapshot(request.step, workspace, meta, state_json, rng_json, attachments, trouble)

    def write_and_publish(self, snapshot: Snapshot) -> Path:
        """Write this rank's files and, when all ranks have, publish (rank 0). Returns the checkpoint's path.

        Raises:
            RunFailed: on all ranks; nothing was published.
        """
        what = f"The checkpoint of step {snapshot.step} was not saved"
        advice = f"The earlier checkpoints in {self._folder} are as they were."
        try:
            written = self._group.together(what, lambda: self._write(snapshot), advice=advice)
            paths = self._group.together(what, lambda: self._publish(snapshot, written), advice=advice)
        except BaseException:
            if self._ctx.rank == 0:
                snapshot.workspace.discard()
            raise
        finally:
            snapshot.workspace.leave()
        assert paths[0] is not None
        return paths[0]

    def _write(self, snapshot: Snapshot) -> dict[str, FileEntry]:
        """This rank's files, written and fsynced with their folders."""
        if snapshot.trouble is not None:
            raise RunFailed(snapshot.trouble, rank=self._ctx.rank)
        assert self._prepared is not None
        root, rank, point = snapshot.workspace.path, self._ctx.rank, self._fault_point
        listed = {}
        point("writing")

        def write(name: str, data: bytes | memoryview, before_sync: Callable[[], None] = lambda: None) -> None:
            listed[name] = FileEntry(*files.write_durably(root / name, [data], before_sync))

        *others, last = self._prepared.images
        for image in others:
            write(image.name, image.view())
        write(last.name, last.view(), lambda: point("tensors-written"))
        point("tensors-synced")
        folders = {root / RNG_FOLDER}
        files.make_folder(root / RNG_FOLDER)
        write(rng_name(rank), snapshot.rng_json)
        for name, (source, size) in snapshot.attachments.items():
            target = root.joinpath(*files.safe_parts(name))
            for folder in reversed([p for p in target.parents if root in p.parents]):
                files.make_folder(folder)
                folders.add(folder)
            listed[name] = FileEntry(*files.copy_durably(source, size, target))
        if rank == 0:
            for name, data in self._prepared.index.items():
                write(name, data)
            write(STATE, snapshot.state_json)
        for folder in (*sorted(folders, reverse=True), root):
            files.sync_folder(folder)
        point("rank-synced")
        return listed

    def _publish(self, snapshot: Snapshot, written: Sequence[Mapping[str, FileEntry]]) -> Path | None:
        """On rank 0: everything from the manifest to pruning."""
        self._fault_point("agreed")
        if self._ctx.rank:
            return None
        listed: dict[str, FileEntry] = {}
        for rank, entries in enumerate(written):
            for name, entry in entries.items():
                if name in listed:
                    raise RunFailed(f"rank {rank} wrote {name}, which another rank had written too")
                size = (snapshot.workspace.path / name).stat().st_size
                if size != entry.size:
                    raise RunFailed(f"{name} has {size} bytes, but rank {rank} wrote {entry.size}")
                listed[name] = entry
        now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        values = {**snapshot.meta, "sequence": publish.next_sequence(self._folder), "created_at": now}
        stated = {**UNSAID, **values}
        check_values(stated)
        readme = readme_text(values, self._storage.readme).encode()
        listed[README] = FileEntry(*files.write_durably(snapshot.workspace.path / README, [readme]))
        path = publish.publish(snapshot.workspace, self._folder, Manifest(stated, listed), self._fault_point)
        publish.prune(self._folder, keep_last=self._keep_last, keep_every=self._keep_every)
        self._fault_point("pruned")
        return path


def _flatten(state: State) -> list[tuple[str, Piece]]:
    return [(key, piece) for key, pieces in state.pieces.items() for piece in pieces]


def _dtype(piece: Piece) -> str:
    return str(piece.tensor.dtype).removeprefix("torch.")


def _describe(flat: Sequence[tuple[str, Piece]]) -> list[tuple[Any, ...]]:
    return [(key, p.tensor.dtype, p.shape, p.offset, p.tensor.shape, p.tensor.is_cuda) for key, p in flat]


def _entries(placed: Sequence[tuple[Part, Chunk]]) -> dict[str, TensorEntry]:
    chunks: dict[str, list[Chunk]] = {}
    kinds: dict[str, Part] = {}
    for part, chunk in placed:
        kinds[part.key] = part
        chunks.setdefault(part.key, []).append(chunk)
    ordered = {key: tuple(sorted(chunks[key], key=lambda c: c.offset)) for key in sorted(chunks)}
    return {key: TensorEntry(kinds[key].dtype, kinds[key].shape, ordered[key]) for key in ordered}


def _same_on_all(what: str, digests: Sequence[Mapping[str, str]]) -> None:
    for rank, mine in enumerate(digests):
        differing = sorted(k for k in {*digests[0], *mine} if digests[0].get(k) != mine.get(k))
        if differing:
            msg = (
                f"{what}: rank {rank} has other values than rank 0 for {', '.join(differing)}; what describes a "
                "checkpoint must be equal on all ranks, so give the global value, not a rank's own."
            )
            raise RunFailed(msg, rank=rank)
