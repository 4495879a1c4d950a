"""Checks: their definition, choice and running."""

from __future__ import annotations

import fnmatch
import hashlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import attrs

from mtb_core.api.errors import ConfigError
from mtb_core.api.options import nearest

from .lab import Lab
from .states import Mismatch

#: Groups of checks, in the order in which they run.
_GROUPS = ("discovery", "parity", "sync", "models", "checkpoints", "failures", "processes")
#: Groups and checks that others rest on, the most basic first: a wrong gradient makes wrong losses, weights and
#: checkpoints, and a run that does not come to its end fails them all. Of the rest the kit's own order holds. A rule of
#: thumb, made by looking at what the deliberately broken strategies in tests/broken fail on two ranks.
_BASICS = (
    "discovery",
    "parity.initial_weights",
    "parity.data",
    "parity.positions",
    "parity.replicas",
    "parity.master_weights",
    "parity.reduce_dtype",
    "parity.gradients",
    "parity.gradients_cleared",
    "parity.token_weighting",
    "parity.grad_norm",
    "parity.clipping",
    "sync",
)
#: Modules whose import fills the list of checks.
_MODULES = (*_GROUPS, "publishing", "counting", "precision", "resuming", "holdings", "requests")
#: A selection for tests that run often: some of every group, which find most mistakes.
ESSENTIAL = (
    "discovery",
    "parity.initial_weights",
    "parity.losses",
    "parity.gradients",
    "parity.gradients_cleared",
    "parity.grad_norm",
    "parity.weights",
    "parity.replicas",
    "parity.data",
    "parity.positions",
    "parity.reported",
    "parity.applied",
    "sync.count",
    "sync.volume",
    "models.extra",
    "models.tied",
    "models.norm",
    "checkpoints.keys",
    "checkpoints.shapes",
    "checkpoints.restored_state",
    "checkpoints.learning_rate",
    "checkpoints.random_state",
    "checkpoints.exact_resume",
    "checkpoints.interchange",
    "failures.nonfinite",
    "failures.roll_back",
    "processes.result",
    "processes.overhead",
)
#: A selection for options that change how a strategy computes, of which another class runs all checks: not those of
#: what a save, a failure or the end of a process does.
NUMBERS = (
    "discovery",
    "parity",
    "sync",
    "models",
    "checkpoints.keys",
    "checkpoints.shapes",
    "checkpoints.optimizer_state",
    "checkpoints.restored_state",
    "checkpoints.exact_resume",
    "checkpoints.resharding",
    "checkpoints.interchange",
    "checkpoints.*_resume",
    "checkpoints.buffers",
    "failures.nonfinite*",
    "failures.skipped_update",
    "failures.roll_back",
    "processes.result",
    "processes.memory",
)
#: The likely mistake of an author whose declaration has no plan, whichever check is the first to need that plan.
OVERDECLARED = "the declaration promises more than the plan; change one of the two"
#: The page that explains every check, in the repository.
PAGE = "docs/reference/checks.md"

CheckFunction = Callable[[Lab, int], Mapping[str, Any] | None]
Status = Literal["passed", "failed", "skipped"]


class Skip(Exception):
    """A check does not apply; the text says why."""


@attrs.frozen
class Check:
    """One thing that must hold.

    Attributes:
        name: ``group.what``.
        title: what must hold, one sentence.
        mistake: what an author whose strategy fails here has probably done.
        ranks: ``"all"`` world sizes, ``"several"`` (those above one), ``"fewest"``: the smallest
            of those (one, where there is none), or ``"most"``: the largest one only.
        needs: promises of the plan without which it is skipped.
        function: raises `Mismatch` where it does not hold, `Skip` where it does not apply; may return figures.
    """

    name: str
    title: str
    mistake: str
    ranks: Literal["all", "several", "fewest", "most"]
    needs: tuple[str, ...]
    function: CheckFunction

    @property
    def how(self) -> str:
        """Method of the check: the docstring of its function; empty if the title says it."""
        text = inspect.cleandoc(self.function.__doc__ or "")
        return "" if text == "See the title." else text

    @property
    def page(self) -> str:
        """Its place in the documentation."""
        return f"{PAGE}#{self.name.replace('.', '')}"


@attrs.frozen
class Case:
    """A check at a number of ranks."""

    check: Check
    ranks: int

    @property
    def name(self) -> str:
        """``group.what@ranks``."""
        return f"{self.check.name}@{self.ranks}"


@attrs.frozen
class Outcome:
    """Outcome of a case.

    Attributes:
        expected: with `seen`, what did not hold, where it failed.
        mistake: what an author who fails here has probably done; that of the check, as far as nothing else is known.
        reason: why it was skipped.
        figures: what it measured.
    """

    case: Case
    status: Status
    expected: str = ""
    seen: str = ""
    mistake: str = attrs.field()
    reason: str = ""
    figures: Mapping[str, Any] = attrs.field(factory=dict)
    seconds: float = 0.0

    @mistake.default
    def _of_the_check(self) -> str:
        return self.case.check.mistake

    @property
    def text(self) -> str:
        """A failure as a paragraph for the author."""
        check = self.case.check
        how = " ".join(check.how.split())
        return (
            f"{self.case.name}: {check.title}\n  expected:       {self.expected}\n  seen:           {self.seen}\n"
            f"  likely mistake: {self.mistake}" + (f"\n  how:            {how}" if how else "")
        )


