"""Leftovers of a strategy in its process and in the run's folder, and the number of its calls."""

from __future__ import annotations

import importlib.machinery
import sys
import time
import types
import typing
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import attrs

from mtb_core.api.hooks import hookimpl
from mtb_core.api.records import StepRecord
from mtb_core.api.strategy import Strategy
from mtb_core.api.values import Prepared
from mtb_core.api.work import Shards
from mtb_core.ckpt.layout import parse_json
from mtb_core.measure.result import Result
from mtb_core.registry.run_hooks import Hooks
from mtb_kit.checking import Skip, check
from mtb_kit.checks.counting import reporting
from mtb_kit.episodes import episode
from mtb_kit.lab import Lab, Run
from mtb_kit.probes_processes import Groups, HookCalls, Leftovers, Surroundings
from mtb_kit.probes_tensors import Living
from mtb_kit.states import Mismatch, equal_bitwise

#: Steps after which `watched` notes the tensors that are alive.
LIVING = (2, 4)


def watched(lab: Lab, ranks: int) -> Run:
    """Four steps after which the process must be as it was."""
    return lab.done(episode(ranks, probes=(Groups(), Leftovers(), Surroundings(), Living(LIVING))))


@check(
    "processes.groups",
    "Process groups after the trial are those that were there before it.",
    mistake="a group or a mesh of the strategy's own was not destroyed: do it in close(prepared), or use job.ctx.mesh, "
    "which is core's to close",
)
def groups(lab: Lab, ranks: int) -> None:
    """Compared before ``prepare`` and after ``close``."""
    for rank, trace in watched(lab, ranks).traces.items():
        before, after = trace.notes["groups"]["before"], trace.notes["groups"]["after"]
        if before != after:
            left = {name: members for name, members in after.items() if name not in before}
            gone = sorted(before.keys() - after.keys())
            raise Mismatch(
                f"the groups {sorted(before)} on rank {rank}, as before",
                f"left: {left or 'none'} (name: ranks); destroyed: {gone or 'none'}",
            )


@check(
    "processes.threads",
    "After the run its threads have ended.",
    mistake="a thread or a pool of the strategy's is not ended in close(prepared); or the strategy object, or a global, "
    "keeps a wrapped model or a group alive, whose threads then live on",
)
def threads(lab: Lab, ranks: int) -> None:
    """Counted by name before the rank joins the others, and after it has left them."""
    _nothing_left(watched(lab, ranks), "threads")


@check(
    "processes.files",
    "After the run its files, pipes and sockets are closed, and it listens on no port.",
    mistake="a file, a store or a connection of the strategy's is not closed in close(prepared); or a global keeps a "
    "group alive, whose sockets then stay open",
)
def files(lab: Lab, ranks: int) -> None:
    """Open descriptors by what they lead to, before the rank joins the others and after it has left them."""
    _nothing_left(watched(lab, ranks), "files")


def _nothing_left(run: Run, kind: str) -> None:
    for rank, trace in run.traces.items():
        left: dict[str, int] = trace.notes[kind]
        if left:
            shown = ", ".join(f"{count} × {name}" for name, count in sorted(left.items()))
            raise Mismatch(f"no more {kind} on rank {rank} than before the run", shown)


@check(
    "processes.surroundings",
    "After the run working directory, environment and signal handlers are as they were, and no file was left there.",
    mistake="what the strategy or its library changes for the whole process is not put back in close(prepared); files "
    "belong into the run's folder",
)
def surroundings(lab: Lab, ranks: int) -> None:
    """Each rank works in an empty directory of its own meanwhile."""
    for rank, trace in watched(lab, ranks).traces.items():
        changed: dict[str, str] = trace.notes["surroundings"]
        if changed:
            raise Mismatch(f"rank {rank} to leave all as it was", "; ".join(f"{k}: {v}" for k, v in changed.items()))


@check(
    "processes.second_trial",
    "With --repeat every trial starts anew: the second gives the bits of the first.",
    mistake="a model, an optimizer or a counter is kept in a global or on the class, and the next trial goes on with it",
    ranks="fewest",
    needs=("exact_resume",),
)
def second_trial(lab: Lab, ranks: int) -> None:
    """Losses of both, and the state after the second against that of a run with one trial."""
    steps = 2
    run = lab.done(episode(ranks, repeat=2, steps=steps, states=(steps,)))
    for rank, trace in run.traces.items():
        if trace.losses[steps:] != trace.losses[:steps]:
            raise Mismatch(f"the losses {trace.losses[:steps]} again, on rank {rank}", f"{trace.losses[steps:]}")
    equal_bitwise(
        run.whole(steps),
        lab.done(episode(ranks, steps=steps, states=(steps,))).whole(steps),
        "the state after a second trial",
    )


