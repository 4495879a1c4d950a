"""The plugin that docs/plugins.md builds works as the page says, and passes the tests that docs/conformance.md gives it."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from mtb_kit import StrategyConformance
from mtb_kit.checking import cases, run_case
from mtb_kit.lab import Lab

PAGE = Path(__file__).parent.parent / "docs" / "plugins.md"
TESTS_PAGE = PAGE.with_name("conformance.md")
_WHOLE = re.MULTILINE | re.DOTALL
_FILE = re.compile(r"^`(mtb_\w+/\S+)`\n\n```\w+\n(.*?)^```", _WHOLE)
SMALL = "--steps 3 --warmup-steps 1 --d-model 16 --n-heads 2 --n-layers 1 --seq-length 16 --global-batch-size 8"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that holds the page's packages, with the metadata that pip would make of their pyproject.toml."""
    for name, text in _FILE.findall(PAGE.read_text(encoding="utf-8")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    project = tomllib.loads((tmp_path / "mtb_sumall" / "pyproject.toml").read_text())["project"]
    install(tmp_path, project["name"], project["entry-points"]["mtb"])
    install(tmp_path, "mtb-twins", {"twins": "mtb_twins.plugin"})
    return tmp_path


def install(site: Path, name: str, points: dict[str, str]) -> None:
    """The metadata that pip makes of a project."""
    info = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[mtb]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()))


def mtb(site: Path, *arguments: str) -> str:
    """Standard output of `mtb`, which must succeed."""
    return python(site, "mtb_core", *arguments, timeout_s=240)


def python(site: Path, module: str, *arguments: str, timeout_s: float) -> str:
    """Standard output of a command that must succeed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(site),
        "OMP_NUM_THREADS": "1",
        "MTB_STRICT_PLUGINS": "1",
        "XDG_CACHE_HOME": str(site),
    }
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=site, env=environment, capture_output=True, text=True, check=False, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_plugin_of_the_page(site: Path) -> None:
    """It is shown, trains like `single` on the same global batch, and its observers leave their files."""
    shown = mtb(site, "plugins", "show", "sumall")
    assert "flatten (bool, default true)" in shown

    common = [*SMALL.split(), "--quiet", "--json"]
    alone = json.loads(mtb(site, "train", *common, "--run-dir", "alone", "--sink", "jsonl"))
    options = ["--strategy", "sumall", "--nproc", "2", "--grad-accum-steps", "2", "--strategy-opt", "flatten=false"]
    both = json.loads(mtb(site, "train", *common, *options, "--run-dir", "both", "--sink", "slowest"))
    assert both["world_size"] == 2
    assert both["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert (site / "both" / "slowest.txt").read_text().startswith("step ")
    enough = ["--plugin-opt", "enough.below=100", "--run-dir", "enough"]
    ended = json.loads(mtb(site, "train", *common, *enough))
    assert (ended["exit_reason"], ended["global_step"]) == ("done", 2)
    assert ended["stop_reason"].endswith("is below 100")
    assert ended["plugin_results"]["enough"]["lowest"] < 100
    steps, micro_batches = 4, 2
    for rank in range(2):
        assert (site / "both" / f"backward_{rank}.txt").read_text() == str(steps * micro_batches)


def test_the_plugin_that_builds_on_another(site: Path) -> None:
    """On twice the ranks it trains what `ddp` trains, with plugin `ddp` left out too: its package is still there."""
    common = [*SMALL.split(), "--quiet", "--json", "--sink", "jsonl"]
    once = json.loads(mtb(site, "train", *common, "--strategy", "ddp", "--nproc", "2", "--run-dir", "once"))
    options = ["--strategy", "twins", "--nproc", "4", "--no-plugin", "ddp", "--run-dir", "twice"]
    twice = json.loads(mtb(site, "train", *common, *options))
    assert (twice["loss"], twice["grad_norm"]) == (once["loss"], once["grad_norm"])


@pytest.mark.slow
def test_the_plugin_of_the_page_conforms(site: Path) -> None:
    """The kit has nothing to say against it; here of parity, the sync context and models, on two ranks."""
    chosen = [word for group in ("parity", "sync", "models", "discovery") for word in ("--only", group)]
    document = json.loads(mtb(site, "plugins", "check", "sumall", "--nproc", "2", "--quiet", "--json", *chosen))
    assert document["failed"] == 0
    assert document["passed"] > 30


def block_of_tests() -> str:
    """The class with which docs/conformance.md has the plugin tested."""
    (block,) = re.findall(r"^```python\n(from mtb_kit.*?)^```", TESTS_PAGE.read_text(encoding="utf-8"), _WHOLE)
    return block


def test_the_tests_of_the_plugin_declare_what_it_plans(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two pages agree, at every number of ranks."""
    monkeypatch.syspath_prepend(site)
    (info,) = importlib.import_module("mtb_sumall.plugin").mtb_strategies()
    names: dict[str, Any] = {}
    exec(compile(block_of_tests(), TESTS_PAGE, "exec"), names)
    tests: type[StrategyConformance] = names["TestSumAll"]
    lab = Lab(info, tests.options, capabilities=tests.capabilities)
    for case in cases(lab.world_sizes, ["discovery.plan", "discovery.capabilities"]):
        outcome = run_case(lab, case)
        assert outcome.status == "passed", outcome.text
    for name in [name for name in sys.modules if name.partition(".")[0] == "mtb_sumall"]:
        del sys.modules[name]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tests_of_the_plugin_pass(site: Path) -> None:
    """Each check at each number of ranks becomes a test of the class, and nothing fails."""
    (site / "test_sumall.py").write_text(block_of_tests())
    told = python(site, "pytest", "-q", "-p", "no:cacheprovider", "test_sumall.py", timeout_s=1700)
    assert re.search(r"^\d+ passed", told, re.MULTILINE), told


@pytest.mark.slow
def test_the_launcher_of_the_page(site: Path) -> None:
    """It starts ranks that train to the bits of the launcher `local`."""
    common = [*SMALL.split(), "--quiet", "--json"]
    losses = [
        json.loads(
            mtb(site, "train", *common, "--strategy", "ddp", "--nproc", "2", "--run-dir", name, "--launcher", name)
        )["loss"]
        for name in ("pool", "local")
    ]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_the_checkpoint_format_of_the_page(site: Path) -> None:
    """It saves what verifies, is resumed from to the bit, and says what to install where it is missing."""
    common = [*SMALL.split()[4:], "--warmup-steps", "0", "--quiet", "--json"]
    saving = ["--checkpoint-format", "raw", "--save-every", "2", "--checkpoint-dir"]
    whole = json.loads(mtb(site, "train", *common, *saving, "whole", "--until-step", "4"))
    mtb(site, "train", *common, *saving, "cut", "--until-step", "2")
    again = json.loads(mtb(site, "train", *common, *saving, "cut", "--until-step", "4", "--resume", "auto"))
    assert (again["loss"], again["runtime"]["resume_deterministic"]) == (whole["loss"], True)
    assert "all as they were published" in mtb(site, "checkpoint", "verify", "cut/step_00000004")
    mtb(site, "checkpoint", "verify", "cut/step_00000004", "whole/step_00000004")
    environment = {**os.environ, "MTB_DISABLE_PLUGINS": "mtb-sumall", "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "mtb_core", "checkpoint", "show", "cut/step_00000004"]
    done = subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 2
    told = (
        "It comes with the plugin 'sumall' (mtb-sumall 0.1.0), which is disabled: switched off by MTB_DISABLE_PLUGINS"
    )
    assert told in " ".join(done.stderr.split())
