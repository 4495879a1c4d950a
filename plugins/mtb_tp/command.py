"""``mtb tp``: parallel layers held against one process. Torch is imported only by the ranks."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import click

from mtb_core import CheckFailed, RunFailed, check_output, dumps, external_launcher, run_ranks, write_json

from .plugin import check_sizes

DTYPES = ("fp32", "bf16", "fp64")


def _number(label: str, default: int, text: str, least: int = 1) -> Callable[[Any], Any]:
    return click.option(
        label, default=default, show_default=True, type=click.IntRange(min=least), metavar="N", help=text
    )


class _Finite(click.FloatRange):
    """A range without infinity, and without NaN, which compares with no bound."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


_SIZES = {
    "in": _number("--in-features", 32, "Input features of the layer."),
    "out": _number("--out-features", 24, "Output features of the layer."),
    "hidden": _number("--hidden-features", 64, "Hidden features of the MLP, which ranks share."),
    "size": _number("--hidden-size", 32, "Features of the residual stream."),
    "batch": _number("--batch-size", 4, "Samples."),
    "length": _number("--seq-length", 8, "Positions; a multiple of --tp."),
}
#: What a command that has no such option sets; none of its layers looks at it.
_UNUSED = {
    "in_features": 0,
    "out_features": 0,
    "hidden_features": 0,
    "hidden_size": 0,
    "seq_length": 0,
    "dropout": 0.0,
}
_DROPOUT = click.option(
    "--dropout", default=0.1, show_default=True, type=_Finite(0, 1, max_open=True), metavar="X",
    help="Probability of dropout in the sequence region.",
)  # fmt: skip
_COMMON = (
    click.option("--tp", "ranks", default=None, type=click.IntRange(min=2), metavar="N", help="Tensor-parallel degree: ranks. [default: 2]"),
    click.option("--dtype", default="fp32", show_default=True, type=click.Choice(DTYPES), help="Of inputs, parameters and arithmetic."),
    _number("--seed", 0, "Of inputs, parameters and dropout.", least=0),
    click.option("--atol", type=_Finite(min=0), metavar="X", help="Largest absolute error allowed, in place of the dtype's tolerance."),
    click.option("--self-test", is_flag=True, help="Also make known mistakes on purpose; each must be detected."),
    click.option("--device", default="cpu", show_default=True, type=click.Choice(("cpu", "cuda", "auto")), help="Where ranks compute."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout."),
    click.option("--output", metavar="FILE", help="Write the same document to FILE."),
    click.option("--quiet", is_flag=True, help="Print nothing but what --json asks for."),
    click.option("--debug", is_flag=True, help="Show tracebacks."),
)  # fmt: skip


def _options(*sizes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        for option in reversed((*sizes, *_COMMON)):
            function = option(function)
        return function

    return decorate


@click.group(no_args_is_help=True)
def tp() -> None:
    """Check tensor- and sequence-parallel layers against one process.

    Layers written by hand (mtb_tp.explicit) and torch's own (parallelize_module) run on several ranks: outputs, all
    gradients and the collectives of each pass must be what one process and theory say. Exit code 1 where one is not.
    """


@tp.command()
@_options(_SIZES["in"], _SIZES["out"], _SIZES["batch"])
def check(**given: Any) -> int:
    """Column- and row-parallel linear layers. Features need not be multiples of --tp."""
    return _run("check", ("column", "row"), given)


@tp.command()
@_options(_SIZES["in"], _SIZES["hidden"], _SIZES["out"], _SIZES["batch"])
def mlp(**given: Any) -> int:
    """A parallel MLP: columns, GELU, rows. Features need not be multiples of --tp."""
    return _run("mlp", ("mlp",), given)


@tp.command()
@_options(_SIZES["size"], _SIZES["hidden"], _SIZES["length"], _SIZES["batch"], _DROPOUT)
def sequence(**given: Any) -> int:
    """Sequence parallelism: layer norm and dropout on parts of the sequence, with an MLP behind them."""
    return _run("sequence", ("sequence",), given)


def _run(name: str, layers: tuple[str, ...], given: dict[str, Any]) -> int:
    external = external_launcher() is not None
    ranks = 2 if given["ranks"] is None else given["ranks"]
    if not external:
        check_sizes(given, ranks)
    if given["output"] is not None:
        check_output(given["output"])
    # Only now: help and refusals must not wait for torch.
    from .checking import Request, check_on_rank  # noqa: PLC0415
    from .layers import Settings  # noqa: PLC0415

    sizes = {key: given.get(key, default) for key, default in _UNUSED.items()}
    settings = Settings(layers=layers, **sizes, **{key: given[key] for key in ("batch_size", "seed", "dtype", "atol")})
    outcome = run_ranks(
        check_on_rank,
        Request(settings, given["self_test"], given["ranks"]),
        nproc=ranks,
        device=given["device"],
        debug=given["debug"],
    )
    if outcome.exit_reason == "interrupted":
        raise KeyboardInterrupt
    if outcome.exit_reason != "done":
        raise RunFailed(str(outcome.failure or "The ranks were stopped."))
    if outcome.value is None:
        return 0  # of external ranks, only the first one reports
    return _report(f"tp {name}", settings, outcome.value, given)


def _report(name: str, settings: Any, report: Any, given: dict[str, Any]) -> int:
    from rich.console import Console  # noqa: PLC0415

    from .document import make_document, show  # noqa: PLC0415

    document = make_document(name, settings, report, sys.argv)
    if given["output"] is not None:
        write_json(given["output"], document)
    if given["as_json"]:
        click.echo(dumps(document, indent=2))
    elif not given["quiet"]:
        show(document, Console())
    if document["status"] != "ok":
        raise CheckFailed(_complaint(document))
    return 0


def _complaint(document: dict[str, Any]) -> str:
    """Error text with everything that does not hold."""
    wrong = []
    for case in document["cases"]:
        label = f"{case['implementation']} {case['layer']}"
        wrong += [
            f"{label}: {quantity} is off by {error['max_abs_error']:.1e} (allowed {error['tolerance']:.1e})"
            for quantity, error in case["errors"].items()
            if error["status"] != "ok"
        ]
        wrong += [
            f"{label}: collectives of {phase} are not those of theory"
            for phase, found in case["collectives"].items()
            if found["status"] != "ok"
        ]
    wrong += [f"unseen mistake: {row['mistake']}" for row in document["self_test"] if row["status"] != "ok"]
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    return f"{document['check']} does not hold: {'; '.join(wrong[:4])}{more}."
