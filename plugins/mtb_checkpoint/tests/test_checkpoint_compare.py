"""Tests of mtb_checkpoint.compare."""

import json

import numpy as np
import pytest
import torch

from mtb_checkpoint import compare_checkpoints
from mtb_core.api.values import Piece, State
from mtb_core.ckpt.dtypes import as_numbers, as_ordered
from mtb_core.ckpt.manager import CheckpointManager
from mtb_core.ckpt.opened import open_checkpoint
from mtb_core.tests.ckpt_ranks import Training, run_ranks, saved

SECTIONS = {"scheduler": {"completed_steps": 1}, "train_state": {"samples_seen": 4}, "data": {"samples_seen": 4}}


def write(folder, tensors, sections=SECTIONS, rng=None, **kwargs):
    manager = CheckpointManager(folder, asynchronous=False)
    manager.preflight()
    state = State({k: [Piece(t, tuple(t.shape), (0,) * t.dim())] for k, t in tensors.items()})
    manager.save(1, state, sections=sections, rng={"torch_cpu": "00"} if rng is None else rng, **kwargs)
    return open_checkpoint(folder / "step_00000001")


def strict(result):
    """The result, as strict JSON has it."""
    return json.loads(json.dumps(result, allow_nan=False))


@pytest.fixture
def pair(tmp_path):
    """``pair(left, right, …)`` of tensors: the result of comparing them."""

    def compare(left, right, tolerance=None, **kwargs):
        one = write(tmp_path / "l", left)
        return strict(compare_checkpoints(one, write(tmp_path / "r", right, **kwargs), tolerance))

    return compare


def test_equal(pair):
    """Equal states match, and their digests are equal."""
    tensors = {"model/w": torch.randn(3, 4), "optim/w/exp_avg": torch.randn(3, 4)}
    result = pair(tensors, tensors)
    assert (result["exact_match"], result["matches"], result["reasons"]) == (True, True, [])
    assert result["digests"]["left"] == result["digests"]["right"]
    assert (result["left_deterministic"], result["right_deterministic"]) == (True, True)
    assert result["digests"]["left"].keys() == {"model", "optimizer", "scheduler", "train_state", "data", "rng"}


def test_one_element(pair):
    """The first difference is named: tensor, index, both values, and the largest differences."""
    left = torch.ones(3, 4)
    right = left.clone()
    right[1, 2] = 1 + 2**-23
    right[2, 0] = 1.5
    result = pair({"model/a": left, "model/b": left}, {"model/a": left, "model/b": right})
    assert not result["exact_match"]
    assert result["digests"]["left"]["model"] != result["digests"]["right"]["model"]
    section = result["sections"]["model"]
    assert (section["exact"], section["compared"], section["differing"]) == (False, 2, 1)
    first = section["first_difference"]
    assert (first["name"], first["index"], first["left"]) == ("model/b", [1, 2], 1.0)
    assert first["right"] == pytest.approx(1.0000001, abs=1e-7)
    assert (first["max_abs"], first["max_rel"], first["max_ulps"]) == (0.5, 0.5 / 1.5, 1 << 22)
    assert first["elements_differing"] == 2


def test_signed_zero_and_nan(pair):
    """Bits count: -0.0 is not 0.0 (0 ULPs apart); a NaN equals itself and differs visibly from a number."""
    result = pair(
        {"model/a": torch.tensor([0.0, float("nan")]), "model/b": torch.tensor([float("nan")])},
        {"model/a": torch.tensor([-0.0, float("nan")]), "model/b": torch.tensor([1.0])},
    )
    section = result["sections"]["model"]
    assert section["differing"] == 2
    assert section["first_difference"]["max_ulps"] == 0
    assert not section["first_difference"]["nonfinite"]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64]
)
def test_dtypes(pair, dtype):
    """Every dtype is compared; ULPs are given where they mean something."""
    right = torch.zeros(4).to(dtype)
    right[3] = 1
    first = pair({"model/w": torch.zeros(4).to(dtype)}, {"model/w": right})["sections"]["model"]["first_difference"]
    assert (first["index"], first["max_abs"]) == ([3], 1.0)
    assert (first["max_ulps"] is not None) == dtype.is_floating_point


def test_kinds_and_missing(pair):
    """Another shape, another dtype and a missing tensor are differences with a reason."""
    result = pair(
        {"model/a": torch.ones(2), "model/b": torch.ones(2), "model/c": torch.ones(2)},
        {"model/a": torch.ones(3), "model/b": torch.ones(2).double()},
    )
    assert result["sections"]["model"]["differing"] == 3
    assert "model/a is float32 of shape [2] on the left and float32 of shape [3] on the right" in result["reasons"][0]


def test_tolerance(pair):
    """Within the tolerance times a tensor's largest value two states match, without being exact."""
    left = torch.tensor([100.0, 1.0])
    right = left + torch.tensor([0.0, 0.05])
    result = pair({"model/w": left}, {"model/w": right}, 1e-3)
    assert (result["exact_match"], result["matches"]) == (False, True)


def test_beyond_tolerance(pair):
    """Beyond it they do not; nor do values that are not finite."""
    tensors = {"model/w": torch.tensor([100.0, 1.0])}
    assert not pair(tensors, {"model/w": torch.tensor([100.0, 1.2])}, 1e-3)["matches"]


def test_nan_is_never_within_tolerance(pair):
    """A NaN on one side is beyond every tolerance."""
    assert not pair({"model/w": torch.ones(2)}, {"model/w": torch.tensor([1.0, float("nan")])}, 1e9)["matches"]


