"""A run plugin that notes when collectives are launched while backward runs: whether the two can overlap."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from mtb_core.api.hooks import hookimpl
from mtb_core.api.values import Job, Prepared
from mtb_core.config import TrainConfig
from mtb_core.measure.collectives import CountCollectives
from mtb_core.measure.result import Result
from mtb_core.running import run


@attrs.frozen
class Launch:
    """A collective that was launched during a backward.

    Attributes:
        kind: as `CountCollectives` names it.
        ranks: global ranks of its group; None: torch does not tell.
        message_bytes: of its message.
        ahead: parameters of the blocks that backward has not come to yet, as a share of all trainable parameters.
            None of them has a gradient yet.
    """

    kind: str
    ranks: tuple[int, ...] | None
    message_bytes: int
    ahead: float


class LaunchRecorder:
    """Writes to `folder`, for each rank, the launches of each backward of its trial."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._rank = folder, -1
        self._sizes: dict[str, float] = {}
        self._reached: set[str] = set()
        self._backwards: list[list[Launch]] = []

    @hookimpl(wrapper=True)
    def mtb_prepare(self, job: Job) -> Generator[None, Prepared, Prepared]:
        """Watch the output of each block: backward begins there what it does in the block."""
        prepared = yield
        self._rank = job.ctx.rank
        total = sum(p.numel() for p in prepared.trainable)
        for name in job.model.blocks:
            block = prepared.core.get_submodule(name)
            self._sizes[name] = sum(p.numel() for p in block.parameters() if p.requires_grad) / total
            block.register_forward_hook(partial(self._watch, name))
        return prepared

    @hookimpl(wrapper=True)
    def mtb_backward(self) -> Generator[None, None, None]:
        """Count in each backward."""
        self._reached.clear()
        found: list[Launch] = []
        self._backwards.append(found)
        with _Noticing(lambda: found.append(self._launch(counter))) as counter:
            return (yield)

    @hookimpl(wrapper=True)
    def mtb_close(self) -> Generator[None, None, None]:
        """Write them down."""
        (self._folder / f"launches{self._rank}.pickle").write_bytes(pickle.dumps(self._backwards))
        yield

    def _watch(self, name: str, _module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: self._reached.add(name))

    def _launch(self, counter: CountCollectives) -> Launch:
        last = counter.seen[-1]
        ahead = sum(size for name, size in self._sizes.items() if name not in self._reached)
        return Launch(last.kind, last.ranks, last.message_bytes, ahead)


class _Noticing(CountCollectives):
    """Calls `then` at each collective, after it was counted."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__()
        self._then = then

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func`."""
        before = len(self.seen)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.seen) > before:
            self._then()
        return result


def run_launches(config: TrainConfig, folder: Path) -> tuple[Result, list[list[list[Launch]]]]:
    """Run `config` quietly, run folder under `folder`; returns the result, and launches by rank and backward."""
    folder.mkdir(parents=True, exist_ok=True)
    config = attrs.evolve(config, run_dir=str(folder / "run"), sink=("jsonl",))
    result = run(config, quiet=True, plugins={"launches": partial(LaunchRecorder, folder)})
    paths = sorted(folder.glob("launches*.pickle"), key=lambda p: int(p.stem.removeprefix("launches")))
    return result, [pickle.loads(path.read_bytes()) for path in paths]  # noqa: S301  (written by ourselves, just now)
