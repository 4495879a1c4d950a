"""``mtb moe``: from the command line to the ranks and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mtb_comm.kept import first_line, warned
from mtb_comm.outputs import Output, write_all
from mtb_core import ConfigError, RunFailed, check_output, dumps, write_json

from .document import Launch, Measured, document, measure
from .files import check_text, read_counts
from .plot import check_plot, plot_sweep
from .settings import DISTRIBUTIONS, DTYPES, GATES, OVERFLOWS, ROUTINGS, RouteSettings

_DEFAULTS = RouteSettings()
_PATH = click.Path(path_type=Path)
_MIN_TEXT = 64  # bytes


def _option(name: str, **kwargs: Any) -> Callable[[Any], Any]:
    """An option for the setting of that name, with its default."""
    default = getattr(_DEFAULTS, name)
    return click.option(f"--{name.replace('_', '-')}", type=type(default), default=default, show_default=True, **kwargs)


def _choice(name: str, values: tuple[str, ...], text: str) -> Callable[[Any], Any]:
    return click.option(
        f"--{name}", type=click.Choice(values), default=getattr(_DEFAULTS, name), show_default=True, help=text
    )


_LAYER = (
    _option("tokens_per_rank", help="Tokens of each rank."),
    _option("hidden_size", help="Width of a token."),
    click.option("--ffn-size", type=int, help="Inner width of an expert.  [default: 4 * hidden size]"),
    _option("num_experts", help="Experts over all ranks; need not be a multiple of the ranks."),
    _option("top_k", help="Experts that a token asks for."),
    _choice("gate", GATES, "How logits become weights."),
    _choice("overflow", OVERFLOWS, "What becomes of a slot whose expert is full."),
    _option("aux_weight", help="Weight of the load-balancing loss."),
    _option("z_weight", help="Weight of the router z-loss."),
    _choice("dtype", DTYPES, "Of tokens and experts; the router computes in fp32 at least."),
)
_MEASURING = (
    _option("iters", help="Measured iterations of forward and backward."),
    _option("warmup", help="Iterations before these."),
    _option("seed", help="Of weights, tokens and their preferences."),
    click.option(
        "--check/--no-check",
        default=True,
        show_default=True,
        help="Compare with the naive layer; exit code 1 if they differ.",
    ),
    click.option("--nproc", type=int, default=2, show_default=True, help="Ranks to start; under torchrun: its own."),
    click.option(
        "--device",
        type=click.Choice(["auto", "cpu", "cuda"]),
        default="auto",
        show_default=True,
        help="Where to compute; auto: CUDA where there is one.",
    ),
    click.option(
        "--backend",
        type=click.Choice(["auto", "gloo", "nccl"]),
        default="auto",
        show_default=True,
        help="Of the collectives; auto: nccl on CUDA, else gloo.",
    ),
    click.option(
        "--start-method",
        type=click.Choice(["auto", "fork", "spawn"]),
        default="auto",
        show_default=True,
        help="How ranks are started here; auto: fork where that is safe.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout."),
    click.option("--output", type=_PATH, metavar="FILE", help="Write the JSON document there."),
    click.option("--quiet", is_flag=True, help="No progress on stderr."),
    click.option("--debug", is_flag=True, help="Show tracebacks."),
)


def _options(options: tuple[Callable[[Any], Any], ...]) -> Callable[[Any], Any]:
    return lambda function: functools.reduce(lambda inner, option: option(inner), reversed(options), function)


@click.group(name="moe", help="Measure MoE routing, phase by phase.", no_args_is_help=True)
def moe() -> None:
    """Group of the commands below."""


@moe.command(name="route")
@_choice("distribution", DISTRIBUTIONS, "How tokens spread over experts.")
@_option("zipf_s", help="zipf: expert e is drawn with a probability ~ 1/(e+1)^s.")
@_option("hot_share", help="hot: share of the tokens whose first choice is expert 0.")
@click.option("--counts", type=_PATH, metavar="FILE", help="counts: JSON list with a number for each expert.")
@click.option("--data", type=_PATH, metavar="FILE", help="learned: text whose bytes the router is trained on.")
@_option("router_steps", help="learned: steps of training before the measurement.")
@click.option(
    "--capacity-factor",
    type=float,
    help=f"An expert takes ceil(factor * k * T / E) tokens.  [default: {_DEFAULTS.capacity_factor}]",
)
@click.option("--dropless", is_flag=True, help="Experts take as many tokens as come.")
@_choice("routing", ROUTINGS, "Who chooses: the tokens, or the experts.")
@_options(_LAYER)
@_options(_MEASURING)
def route(**given: Any) -> int:
    """Route tokens to experts on all ranks, there and back, and say where time and tokens go."""
    launch, shown = _launch(given), _shown(given)
    if given.pop("dropless"):
        if given["capacity_factor"] is not None:
            raise ConfigError("--dropless and --capacity-factor exclude each other: one of them must go.")
    elif given["capacity_factor"] is None:
        given["capacity_factor"] = _DEFAULTS.capacity_factor
    if given["counts"] is not None:
        given["counts"] = read_counts(given["counts"])
    if given["data"] is not None:
        check_text(given["data"], _MIN_TEXT)
        given["data"] = str(given["data"])
    return _measured((_settings(given),), launch, {**shown, "plot": None}, sweep=False)


def _measured(points: tuple[RouteSettings, ...], launch: Launch, shown: dict[str, Any], *, sweep: bool) -> int:
    """Measure and report; the exit code."""

    def keep(measured: Measured) -> None:
        _write(document(measured, sweep=sweep), shown)

    measured = measure(points, launch, on_progress=_progress(shown), debug=shown["debug"], keep=keep)
    return _report(measured, shown, sweep=sweep)


@moe.command(name="sweep")
@click.option(
    "--capacity-factors", default="0.5,1,1.25,1.5,2", show_default=True, help="Capacity factors, separated by commas."
)
@click.option("--skews", default="0,0.5,1", show_default=True, help="Exponents of Zipf's law, separated by commas.")
@click.option("--plot", type=_PATH, metavar="FILE", help="Draw time and drop rate: .png, .svg or .pdf.")
@_options(_LAYER)
@_options(_MEASURING)
def sweep(capacity_factors: str, skews: str, plot: Path | None, **given: Any) -> int:
    """Measure each capacity factor with each skew: time against drop rate."""
    launch, shown = _launch(given), _shown(given)
    if plot is not None:
        check_plot(plot)
        check_output(plot, "--plot")
    factors, exponents = _numbers("--capacity-factors", capacity_factors), _numbers("--skews", skews)
    points = tuple(
        _settings({**given, "distribution": "zipf", "capacity_factor": factor, "zipf_s": skew})
        for skew in exponents
        for factor in factors
    )
    return _measured(points, launch, {**shown, "plot": plot}, sweep=True)


def _numbers(option: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} is {text!r}; valid are numbers separated by commas, such as 1,1.25,2.") from None
    return list(dict.fromkeys(numbers))


def _settings(given: dict[str, Any]) -> RouteSettings:
    if given["ffn_size"] is None:
        given = {**given, "ffn_size": 4 * given["hidden_size"]}
    return RouteSettings(**given)


def _launch(given: dict[str, Any]) -> Launch:
    return Launch(**{name: given.pop(name) for name in ("nproc", "device", "backend", "start_method")})


def _shown(given: dict[str, Any]) -> dict[str, Any]:
    shown = {name: given.pop(name) for name in ("as_json", "output", "quiet", "debug")}
    if shown["output"] is not None:
        read = (given.get("counts"), given.get("data"))
        check_output(shown["output"], inputs=[file for file in read if file is not None])
    return shown


def _progress(shown: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    def show(fields: dict[str, Any]) -> None:
        if not warned(fields) and not shown["quiet"]:
            click.echo(f"moe: point {fields['point']} of {fields['points']}", err=True)

    return show


def _reports_here() -> bool:
    from mtb_core import reports_here  # noqa: PLC0415  (imports torch; help must not)

    return reports_here()


def _report(measured: Measured, shown: dict[str, Any], *, sweep: bool) -> int:
    """Tables or the document, then the files that were asked for; errors on stderr. Returns the exit code."""
    if not _reports_here():
        return measured.exit_code
    values = document(measured, sweep=sweep)
    try:
        _show(values, shown, sweep=sweep)
    finally:  # also where nobody reads stdout
        written = _write(values, shown)
    failure = measured.outcome.failure
    if failure is not None:
        traceback = failure.traceback if shown["debug"] and not failure.expected else ""
        click.echo(f"{traceback}mtb: error: {first_line(str(failure))}", err=True)
    code = measured.exit_code
    return code if written or code not in (0, 1) else RunFailed.exit_code


def _show(values: dict[str, Any], shown: dict[str, Any], *, sweep: bool) -> None:
    if shown["as_json"]:
        click.echo(dumps(values, indent=2))
    elif values.get("results", values.get("time_ms")):
        from .tables import print_route, print_sweep  # noqa: PLC0415

        (print_sweep if sweep else print_route)(values)


def _write(values: dict[str, Any], shown: dict[str, Any]) -> bool:
    """The files; False where one could not be written."""
    outputs = []
    if shown["output"] is not None:
        outputs.append(Output("output", shown["output"], lambda: write_json(shown["output"], values)))
    if shown["plot"] is not None and values["results"]:
        outputs.append(Output("plot", shown["plot"], lambda: plot_sweep(values["results"], shown["plot"])))
    return write_all(outputs)