_checks: list[Check] = []


def check(
    name: str,
    title: str,
    *,
    mistake: str,
    ranks: Literal["all", "several", "fewest", "most"] = "all",
    needs: tuple[str, ...] = (),
) -> Callable[[CheckFunction], CheckFunction]:
    """Add a function to the kit's checks."""

    def add(function: CheckFunction) -> CheckFunction:
        _checks.append(Check(name, title, mistake, ranks, needs, function))
        return function

    return add


def all_checks() -> Sequence[Check]:
    """Every check of the kit, in order."""
    for module in _MODULES:
        import_module(f"mtb_kit.checks.{module}")
    return sorted(_checks, key=lambda c: _GROUPS.index(c.name.partition(".")[0]))


def cases(world_sizes: Sequence[int], only: Sequence[str] = ()) -> list[Case]:
    """The cases at `world_sizes`; `only`: patterns of check or case names, ``*`` matches anything.

    Raises:
        ConfigError: a pattern that matches nothing.
    """
    for pattern in only:
        if not any(_matches(Case(c, n), pattern) for c in all_checks() for n in world_sizes):
            names = [c.name for c in all_checks()]
            raise ConfigError(
                f"No check matches '{pattern}'.{nearest(pattern, [*_GROUPS, *names])} Valid: a check's name "
                f"(`mtb plugins check NAME --list`), a group ({', '.join(_GROUPS)}), or a pattern like 'parity.*' or '*@3'."
            )
    found = [Case(c, n) for c in all_checks() for n in _ranks_of(c, world_sizes)]
    return [case for case in found if not only or any(_matches(case, pattern) for pattern in only)]


def _matches(case: Case, pattern: str) -> bool:
    return any(
        fnmatch.fnmatchcase(name, pattern) for name in (case.name, case.check.name, case.check.name.partition(".")[0])
    )


def _ranks_of(check: Check, world_sizes: Sequence[int]) -> list[int]:
    if check.ranks == "most":
        return [max(world_sizes)]
    if check.ranks == "fewest":
        return [min((n for n in world_sizes if n > 1), default=1)]
    return [n for n in world_sizes if check.ranks == "all" or n > 1]


def run_case(lab: Lab, case: Case) -> Outcome:
    """Run one case; whatever it raises becomes an outcome.

    What fails on ranks that had run other episodes before is repeated with fresh ones, and that outcome counts: a
    failure never comes from what an earlier episode has left. Where the two differ, a figure says so.
    """
    outcome = _outcome(lab, case)
    if outcome.status != "failed" or (again := lab.again) is None:
        return outcome
    second = _outcome(again, case)
    if second.status == "passed":
        figures = {**second.figures, "failed_at_first": f"expected {outcome.expected}; seen {outcome.seen}"}
        second = attrs.evolve(second, figures=figures)
    return attrs.evolve(second, seconds=outcome.seconds + second.seconds)


def _outcome(lab: Lab, case: Case) -> Outcome:
    started = time.monotonic()
    try:
        missing = [need for need in case.check.needs if not lab.promises(need, case.ranks)]
        if missing:
            raise Skip(f"not promised: {', '.join(missing)}")
        figures = case.check.function(lab, case.ranks)
    except Skip as skip:
        return Outcome(case, "skipped", reason=str(skip), seconds=time.monotonic() - started)
    except Mismatch as mismatch:
        return Outcome(
            case, "failed", expected=mismatch.expected, seen=mismatch.seen, seconds=time.monotonic() - started
        )
    except ConfigError as error:
        return Outcome(
            case,
            "failed",
            expected="a plan for what was declared",
            seen=str(error),
            mistake=OVERDECLARED,
            seconds=time.monotonic() - started,
        )
    return Outcome(case, "passed", figures=figures or {}, seconds=time.monotonic() - started)


def likely_cause(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The failure to look at first: the most basic check that failed, at the fewest ranks. None: nothing failed."""

    def place(outcome: Outcome) -> tuple[int, int, int]:
        name = outcome.case.check.name
        basic = next((i for i, b in enumerate(_BASICS) if b in (name, name.partition(".")[0])), len(_BASICS))
        return basic, all_checks().index(outcome.case.check), outcome.case.ranks

    return min((o for o in outcomes if o.status == "failed"), key=place, default=None)


def run_cases(lab: Lab, chosen: Sequence[Case]) -> Iterator[Outcome]:
    """Run cases one after the other."""
    for case in chosen:
        yield run_case(lab, case)


def digest() -> str:
    """Digest of the kit's own code: certificates with the same one were made by the same checks."""
    state = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        state.update(path.relative_to(folder).as_posix().encode())
        state.update(path.read_bytes())
    return state.hexdigest()
