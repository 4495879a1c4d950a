"""What ``--model`` can be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from mtb_core import ConfigError, ModelInfo, TrainConfig
from mtb_core.model.services import build_module
from mtb_core.model.spec import check_model, load_model

NAMED = {"gpt": ModelInfo("gpt", "", "mtb_core.model.gpt:gpt_spec")}

GOOD = """
from torch import nn
from mtb_core import ModelSpec

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.few = nn.ModuleList(nn.Linear(2, 2) for _ in range(1))
        self.body = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(width, width) for _ in range(3))})

def net(): return Net()
def sized(config): return Net(config.d_model)
def keyword(width=6, *, config): return Net(config.d_model)
def renamed(cfg): return Net(cfg.d_model)
def spec(config): return ModelSpec(build=Net, blocks=("few.0",), vocab_size=config.vocab_size)
def wrong(): return 3
def greedy(a, b): return Net()
def fails(): raise KeyError("no such thing")
def flat(): return nn.Linear(2, 2)
value = 3
"""


@pytest.fixture
def load(tmp_path):
    def load(factory, text=GOOD, name="models.py", **settings):
        (tmp_path / name).write_text(text)
        return load_model(TrainConfig(model=f"{tmp_path / name}:{factory}", **settings), named=NAMED)

    return load


def test_named_model():
    """A name that is provided gives that provider's spec."""
    spec = load_model(TrainConfig(model="gpt", vocab_size=16, d_model=8, n_heads=2), named=NAMED)
    assert spec.blocks == ("blocks.0", "blocks.1")


@pytest.mark.parametrize("factory", ["net", "Net", "sized", "renamed", "keyword"])
def test_factories_of_modules(load, factory):
    """Functions and classes, with and without the configuration, give a spec whose blocks are the longest list's."""
    spec = load(factory, d_model=8, n_heads=2)
    assert spec.init is None
    assert spec.blocks == ("body.layers.0", "body.layers.1", "body.layers.2")
    width = 8 if factory in ("sized", "renamed", "keyword") else 4
    assert spec.build().get_submodule(spec.blocks[2]).in_features == width


def test_factory_of_a_spec(load):
    """A factory may describe its model fully."""
    spec = load("spec", vocab_size=11)
    assert (spec.blocks, spec.vocab_size) == (("few.0",), 11)


def test_each_build_is_a_new_module_under_the_seed(load):
    """Trials share nothing, and start alike."""
    spec = load("net")
    first, second = build_module(spec, 1, "cpu"), build_module(spec, 1, "cpu")
    assert first is not second
    assert torch.equal(first.few[0].weight, second.few[0].weight)


def test_loading_leaves_the_random_state_alone(load):
    """Calling the factory to see what it returns consumes none of the run's random numbers."""
    before = torch.get_rng_state()
    load("net")
    assert torch.equal(torch.get_rng_state(), before)


def test_modules_beside_the_file_can_be_imported(load, tmp_path, monkeypatch):
    """A model may be spread over several files of a folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mtb_test_parts.py").write_text("from torch import nn\nclass Part(nn.Module): pass\n")
    spec = load("make", "from mtb_test_parts import Part\ndef make(): return Part()\n", name="main.py")
    assert type(spec.build()).__name__ == "Part"


def test_another_process_loads_it_again(load, tmp_path):
    """What a worker needs is the setting's text; nothing is kept from the parent, and pickle finds the classes."""
    load("net")
    code = f"""
import pickle
from mtb_core import TrainConfig
from mtb_core.model.spec import load_model
spec = load_model(TrainConfig(model={str(tmp_path / "models.py")!r} + ":net"), named={{}})
print(type(pickle.loads(pickle.dumps(spec.build()))).__name__)
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.stdout == "Net\n", done.stderr


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("gtp", ["no model 'gtp'", "Did you mean 'gpt'?", "FILE.py:FACTORY"]),
        ("missing.py:net", ["missing.py' does not exist"]),
        ("missing.py", ["missing.py' does not exist"]),
        ("package.module:net", ["no model 'package.module:net'"]),
    ],
)
def test_unknown_models(model, words):
    """A name or file that is not there is refused without importing anything, with what would be valid."""
    with pytest.raises(ConfigError) as error:
        check_model(model, named=NAMED)
    assert all(word in str(error.value) for word in words), error.value


def test_a_file_needs_a_factory(tmp_path):
    """A file alone is refused with the way to write it."""
    (tmp_path / "m.py").touch()
    for model in (f"{tmp_path}/m.py", f"{tmp_path}/m.py:", f"{tmp_path}/m.py:a b"):
        with pytest.raises(ConfigError, match=r"FILE\.py:FACTORY"):
            check_model(model, named=NAMED)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("nets", ["has no 'nets'", "Did you mean 'net'?", "Net, net"]),
        ("wrong", ["returned int", "torch.nn.Module"]),
        ("greedy", ["a, b", "takes none"]),
        ("fails", ["the factory failed", "KeyError", "no such thing"]),
        ("value", ["is int", "callable"]),
    ],
)
def test_bad_factories(load, factory, words):
    """Each way of being wrong has its own message."""
    with pytest.raises(ConfigError) as error:
        load(factory)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("text", ["import mtb_no_such_module", "raise SystemExit(3)", "def broken(:", "1/0"])
def test_a_file_that_cannot_be_imported(load, text):
    """Whatever stops the import is given as the cause, and a repaired file can be loaded."""
    with pytest.raises(ConfigError, match=r"importing .*models.py' failed: \w+"):
        load("net", text)
    assert load("net").blocks


def test_activation_checkpointing_needs_blocks(load):
    """A model without blocks works, except where blocks are needed: refused by the option's name."""
    assert load("flat").blocks == ()
    with pytest.raises(ConfigError, match=r"--activation-checkpointing.*ModuleList"):
        load("flat", activation_checkpointing=True)


def test_list_at_the_root(load):
    """A module that is itself the list has plainly numbered blocks."""
    spec = load("make", "from torch import nn\ndef make(): return nn.ModuleList([nn.Linear(1, 1)] * 2)\n", name="l.py")
    assert spec.blocks == ("0", "1")
    assert isinstance(spec.build(), nn.ModuleList)


def test_importing_spec_imports_no_torch():
    """The parent can check a model's name without torch."""
    code = "import sys, mtb_core.model.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_documented_example_is_a_model(load):
    """The example in ``docs/model.md`` loads, has blocks, and gives logits."""
    page = Path(__file__).parents[2] / "docs" / "model.md"
    if not page.exists():
        pytest.skip("the documentation is not beside the package")
    example = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    spec = load("net", example, name="documented.py", vocab_size=7, d_model=4)
    assert len(spec.blocks) == 4
    assert spec.build()(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 7)
