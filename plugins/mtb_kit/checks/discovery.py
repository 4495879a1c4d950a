"""Checks before any rank starts: imports, options, plan, hook signatures, declared capabilities."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from typing import Any

import attrs

from mtb_core.api.descriptions import load_reference
from mtb_core.api.errors import ConfigError, MtbError
from mtb_core.api.layout import World
from mtb_core.api.options import describe_options, parse_options
from mtb_core.api.strategy import Strategy
from mtb_core.registry.entry_points import installed
from mtb_core.registry.run_hooks import Hooks
from mtb_kit.checking import OVERDECLARED, check
from mtb_kit.episodes import episode
from mtb_kit.lab import Lab
from mtb_kit.states import Mismatch

_DTYPES = ("fp32", "bf16", "fp16", "fp64")
_MODES = ("every", "last")


@check(
    "discovery.torch_free",
    "Finding the strategy, its options and its plan imports no torch.",
    mistake="the module with the StrategyInfo imports torch, directly or through another; keep plan and options apart "
    "from the implementation, which is imported when it is used",
    ranks="most",
)
def torch_free(lab: Lab, ranks: int) -> None:
    """In a process of its own, which imports the plugin's modules and makes the plan."""
    modules = sorted({lab.info.plan.__module__, lab.info.options.__module__, *_entry_point(lab)})
    code = (
        "import sys, json, importlib, pickle\n"
        f"sys.path[:] = json.loads({json.dumps(json.dumps(sys.path))})\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print('torch' in sys.modules)\n"
        f"{_planning(lab, ranks)}"
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    found = ran.stdout.split()
    for place, what in enumerate((f"the import of {', '.join(modules)}", "the plan")):
        if found[place : place + 1] != ["False"]:
            seen = "torch was imported" if len(found) > place else str(ran.stderr.strip().splitlines()[-1:])
            raise Mismatch(f"{what} to leave torch alone", seen)


def _entry_point(lab: Lab) -> set[str]:
    """The module that discovery loads; none where the strategy is not installed."""
    record = lab.registry.provider("strategies", lab.info.name)
    if record is None:
        return set()
    return {source.module for source in installed() if source.distribution == record.distribution}


def _planning(lab: Lab, ranks: int) -> str:
    """Code that makes the plan; empty where its function can only be had from the module that made it."""
    what = lab.info.plan, lab.info.options, lab.options, lab.config(episode(ranks)), World(ranks, ranks)
    try:
        packed = pickle.dumps(what)
    except (pickle.PicklingError, AttributeError, TypeError):
        return ""
    return (
        "from mtb_core.api.options import parse_options\n"
        f"plan, kind, options, config, world = pickle.loads(bytes.fromhex({packed.hex()!r}))\n"
        "plan(parse_options(kind, options, owner='this strategy'), config, world)\n"
    )


@check(
    "discovery.options",
    "Options are a frozen attrs class, each documented, checked and picklable.",
    mistake="declare them with mtb_core.option(default, help=…) in a class decorated with @attrs.frozen",
    ranks="most",
)
def options(lab: Lab, ranks: int) -> None:
    """Defaults parse, values are refused where they are wrong, and the value can be sent to ranks."""
    del ranks
    kind, owner = lab.info.options, f"strategy '{lab.info.name}'"
    for found in describe_options(kind):
        if not found.help:
            raise Mismatch(f"a help text for option '{found.name}'", "none")
    value = parse_options(kind, lab.options, owner=owner)
    if pickle.loads(pickle.dumps(value)) != value:  # noqa: S301  (made here)
        raise Mismatch("options that are equal after pickling", "others")
    name = next((f.name for f in attrs.fields(kind)), None)
    if name is not None:
        try:
            setattr(value, name, None)
        except attrs.exceptions.FrozenInstanceError:
            pass
        else:
            raise Mismatch("options that cannot be changed", f"'{name}' was set; use @attrs.frozen")
    try:
        parse_options(kind, {"no_such_option": "1"}, owner=owner)
    except ConfigError:
        return
    raise Mismatch("an unknown option to be refused", "it was taken")


@check(
    "discovery.plan",
    "The plan is a pure function of options, configuration and world, and fits the number of ranks.",
    mistake="plan() reads or keeps something else than its arguments, or its layout has another number of ranks",
)
def plan(lab: Lab, ranks: int) -> None:
    """Planned twice, with another world between."""
    first = lab.plan(ranks)
    for other in lab.world_sizes:
        lab.plan(other)
    if lab.plan(ranks) != first:
        raise Mismatch("the same plan for the same arguments", "another one")
    if first.layout.size != ranks:
        raise Mismatch(f"a layout of {ranks} ranks", f"{first.layout.size}: {first.layout.axes}")
    if first.auto_sync not in first.sync_modes:
        raise Mismatch(f"auto_sync to be one of {first.sync_modes}", first.auto_sync)
    if first.reduce_dtype not in _DTYPES:
        raise Mismatch(f"reduce_dtype to be one of {', '.join(_DTYPES)}", first.reduce_dtype)
    if pickle.loads(pickle.dumps(first)) != first:  # noqa: S301  (made here)
        raise Mismatch("a plan that is equal after pickling", "another one")


@check(
    "discovery.capabilities",
    "The plan promises what the author insists on.",
    mistake=OVERDECLARED,
)
def capabilities(lab: Lab, ranks: int) -> None:
    """Promises that are declared as True, at every number of ranks above one; and the declared sync modes."""
    planned, declared = lab.plan(ranks), lab.capabilities
    for name, wanted in declared.promises.items():
        if wanted and not getattr(planned, name) and (ranks > 1 or lab.world_sizes == (1,)):
            raise Mismatch(f"Plan.{name}, as declared", f"the plan for {ranks} ranks says False")
    modes = declared.sync_modes or ()
    if missing := set(modes) - set(planned.sync_modes):
        raise Mismatch(f"sync modes {modes}, as declared", f"the plan lacks {', '.join(sorted(missing))}")


@check(
    "discovery.promises",
    "What the plan promises is accepted, and what it does not promise is refused, before any rank starts.",
    mistake="plan() refuses by a ConfigError of its own what the Plan that it returns promises; say it in the Plan, and "
    "core refuses with a message",
)
def promises(lab: Lab, ranks: int) -> None:
    """Clipping, bf16, tied weights, micro-batches and sync modes, as settings of a run."""
    planned = lab.plan(ranks)
    fits = lab.micro_batches(ranks, 2)
    asked: list[tuple[str, bool, dict[str, Any]]] = [
        ("clipping", planned.clipping, {"max_grad_norm": 1.0}),
        ("bf16", planned.bf16, {"precision": "bf16"}),
        ("tied_weights", planned.tied_weights, {"tie_embeddings": True}),
        ("accumulation", planned.accumulation, {"grad_accum_steps": max(fits, 2)}),
    ]
    asked += [("sync_modes", mode in planned.sync_modes, {"gradient_sync_mode": mode}) for mode in _MODES]
    if planned.least_micro_batches > 1:
        asked.append(("least_micro_batches", False, {"grad_accum_steps": planned.least_micro_batches - 1}))
    for name, promised, settings in asked:
        refusal = lab.refusal(ranks, **{"grad_accum_steps": fits, **settings})
        if promised and refusal:
            raise Mismatch(f"{settings} to be accepted, as Plan.{name} promises for {ranks} ranks", refusal)
        if not promised and not refusal:
            raise Mismatch(f"{settings} to be refused, for Plan.{name} does not promise it", "it was accepted")


@check(
    "discovery.hooks",
    "The class is a Strategy whose public methods are hooks, with the right arguments, made without arguments.",
    mistake="a misspelt hook would never be called, so it is refused; helper methods start with an underscore",
    ranks="most",
)
def hooks(lab: Lab, ranks: int) -> None:
    """It is registered as core does it."""
    del ranks
    kind = load_reference(lab.info.impl)
    if not issubclass(kind, Strategy):
        raise Mismatch("a subclass of mtb_core.Strategy", f"{kind}")
    try:
        Hooks(kind())
    except (MtbError, TypeError) as error:
        raise Mismatch("hooks that core accepts", str(error)) from error
    if "prepare" not in {name for c in kind.__mro__ if c is not Strategy for name in vars(c)}:
        raise Mismatch("a method prepare(job)", "none")
