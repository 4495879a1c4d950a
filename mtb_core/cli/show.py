"""A training result as a table for people, on stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mtb_core.measure.jsonio import FLAG_SUFFIX, to_plain

if TYPE_CHECKING:
    from mtb_core.measure.result import Result

#: Width where stdout is no terminal and ``COLUMNS`` does not say.
PIPE_WIDTH = 100

_MEMORY_KINDS = {"cuda_allocated": "allocated on the CUDA device", "process_rss": "resident set of the process"}


def print_result(
    result: Mapping[str, Any] | Result,
    *,
    folder: str | os.PathLike[str] | None = None,
    file: str | os.PathLike[str] | None = None,
) -> None:
    """Print `result` (the content of ``result.json``) as a table on stdout.

    Args:
        result: missing keys and nulls are left out, so that an unfinished run's result shows what there is.
        folder: the run's folder.
        file: where ``result.json`` was written.

    Raises:
        BrokenPipeError: the reader of stdout has gone.
    """
    from rich.console import Console  # noqa: PLC0415  (imported when something is shown)
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    values: dict[str, Any] = to_plain(result)
    rows = [*rows_of(values)]
    rows += [(name, os.fspath(path)) for name, path in (("run folder", folder), ("result file", file)) if path]
    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    console = Console(width=width, highlight=False, markup=False)
    with console.capture() as captured:  # written below: rich would leave the program when stdout's reader has gone
        console.print(Text(title_of(values), style="bold"))
        console.print(table)
    encoding = sys.stdout.encoding or "utf-8"  # a name that stdout cannot spell is no reason to fail
    sys.stdout.write(captured.get().encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def title_of(values: Mapping[str, Any]) -> str:
    """``training with ddp on 2 ranks: done``."""
    size = values.get("world_size")
    where = "" if size is None else f" on {size} rank{'' if size == 1 else 's'}"
    return f"{values.get('benchmark', 'training')} with {values.get('strategy', '?')}{where}: {values.get('exit_reason', '?')}"


def rows_of(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The table's rows, name and text, of a result's content."""
    for name, make in (
        ("strategy", _strategy),
        ("model", _model),
        ("ranks", _ranks),
        ("batch", _batch),
        ("steps", _steps),
        ("ended early", _ended_early),
        ("loss", _loss),
        ("eval loss", _eval_loss),
        ("gradient norm", _gradient_norm),
        ("metrics", _metrics),
        ("step time", _step_time),
        ("throughput", _throughput),
        ("peak memory", _memory),
        ("MFU", _mfu),
        ("repeats", _repeats),
        ("not to compare", _invalid),
    ):
        text = make(values)
        if text:
            yield name, text


def _strategy(values: Mapping[str, Any]) -> str:
    options = values.get("strategy_options") or {}
    shown = ", ".join(f"{key}={_option(value)}" for key, value in options.items() if value is not None)
    return f"{values.get('strategy', '?')}{f' ({shown})' if shown else ''}"


