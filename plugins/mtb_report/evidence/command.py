"""``mtb evidence``: the manifest of a folder of results, and the search for what must not be in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from mtb_core import CheckFailed, ConfigError

FILE = "manifest.json"


@click.group(no_args_is_help=True)
def evidence() -> None:
    """List results with digests and what they were measured on, and look for what must not be handed on."""


_DIR = click.argument("folder", metavar="DIR")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
_DEBUG = click.option("--debug", is_flag=True, help="Show tracebacks.")


def _folder(text: str) -> Path:
    folder = Path(text)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give one that holds results.")
    return folder


@evidence.command()
@_DIR
@click.option("--output", metavar="FILE", help="Where to write it. [default: DIR/manifest.json]")
@click.option("--one-batch", is_flag=True, help="Exit with 1 unless all results are of one environment and source.")
@_JSON
@_DEBUG
def manifest(folder: str, output: str | None, one_batch: bool, as_json: bool, debug: bool) -> int:  # noqa: ARG001
    """Write DIR/manifest.json: of each result the SHA-256, status, command, revision and environment.

    Results of unlike environments or sources are put into separate batches, never into one.
    """
    from mtb_core import dumps, write_json  # noqa: PLC0415  (help needs none of it)
    from mtb_report.results import find_records  # noqa: PLC0415

    from .manifest import make_manifest  # noqa: PLC0415

    place = _folder(folder)
    target = Path(output) if output is not None else place / FILE
    _refuse_to_replace(target)
    found = find_records([place])
    # A manifest of an earlier call is no result.
    kept = [record for record in found.records if record.kind != "evidence_manifest"]
    document = make_manifest(place, type(found)(kept, found.unreadable), sys.argv)
    if not document["results"] and not document["unreadable"]:
        raise ConfigError(f"{place} holds no results.")
    try:
        write_json(target, document)
    except OSError as error:
        raise ConfigError(f"The manifest cannot be written to {target}: {error.strerror}.") from error
    if as_json:
        click.echo(dumps(document, indent=2))
    else:
        _show(document)
    if document["unreadable"]:
        files = ", ".join(row["path"] for row in document["unreadable"])
        raise CheckFailed(f"Results that cannot be read: {files}.")
    if one_batch and not document["one_batch"]:
        raise CheckFailed(
            f"The results are of {len(document['batches'])} unlike environments or sources, and no one batch; the "
            "manifest lists them apart."
        )
    return 0


def _refuse_to_replace(file: Path) -> None:
    """A manifest takes the place of an earlier manifest, and of nothing else."""
    if file.is_dir():
        raise ConfigError(f"The manifest cannot be written to {file}, which is a folder; name a file with --output.")
    if file.is_file() and not _is_manifest(_read_json(file)):
        raise ConfigError(
            f"{file} exists and is no manifest, so it is not replaced; name another file with --output, and the same "
            "one with `mtb evidence verify --manifest`."
        )


def _read_json(file: Path) -> Any:
    """What a JSON file holds; None where it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _is_manifest(document: Any) -> bool:
    return isinstance(document, dict) and document.get("benchmark") == "evidence_manifest"


def _show(document: dict[str, Any]) -> None:
    from mtb_report.report.cells import plural  # noqa: PLC0415

    for number, batch in enumerate(document["batches"], 1):
        source, place = batch["source"], batch["environment"]
        cuda = (place.get("cuda") or {}).get("devices") or []
        device = f"{len(cuda)} × {cuda[0]['name']}" if cuda else place.get("cpu_model") or "machine not known"
        torch, revision = place.get("torch") or "not known", source.get("git_revision") or "not known"
        dirty = " (changed files)" if source.get("git_dirty") else ""
        click.echo(
            f"Batch {number}: {plural(len(batch['results']), 'result')}; {device}, torch {torch}, revision {revision}{dirty}"
        )
        for entry in document["results"]:
            if entry["batch"] == batch["id"]:
                valid = {True: "valid", False: "not valid", None: "validity not known"}[entry["performance_valid"]]
                status = entry["status"] or "status not known"
                click.echo(f"  {entry['sha256'][:12]}  {status}, {valid}  {entry['path']}")
    for entry in document["results"]:
        if entry["batch"] is None:
            click.echo(f"Put together of results: {entry['sha256'][:12]}  {entry['kind']}  {entry['path']}")
    for row in document["unreadable"]:
        click.echo(f"  cannot be read: {row['path']}")


@evidence.command()
@_DIR
@click.option("--manifest", "file", metavar="FILE", help="The manifest. [default: DIR/manifest.json]")
@_JSON
@_DEBUG
def verify(folder: str, file: str | None, as_json: bool, debug: bool) -> int:  # noqa: ARG001
    """Check that the results in DIR are those of its manifest, byte by byte, and no others, and that what it says is theirs."""
    from mtb_core import dumps  # noqa: PLC0415

    from .manifest import check_manifest, shape_error  # noqa: PLC0415

    place = _folder(folder)
    path = Path(file) if file is not None else place / FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. `mtb evidence manifest` writes it.") from error
    if not _is_manifest(document):
        raise ConfigError(f"{path} is no manifest; `mtb evidence manifest` writes one.")
    broken = shape_error(document)
    if broken is not None:
        raise ConfigError(f"{path} is a broken manifest: {broken}. Make it anew with `mtb evidence manifest`.")
    wrong = check_manifest(place, document)
    if as_json:
        click.echo(dumps({"results": len(document["results"]), "wrong": wrong}, indent=2))
    elif not wrong:
        click.echo(f"As the manifest says; results: {len(document['results'])}.")
    if wrong:
        raise CheckFailed(f"Not as the manifest says: {'; '.join(wrong)}.")
    return 0


@evidence.command()
@_DIR
@_JSON
@_DEBUG
def audit(folder: str, as_json: bool, debug: bool) -> int:  # noqa: ARG001
    """Search every file in DIR for host names, addresses, GPU UUIDs, proxies, credentials and home folders.

    Text, also compressed, is searched, logs and traces too. What is found is named by file and kind, not repeated; so
    is what was not searched as a whole. Exit code 1 where something was found, or a file cannot be read.
    """
    from mtb_core import dumps, redact  # noqa: PLC0415
    from mtb_evidence import audit_folder  # noqa: PLC0415

    missed: dict[str, str] = {}
    found = audit_folder(_folder(folder), passed_over=missed)
    missed = {name: redact(why) for name, why in missed.items()}
    unreadable = {name: why for name, why in missed.items() if why.startswith("it cannot be read")}
    if as_json:
        click.echo(dumps({"found": found, "not_searched": missed}, indent=2))
    else:
        for name, why in missed.items():
            click.echo(f"Not searched: {name}: {why}")
        if not found and not unreadable:
            click.echo("Nothing was found that must not be handed on.")
    told = [f"{name} ({', '.join(kinds)})" for name, kinds in found.items()]
    complaints = [f"Must not be handed on: {'; '.join(told)}."] if told else []
    if unreadable:
        listed = "; ".join(f"{name} ({why})" for name, why in unreadable.items())
        complaints.append(f"Files that were not searched to their end, so that nothing can be said of them: {listed}.")
    if complaints:
        raise CheckFailed(" ".join(complaints))
    return 0
