"""Output of ``mtb tp``: one JSON document for programs, tables for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from rich import box
from rich.console import Console
from rich.table import Table

from mtb_evidence import environment, provenance
from mtb_tp.checking import Error, Outcome, Report, wire_bytes
from mtb_tp.layers import Settings


def make_document(check: str, settings: Settings, report: Report, argv: Sequence[str]) -> dict[str, Any]:
    """The document of `report`. Needs no process group."""
    return {
        "schema_version": 1,
        "benchmark": "tensor_parallel",
        "check": check,
        "status": _status(report.ok),
        "tp_degree": report.ranks,
        "device": report.device,
        "backend": report.backend,
        "dtype": settings.dtype,
        "settings": {k: v for k, v in attrs.asdict(settings).items() if k != "layers"},
        "errors": _worst(report.outcomes),
        "collectives": {_name(o): _calls(o.collectives) for o in report.outcomes},
        "communication_bytes": {
            _name(o): {phase: wire_bytes(kinds, report.ranks) for phase, kinds in o.collectives.items()}
            for o in report.outcomes
        },
        "cases": [_case(o, report.ranks) for o in report.outcomes],
        "self_test": [
            {**attrs.asdict(d), "seen_in": list(d.seen_in), "status": _status(bool(d.seen_in))}
            for d in report.detections
        ],
        "environment": environment(report.device),
        "provenance": provenance(argv),
        "execution_complete": True,
        "performance_valid": None,
        "performance_invalid_reasons": ["nothing is timed"],
    }


def _status(ok: bool) -> str:
    return "ok" if ok else "failed"


def _name(outcome: Outcome) -> str:
    return f"{outcome.implementation}/{outcome.layer}"


def _calls(collectives: Mapping[str, Mapping[str, tuple[int, int]]]) -> dict[str, dict[str, int]]:
    return {phase: {kind: calls for kind, (calls, _) in kinds.items()} for phase, kinds in collectives.items()}


def _worst(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """For each quantity the worst error, by its share of the tolerance, of all implementations and layers."""
    worst: dict[str, tuple[float, Outcome, Error]] = {}
    for outcome in outcomes:
        for quantity, error in outcome.errors.items():
            share = _share(error)
            if quantity not in worst or share > worst[quantity][0]:
                worst[quantity] = (share, outcome, error)
    return {quantity: {**_error(error), "case": _name(outcome)} for quantity, (_, outcome, error) in worst.items()}


def _share(error: Error) -> float:
    if error.ok:
        return error.max_abs / error.tolerance if error.tolerance else 0.0
    return math.inf if math.isnan(error.max_abs) or not error.tolerance else error.max_abs / error.tolerance


def _error(error: Error) -> dict[str, Any]:
    return {
        "max_abs_error": error.max_abs,
        "max_rel_error": error.max_rel,
        "tolerance": error.tolerance,
        "status": _status(error.ok),
    }


def _case(outcome: Outcome, ranks: int) -> dict[str, Any]:
    return {
        "implementation": outcome.implementation,
        "layer": outcome.layer,
        "status": _status(outcome.ok),
        "errors": {quantity: _error(error) for quantity, error in outcome.errors.items()},
        "collectives": {
            phase: {
                "counted": _pairs(outcome.collectives[phase]),
                "expected": _pairs(outcome.expected[phase]),
                "communication_bytes": wire_bytes(outcome.collectives[phase], ranks),
                "status": _status(outcome.collectives[phase] == outcome.expected[phase]),
            }
            for phase in outcome.collectives
        },
    }


def _pairs(kinds: Mapping[str, tuple[int, int]]) -> dict[str, dict[str, int]]:
    return {kind: {"calls": calls, "message_bytes": size} for kind, (calls, size) in kinds.items()}


def show(document: Mapping[str, Any], console: Console) -> None:
    """The document as tables."""
    console.print(_errors_table(document))
    console.print(_collectives_table(document))
    if document["self_test"]:
        console.print(_mistakes_table(document["self_test"]))
    sizes = f"tp={document['tp_degree']}, {document['dtype']}, {document['device']}"
    console.print(f"[bold]{document['check']}[/bold] ({sizes}): {_mark(document['status'])}")


def _mark(status: str) -> str:
    return "[green]ok[/green]" if status == "ok" else "[bold red]FAILED[/bold red]"


def _table(title: str, *headings: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
    for heading in headings:
        fixed = heading not in ("collectives", "mistake", "seen in")
        table.add_column(heading, justify="right" if heading in right else "left", no_wrap=fixed)
    return table


def _errors_table(document: Mapping[str, Any]) -> Table:
    numbers = ("max abs", "max rel", "tolerance")
    table = _table("Errors against one process", "layer", "quantity", *numbers, "status", right=numbers)
    for case in document["cases"]:
        for quantity, error in case["errors"].items():
            shown = (error["max_abs_error"], error["max_rel_error"], error["tolerance"])
            table.add_row(_title(case), quantity, *(f"{n:.1e}" for n in shown), _mark(error["status"]))
        table.add_section()
    return table


def _collectives_table(document: Mapping[str, Any]) -> Table:
    table = _table(
        "Collectives of each rank", "layer", "pass", "collectives", "bytes sent", "status", right=("bytes sent",)
    )
    for case in document["cases"]:
        for phase, found in case["collectives"].items():
            text = _listed(found["counted"])
            if found["status"] != "ok":
                text += f" (theory: {_listed(found['expected'])})"
            table.add_row(_title(case), phase, text, str(found["communication_bytes"]), _mark(found["status"]))
        table.add_section()
    return table


def _title(case: Mapping[str, Any]) -> str:
    return f"{case['implementation']} {case['layer']}"


def _listed(kinds: Mapping[str, Mapping[str, int]]) -> str:
    return ", ".join(f"{n['calls']} {kind} of {n['message_bytes']} B" for kind, n in sorted(kinds.items())) or "none"


def _mistakes_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("Self-test: mistakes made on purpose", "layer", "mistake", "seen in", "status")
    for row in rows:
        table.add_row(row["layer"], row["mistake"], ", ".join(row["seen_in"]) or "nothing", _mark(row["status"]))
        table.add_section()
    return table
