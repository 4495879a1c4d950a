"""``mtb doctor``: what of this machine and installation would stop a run, found before a run does.

A check is a function without arguments that returns a `DoctorResult`; plugins add theirs by ``mtb_doctor_checks``.
"""

from __future__ import annotations

import json
import threading

import attrs
import click

from mtb_core import CheckFailed, DoctorCheck, DoctorResult, load_reference
from mtb_core.registry.discovery import discover

_LIMIT_S = 60.0  # the first import of torch from a cold disk is slow
_MARKS = {True: ("ok", "green"), False: ("FAIL", "red"), None: ("n/a", "yellow")}


@attrs.frozen
class Row:
    """One check and its outcome."""

    name: str
    help: str
    ok: bool | None
    detail: str


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def doctor(as_json: bool) -> None:
    """Check this machine and installation.

    Runs every check of core and of the plugins. Exit code 1 if one of them fails; "n/a" does not apply here.
    """
    # Those of this distribution first, whatever is installed: the others may need what they look at.
    checks = sorted(discover(strict=False).doctor_checks.values(), key=lambda c: not c.impl.startswith("mtb_doctor."))
    rows = []
    for check in checks:
        rows.append(run_check(check))
        if not as_json:
            _show(rows[-1], width=max(len(c.name) for c in checks))
    failed = [row.name for row in rows if row.ok is False]
    if as_json:
        document = {"schema_version": 1, "ok": not failed, "checks": [attrs.asdict(row) for row in rows]}
        click.echo(json.dumps(document, indent=2, allow_nan=False))
    if failed:
        msg = f"{len(failed)} of {len(rows)} checks failed: {', '.join(failed)}. What to do stands beside each."
        raise CheckFailed(msg)


def run_check(check: DoctorCheck, *, limit_s: float = _LIMIT_S) -> Row:
    """Run one check on its own: whatever it raises, and also not coming back, is a failed check and nothing else."""
    answer: list[DoctorResult] = []

    def work() -> None:
        try:
            result = load_reference(check.impl)()
            if not isinstance(result, DoctorResult):
                result = DoctorResult(ok=False, detail=f"the check returned {result!r}, not a DoctorResult")
        except BaseException as error:  # noqa: BLE001  (a check that calls sys.exit must not end the others)
            result = DoctorResult(ok=False, detail=f"the check raised {type(error).__name__}: {error}")
        answer.append(result)

    # A daemon: a check that hangs for good does not keep the process from ending.
    thread = threading.Thread(target=work, name=f"doctor-{check.name}", daemon=True)
    thread.start()
    thread.join(limit_s)
    result = answer[0] if answer else DoctorResult(ok=False, detail=f"no answer after {limit_s:g} s")
    return Row(check.name, check.help, result.ok, " ".join(str(result.detail).split()))


def _show(row: Row, *, width: int) -> None:
    word, colour = _MARKS[row.ok]
    click.echo(f"{row.name:<{width}}  {click.style(f'{word:<4}', fg=colour)}  {row.detail}")
