"""``mtb comm``: from the command line to the benchmark and back. Imports no torch until it measures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from mtb_core import ConfigError, RunFailed, check_output

from .definitions import DTYPE_BYTES, REDUCTIONS
from .outputs import Output, write_all
from .points import MAX_ITERATIONS, CommRequest, dtype_names, operation_names, ranks_of, reduction_names, split_names
from .sizes import parse_size, parse_splits, swept_sizes

if TYPE_CHECKING:
    from .compare import Pair

_EXITS = {"done": 0, "stopped": 4, "interrupted": 130, "failed": 3}
_SOURCES = ("nccl-tests",)
#: Seconds that torch takes as a timeout: it counts in milliseconds, and adds them to the time that it is.
_TIMEOUTS = (1e-3, 1e8)


@click.command("comm")
@click.argument("operations", nargs=-1, metavar="[OPERATION]...")
@click.option(
    "--op",
    "--operation",
    "named",
    multiple=True,
    metavar="NAME",
    help="The same as an argument; repeatable, a list with commas, or all.",
)
@click.option(
    "-b",
    "--minbytes",
    default="1K",
    show_default=True,
    metavar="SIZE",
    help="Smallest size S: 8, 4K, 64M, 1G (powers of 1024).",
)
@click.option("-e", "--maxbytes", default="4M", show_default=True, metavar="SIZE", help="Largest size.")
@click.option("-f", "--stepfactor", default=4.0, show_default=True, metavar="X", help="From one size to the next.")
@click.option("--sizes", multiple=True, metavar="LIST", help="These sizes instead: 1K,1M; repeatable.")
@click.option("-n", "--iters", default=20, show_default=True, metavar="N", help="Timed calls of each point.")
@click.option(
    "-w", "--warmup", default=5, show_default=True, metavar="N", help="Calls before them that are not counted."
)
@click.option(
    "--time", "seconds", type=float, metavar="SECONDS", help="Time each point for about so long, instead of --iters."
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    default=("fp32",),
    show_default=True,
    metavar="NAME",
    help=f"{', '.join(DTYPE_BYTES)}, all; repeatable, or a list.",
)
@click.option(
    "--reduction",
    "reductions",
    multiple=True,
    default=("sum",),
    show_default=True,
    metavar="NAME",
    help=f"{', '.join(REDUCTIONS)}, all; repeatable, or a list.",
)
@click.option("--in-place", is_flag=True, help="Results in the buffer of the inputs.")
@click.option(
    "--out-of-place",
    is_flag=True,
    help="Results in a buffer of their own. With neither, what is usual in torch; with both, both.",
)
@click.option(
    "--split",
    "kinds",
    multiple=True,
    default=("equal",),
    show_default=True,
    metavar="KIND",
    help="How all_to_all spreads S: equal, uneven (drawn by --seed), all.",
)
@click.option(
    "--splits",
    metavar="LIST",
    help="An uneven all_to_all by hand: bytes to each rank, 1K,3K; rows of ranks that differ after semicolons.",
)
@click.option("--seed", default=0, show_default=True, metavar="N", help="Of drawn splits.")
@click.option(
    "--nproc", default=2, show_default=True, metavar="N", help="Ranks to start; under torchrun it is not looked at."
)
@click.option("--group-size", type=int, metavar="N", help="Ranks in each of several groups that all run at once.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where the data is."
)
@click.option(
    "--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", show_default=True, help="What moves it."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    metavar="SECONDS",
    help="Give a collective up after so long; torch's default otherwise.",
)
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Compare every element of every result with what it must be.",
)
@click.option("--calibration", metavar="FILE", help="Write the fitted latency and bandwidth for other programs.")
@click.option("--plot", metavar="FILE", help="Draw time and busbw over size: .png or .svg.")
@click.option("--result", metavar="FILE", help="Show this earlier document instead of measuring.")
@click.option("--compare", metavar="FILE", help="Set this other document beside it.")
@click.option("--against", nargs=2, metavar="nccl-tests LOG", help="Set a log of nccl-tests beside it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
@click.option("--output", metavar="FILE", help="Write the same document to a file.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def comm(ctx: click.Context, /, **given: Any) -> int:
    """Measure collectives: time, algbw and busbw as nccl-tests defines them.

    OPERATION is one of all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter,
    send_recv (a ring) and barrier; without any, all are measured. Exit codes: 0 done, 1 wrong elements, 2 wrong
    usage, 3 a rank failed, 130 Ctrl-C; rows that were finished are kept in each case.
    """
    from .compare import comparison  # noqa: PLC0415
    from .document import read_document  # noqa: PLC0415

    _check_outputs(given)
    other = None if given["compare"] is None else read_document(given["compare"])
    log = _log(given["against"])
    document = _document(ctx, given)
    if document is None:
        return 0
    compared = _comparisons(document, given, other, log)
    document["comparisons"] = [comparison(*one) for one in compared]
    try:
        _show(document, given, compared)
    finally:  # also where nobody reads stdout
        written = _write(document, given)
    code = _exit_code(document)
    return code if written or code not in (0, 1) else RunFailed.exit_code


def request_of(given: dict[str, Any], *, sizes_given: bool, kinds_given: bool, ranks: int) -> CommRequest:
    """The request that the options stand for; `sizes_given`, `kinds_given`: some option named a size, a kind of split.

    Raises:
        ConfigError: a value that cannot be; the message says what is valid.
    """
    for name, least in (("iters", 1), ("warmup", 0), ("nproc", 1)):
        if given[name] < least:
            raise ConfigError(f"--{name} is {given[name]}; it must be at least {least}.")
        if name != "nproc" and given[name] > MAX_ITERATIONS:
            raise ConfigError(
                f"--{name} is {given[name]}; each call's time is kept, so at most {MAX_ITERATIONS} are made."
            )
    if given["seconds"] is not None and not 0 < given["seconds"] < float("inf"):
        raise ConfigError(f"--time is {given['seconds']:g}; it must be more than 0 seconds.")
    timeout = given["timeout_s"]
    if timeout is not None and not _TIMEOUTS[0] <= timeout <= _TIMEOUTS[1]:
        raise ConfigError(f"--timeout is {timeout:g}; valid: {_TIMEOUTS[0]:g} to {_TIMEOUTS[1]:g} seconds.")
    sizes = _sizes(given)
    operations = operation_names((*given["operations"], *given["named"]) or ("all",))
    splits, kinds = None, split_names(given["kinds"])
    if given["splits"] is not None:
        _check_splits(operations, kinds if kinds_given else ("uneven",))
        splits = parse_splits(given["splits"], given["group_size"] or ranks, sizes if sizes_given else ())
        sizes, kinds = (sum(splits[0]),), ("uneven",)
    return CommRequest(
        operations=operations,
        sizes=tuple(sizes),
        dtypes=dtype_names(given["dtypes"]),
        reductions=reduction_names(given["reductions"]),
        placements=(*((False,) if given["out_of_place"] else ()), *((True,) if given["in_place"] else ())),
        split_kinds=kinds,
        splits=splits,
        iterations=given["iters"],
        warmup=given["warmup"],
        seconds=given["seconds"],
        group_size=given["group_size"],
        check=given["check"],
        seed=given["seed"],
    )


def _check_splits(operations: tuple[str, ...], kinds: tuple[str, ...]) -> None:
    """Refuse --splits beside what it would silently change, or what would silently change it."""
    if operations != ("all_to_all",):
        raise ConfigError(
            f"--splits is for all_to_all, but {', '.join(operations)} are to be measured; name it alone: "
            "mtb comm all_to_all --splits ..."
        )
    if kinds != ("uneven",):
        raise ConfigError(
            f"--splits makes an uneven all_to_all, but --split is {', '.join(kinds)}; leave --split out, and measure "
            "equal parts in a run of their own."
        )


def _sizes(given: dict[str, Any]) -> tuple[int, ...]:
    if given["sizes"]:
        words = [word for entry in given["sizes"] for word in entry.split(",")]
        return tuple(dict.fromkeys(parse_size(word, "An entry of --sizes") for word in words))
    first, last = parse_size(given["minbytes"], "-b"), parse_size(given["maxbytes"], "-e")
    return tuple(swept_sizes(first, last, given["stepfactor"]))


def _named(ctx: click.Context, *names: str) -> bool:
    return any(ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in names)


def _document(ctx: click.Context, given: dict[str, Any]) -> dict[str, Any] | None:
    from .document import read_document  # noqa: PLC0415

    if given["result"] is not None:
        return read_document(given["result"])
    if _named(ctx, "minbytes") and not _named(ctx, "maxbytes"):
        given["maxbytes"] = max(given["minbytes"], given["maxbytes"], key=lambda text: parse_size(text, "-b"))
    if _named(ctx, "maxbytes") and not _named(ctx, "minbytes"):
        given["minbytes"] = min(given["minbytes"], given["maxbytes"], key=lambda text: parse_size(text, "-e"))
    request = request_of(
        given,
        sizes_given=_named(ctx, "minbytes", "maxbytes", "sizes"),
        kinds_given=_named(ctx, "kinds"),
        ranks=ranks_of(given["nproc"]),
    )
    from .running import measure_all  # noqa: PLC0415  (imports torch)

    return measure_all(
        request,
        nproc=given["nproc"],
        device=given["device"],
        backend=given["backend"],
        timeout_s=given["timeout_s"],
        quiet=given["quiet"],
        debug=given["debug"],
        argv=tuple(sys.argv),
        keep=lambda document: _write(document, given),
    )


def _check_outputs(given: dict[str, Any]) -> None:
    """Refuse what could not be written after the measurement, before it."""
    from .plot import check_plot  # noqa: PLC0415

    if given["plot"] is not None:
        check_plot(given["plot"])
    for name in ("output", "calibration", "plot"):
        if given[name] is not None:
            check_output(given[name], f"--{name}")


def _log(against: tuple[str, str] | None) -> Any:
    if against is None:
        return None
    from .nccl_log import read_log  # noqa: PLC0415

    kind, path = against
    if kind not in _SOURCES:
        raise ConfigError(f"--against is {kind!r}; valid: {', '.join(_SOURCES)}, followed by the file of its output.")
    return read_log(path)


def _write(document: dict[str, Any], given: dict[str, Any]) -> bool:
    """The files that were asked for; False where one could not be written."""
    from mtb_core import write_json  # noqa: PLC0415

    from .fit import calibration  # noqa: PLC0415
    from .plot import draw  # noqa: PLC0415

    def plot() -> None:
        Path(given["plot"]).parent.mkdir(parents=True, exist_ok=True)
        draw(document, given["plot"])

    writers: dict[str, Callable[[], object]] = {
        "output": lambda: write_json(given["output"], document),
        "calibration": lambda: write_json(given["calibration"], calibration(document)),
        "plot": plot,
    }
    return write_all([Output(name, given[name], write) for name, write in writers.items() if given[name] is not None])


def _comparisons(
    document: dict[str, Any], given: dict[str, Any], other: dict[str, Any] | None, log: Any
) -> list[tuple[list[Pair], str, list[str]]]:
    """Comparisons of the document: pairs, name of the other side, and conditions that differ."""
    from .compare import other_conditions, pair_documents, pair_log  # noqa: PLC0415

    found = []
    if other is not None:
        name = Path(given["compare"]).name
        found.append((pair_documents(document, other), name, other_conditions(document, other)))
    if log is not None:
        found.append((pair_log(document, log), "nccl-tests", []))
    return found


def _show(document: dict[str, Any], given: dict[str, Any], compared: list[tuple[list[Pair], str, list[str]]]) -> None:
    """The result on stdout; what went wrong on stderr."""
    from mtb_core import dumps  # noqa: PLC0415

    from .tables import print_document, print_pairs  # noqa: PLC0415

    if given["as_json"]:
        click.echo(dumps(document, indent=2))
    else:
        print_document(document)
        for one in compared:
            print_pairs(*one)
    if document["failure"] is not None:
        sys.stdout.flush()
        click.echo(f"mtb: error: {document['failure']['text']}", err=True)


def _exit_code(document: dict[str, Any]) -> int:
    from mtb_core import external_launcher  # noqa: PLC0415

    reason = document["exit_reason"]
    if reason in ("stopped", "interrupted") and external_launcher() is not None:
        return 0  # torchrun takes any other code for a failure
    if reason == "done" and any(row["status"] == "failed" for row in document["results"]):
        return 1
    return _EXITS[reason]
