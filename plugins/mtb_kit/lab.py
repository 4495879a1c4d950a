"""The laboratory: runs episodes on real ranks, once each, and gives checks what they need to judge them."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs

from mtb_core.api.descriptions import DatasetInfo, ModelInfo, StrategyInfo, load_reference
from mtb_core.api.errors import EXIT_STOPPED, ConfigError, MtbError
from mtb_core.api.layout import World
from mtb_core.api.options import parse_options
from mtb_core.api.values import Plan, SyncMode
from mtb_core.config import TrainConfig
from mtb_core.launch import LaunchSpec
from mtb_core.ranks.failures import Failure
from mtb_core.registry.discovery import Registry, discover
from mtb_core.train.planning import plan_run
from mtb_launcher import launch

from .capabilities import PROMISES, Capabilities
from .debugging import Terminal
from .episodes import COMMON, Episode, episode
from .probes_processes import clear_caches_of_torch
from .rank import RankWork, rank_of_episode, read_traces
from .stage import RankTrace
from .standing import Ending, StandingRanks
from .states import Mismatch, Whole, assemble

#: Names that the laboratory adds to those of the installed plugins.
DATASETS = (
    DatasetInfo("kit-ragged", "Samples with few or no valid tokens", "mtb_kit.ragged:ragged"),
    DatasetInfo("kit-ragged-23", "23 of them", "mtb_kit.ragged:ragged_23"),
)
MODELS = tuple(
    ModelInfo(f"kit-{name}", text, f"mtb_kit.samples:{name}")
    for name, text in (
        ("frozen", "Some parameters do not require gradients"),
        ("unused", "A parameter that forward never uses"),
        ("buffers", "Persistent and other buffers that forward changes"),
        ("odd", "Dimensions that no number of ranks divides, a single element, fewer rows than ranks"),
        ("scalar", "A parameter without dimensions"),
        ("extra", "The built-in model with an auxiliary loss and a metric"),
    )
)
#: What takes long to import is imported here, before ranks are forked, and so once.
_PRELOAD = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.optim",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "mtb_core.model.gpt",
    "mtb_core.ckpt.manager",
)
#: A rank of an episode that takes longer than this shows its stacks and is ended, seconds.
DEADLINE_S = 60.0


class Stopped(MtbError):
    """This process was told to end while it ran an episode; whether the strategy is right is not known then."""

    exit_code = EXIT_STOPPED

    def __init__(self, signal_name: str) -> None:
        super().__init__(
            f"Stopped by {signal_name}: the remaining checks were not run. There is no certificate, and what failed the "
            "last time is still remembered for --last-failed."
        )


@attrs.frozen
class Run:
    """An episode that took place.

    Attributes:
        traces: by rank; a rank that was killed before it could write one is left out.
        failure: the first cause, where the ranks did not agree on it; agreed ones are in the result.
        exit_reason: of the run.
        log: last lines that each rank has written, by rank.
        folder: with ``run`` in it, the run's folder.
    """

    episode: Episode
    traces: Mapping[int, RankTrace]
    failure: Failure | None
    exit_reason: str
    log: Mapping[int, list[str]]
    folder: Path

    @property
    def first(self) -> RankTrace:
        """The trace of rank 0."""
        return self.traces[0]

    @property
    def result(self) -> Mapping[str, Any]:
        """The run's result."""
        assert self.first.result is not None
        return self.first.result

    def whole(self, step: int) -> Whole:
        """Model and optimizer after `step`, put together from the parts of all ranks.

        Raises:
            Mismatch: a part is missing, or ranks that hold the same elements disagree, though the plan sums gradients.
        """
        plan = next(iter(self.traces.values())).plan
        return assemble(self.traces, step, agreeing=plan is None or plan.sums_gradients)

    def why(self) -> str:
        """Text on the end of the run, with the end of the log if a rank failed."""
        if self.failure is None:
            agreed = (self.first.result or {}).get("failure") if self.traces else None
            return self.exit_reason if agreed is None else f"{self.exit_reason}: {agreed['text']}"
        told = [_told(rank, lines) for rank, lines in sorted(self.log.items()) if lines and self._matters(rank, lines)]
        return "\n".join([f"failed: {self.failure}", *told])

    def _matters(self, rank: int, lines: list[str]) -> bool:
        assert self.failure is not None
        return rank == (self.failure.rank or 0) or _overdue(lines) is not None


