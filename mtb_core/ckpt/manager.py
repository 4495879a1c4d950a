"""`CheckpointManager`: saving and loading of checkpoints for any training loop.

A loop on every rank::

    with CheckpointManager("checkpoints") as manager:
        manager.preflight(state())                 # before the first step: writable? buffers made
        if path := manager.find("auto"):
            loaded = manager.load(path, state())   # fills the tensors in place
            restore_rng(loaded.rng)
        for step in ...:
            ...
            manager.save(step, state(), sections={"train_state": {...}})
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mtb_core.api.errors import MtbError, RunFailed
from mtb_core.api.values import RankContext, State
from mtb_core.ranks.rng import capture_rng
from mtb_core.registry.discovery import Registry

from . import catalog, files, publish
from .group import SaverGroup, surrounding_context
from .layout import TEMPORARY
from .loading import Loaded, load_checkpoint
from .manifest import with_counts
from .saving import Request, Saver, Snapshot
from .storage import DEFAULT_FORMAT, provider_of, storage_named


class CheckpointManager:
    """Publishes checkpoints in a folder that all ranks share; made, and its methods called, by all ranks alike.

    Args:
        folder: the folder of checkpoints, the same on all ranks; created by `preflight`.
        ctx: this rank's context; None takes it from ``torch.distributed``, or one rank without it.
        keep_last: READY checkpoints to keep, by integer step; 0 keeps all.
        keep_every: steps that are multiples of it are kept for good; 0: none.
        asynchronous: `save` returns when everything is copied; writing happens in a thread, one save at a time.
        fault_point: called with the names in `publish.RANK_POINTS` and `publish.PUBLISH_POINTS`; for fault drills.
        published: ``published(path, step)``, called on each rank in the caller's thread when that rank has learnt
            that the checkpoint is durable.
        timeout_s: how long ranks wait for each other in a save.
        format_name: the checkpoint format to write, see `mtb_core.ckpt.storage`. What is loaded names its own.
        registry: the plugins in which formats are looked for; None: all that are installed.
    """

    def __init__(
        self,
        folder: str | Path,
        ctx: RankContext | None = None,
        *,
        keep_last: int = 3,
        keep_every: int = 0,
        asynchronous: bool = True,
        fault_point: Callable[[str], None] = lambda _: None,
        published: Callable[[Path, int], None] = lambda _path, _step: None,
        timeout_s: float = 1800.0,
        format_name: str = DEFAULT_FORMAT,
        registry: Registry | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.ctx = ctx if ctx is not None else surrounding_context()
        self.asynchronous = asynchronous
        self.last_published: Path | None = None
        self._published = published
        self._group = SaverGroup(self.ctx, timeout_s)
        self._registry = registry
        self._saver = Saver(
            self.folder,
            self.ctx,
            self._group,
            keep_last=keep_last,
            keep_every=keep_every,
            fault_point=fault_point,
            storage=storage_named(format_name, registry),
            meta={"storage": format_name, "storage_distribution": provider_of(format_name, registry)},
        )
        self._in_flight: _Flight | None = None
        #: Whether this training is the original one to the bit, and why not; goes into every checkpoint.
        self.determinism: tuple[bool, str | None] = (True, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()

    def preflight(self, state: State | None = None) -> None:
        """Before training: can every rank write here? Removes what dead saves left; never what a living one has.

        With `state` it also decides who writes what, and allocates the buffers, so that the first save is as short
        as the others.

        Raises:
            RunFailed: on all ranks, with path and errno.
        """
        name = self._group.from_rank_zero(f"{TEMPORARY}probe-{secrets.token_hex(8)}")
        mine = f"{name}-{self.ctx.rank}"
        held = contextlib.ExitStack()

        def clean() -> None:
            if self.ctx.rank == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                publish.clean_leftovers(self.folder)

        def write() -> str:
            self.folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(files.in_use(self.folder))  # so that no other run takes the probes for leftovers
            publish.probe(self.folder, mine)
            return str(self.folder)

        def look() -> None:
            seen = [r for r in range(self.ctx.world_size) if (self.folder / f"{name}-{r}").exists()]
            if len(seen) != self.ctx.world_size:
                raise RunFailed(f"it sees only the files of ranks {seen} there; all ranks need one shared folder")

        try:
            advice = "Name another --checkpoint-dir, or make this one writable."
            what = f"Checkpoints cannot be written to {self.folder}"
            # First, and on its own: the probes of the other ranks would look like leftovers.
            self._group.together(what, clean, advice=advice)
            folders = self._group.together(what, write, advice=advice)
            if len(set(folders)) > 1:
                raise RunFailed(f"The ranks have different checkpoint folders, {sorted(set(folders))}; give them one.")
            self._group.together(f"Checkpoints in {self.folder} would be incomplete", look)
        finally:
            with contextlib.suppress(OSError):
                (self.folder / mine).unlink()
            held.close()
        if state is not None:
            self._saver.prepare(state)

    def save(
        self,
        step: int,
        state: State,
        *,
        meta: Mapping[str, Any] | None = None,
        sections: Mapping[str, Any] | None = None,
        rng: Mapping[str, Any] | None = None,
        attachments: Mapping[str, Path] | None = None,
    ) -> float:
        """Save `state` as the checkpoint of `step`; returns the seconds for which the caller was held up.

        A save that is still in flight is waited for first, and its error raised here. An asynchronous one returns as
        soon as nothing of it depends on the caller's values any more.

        Args:
            step: optimizer steps completed.
            state: this rank's pieces.
            meta: JSON values for the manifest, equal on all ranks; for those that every checkpoint has and that are
                not given, see `mtb_core.ckpt.manifest.UNSAID`.
            sections: JSON values for ``state.json``, equal on all ranks: ``train_state``, ``scheduler``, ``data``,
                ``optimizer``, ``loss_scaler``, ``plugins``, … Counts that ``train_state`` lacks (``global_step``,
                ``samples_seen``, ``tokens_seen``) are taken from `step` and `meta`.
            rng: this rank's random state; None takes the present one.
            attachments: this rank's further files, name in the checkpoint to source; the part that is there now is
                copied.

        Raises:
            RunFailed: on all ranks, with the first failing rank, path and errno. Nothing was published.
        """
        began = time.perf_counter()
        self.finish()
        deterministic, reason = self.determinism
        request = Request(
            step=step,
            meta={**(meta or {}), "deterministic": deterministic, "determinism_reason": reason},
            sections={**with_counts(sections or {}, step, meta or {}), "scalars": dict(state.scalars)},
            rng=capture_rng(self.ctx.device) if rng is None else rng,
            attachments=attachments or {},
        )
        snapshot = self._saver.snapshot(request, state)
        self._in_flight = _Flight(self._saver, snapshot, threaded=self.asynchronous)
        if not self.asynchronous:
            self.finish()
        return time.perf_counter() - began

    def poll_vote(self) -> float:
        """At a step boundary: 1.0 if the save in flight is known here to have failed, else 0.0.

        To be summed over the ranks with whatever else they agree on, and the sum given to `settle`. A rank must not
        raise on its own here: others may not know yet.
        """
        flight = self._in_flight
        if flight is None or not flight.done:
            return 0.0
        if flight.error is not None:
            return 1.0
        self._land()
        return 0.0

    def settle(self, votes: float) -> None:
        """Raise the error of the save in flight on all ranks if the sum of the `votes` says that there is one."""
        if votes > 0:
            self.finish()

    def finish(self) -> None:
        """Wait for the save in flight, if there is one.

        Raises:
            RunFailed: on all ranks, if it failed.
        """
        if self._in_flight is not None:
            self._in_flight.wait()
            self._land()

    def find(self, selector: str) -> Path | None:
        """The checkpoint that ``latest``, ``auto`` or a path means, as rank 0 sees it, on all ranks.

        None only for ``auto`` where nothing is READY; see `mtb_core.ckpt.catalog.find`.
        """
        found: Path | None = None
        error: MtbError | None = None
        if self.ctx.rank == 0:
            try:
                found = catalog.find(self.folder, selector)
            except MtbError as caught:
                error = caught
        found, error = self._group.from_rank_zero((found, error))
        if error is not None:
            raise error
        return found

    def load(self, path: str | Path, state: State, *, allow_missing_rng: bool = False) -> Loaded:
        """Fill the pieces of `state` from the checkpoint at `path`, and return everything else it holds.

        The digests of all files are checked first, shared out among the ranks. Afterwards, saves by this manager
        carry on the checkpoint's statement on determinism (`determinism`).

        Raises:
            RunFailed, DamagedCheckpoint: on all ranks: damaged, keys missing, unexpected or of another shape or
                dtype, or random state missing or damaged (unless `allow_missing_rng`). After a failure the pieces
                may be partly filled.
        """
        found = catalog.followed(Path(path))
        loaded = load_checkpoint(
            found, state, self.ctx, self._group, allow_missing_rng=allow_missing_rng, registry=self._registry
        )
        self.determinism = (loaded.deterministic, loaded.determinism_reason)
        return loaded

    def newest(self, wanted: Callable[[int], bool]) -> Path | None:
        """The READY checkpoint of the highest step that is `wanted`, as rank 0 sees it; None if there is none."""

        def look() -> Path | None:
            if self.ctx.rank:
                return None
            steps = reversed(catalog.list_steps(self.folder))
            return next((found.path for found in steps if found.ready and wanted(found.step)), None)

        return self._group.together(f"The checkpoints in {self.folder} could not be listed", look)[0]

    def put_aside(self, *, after: int) -> list[str]:
        """Give the checkpoints of steps above `after` other names, so that none of them is resumed from.

        Returns:
            These names.

        Raises:
            RunFailed: on all ranks.
        """
        return self._group.together(
            f"The checkpoints after step {after} could not be put aside",
            lambda: [path.name for path in publish.put_aside_after(self.folder, after)] if self.ctx.rank == 0 else [],
        )[0]

    def ready_steps(self) -> list[int]:
        """Steps of the READY checkpoints in the folder, ascending."""
        return [found.step for found in catalog.list_steps(self.folder) if found.ready]

    def _land(self) -> None:
        flight, self._in_flight = self._in_flight, None
        if flight is None:
            return
        if flight.error is not None:
            raise flight.error
        assert flight.path is not None
        self.last_published = flight.path
        self._published(flight.path, flight.step)


class _Flight:
    """A save on its way, in a thread or, when it is made, at once."""

    def __init__(self, saver: Saver, snapshot: Snapshot, *, threaded: bool) -> None:
        self.step = snapshot.step
        self.path: Path | None = None
        self.error: BaseException | None = None
        self._saver, self._snapshot = saver, snapshot
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name=f"mtb-save-{self.step}", daemon=True)
            self._thread.start()
        else:
            self._run()

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self.path = self._saver.write_and_publish(self._snapshot)
        except BaseException as error:  # noqa: BLE001  (raised where all ranks meet: see CheckpointManager.finish)
            self.error = error