@check(
    "processes.spawn",
    "The strategy works in ranks that are spawned, not forked.",
    mistake="something is taken over from the process that launched the ranks: a module's global that was filled there, "
    "options or a plan that cannot be pickled, code that can only be imported there",
    ranks="fewest",
)
def spawn(lab: Lab, ranks: int) -> None:
    """One step; what ranks need is pickled and made again from nothing."""
    modules = {lab.info.impl.partition(":")[0], lab.info.plan.__module__, lab.info.options.__module__}
    for module in sorted(modules):
        if not _importable(module):
            raise Skip(f"{module} is loaded here, but a new process would not find it")
    run = lab.done(episode(ranks, steps=1, start_method="spawn"))
    reference = lab.done(episode(ranks, steps=1))
    seen, expected = run.first.losses, reference.first.losses
    if seen != expected:
        raise Mismatch(f"the loss {expected} of forked ranks", f"{seen} with spawned ranks")


def _importable(module: str) -> bool:
    """True if a process that has not loaded it would find it, on ``sys.path`` or through an editable install."""
    path: Sequence[str] | None = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        found = (f.find_spec(name, path, None) for f in sys.meta_path)
        spec: importlib.machinery.ModuleSpec | None = next((s for s in found if s is not None), None)
        if spec is None:
            return False
        path = spec.submodule_search_locations
    return True


@check(
    "processes.metrics",
    "Metrics lines and result.json have the documented keys and types, and are strict JSON.",
    mistake="a value of the strategy's own in Plan or Prepared is of another type than it should be (a tensor, a numpy "
    "number, a path), or not finite",
    ranks="most",
)
def metrics(lab: Lab, ranks: int) -> None:
    """Keys compared with those of `single`, types with those that `StepRecord` and `Result` declare."""
    run, reference = _measured(lab, ranks)
    fields = typing.get_type_hints(StepRecord)
    for rank in range(ranks):
        lines = _lines(run, rank)
        if len(lines) != 3:
            raise Mismatch(f"3 metrics lines of rank {rank}", f"{len(lines)}")
        for line in lines:
            # Figures of model and plugins are left out where there are none.
            _typed({"metrics": {}, **line}, fields, f"a metrics line of rank {rank}")
    own, other = _result(run), _result(reference)
    _typed(own, typing.get_type_hints(Result), "result.json")
    for part in ("config", "runtime", "environment", "provenance"):
        _same_names(own[part], other[part], f"'{part}' in result.json")
    _same_names(own["repeats"][0], other["repeats"][0], "'repeats' in result.json")
    _same_names(own["strategy_options"], attrs.fields_dict(lab.info.options), "'strategy_options' in result.json")


#: What a result counts of the whole model and of all ranks.
_COUNTED = (
    "parameters",
    "model_flops_per_token",
    "flops_convention",
    "steps",
    "global_step",
    "samples_seen",
    "tokens_seen",
    "global_batch_size",
)


def _measured(lab: Lab, ranks: int) -> tuple[Run, Run]:
    """A run with warm-up of the strategy, and one of `single`."""
    asked: Mapping[str, Any] = {"steps": 2, "warmup_steps": 1}
    return lab.done(episode(ranks, **asked)), lab.done(episode(1, subject=False, **asked))


@check(
    "processes.result",
    "The result counts what `single` counts: parameters, FLOPs per token, steps, samples and tokens.",
    mistake="the layout gives an axis the wrong role, so that ranks count tokens twice or not at all; or the model is not built by job.build",
)
def result(lab: Lab, ranks: int) -> None:
    """Of the same global batches, in the run of `parity.reported`."""
    run, reference = lab.done(reporting(ranks)), lab.done(reporting(1, subject=False))
    seen, expected = _result(run), _result(reference)
    for name in _COUNTED:
        if seen[name] != expected[name]:
            raise Mismatch(f"'{name}' to be {expected[name]}, as with `single`", f"{seen[name]}")


def _lines(run: Run, rank: int) -> list[dict[str, Any]]:
    path = run.folder / "run" / "metrics" / f"rank_{rank:05d}.jsonl"
    return [_strict(line, f"metrics of rank {rank}") for line in path.read_bytes().splitlines()]


def _result(run: Run) -> dict[str, Any]:
    return _strict((run.folder / "run" / "result.json").read_bytes(), "result.json")