def _overdue(lines: list[str]) -> int | None:
    """Index of the line at which the stacks of a rank that took too long begin."""
    return next((i for i, line in enumerate(lines) if line.startswith("Timeout (")), None)


def _told(rank: int, lines: list[str]) -> str:
    """Excerpt of a rank's output: the innermost frames of its stacks if it took too long, else the end."""
    start = _overdue(lines)
    if start is None:
        shown = lines[-15:]
    else:
        stacks = [line for line in lines[start:] if not line.strip().startswith("...")]
        main = max((i for i, line in enumerate(stacks) if "most recent call first" in line), default=0)
        shown = [f"rank {rank} took too long; it was at (innermost first):", *stacks[main : main + 25]]
    return "\n".join([f"rank {rank} had written:", *shown])


class Lab:
    """Runs episodes of one strategy with one set of options, and of ``single`` as the reference.

    Use it as a context manager; it keeps its files in a temporary folder.

    Args:
        info: the strategy; need not be installed.
        options: of the strategy, as on the command line.
        capabilities: what its author declares; None: nothing beside the plan.
        settings: settings that every episode of strategy and reference has (model sizes that it needs, say).
        world_sizes: numbers of ranks to check at, as far as the plan takes them, where nothing is declared.
        debug: terminal for a debugger in one rank.
        standing: ranks run one episode after the other, but for those that ask for fresh ones; False: every episode
            has processes of its own.
    """

    def __init__(
        self,
        info: StrategyInfo,
        options: Mapping[str, Any] | None = None,
        *,
        capabilities: Capabilities | None = None,
        settings: Mapping[str, Any] | None = None,
        world_sizes: tuple[int, ...] = (1, 2, 3),
        debug: Terminal | None = None,
        standing: bool = True,
    ) -> None:
        self.info = info
        self.options = dict(options or {})
        self.settings = {**COMMON, **(settings or {})}
        self.registry = _registry(info)
        self._declared, self._candidates = capabilities, world_sizes
        self._debug = debug
        self._stand = standing and debug is None
        self._standing: dict[tuple[int, bool], StandingRanks] = {}
        self._again: Lab | None = None
        self._runs: dict[Episode, Run] = {}
        self._numbers = itertools.count(1)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.capabilities = capabilities or Capabilities(world_sizes=self._possible(world_sizes))

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="mtb-kit-", ignore_cleanup_errors=True)
        for module in (*_PRELOAD, self.info.impl.partition(":")[0]):
            importlib.import_module(module)
        if self.info.preload:
            load_reference(self.info.preload)(self.settings["device"])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._folder is not None
        for ranks in self._standing.values():
            ranks.close()
        self._standing.clear()
        if self._again is not None:
            self._again.__exit__(kind, error, trace)
            self._again = None
        self._folder.cleanup()

    @property
    def folder(self) -> Path:
        """A folder for whatever a check writes."""
        assert self._folder is not None
        return Path(self._folder.name)

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Numbers of ranks that the strategy is checked at."""
        return self.capabilities.world_sizes

    @property
    def again(self) -> Lab | None:
        """The laboratory in which every episode has processes of its own, to repeat what failed; None: it is this one."""
        if self._stand and self._again is None:
            self._again = Lab(
                self.info,
                self.options,
                capabilities=self._declared,
                settings=self.settings,
                world_sizes=self._candidates,
                standing=False,
            )
            self._again.__enter__()
        return self._again

    def _possible(self, candidates: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `candidates` that the plan takes.

        Raises:
            ConfigError: it refuses all; the reason is that of the last.
        """
        sizes, reason = [], ConfigError("no number of ranks was given")
        for ranks in candidates:
            try:
                self.plan(ranks)
            except ConfigError as error:
                reason = error
            else:
                sizes.append(ranks)
        if not sizes:
            raise reason
        return tuple(sizes)

    def plan(self, ranks: int, **settings: Any) -> Plan:
        """The strategy's plan.

        Raises:
            ConfigError: it cannot run so.
        """
        return self._plan(episode(ranks, **settings))

    def _plan(self, asked: Episode) -> Plan:
        parsed = parse_options(self.info.options, self.options, owner=f"strategy '{self.info.name}'")
        return self.info.plan(parsed, self._as_asked(asked), World(asked.ranks, asked.ranks))

    def promises(self, name: str, ranks: int) -> bool:
        """True if the plan for `ranks` ranks promises `name`, one of `PROMISES`, and its author has not left it out.

        Raises:
            ConfigError: there is no plan for so many ranks.
        """
        if getattr(self.capabilities, name) is False:
            return False
        promised: bool = getattr(self.plan(ranks), name)
        return promised and not (name == "bf16" and self.refusal(ranks, precision="bf16"))

    def promised(self, ranks: int) -> dict[str, bool]:
        """All promises for `ranks` ranks by name, as `promises` gives them; empty where there is no plan."""
        with contextlib.suppress(ConfigError):
            return {name: self.promises(name, ranks) for name in PROMISES}
        return {}

    def sync_modes(self, ranks: int) -> tuple[SyncMode, ...]:
        """The sync modes to check."""
        return self.capabilities.sync_modes or self.plan(ranks).sync_modes

    def refusal(self, ranks: int, **settings: Any) -> str:
        """Error text if a run with `settings` is refused before any rank starts, by the plan or by core; else empty."""
        try:
            plan_run(self._as_asked(episode(ranks, **settings)), self.registry, World(ranks, ranks))
        except MtbError as error:
            return str(error)
        return ""

    def micro_batches(self, ranks: int, wanted: int) -> int:
        """The number of micro-batches nearest above `wanted` that plan and global batch allow."""
        return self._micro_batches(self.plan(ranks), wanted)

    def _micro_batches(self, plan: Plan, wanted: int) -> int:
        batch, streams = int(self.settings["global_batch_size"]), plan.layout.data_size
        if not plan.accumulation:
            return 1
        for count in range(max(wanted, plan.least_micro_batches), batch + 1):
            if batch % (count * streams) == 0:
                return count
        raise ConfigError(
            f"The kit's global batch of {batch} samples cannot be shared by {streams} data ranks in at least "
            f"{plan.least_micro_batches} micro-batches each; set global_batch_size in StrategyConformance.settings."
        )

    def _as_asked(self, asked: Episode) -> TrainConfig:
        who = {"strategy": self.info.name, "strategy_opt": self.options} if asked.subject else {"strategy": "single"}
        own = dict(asked.settings)
        if "model" in own:  # the options of the author's are not those of another model
            own.setdefault("model_opt", {})
        return TrainConfig(**{**self.settings, **who, "nproc": asked.ranks, **own})

    def config(self, asked: Episode) -> TrainConfig:
        """The configuration of an episode, changed where the plan does not promise what was asked for.

        It has more micro-batches where the plan needs them; and no clipping, the reference neither, where the strategy
        has none.

        Raises:
            ConfigError: it cannot be run at all.
        """
        config = self._as_asked(asked)
        if asked.subject:
            count = self._micro_batches(self._plan(asked), config.grad_accum_steps or 1)
            config = attrs.evolve(config, grad_accum_steps=count)
        if config.max_grad_norm and not all(self.plan(ranks).clipping for ranks in self.world_sizes):
            config = attrs.evolve(config, max_grad_norm=0.0)
        return config

    def run(self, asked: Episode) -> Run:
        """The run of an episode; each is run once.

        Raises:
            ConfigError: it cannot be run at all.
            KeyboardInterrupt, Stopped: this process, not a rank, was interrupted or told to end meanwhile.
        """
        if asked not in self._runs:
            self._runs[asked] = self._run(asked)
        return self._runs[asked]

    def done(self, asked: Episode) -> Run:
        """The run of an episode that must come to its end.

        Raises:
            Mismatch: it did not.
        """
        run = self.run(asked)
        if run.exit_reason != "done" or run.traces.keys() != set(range(asked.ranks)):
            raise Mismatch("a run that comes to its end on all ranks", run.why())
        return run

    def _run(self, asked: Episode) -> Run:
        folder = self.folder / f"episode-{next(self._numbers):03d}"
        folder.mkdir()
        work = self._work(asked, folder)
        standing = self._stand and not asked.fresh and StandingRanks.possible(asked.ranks)
        ending = self._on_standing_ranks(asked, folder) if standing else _on_fresh_ranks(asked, work)
        if ending is not None and ending.signal is not None:
            raise KeyboardInterrupt if ending.signal == "SIGINT" else Stopped(ending.signal)
        traces = {r: trace for r, trace in enumerate(read_traces(folder, asked.ranks)) if trace is not None}
        reason = "done" if ending is None else ending.exit_reason
        if reason == "done" and traces and (result := next(iter(traces.values())).result) is not None:
            reason = result["exit_reason"]
        failure, log = (None, {}) if ending is None else (ending.failure, ending.log)
        return Run(asked, traces, failure, reason, log, folder)

    def _work(self, asked: Episode, folder: Path) -> RankWork:
        """Input of each rank of an episode.

        Raises:
            ConfigError: it cannot be run at all.
        """
        config = attrs.evolve(self.config(asked), run_dir=str(folder / "run"))
        planned = plan_run(config, self.registry, World(asked.ranks, asked.ranks))
        impl = planned.strategy.impl
        planned = attrs.evolve(planned, strategy=attrs.evolve(planned.strategy, impl="mtb_kit.stage:make_strategy"))
        return RankWork(planned, impl, asked.probes, asked.states, folder, DEADLINE_S, self._debug)

    def _on_standing_ranks(self, asked: Episode, folder: Path) -> Ending | None:
        who = (asked.ranks, asked.subject)
        if who not in self._standing:
            logs = self.folder / f"ranks-{next(self._numbers):03d}"
            self._standing[who] = StandingRanks(asked.ranks, self._work, logs)
        try:
            ending = self._standing[who].play(asked, folder)
        except BaseException:
            self._standing.pop(who).close()
            raise
        if ending is not None:
            del self._standing[who]
        return ending


def _on_fresh_ranks(asked: Episode, work: RankWork) -> Ending:
    clear_caches_of_torch()
    log: dict[int, list[str]] = {}
    outcome = launch(
        LaunchSpec(
            entry=rank_of_episode,
            payload=work,
            nproc=asked.ranks,
            start_method=work.planned.resolved.config.start_method,
            log_dir=work.folder / "logs",
            on_line=_keep_in(log),
        )
    )
    return Ending(outcome.exit_reason, outcome.failure, log, outcome.signal)


def _keep_in(log: dict[int, list[str]]) -> Callable[[int, str], None]:
    def keep(rank: int, line: str) -> None:
        log.setdefault(rank, []).append(line)

    return keep


def _registry(info: StrategyInfo) -> Registry:
    """The installed plugins, with the strategy under test and the laboratory's own data and models."""
    found = discover()
    return attrs.evolve(
        found,
        strategies={**found.strategies, info.name: info},
        datasets={**found.datasets, **{d.name: d for d in DATASETS}},
        models={**found.models, **{m.name: m for m in MODELS}},
    )
