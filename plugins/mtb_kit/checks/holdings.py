"""Checks of what a rank holds in memory: its share of the model, and no more from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtb_kit.checking import check
from mtb_kit.checks.parity import training
from mtb_kit.checks.processes import LIVING, watched
from mtb_kit.lab import Lab
from mtb_kit.probes_tensors import ROOM, Held
from mtb_kit.states import Mismatch

#: Of the optimizer's state, which every sharded strategy shares.
OPTIMIZER_SHARE = 0.8
#: Of parameters and optimizer state together: ZeRO's first stages keep whole working weights besides their shares.
TOTAL_SHARE = 0.9


@check(
    "models.held",
    "No rank keeps memory for all of the model and its optimizer.",
    mistake="what state(prepared) gives is a share, but views of whole tensors are behind it: the optimizer must be made "
    "over this rank's shards, and whole gradients or weights must not be kept from step to step",
    ranks="several",
    needs=("sharded",),
)
def held(lab: Lab, ranks: int) -> Mapping[str, Any]:
    """After a step, whole storages behind parameters, gradients and optimizer state; views of them do not count less."""
    if not lab.plan(ranks).sharded:
        return {"largest_share": 1.0}
    run = lab.done(training(ranks, probes=(Held(4),)))
    sizes = {key: tensor.numel() * tensor.element_size() for key, tensor in run.whole(4).items() if tensor.dim()}
    optimizer = sum(size for key, size in sizes.items() if key.startswith("optim/"))
    figures = {}
    for kind, whole, share in (("optimizer", optimizer, OPTIMIZER_SHARE), ("all", sum(sizes.values()), TOTAL_SHARE)):
        largest = max(trace.notes["held"][kind] for trace in run.traces.values())
        figures[f"largest_share_{kind}"] = largest / whole
        if largest > share * whole:
            what = "optimizer state" if kind == "optimizer" else "parameters, gradients and optimizer state"
            raise Mismatch(f"at most {share:.0%} of {whole} bytes of {what} on a rank of {ranks}", f"{largest} on one")
    return figures


@check(
    "processes.memory",
    "Tensors that are alive after a step do not grow from step to step.",
    mistake="something is kept in every step: outputs, copies of gradients or weights; keep numbers, and let go of tensors",
)
def memory(lab: Lab, ranks: int) -> None:
    """Bytes of all floating-point tensors that Python can reach, after two steps of one run; 1% more may be scalars."""
    first, last = LIVING
    for rank, trace in watched(lab, ranks).traces.items():
        before, after = trace.notes["living"][first], trace.notes["living"][last]
        if after > ROOM * before:
            raise Mismatch(
                f"{before} bytes of tensors on rank {rank} after step {last}, as after step {first}", f"{after}"
            )
