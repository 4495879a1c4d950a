"""One contender's process: ``python -m mtb_bench.contender NAME``; started by the conductor."""

from __future__ import annotations

import sys
from collections.abc import Callable

import attrs


@attrs.frozen
class Contender:
    """How a contender is called and started.

    Attributes:
        label: in the table.
        launches: starts its own ranks; otherwise they are started with torchrun.
    """

    label: str
    launches: bool = False


CONTENDERS = {
    "bare": Contender("loop by hand (AdamW's defaults, no guards)"),
    "bare_again": Contender("the same loop again (noise)"),
    "bare_fused": Contender("loop by hand, fused AdamW"),
    "bare_guarded": Contender("loop by hand, fused AdamW, the same guards"),
    "accelerate": Contender("accelerate"),
    "fabric": Contender("Lightning Fabric"),
    "lightning": Contender("Lightning Trainer"),
    "mtb": Contender("MiniTrainBench, no sinks", launches=True),
    "mtb_default": Contender("MiniTrainBench, console and jsonl", launches=True),
}


def command(name: str, nproc: int) -> list[str]:
    """How to start contender `name` with `nproc` ranks."""
    run = [sys.executable]
    if nproc > 1 and not CONTENDERS[name].launches:
        run += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    return [*run, "-m", "mtb_bench.contender", name, str(nproc)]


def _loop(name: str, nproc: int) -> Callable[[], None]:
    # Each imports its own framework only.
    if name.startswith("bare"):
        from . import loops

        return {
            "bare": loops.bare,
            "bare_again": loops.bare,
            "bare_fused": lambda: loops.bare(fused=True),
            "bare_guarded": loops.bare_guarded,
        }[name]
    if name.startswith("mtb"):
        from .ours import mtb

        return lambda: mtb(("console", "jsonl") if name == "mtb_default" else (), nproc)
    from . import peers

    return {"accelerate": peers.accelerate, "fabric": peers.fabric, "lightning": peers.lightning_trainer}[name]


if __name__ == "__main__":
    _loop(sys.argv[1], int(sys.argv[2]))()
