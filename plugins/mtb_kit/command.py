"""``mtb plugins check``: the conformance kit on an installed strategy."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from mtb_core.api.errors import EXIT_CHECK_FAILED, EXIT_OK, ConfigError, RunFailed
from mtb_core.cli.options import key_values
from mtb_core.cli.root import warn
from mtb_core.measure.outputs import check_output
from mtb_core.registry.discovery import discover, warn_failed

if TYPE_CHECKING:
    from mtb_kit.certificate import Certificate
    from mtb_kit.checking import Outcome


@click.command()
@click.argument("name")
@click.option("--strategy-opt", multiple=True, metavar="KEY=VALUE", help="Option of the strategy.")
@click.option("--nproc", multiple=True, type=int, metavar="N", help="Check at N ranks. [default: 1, 2 and 3]")
@click.option("--only", multiple=True, metavar="PATTERN", help="Run these checks: parity, 'sync.*', '*@3', …")
@click.option("--last-failed", is_flag=True, help="Run what failed the last time.")
@click.option("--debug-rank", type=int, metavar="N", help="Open a debugger in rank N, at prepare and at errors.")
@click.option("--list", "list_only", is_flag=True, help="List the checks and run none.")
@click.option("--json", "as_json", is_flag=True, help="Print the certificate as one JSON document on stdout.")
@click.option("--output", metavar="FILE", help="Write the JSON document here too.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
def check(
    name: str,
    *,
    strategy_opt: tuple[str, ...],
    nproc: tuple[int, ...],
    only: tuple[str, ...],
    last_failed: bool,
    debug_rank: int | None,
    list_only: bool,
    as_json: bool,
    output: str | None,
    quiet: bool,
) -> int:
    """Check strategy NAME: does it train, save and fail as the contract says.

    Runs short trainings on real ranks with gloo and compares them with `single`. Prints a certificate; the exit code
    is 1 if a check failed.
    """
    registry = discover()
    warn_failed(registry, warn)
    info = registry.strategy(name)
    if any(n < 1 for n in nproc):
        raise ConfigError(f"--nproc is {min(nproc)}; it must be at least 1.")
    if debug_rank is not None and not 0 <= debug_rank < max(nproc or (3,)):
        raise ConfigError(f"--debug-rank is {debug_rank}; there are ranks 0 to {max(nproc or (3,)) - 1}.")

    if output is not None:
        check_output(output)
    from mtb_kit import checking  # noqa: PLC0415  (imports torch; the help must not)
    from mtb_kit.certificate import Certificate  # noqa: PLC0415
    from mtb_kit.debugging import Terminal  # noqa: PLC0415
    from mtb_kit.lab import Lab  # noqa: PLC0415

    options = key_values(strategy_opt, "--strategy-opt")
    terminal = None if debug_rank is None else Terminal.here(debug_rank)
    lab = Lab(
        info,
        options,
        world_sizes=tuple(sorted(set(nproc))) or (1, 2, 3),
        debug=terminal,
    )
    memory = _memory(name, options)
    chosen = checking.cases(lab.world_sizes, only)
    if last_failed:
        failed = set(_remembered(memory))
        if not failed:
            click.echo(f"Nothing of strategy '{name}' with these options failed the last time.", err=True)
            return EXIT_OK
        chosen = [case for case in chosen if case.name in failed]
    if list_only:
        for case in chosen:
            click.echo(f"{case.name:34} {case.check.title}")
        return EXIT_OK
    outcomes: list[Outcome] = []
    with _ending_at_signals(), lab:
        for number, case in enumerate(chosen, 1):
            outcomes.append(checking.run_case(lab, case))
            if not quiet:
                _report(outcomes[-1], number, len(chosen))
    certificate = Certificate(lab, outcomes)
    _remember(memory, [o.case.name for o in outcomes if o.status == "failed"])
    _show(certificate, as_json, output)
    return EXIT_CHECK_FAILED if certificate.count("failed") else EXIT_OK


@contextmanager
def _ending_at_signals() -> Iterator[None]:
    """SIGTERM and SIGUSR1 between two episodes end the command as they do in one (Ctrl-C does so by itself)."""
    from mtb_kit.lab import Stopped  # noqa: PLC0415

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number).name)

    former = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _report(outcome: Outcome, number: int, total: int) -> None:
    text = f"[{number}/{total}] {outcome.status:7} {outcome.case.name} ({outcome.seconds:.1f} s)"
    click.echo(f"{text}{': ' + outcome.reason if outcome.reason else ''}", err=True)
    if outcome.status == "failed":
        click.echo(outcome.text, err=True)


def _show(certificate: Certificate, as_json: bool, output: str | None) -> None:
    """The certificate on stdout first: a file that cannot be written by now must not cost what was found out."""
    from mtb_core.measure.jsonio import dumps, write_json  # noqa: PLC0415

    if as_json:
        click.echo(dumps(certificate.as_json(), indent=2))
    else:
        for outcome in certificate.outcomes:
            if outcome.status == "failed":
                click.echo(f"{outcome.text}\n")
        click.echo(certificate.text())
    if output is not None:
        try:
            write_json(output, certificate.as_json())
        except OSError as error:
            raise RunFailed(f"--output {output} could not be written: {error.strerror}.") from error


def _memory(name: str, options: Mapping[str, str]) -> Path:
    """File that remembers the failed checks of a strategy, for --last-failed."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    key = hashlib.sha256(json.dumps([name, sorted(options.items())]).encode()).hexdigest()[:16]
    return Path(base) / "mtb" / "last-failed" / f"{key}.json"


def _remembered(path: Path) -> list[str]:
    try:
        found: list[str] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return found


def _remember(path: Path, failed: list[str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(failed), encoding="utf-8")
    except OSError as error:
        click.echo(f"mtb: warning: what failed cannot be remembered in {path}: {error.strerror}.", err=True)
