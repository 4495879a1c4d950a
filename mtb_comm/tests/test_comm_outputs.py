"""Files for results: no failed one costs the measurement."""

from __future__ import annotations

import json

from click.testing import CliRunner

from mtb_comm.command import comm
from mtb_comm.outputs import Output, write_all
from mtb_core.cli import main

MOE = ["--tokens-per-rank", "8", "--hidden-size", "4", "--num-experts", "2", "--iters", "1", "--warmup", "0"]
MOE += ["--device", "cpu", "--nproc", "1", "--quiet", "--json"]
COMM = ["all_reduce", "--sizes", "64", "-n", "2", "-w", "0", "--device", "cpu", "--nproc", "1", "--quiet", "--json"]


def test_each_file_on_its_own(tmp_path, capsys):
    """One that fails is named in one line; the next one is written all the same."""

    def full():
        raise OSError(28, "No space left on device")

    good = tmp_path / "good"
    assert not write_all([Output("plot", "bad", full), Output("output", good, lambda: good.write_text("yes"))])
    assert good.read_text() == "yes"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mtb: error: --plot bad could not be written: No space left on device.")
    assert write_all([])


def test_comm_shows_what_it_cannot_write(tmp_path):
    """The document is on stdout, the other file is there, and the exit code is that of a failed run."""
    calibration = tmp_path / "c.json"
    done = CliRunner().invoke(
        comm, [*COMM, "--output", "/dev/full", "--calibration", str(calibration)], standalone_mode=False
    )
    assert done.return_value == 3
    assert json.loads(done.stdout)["results"][0]["status"] == "ok"
    assert "--output /dev/full could not be written" in done.stderr
    assert json.loads(calibration.read_text())["kind"] == "communication_calibration"


def test_moe_shows_what_it_cannot_write(tmp_path, capfd):
    """The same of ``mtb moe``: a plot that fails costs neither the document nor its file."""
    output, full = tmp_path / "new" / "x.json", tmp_path / "full.png"
    full.symlink_to("/dev/full")
    words = ["--capacity-factors", "1", "--skews", "0", "--output", str(output), "--plot", str(full)]
    assert main(["moe", "sweep", *MOE, *words]) == 3
    out, err = capfd.readouterr()
    assert json.loads(out) == json.loads(output.read_text())
    assert f"--plot {full} could not be written" in err
    assert len(err.splitlines()) == 1
