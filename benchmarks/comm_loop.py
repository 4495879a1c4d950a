"""`mtb comm`'s times against a bare loop of torch.distributed calls: side by side, in one set of processes.

For each operation and size, rounds of both take turns, so that whatever else the machine does meets both. Run plainly
(``--nproc 2``) or under torchrun. With ``--interface`` it also reads how many bytes an interface sent in the calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mtb_comm.bench import timed
from mtb_comm.calls import Group, clear, prepare
from mtb_comm.definitions import whole_elements
from mtb_comm.points import CommRequest, Point, operation_names
from mtb_comm.sizes import parse_size, size_text
from mtb_comm.wire import wire_bytes
from mtb_core import RankContext, Worker, gather_objects, reports_here, run_ranks


def bare_call(operation: str, elements: int, rank: int, ranks: int) -> Callable[[], object]:
    """What a person would write: plain calls on fp32 tensors, nothing of mtb_comm."""
    whole, part = torch.zeros(elements), torch.zeros(elements // ranks)
    other = torch.zeros(elements)
    parts = list(whole.split(elements // ranks)) if rank == 0 and elements else None

    def ring() -> None:
        sent = dist.P2POp(dist.isend, whole, (rank + 1) % ranks)
        got = dist.P2POp(dist.irecv, other, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([sent, got]):
            work.wait()

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_single(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "gather": lambda: dist.gather(part, parts),
        "scatter": lambda: dist.scatter(part, parts),
        "send_recv": ring,
        "barrier": dist.barrier,
    }
    return calls[operation]


def bare_loop(call: Callable[[], object], iterations: int, warmup: int, ctx: RankContext) -> float:
    """Seconds of one call: the loop's time on the slowest rank, divided by the number of calls."""
    for _ in range(warmup):
        call()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        call()
    return max(gather_objects(ctx, time.perf_counter() - start)) / iterations


def sent_bytes(interface: str | None) -> int:
    if interface is None:
        return 0
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text(encoding="ascii"))


def compare(args: argparse.Namespace, ctx: RankContext, worker: Worker) -> list[dict[str, Any]]:
    """Rows of both times, on every rank."""
    assert dist.group.WORLD is not None
    group = Group(dist.group.WORLD, ctx.rank, tuple(range(ctx.world_size)), "gloo", "cpu")
    interface = args.interface.split(",")[ctx.rank] if args.interface else None
    rows = []
    for name in operation_names(tuple(args.operations) or ("all",)):
        for size in [parse_size(word, "--sizes") for word in args.sizes.split(",")]:
            elements = whole_elements(name, size, "fp32", ctx.world_size)
            point = Point(
                operation=name,
                dtype="fp32",
                reduction="sum" if name in ("all_reduce", "reduce", "reduce_scatter") else None,
                in_place=None,
                split=None,
                ranks=ctx.world_size,
                elements=elements,
            )
            calls = max(args.min_iters, min(args.max_iters, args.bytes // size))
            request = CommRequest(operations=(name,), sizes=(size,), iterations=calls, warmup=2)
            prepared, bare = prepare(point, group), bare_call(name, elements, ctx.rank, ctx.world_size)
            clear(prepared)
            ours, theirs, sent = [], [], []
            for _ in range(args.rounds):
                before = sent_bytes(interface)
                ours.append(statistics.fmean(timed(prepared, request, ctx, worker)))
                sent.append((sent_bytes(interface) - before) / (request.iterations + request.warmup))
                theirs.append(bare_loop(bare, calls, request.warmup, ctx))
            expected = wire_bytes(name, point.size_bytes, ctx.world_size, "gloo")
            rows.append(
                {
                    "operation": name,
                    "size_bytes": point.size_bytes,
                    "ranks": ctx.world_size,
                    "iterations": calls,
                    "ours_ms": 1e3 * statistics.median(ours),
                    "bare_ms": 1e3 * statistics.median(theirs),
                    "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
                    "ratio_of_best": min(ours) / min(theirs),
                    "wire_bytes": expected and expected.busiest,
                    "sent_bytes": max(gather_objects(ctx, statistics.median(sent))) if interface else None,
                }
            )
            if ctx.rank == 0:
                worker.progress(rows[-1])
    return rows


def say(row: dict[str, Any]) -> None:
    print(
        f"{row['operation']:15} {size_text(row['size_bytes']):>8} {row['ranks']} ranks: "
        f"mtb {row['ours_ms']:9.4f} ms, bare {row['bare_ms']:9.4f} ms, ratio {row['ratio']:.3f}, "
        f"of the best rounds {row['ratio_of_best']:.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operations", nargs="*")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--sizes", default="1K,1M,64M")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bytes", type=int, default=2**28, help="data of one round's calls, about")
    parser.add_argument("--min-iters", type=int, default=4)
    parser.add_argument("--max-iters", type=int, default=200)
    parser.add_argument("--interface", help="names of the ranks' interfaces, with commas, to count bytes on")
    parser.add_argument("--json", help="write rows to this file")
    args = parser.parse_args()
    outcome = run_ranks(compare, args, nproc=args.nproc, device="cpu", backend="gloo", on_progress=say)
    if outcome.failure is not None:
        raise SystemExit(str(outcome.failure))
    if args.json and reports_here():
        Path(args.json).write_text(json.dumps(outcome.value), encoding="utf-8")


if __name__ == "__main__":
    main()
