"""Sweep files and recipes: the right cells in a random order, and what is wrong in a file is said before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from mtb_core import ConfigError
from mtb_report.sweep.command import sweep
from mtb_report.sweep.plan import SweepPlan, read_plan
from mtb_report.sweep.recipes import FOLDER, recipes, sweep_file

TINY = "[base]\nsteps = 2\nwarmup_steps = 0\nd_model = 8\nn_heads = 1\nn_layers = 1\nseq_length = 8\nbatch_size = 2\n"


def plan(tmp_path: Path, text: str) -> SweepPlan:
    file = tmp_path / "s.toml"
    file.write_text(text)
    return read_plan(file)


@pytest.mark.parametrize("size", ["small", "full"])
@pytest.mark.parametrize("recipe", recipes())
def test_recipes_are_valid(recipe: str, size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every recipe has both sizes, valid settings in all cells, and can be shown by its name from anywhere."""
    monkeypatch.chdir(tmp_path)
    plan = read_plan(sweep_file(recipe), size)
    assert plan.name == recipe
    done = CliRunner().invoke(sweep, [recipe, "--size", size, "--dry-run"], standalone_mode=False)
    assert done.exception is None
    assert f"{len(plan.cells)} cells" in done.stdout


def test_all_recipes_are_there() -> None:
    """The named ones, each listed with what it is about; where they are is told."""
    names = [
        "bucket-size", "determinism", "gradient-sync", "largest-micro-batch", "memory-pressure", "micro-batch",
        "precision", "sharding-frontier", "stability", "strong-scaling", "weak-scaling",
    ]  # fmt: skip
    assert list(recipes()) == names
    told = CliRunner().invoke(sweep, ["--list-recipes"]).stdout
    assert [line.split()[0] for line in told.splitlines()[: len(names)]] == names
    assert str(FOLDER) in told


def test_a_file_of_a_recipes_name_is_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is there is meant; a folder of a recipe's name is not in the way."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precision").mkdir()
    (tmp_path / "stability").touch()
    assert sweep_file("precision") == FOLDER / "precision.toml"
    assert sweep_file("stability") == Path("stability")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("recipes/strong-scaling.toml", "mtb sweep strong-scaling."),
        ("micro-bach", "Did you mean 'micro-batch'"),
        ("missing.toml", "--list-recipes"),
        (".", "is a folder"),
    ],
)
def test_a_file_that_is_not_there_leads_to_the_recipes(given: str, words: str) -> None:
    """What is missing is named, with the recipe that may be meant and how to see all of them."""
    with pytest.raises(ConfigError, match=given.replace(".", r"\.")) as info:
        sweep_file(given)
    assert words in str(info.value)


def test_a_matrix_is_a_product(tmp_path: Path) -> None:
    """Axes are settings, options of the strategy, or sets of settings; [[exclude]] takes combinations out."""
    got = plan(
        tmp_path,
        f"""{TINY}
[sets.kind.a]
strategy = "ddp"
strategy_opt = {{ static_graph = true }}
[sets.kind.b]
strategy = "fsdp"
[matrix]
nproc = [1, 2]
kind = ["a", "b"]
"strategy_opt.x" = [1, 5]
[[exclude]]
kind = "b"
nproc = 2
""",
    )
    assert len(got.cells) == 6
    first = got.cells[0]
    assert first.labels == {"nproc": 1, "kind": "a", "strategy_opt.x": 1}
    assert first.settings["strategy_opt"] == {"static_graph": True, "x": 1}
    assert first.settings["strategy"] == "ddp"
    assert len({cell.id for cell in got.cells}) == 6


def test_the_order_is_random_and_the_same_again(tmp_path: Path) -> None:
    """By the seed alone."""
    text = TINY + "[matrix]\nseed = [0, 1, 2, 3, 4, 5, 6, 7]\n"
    orders = [[c.id for c in plan(tmp_path, f"seed = {s}\n{text}").in_order()] for s in (1, 1, 2)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])
    assert orders[0] != [c.id for c in plan(tmp_path, text).cells]


def test_other_settings_are_other_cells(tmp_path: Path) -> None:
    """A cell's folder changes with any of its settings, so that an old result is never taken for it."""
    text = TINY + "[matrix]\nseed = [0]\n"
    assert plan(tmp_path, text).cells[0].id != plan(tmp_path, text.replace("steps = 2", "steps = 3")).cells[0].id


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = [", "TOML"),
        (TINY, "no cell"),
        ("matrx = 1", "matrix"),
        ("[matrix]\nseed = []", "not empty"),
        ("[matrix]\nseed = 1", "list"),
        ("[matrix]\nsteps = ['a']", "cell steps=a"),
        ("[matrix]\nstepps = [1]", "steps"),
        ("scaling = 'strong'\n[matrix]\nsteps = [1]", "nproc"),
        ("scaling = 'odd'\n[matrix]\nsteps = [1]", "strong, weak"),
        ("largest = 'x'\n[matrix]\nsteps = [1]", "no axis"),
        ("[matrix]\nrun_dir = ['x']", "decides"),
        ("timeout_s = 0\n[matrix]\nsteps = [1]", "above 0"),
        ("[sets.k.a]\n[matrix]\nk = ['b']", "sets.k.b"),
        ("[sizes.small.bse]\n[matrix]\nsteps = [1]", "bse"),
        ("[matrix]\nseed = [2020-01-01]", "each value must be"),
        ("[matrix]\nseed = [nan]", "each value must be"),
        ("[matrix]\nk = [['a']]\n[sets.k.a]\nsteps = 1", "each value must be"),
        ("[matrix]\nk = ['a']\n[sets.k]\na = 3", r"\[sets.k.a\] is 3"),
        ("[matrix]\nk = ['a']\n[sets]\nk = 3", r"\[sets.k\] is 3"),
        ("[matrix]\nsteps = [1]\n[sizes]\nsmall = 3", r"\[sizes.small\] is 3"),
        ("[matrix]\nsteps = [1]\n[sizes.small]\nbase = 3", r"\[sizes.small.base\] is 3"),
        ("[base]\nstrategy_opt = 3\n[matrix]\nsteps = [1]", "strategy_opt is 3"),
        ("exclude = [1]\n[matrix]\nsteps = [1]", r"\[\[exclude\]\] is 1"),
        ("name = 'a/../../b'\n[matrix]\nsteps = [1]", "names a folder"),
        ("name = '..'\n[matrix]\nsteps = [1]", "names a folder"),
        ("[sizes.'a/b'.base]\n[matrix]\nsteps = [1]", "names a folder"),
        ("timeout_s = nan\n[matrix]\nsteps = [1]", "finite"),
        ("timeout_s = inf\n[matrix]\nsteps = [1]", "finite"),
        ("[[exclude]]\nstep = 1\n[matrix]\nsteps = [1, 2]", "no axis"),
        ("[[exclude]]\nsteps = 3\n[matrix]\nsteps = [1, 2]", "values of that axis"),
        ("[error_against]\nprecision = 'fp23'\n[matrix]\nprecision = ['fp32', 'bf16']", "values of that axis"),
        ("largest = 'steps'\n[matrix]\nsteps = [4, 2]", "small to large"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path: Path, text: str, words: str) -> None:
    """Before anything runs, with what would be valid."""
    with pytest.raises(ConfigError, match=words):
        plan(tmp_path, text)