@pytest.mark.parametrize("section", SECTIONS)
def test_values(pair, section):
    """A differing value of a section is named; no tolerance covers it."""
    tensors = {"model/w": torch.ones(1)}
    other = {**SECTIONS, section: {k: v + 1 for k, v in SECTIONS[section].items()}}
    result = pair(tensors, tensors, 1.0, sections=other)
    assert not result["matches"]
    assert result["sections"][section]["first_difference"]["name"] == next(iter(SECTIONS[section]))


def test_random_state(pair):
    """Another random state is a difference."""
    tensors = {"model/w": torch.ones(1)}
    result = pair(tensors, tensors, rng={"torch_cpu": "01"})
    assert result["reasons"] == ["rng: rank_00000.torch_cpu differs"]


@pytest.mark.parametrize("key", ["strategy/ep/momentum", "plugins/ema/w", "extra", "models/w", "model"])
def test_every_tensor_counts(pair, key):
    """A tensor that is neither the model's nor the optimizer's is compared: changed, and on one side only."""
    tensors = {"model/w": torch.ones(2), key: torch.zeros(4)}
    changed = pair(tensors, {**tensors, key: torch.tensor([0.0, 0.0, 1.0, 0.0])})
    assert not changed["exact_match"]
    assert changed["sections"]["other_tensors"]["first_difference"]["name"] == key
    assert changed["sections"]["other_tensors"]["first_difference"]["index"] == [2]
    assert changed["digests"]["left"]["other_tensors"] != changed["digests"]["right"]["other_tensors"]


@pytest.mark.parametrize("sides", [(True, False), (False, True), (True, True)])
def test_tensors_of_one_side(pair, sides):
    """A tensor that only one side has is a difference, whoever's it is."""
    tensors = {"model/w": torch.ones(2)}
    left, right = ({**tensors, "strategy/ep/m": torch.ones(1)} if has else tensors for has in sides)
    result = pair(left, right)
    assert result["exact_match"] == all(sides)
    assert result["sections"]["other_tensors"]["compared"] == 1


def test_tolerance_for_every_tensor(pair):
    """A tolerance holds for tensors of strategies and plugins as for the model's."""
    left = {"model/w": torch.ones(2), "plugins/ema/w": torch.tensor([100.0])}
    result = pair(left, {**left, "plugins/ema/w": torch.tensor([100.05])}, 1e-3)
    assert (result["exact_match"], result["matches"]) == (False, True)
    assert not pair(left, {**left, "plugins/ema/w": torch.tensor([101.0])}, 1e-3)["matches"]


@pytest.mark.parametrize("right", [{"count": 2}, {}])
def test_scalars_count(tmp_path, right):
    """Scalars of a strategy are compared, also where one side has none."""
    opened = []
    for side, scalars in (("l", {"count": 1}), ("r", right)):
        manager = CheckpointManager(tmp_path / side, asynchronous=False)
        manager.preflight()
        manager.save(1, State({"model/w": [Piece(torch.ones(1), (1,), (0,))]}, scalars), sections=SECTIONS, rng={})
        opened.append(open_checkpoint(tmp_path / side / "step_00000001"))
    result = strict(compare_checkpoints(*opened))
    assert not result["exact_match"]
    assert result["sections"]["scalars"]["first_difference"]["name"] == "count"
    assert compare_checkpoints(opened[0], opened[0])["exact_match"]


def test_what_is_not_compared_is_said(pair):
    """A plugin's values that only one side has are listed beside the verdict."""
    tensors = {"model/w": torch.ones(1)}
    result = pair(tensors, tensors, sections={**SECTIONS, "plugins": {"watch": {"seen": 3}}})
    assert (result["exact_match"], result["not_compared"]) == (True, ["plugins"])


def two_ranks(rank, folder):
    training = Training(rank)
    with CheckpointManager(folder) as manager:
        manager.preflight()
        training.save(manager)


def test_across_world_sizes(tmp_path):
    """One rank against two: tensors are the same; random state is not, and counts only without a tolerance."""
    training = Training()
    with CheckpointManager(tmp_path / "one") as manager:
        manager.preflight()
        training.save(manager)
    run_ranks(2, two_ranks, tmp_path / "two")
    one, two = (open_checkpoint(tmp_path / n / "step_00000000") for n in ("one", "two"))
    exact, close = compare_checkpoints(one, two), compare_checkpoints(one, two, 0.0)
    assert (exact["exact_match"], exact["matches"], close["matches"]) == (False, False, True)
    assert exact["reasons"] == ["rng: the left has 1 ranks, the right 2"]


def test_resumed_run_is_the_same_state(tmp_path):
    """Two runs of the same training end in the same state, to the bit."""
    for name in ("a", "b"):
        saved(tmp_path / name, (1, 3))
    one, other = (open_checkpoint(tmp_path / n / "step_00000003") for n in ("a", "b"))
    assert compare_checkpoints(one, other)["exact_match"]
    assert not compare_checkpoints(one, open_checkpoint(tmp_path / "b" / "step_00000001"))["exact_match"]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_ulps(dtype):
    """Neighbours on the line of a format are one apart, across zero too."""
    values = torch.tensor([-1.0, -0.0, 0.0, 1.0]).to(getattr(torch, dtype))
    carried = values.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else values.numpy()
    assert as_numbers(carried, dtype).tolist() == [-1, 0, 0, 1]
    places = as_ordered(carried, dtype)
    assert places[1] == places[2] == 0
    assert places[0] == -places[3]
