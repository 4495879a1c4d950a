"""What a checkpoint costs: the pause of training, the time until it is durable, and its verification, as ratios.

    python benchmarks/checkpoint_speed.py [--nproc 2] [--mib 384] [--saves 11] [--under-training]

Every round measures all of them one after the other, so what slows a round slows both sides of a ratio:

- pause: `save()` of an asynchronous manager, over one copy of all those bytes into warm memory;
- durable: from the call of `save()` until ``latest`` is fsynced, over `dd conv=fsync` of as many bytes by as many
  writers at the same time (ranks idle meanwhile; or multiplying matrices with ``--under-training``);
- verify: reading the files from page cache in pieces of 1 MiB, over checking them against the manifest.

The first round, whose buffers were allocated before, is shown apart and not in the medians.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from mtb_checkpoint import verify_checkpoint
from mtb_core.api.values import Piece, State
from mtb_core.ckpt import CheckpointManager


def copy_s(source: torch.Tensor, target: torch.Tensor) -> float:
    """Seconds of one copy."""
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began


def dd_s(path: Path, mib: int) -> float:
    """Seconds of writing and fsyncing by dd, on all ranks at once."""
    dist.barrier()
    began = time.perf_counter()
    argv = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={mib}", "conv=fsync"]
    subprocess.run(argv, check=True, stderr=subprocess.DEVNULL)
    dist.barrier()
    elapsed = time.perf_counter() - began
    path.unlink()
    return elapsed


def read_s(path: Path) -> float:
    """Seconds of reading all files of a checkpoint, which are in the page cache."""
    buffer, began = bytearray(1 << 20), time.perf_counter()
    for file in path.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass
    return time.perf_counter() - began


def verify_s(path: Path) -> float:
    """Seconds of `mtb checkpoint verify`, without the start of the interpreter."""
    began = time.perf_counter()
    assert verify_checkpoint(path).ok
    return time.perf_counter() - began


def rank_main(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One rank of the benchmark; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.nproc)
    count = 96
    parts = torch.randn(count, args.mib * (1 << 20) // 4 // count)
    state = State({f"model/{i}": [Piece(part, tuple(part.shape), (0,))] for i, part in enumerate(parts)})
    target, matrix, durable_at = torch.empty_like(parts).zero_(), torch.randn(256, 256), [0.0]

    def fault_point(name: str) -> None:
        if name == "latest-synced":
            durable_at[0] = time.perf_counter()

    manager = CheckpointManager(Path(folder) / "c", keep_last=1, fault_point=fault_point)
    manager.preflight(state)
    rows = []
    for step in range(args.saves):
        copied = copy_s(parts, target)
        dist.barrier()
        began = time.perf_counter()
        pause = manager.save(step, state)
        while (
            args.under_training
            and not manager.poll_vote()
            and manager.last_published != manager.folder / f"step_{step:08d}"
        ):
            matrix = (matrix @ matrix).tanh()
        manager.finish()
        durable = durable_at[0] - began
        dist.barrier()
        raw = dd_s(Path(folder) / f"dd{rank}", args.mib // args.nproc)
        path = manager.folder / f"step_{step:08d}"
        read, verified = (read_s(path), verify_s(path)) if rank == 0 else (1.0, 1.0)
        dist.barrier()
        rows.append((pause / copied, durable / raw, read / verified))
    if rank == 0:
        for name, values in zip(
            ("pause / copy", "durable / dd", "verify speed / read speed"), zip(*rows, strict=True), strict=True
        ):
            rest = sorted(values[1:])
            print(
                f"{name:<26} median {statistics.median(rest):5.2f}  [{rest[0]:.2f} .. {rest[-1]:.2f}]  first {values[0]:.2f}"
            )
    dist.destroy_process_group()


def main() -> None:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--mib", type=int, default=384)
    parser.add_argument("--saves", type=int, default=11)
    parser.add_argument("--under-training", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        torch.multiprocessing.spawn(rank_main, (args, folder), args.nproc)


if __name__ == "__main__":
    main()