def _strict(text: bytes, what: str) -> dict[str, Any]:
    try:
        values: dict[str, Any] = parse_json(text)
    except ValueError as error:
        raise Mismatch(f"{what} as strict JSON", str(error)) from error
    return values


def _typed(values: Mapping[str, Any], declared: Mapping[str, Any], what: str) -> None:
    _same_names(values, declared, what)
    for key, value in values.items():
        if not _fits(value, declared[key]):
            raise Mismatch(f"{what}: '{key}' as {declared[key]}", f"{value!r}, {type(value).__name__}")


def _fits(value: Any, declared: Any) -> bool:
    """True if a value read from JSON is of the type; a whole float may be written as an integer."""
    options = typing.get_args(declared) if isinstance(declared, types.UnionType) else (declared,)
    for option in options:
        kind = typing.get_origin(option) or option
        if kind is Mapping:
            kind = dict
        elif kind is Sequence:
            kind = list
        if kind is not Any and type(value) is kind:
            return True
    return False


def _same_names(seen: Any, expected: Any, what: str) -> None:
    if seen.keys() != expected.keys():
        missing, extra = sorted(expected.keys() - seen.keys()), sorted(seen.keys() - expected.keys())
        raise Mismatch(f"{what} with its documented keys", f"missing: {missing}; unknown: {extra}")


@check(
    "processes.overhead",
    "A step calls each hook of the strategy as often as is documented.",
    mistake="the strategy calls its own hook methods; give what they share a helper, whose name starts with an underscore",
    ranks="most",
)
def overhead(lab: Lab, ranks: int) -> Mapping[str, Any]:
    """Calls are counted, of whomever; the time that a call through the hooks costs is measured and not judged.

    Once a step each: accumulate, gradients, all_sum (with several ranks), optimizer_step; once an evaluation: evaluate
    and all_sum. micro_batch and backward once a micro-batch, or not at all by a strategy with a schedule of its own.
    """
    run = lab.done(episode(ranks, steps=3, eval_data="kit-ragged-23", eval_every=2, probes=(HookCalls(),)))
    micro_batches = lab.micro_batches(ranks, 2)
    once = {"accumulate": 1, "gradients": 1, "optimizer_step": 1, **({"all_sum": 1} if ranks > 1 else {})}
    evaluation = {"evaluate": 1, **({"all_sum": 1} if ranks > 1 else {})}
    for rank, trace in run.traces.items():
        for step in (1, 2):  # at the end of the last one the trial is closed
            calls: Counter[str] = Counter(trace.notes["hook_calls"].get(step, {}))
            by_micro_batch = {name: calls.pop(name, 0) for name in ("micro_batch", "backward")}
            expected = Counter(once) + Counter(evaluation if step == 2 else {})
            if calls != expected or not set(by_micro_batch.values()) <= {0, micro_batches}:
                raise Mismatch(
                    f"calls {dict(expected)} in a step, micro_batch and backward {micro_batches} times or never",
                    f"{dict(calls)} and {by_micro_batch} in step {step} on rank {rank}",
                )
    return {
        "hook_calls_per_step": sum(run.first.notes["hook_calls"][1].values()),
        "us_per_call": _cost_us(Hooks(_Idle())),
        "us_per_call_wrapped": _cost_us(Hooks(_Idle(), plugins={"wraps": _Wraps()})),
    }


class _Idle(Strategy):
    """Does nothing in a step, so that what is measured is the way to it."""

    def gradients(self, prepared: Prepared) -> Sequence[Shards]:  # noqa: ARG002
        return ()

    def optimizer_step(self, prepared: Prepared, apply: bool) -> bool:  # noqa: ARG002
        return apply


class _Wraps:
    """Wraps both hooks, so that pluggy calls them."""

    @hookimpl(wrapper=True)
    def mtb_gradients(self) -> Generator[None, Any, Any]:
        return (yield)

    @hookimpl(wrapper=True)
    def mtb_optimizer_step(self) -> Generator[None, Any, Any]:
        return (yield)


def _cost_us(hooks: Hooks, rounds: int = 2000) -> float:
    """Microseconds of a call, the least of five means."""
    prepared: Any = None

    def once() -> float:
        began = time.perf_counter()
        for _ in range(rounds):
            hooks.gradients(prepared)
            hooks.optimizer_step(prepared, apply=True)
        return (time.perf_counter() - began) / (2 * rounds) * 1e6

    return round(min(once() for _ in range(5)), 3)
