"""The figures against a wire whose rate is known: two network namespaces, joined by a veth pair that tc shapes.

This test sets the physical rate that is measured, so it may assert on times. It needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

SPACES = ("mtb-wire-a", "mtb-wire-b")
LINKS = ("mtbwirea", "mtbwireb")
ADDRESSES = ("10.213.77.1", "10.213.77.2")
RATES = (100, 200, 500)  # Mbit/s
LOOP = Path(__file__).parents[2] / "benchmarks" / "comm_loop.py"
#: Gloo fills the wire with these; with the others it does not, however well it is measured.
FULL = ("all_reduce", "broadcast")
OTHERS = ("all_gather", "reduce_scatter", "all_to_all", "reduce", "gather", "scatter", "send_recv")


def run(*words):
    subprocess.run(words, check=True, capture_output=True, text=True)


def missing():
    """Reason why the test cannot run here; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if lacking:
        return f"{' and '.join(lacking)} not found (Debian: iproute2)"
    try:
        with wire(100):
            pass
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)} failed: {error.stderr.strip()}"
    return None


def remove():
    for space in SPACES:  # the links end with them
        with suppress(subprocess.CalledProcessError):
            run("ip", "netns", "delete", space)


@contextmanager
def wire(rate):
    """Two namespaces with a link that carries `rate` Mbit/s each way."""
    remove()
    try:
        for space in SPACES:
            run("ip", "netns", "add", space)
        run(
            "ip",
            "link",
            "add",
            LINKS[0],
            "netns",
            SPACES[0],
            "type",
            "veth",
            "peer",
            "name",
            LINKS[1],
            "netns",
            SPACES[1],
        )
        for space, link, address in zip(SPACES, LINKS, ADDRESSES, strict=True):
            run("ip", "-n", space, "address", "add", f"{address}/24", "dev", link)
            run("ip", "-n", space, "link", "set", "lo", "up")
            run("ip", "-n", space, "link", "set", link, "up")
            # Two milliseconds' worth of burst, so that a busy machine's late timers cost no rate; a queue long enough
            # that TCP loses nothing.
            burst = f"{max(64, rate // 4)}kb"
            shape = ("tbf", "rate", f"{rate}mbit", "burst", burst, "latency", "400ms")
            run("tc", "-n", space, "qdisc", "add", "dev", link, "root", *shape)
        yield
    finally:
        remove()


def on_both_ends(*words, timeout=240):
    """Run a program with one rank in each namespace, under torchrun; both must succeed."""
    processes = []
    try:
        for index, (space, link, address) in enumerate(zip(SPACES, LINKS, ADDRESSES, strict=True)):
            command = [
                "ip", "netns", "exec", space, sys.executable, "-m", "torch.distributed.run",
                "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(index), "--rdzv-backend", "c10d",
                "--rdzv-endpoint", f"{ADDRESSES[0]}:29571", "--rdzv-id", "wire",
                "--rdzv-conf", f"is_host={str(index == 0).lower()}", "--local-addr", address, *words,
            ]  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": link}
            processes.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
            )
        said = [process.communicate(timeout=timeout)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module", autouse=True)
def _possible():
    reason = missing()
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.parametrize("rate", RATES)
def test_busbw_is_the_rate(tmp_path, rate):
    """The busbw of large messages and the fitted beta are within 12 % of the rate, for all_reduce and broadcast."""
    output = tmp_path / "wire.json"
    with wire(rate):
        on_both_ends(
            "-m", "mtb_core", "comm", *FULL, "--device", "cpu", "--sizes", "64K,256K,1M,4M", "-n", "8", "-w", "2",
            "--output", str(output),
        )  # fmt: skip
    document = json.loads(output.read_text())
    assert {row["wrong"] for row in document["results"]} == {0}
    found = {(row["operation"], row["size_bytes"]): row["busbw_gb_per_sec"] * 8e3 / rate for row in document["results"]}
    fitted = {fit["operation"]: fit["beta_busbw_gb_per_sec"] * 8e3 / rate for fit in document["fits"]}
    print(f"{rate} Mbit/s: busbw / rate {found}, fitted {fitted}")
    for operation in FULL:
        assert found[operation, 4 * 2**20] == pytest.approx(1, abs=0.12)
        assert fitted[operation] == pytest.approx(1, abs=0.12)


@pytest.mark.slow
def test_times_and_bytes_of_all(tmp_path):
    """Times are those of a bare loop on the same wire, within 3 %, and wire_bytes those that the interfaces counted."""
    output = tmp_path / "loop.json"
    with wire(200):
        on_both_ends(
            str(LOOP), *FULL, *OTHERS, "--sizes", "2M", "--rounds", "7", "--bytes", "1", "--min-iters", "4",
            "--interface", ",".join(LINKS), "--json", str(output),
        )  # fmt: skip
    rows = {row["operation"]: row for row in json.loads(output.read_text())}
    for operation, row in rows.items():
        print(
            f"{operation}: ratio {row['ratio']:.4f}, counted / wire_bytes {row['sent_bytes'] / row['wire_bytes']:.4f}"
        )
    assert set(rows) == {*FULL, *OTHERS}
    for operation, row in rows.items():
        assert row["sent_bytes"] / row["wire_bytes"] == pytest.approx(1, abs=0.10), operation
        assert row["ratio"] == pytest.approx(1, abs=0.03), operation
