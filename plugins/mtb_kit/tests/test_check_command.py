"""``mtb plugins check``: what it prints, remembers and refuses."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import attrs
import kit_strategies
import pytest

from mtb_core import StrategyInfo
from mtb_core.cli import main
from mtb_core.registry.discovery import discover
from mtb_kit import command as check


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Nothing is remembered from elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_selection_is_no_certificate(capsys, tmp_path):
    """Checks that were chosen pass, the document says that it is not complete, and stdout holds nothing else."""
    output = tmp_path / "certificate.json"
    arguments = ["plugins", "check", "single", "--only", "parity.losses", "--only", "discovery", "--json"]
    assert main([*arguments, "--output", str(output)]) == 0
    streams = capsys.readouterr()
    document = json.loads(streams.out)
    assert document == json.loads(output.read_text())
    assert document["world_sizes"] == [1]
    assert (document["failed"], document["complete"], document["conformant"]) == (0, False, False)
    assert {row["name"] for row in document["checks"]} > {"parity.losses", "discovery.plan"}
    assert document["passed"] == len(document["checks"])
    assert "passed  parity.losses@1" in streams.err


def test_people_get_a_page(capsys):
    """Without --json the certificate is text; a selection is called incomplete."""
    assert main(["plugins", "check", "single", "--only", "discovery.plan", "--quiet"]) == 0
    streams = capsys.readouterr()
    assert "Conformance of strategy 'single' (mtb-core" in streams.out
    assert "verdict   INCOMPLETE" in streams.out
    assert streams.err == ""


def test_a_full_disk_costs_no_certificate(capsys):
    """What was found out is shown although the file cannot be written; the exit code is 3."""
    arguments = ["plugins", "check", "single", "--only", "discovery.plan", "--quiet", "--json", "--output", "/dev/full"]
    assert main(arguments) == 3
    streams = capsys.readouterr()
    assert json.loads(streams.out)["passed"] == 1
    assert "--output /dev/full could not be written: No space left" in streams.err


def test_the_list_runs_nothing(capsys):
    """--list names every chosen case with what must hold."""
    assert main(["plugins", "check", "single", "--only", "sync", "--list"]) == 0
    assert capsys.readouterr().out == ""  # nothing to synchronise on one rank
    assert main(["plugins", "check", "single", "--only", "parity.losses", "--list"]) == 0
    assert capsys.readouterr().out.startswith("parity.losses@1  ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["singel"], "Did you mean 'single'?"),
        (["single", "--only", "parity.lossse"], "Did you mean 'parity.losses'?"),
        (["single", "--nproc", "2"], "single"),
        (["single", "--nproc", "0"], "at least 1"),
        (["single", "--debug-rank", "7"], "there are ranks 0 to 2"),
        (["single", "--debug-rank", "0"], "needs a terminal"),
        (["single", "--strategy-opt", "x"], "KEY=VALUE"),
        (["single", "--output", "/"], "--output / cannot be written: it is a folder"),
        (["single", "--output", "/dev/null/x.json"], "cannot be written"),
        (["single", "--strategy-opt", "x=1"], "no options"),
    ],
)
def test_what_cannot_be_checked_is_refused(arguments, text, capsys, monkeypatch):
    """Wrong names, numbers and options give 2 before any rank starts."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["plugins", "check", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_debugger_opens_in_a_rank():
    """On a terminal, rank 0 stops before prepare; `c` lets it go on, and the run ends."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "mtb_core", "plugins", "check", "single", "--only", "parity.initial_weights"]
    process = subprocess.Popen([*command, "--debug-rank", "0"], stdin=child, stdout=child, stderr=child)
    os.close(child)
    seen = b""
    deadline = time.monotonic() + 240
    asked = 0
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([parent], [], [], 0.2)[0]:
            try:
                seen += os.read(parent, 65536)
            except OSError:
                break
        if seen.count(b"(Pdb)") > asked:
            asked += 1
            os.write(parent, b"c\n")
    assert process.wait(timeout=240) == 0, seen
    os.close(parent)
    assert b"about to call the strategy's prepare(job)" in seen
    assert asked >= 1


class EndsTheLauncher(kit_strategies.Right):
    """Its first rank signals the process that launched it, as a user does who ends the command."""

    number = signal.SIGTERM

    def prepare(self, job):
        if job.ctx.rank == 0:
            os.kill(os.getppid(), self.number)
        return super().prepare(job)


class Interrupts(EndsTheLauncher):
    """The same with what Ctrl-C sends."""

    number = signal.SIGINT


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [(EndsTheLauncher, 4, "mtb: Stopped by SIGTERM"), (Interrupts, 130, "mtb: interrupted.")],
    ids=["SIGTERM", "SIGINT"],
)
def test_a_signal_ends_the_command(kind, code, words, capsys, monkeypatch, tmp_path):
    """It is no failure of the strategy: no later check, no certificate, and nothing that is remembered is replaced."""
    info = StrategyInfo("ends", "Ends", f"{__name__}:{kind.__name__}", kit_strategies.plan)
    found = attrs.evolve(discover(), strategies={**discover().strategies, info.name: info})
    monkeypatch.setattr(check, "discover", lambda: found)
    memory = check._memory(info.name, {})
    check._remember(memory, ["parity.data@2"])
    output = tmp_path / "certificate.json"
    chosen = ["--nproc", "2", "--only", "parity.losses", "--only", "parity.data", "--output", str(output)]
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    assert main(["plugins", "check", info.name, *chosen]) == code
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.splitlines()[-1].startswith(words)
    assert "parity." not in streams.err
    assert not output.exists()
    assert check._remembered(memory) == ["parity.data@2"]
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
