"""How fast traces are analysed, and in how much memory: `mtb profile analyze` beside HolisticTraceAnalysis.

    python -m venv .venv-hta && .venv-hta/bin/pip install HolisticTraceAnalysis     # it brings 100 packages, so apart
    .venv/bin/python benchmarks/trace_speed.py --hta-python .venv-hta/bin/python [--mib 50] [--rounds 5] [--growth]

The trace is made here, in the form in which PyTorch 2.x writes it, of a GPU job with NCCL. Both read the same
uncompressed file in a process of their own; the time is that from the first import to the last figure. Without
--hta-python, ours is measured alone. See docs/profile.md.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

STEP_US = 20_000.0


def events_of_step(number: int, dice: random.Random) -> list[dict[str, object]]:
    """One step: per kernel an operator with its shapes, a launch, the kernel, and the two ends of an arrow."""
    begin, out, at = number * STEP_US, [], number * STEP_US
    out.append(_event(f"ProfilerStep#{number}", "user_annotation", begin, STEP_US - 50, 100, {"External id": number}))
    busy = begin + 500
    for index in range(400):
        ident = number * 1000 + index
        collective = index % 40 == 39
        duration = round(dice.uniform(5, 60), 3)
        shape = {"Input Dims": [[512, 1024], [1024, 1024], []], "Input type": ["float", "float", "Scalar"]}
        args = {
            "External id": ident,
            "Record function id": 0,
            "Concrete Inputs": ["", "", "1"],
            **shape,
            "Ev Idx": ident,
        }
        out.append(_event("aten::addmm", "cpu_op", round(at, 3), 12.345, 100, args))
        launch = {"External id": ident, "cbid": 211, "correlation": ident}
        out.append(_event("cudaLaunchKernel", "cuda_runtime", round(at + 3, 3), 4.321, 100, launch))
        device = {"External id": ident, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": ident,
                  "registers per thread": 64, "shared memory": 49152, "grid": [16, 1, 1], "block": [256, 1, 1]}  # fmt: skip
        if collective:
            device |= {"Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "Group size": 8,
                       "dtype": "Float", "Process Group Name": "0", "stream": 20}  # fmt: skip
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)" if collective else (
            "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4>"
        )  # fmt: skip
        start = round(busy - (20 if collective else 0), 3)
        out.append(_event(name, "kernel", start, duration, 20 if collective else 7, device, pid=0))
        for ph, ts, tid, pid in (("s", at + 3, 100, 1), ("f", start, 7, 0)):
            out.append({"ph": ph, "id": ident, "pid": pid, "tid": tid, "ts": ts, "cat": "ac2g", "name": "ac2g"})
        at += 45
        busy = max(busy, at) + (0 if collective else duration)
    return out


def _event(
    name: str, cat: str, ts: float, dur: float, tid: int, args: dict[str, object], pid: int = 1
) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def write_trace(path: Path, mib: float) -> int:
    """Write a trace of about `mib` MiB; returns its number of events."""
    dice, count, number = random.Random(0), 0, 0
    head = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8}}
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        while file.tell() < mib * 2**20:
            events = events_of_step(number, dice)
            file.write((",\n" if number else "") + ",\n".join(json.dumps(e, indent=2) for e in events))
            count, number = count + len(events), number + 1
        file.write("\n]}\n")
    return count


def ours(path: Path) -> list[float]:
    """Compute (µs), the part of communication that overlaps (%), idle (µs), by this project."""
    from mtb_profile.analysis import analyze
    from mtb_profile.verdict import judge

    analysis = analyze([path], "steps-but-last")  # the window of HolisticTraceAnalysis
    judge(analysis)
    times = analysis.ranks[0].times
    return [times.compute / 1e3, times.overlapped / times.communication * 100, times.idle / 1e3]


def theirs(path: Path) -> list[float]:
    """The same figures by HolisticTraceAnalysis."""
    import logging

    logging.disable()
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(path.parent))
    row = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    overlap = analysis.get_comm_comp_overlap(visualize=False).iloc[0]
    return [float(row["compute_time(us)"]), float(overlap.iloc[1]), float(row["idle_time(us)"])]


def run_one(tool: str, path: Path) -> None:
    """In a process of its own: print seconds, peak MiB and the figures."""
    began, worked = time.perf_counter(), time.process_time()
    figures = {"mtb": ours, "hta": theirs}[tool](path)
    seconds, cpu = time.perf_counter() - began, time.process_time() - worked
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "peak_mib": peak, "figures": figures}))


def measure(tool: str, python: str, path: Path) -> dict[str, object]:
    """One run in a new process."""
    command = [python, __file__, "--one", tool, "--path", str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(path: Path, pythons: dict[str, str], rounds: int) -> None:
    """The tools in turn, `rounds` times."""
    rows: dict[str, list[dict[str, object]]] = {tool: [] for tool in pythons}
    for _ in range(rounds):
        for tool, python in pythons.items():
            rows[tool].append(measure(tool, python, path))
    for tool, found in rows.items():
        wall, cpu = ([float(str(r[name])) for r in found] for name in ("seconds", "cpu_seconds"))
        print(
            f"{tool}: wall median {median(wall):.2f} s, fastest {min(wall):.2f} s; CPU median {median(cpu):.2f} s; peak "
            f"{max(float(str(r['peak_mib'])) for r in found):.0f} MiB; figures {found[0]['figures']}"
        )
    if len(rows) == 2:
        for name in ("seconds", "cpu_seconds"):
            ratios = [float(str(b[name])) / float(str(a[name])) for a, b in zip(rows["mtb"], rows["hta"], strict=True)]
            print(f"hta / mtb, {name}: median {median(ratios):.1f}, from {min(ratios):.1f} to {max(ratios):.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, default=50)
    parser.add_argument("--hta-python", help="a Python that has HolisticTraceAnalysis")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--growth", action="store_true", help="also the peak memory at a quarter and four times the size"
    )
    parser.add_argument("--one", choices=("mtb", "hta"), help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        run_one(given.one, given.path)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank_0.json"
        count = write_trace(path, given.mib)
        print(f"trace of {path.stat().st_size / 2**20:.1f} MiB, {count} events")
        pythons = {"mtb": sys.executable} | ({"hta": given.hta_python} if given.hta_python else {})
        compare(path, pythons, given.rounds)
        for factor in (0.25, 4) if given.growth else ():
            write_trace(path, given.mib * factor)
            one = measure("mtb", sys.executable, path)
            print(f"mtb at {given.mib * factor:g} MiB: {one['seconds']:.2f} s, peak {one['peak_mib']:.0f} MiB")


if __name__ == "__main__":
    main()
