"""Results as tables for people, on stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .rows import BACKWARD, COMMUNICATION, FORWARD

if TYPE_CHECKING:
    from rich.table import Table

#: Width where stdout is no terminal and ``COLUMNS`` does not say.
PIPE_WIDTH = 100


def print_route(document: Mapping[str, Any]) -> None:
    """Show the document of ``mtb moe route``."""
    _print(_title(document), _phases(document), _loads(document), _facts(document), *_not_valid(document))


def print_sweep(document: Mapping[str, Any]) -> None:
    """Show the document of ``mtb moe sweep``."""
    table = _table(("factor", "Zipf s", "drop rate", "imbalance", "padding", "ms (p50)", "communication", "check"))
    for row in document["results"]:
        table.add_row(
            _factor(row),
            f"{row['zipf_s']:g}",
            f"{row['drop_rate']:.1%}",
            f"{row['requested_imbalance_ratio']:.2f} -> {row['load_imbalance_ratio']:.2f}",
            f"{row['padding_waste']:.1%}",
            f"{row['time_ms']['iteration']['p50']:.3f}",
            f"{row['communication_share']:.1%}",
            "off" if row["check"] is None else row["status"],
        )
    note = (
        "factor: of capacity; imbalance: max/mean over experts of what tokens asked for -> of what experts took;\n"
        "ms: forward and backward on the slowest rank"
    )
    _print(_title(document), table, note, *_not_valid(document))


def _not_valid(document: Mapping[str, Any]) -> list[str]:
    reasons = document["performance_invalid_reasons"]
    return [] if document["performance_valid"] else [f"not to compare: {'; '.join(reasons)}"]


def _title(document: Mapping[str, Any]) -> str:
    size = document["world_size"]
    return (
        f"MoE routing on {size} rank{'' if size == 1 else 's'}, {document['device']}, {document['backend']}: "
        f"{document['exit_reason']}"
    )


def _phases(row: Mapping[str, Any]) -> Table:
    table = _table(("phase", "mean ms", "p50", "p95", "max", "share", "bytes sent"))
    times = row["time_ms"]
    whole = sum(times[name]["mean"] for name in (*FORWARD, *BACKWARD))
    for name in (*FORWARD, *BACKWARD):
        sent = f"{row['sent_bytes'][name]:,}" if name in COMMUNICATION else ""
        table.add_row(name, *_ms(times[name]), f"{times[name]['mean'] / whole:.1%}", sent)
    table.add_section()
    for name in ("forward_pass", "backward_pass", "iteration"):
        table.add_row(name, *_ms(times[name]), "", "")
    return table


def _ms(times: Mapping[str, float]) -> list[str]:
    return [f"{times[key]:.3f}" for key in ("mean", "p50", "p95", "max")]


def _loads(row: Mapping[str, Any]) -> Table:
    table = _table(("rank", "experts", "their tokens", "sends to ranks", "tokens", "compute ms", "communication ms"))
    owners = row["expert_owner_map"]
    for values in row["ranks"]:
        rank = values["rank"]
        own = [expert for expert, owner in enumerate(owners) if owner == rank]
        table.add_row(
            str(rank),
            f"{own[0]}-{own[-1]}" if own else "none",
            _some([row["expert_token_counts"][expert] for expert in own]),
            _some(row["send_counts"][rank]),
            str(values["tokens_received"]),
            f"{values['compute_ms']:.3f}",
            f"{values['communication_ms']:.3f}",
        )
    return table


def _some(numbers: Sequence[int], limit: int = 8) -> str:
    return " ".join(map(str, numbers[:limit])) + (" …" if len(numbers) > limit else "")


def _facts(row: Mapping[str, Any]) -> str:
    capacity = row["capacity_per_expert"]
    limit = "dropless" if capacity is None else f"capacity {capacity:,} an expert (factor {_factor(row)})"
    slots = {name: f"{row[f'{name}_slots']:,}" for name in ("overflowed", "rerouted", "dropped")}
    ratios = [f"{row[f'{name}_imbalance_ratio']:.3f}" for name in ("requested", "load", "rank")]
    loss = row["load_balance_loss"]
    balance = "" if loss is None else f"load-balancing loss {loss:.4f} (1 is even), "
    lines = [
        f"tokens {row['total_tokens']:,}, top-{row['top_k']} of {row['num_experts']} experts, {row['slots']:,} slots; {limit}",
        f"slots overflowed {slots['overflowed']}, rerouted {slots['rerouted']}, dropped {slots['dropped']} ({row['drop_rate']:.1%})",
        f"tokens that no expert takes: {row['dropped_tokens']:,}; padding waste {row['padding_waste']:.1%}",
        f"imbalance (max/mean): asked {ratios[0]}, experts {ratios[1]}, ranks {ratios[2]}",
        f"communication {row['communication_share']:.1%} of the time, waiting for other ranks included",
        f"slowest in computing: rank {row['slowest_rank']}; most tokens: rank {row['busiest_rank']}",
        f"{balance}router z-loss {row['z_loss']:.4f}",
        f"{row['tokens_per_sec']:,.0f} tokens/s",
    ]
    if row["router_loss_first"] is not None:
        lines.append(f"router learned: loss {row['router_loss_first']:.3f} -> {row['router_loss_last']:.3f} a byte")
    lines.append(_check(row))
    return "\n".join(lines)


def _check(row: Mapping[str, Any]) -> str:
    check = row["check"]
    if check is None:
        return "check: off"
    errors = {name: error for name, error in check["errors"].items() if error is not None}
    worst = max(errors, key=errors.__getitem__)
    if check["failed"]:
        return f"check against the naive layer FAILED: {', '.join(check['failed'])}"
    return f"check against the naive layer: ok, largest error {errors[worst]:.1e} ({worst}), allowed {check['tolerance']:g}"


def _factor(row: Mapping[str, Any]) -> str:
    return "none" if row["capacity_factor"] is None else f"{row['capacity_factor']:g}"


def _table(columns: Sequence[str]) -> Table:
    from rich.table import Table  # noqa: PLC0415  (imported when something is shown)

    table = Table()
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    return table


def _print(*parts: Any) -> None:
    from rich.console import Console  # noqa: PLC0415

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    console = Console(width=width, highlight=False, markup=False)
    with console.capture() as captured:  # written below: rich would leave the program when stdout's reader has gone
        for part in parts:
            console.print(part)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(captured.get().encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