def _option(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _model(values: Mapping[str, Any]) -> str:
    name = (values.get("config") or {}).get("model")
    parameters = values.get("parameters")
    return _join(name, parameters is not None and f"{parameters:,} parameters")


def _ranks(values: Mapping[str, Any]) -> str:
    dtype = values.get("reduce_dtype")
    return _join(
        values.get("world_size"),
        values.get("device"),
        values.get("backend"),
        values.get("precision"),
        dtype and values.get("world_size") != 1 and f"gradients reduced in {dtype}",
    )


def _batch(values: Mapping[str, Any]) -> str:
    whole, local = values.get("global_batch_size"), values.get("batch_size_per_rank")
    count, mode = values.get("gradient_accumulation_steps"), values.get("resolved_gradient_sync_mode")
    if whole is None:
        return ""
    parts = [f"{local} per rank and micro-batch" if local is not None else None]
    if count is not None and count != 1:
        parts.append(f"{count} micro-batches a step" + (f", gradients synchronised at {mode}" if mode else ""))
    return f"{whole} samples: " + _join(*parts) if any(parts) else f"{whole} samples"


def _steps(values: Mapping[str, Any]) -> str:
    steps, warmup, last = (values.get(key) for key in ("steps", "warmup_steps", "global_step"))
    if steps is None:
        return ""
    if not steps and values.get("exit_reason") == "failed":  # it did not get so far: no figure
        return f"now at step {last}" if last else ""
    return _join(f"{steps} measured", warmup and f"{warmup} warm-up before", last is not None and f"now at step {last}")


def _ended_early(values: Mapping[str, Any]) -> str:
    return str(values.get("stop_reason") or "")


def _loss(values: Mapping[str, Any]) -> str:
    first, last = _number(values, "loss_first", ".4f"), _number(values, "loss", ".4f")
    return " -> ".join(text for text in (first, last) if text)


def _eval_loss(values: Mapping[str, Any]) -> str:
    return _number(values, "eval_loss", ".4f")


def _gradient_norm(values: Mapping[str, Any]) -> str:
    clipped, skipped = values.get("clipped_steps"), values.get("skipped_steps")
    highest = _number(values, "grad_norm_max", ".4g")
    return _join(
        _number(values, "grad_norm", ".4g"),
        highest and f"at most {highest}",
        clipped and f"clipped steps: {clipped}",
        skipped and f"skipped steps: {skipped}",
    )


def _metrics(values: Mapping[str, Any]) -> str:
    metrics = values.get("metrics") or {}
    names = [name for name in metrics if not name.endswith(FLAG_SUFFIX)]
    return _join(*(f"{name} {_number(metrics, name, '.4g')}" for name in names))


def _step_time(values: Mapping[str, Any]) -> str:
    whole = _number(values, "step_time_ms", ".2f")
    if not whole:
        return ""
    named = {"data": "data_time_ms", "forward-backward": "forward_backward_ms", "optimizer": "optimizer_step_ms"}
    parts = _join(*(f"{name} {_number(values, key, '.2f')}" for name, key in named.items() if _number(values, key, "")))
    return f"{whole} ms" + (f" ({parts})" if parts else "")


def _throughput(values: Mapping[str, Any]) -> str:
    rate = _number(values, "tokens_per_sec", ",.0f")
    return f"{rate} tokens/s" if rate else ""


def _memory(values: Mapping[str, Any]) -> str:
    size, kind = _number(values, "max_memory_mib", ",.0f"), values.get("memory_kind")
    if not size:
        return ""
    return f"{size} MiB on the fullest rank" + (f", {_MEMORY_KINDS.get(kind, kind)}" if kind else "")


def _mfu(values: Mapping[str, Any]) -> str:
    share = values.get("mfu")
    if share is not None:
        convention = values.get("flops_convention")
        return f"{share:.1%}" + (f", FLOPs by the convention '{convention}'" if convention else "")
    if "mfu" not in values or values.get("exit_reason") == "failed":
        return ""
    return f"not known: {values.get('mfu_reason') or 'no reason given'}"


def _repeats(values: Mapping[str, Any]) -> str:
    count, summary = values.get("repeat_count"), values.get("summary") or {}
    if count is None or count < 2:
        return ""
    units = {"tokens_per_sec": (",.0f", "tokens/s"), "step_time_ms": (".2f", "ms a step"), "loss": (".4f", "loss")}
    parts = []
    for key, (form, unit) in units.items():
        mean, spread = (_number(summary.get(key) or {}, part, form) for part in ("mean", "std"))
        if mean:
            parts.append(f"{mean}{f' +/- {spread}' if spread else ''} {unit}")
    return _join(f"{count} trials (mean +/- standard deviation)", *parts)


def _invalid(values: Mapping[str, Any]) -> str:
    if values.get("performance_valid") is not False:
        return ""
    return "; ".join(values.get("performance_invalid_reasons") or ["the measurement is not valid"])


def _number(values: Mapping[str, Any], key: str, form: str) -> str:
    """A number as text; what it was where it is null because it was not finite; empty where there is none."""
    value = values.get(key)
    return format(value, form) if value is not None else str(values.get(key + FLAG_SUFFIX, ""))


def _join(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part)
