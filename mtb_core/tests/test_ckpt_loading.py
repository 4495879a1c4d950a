"""Tests of mtb_core.ckpt.loading: keys, shapes and dtypes must fit; shards go anywhere (FR-28, FR-29, FR-30)."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from mtb_checkpoint import compare_checkpoints
from mtb_core.api.errors import RunFailed
from mtb_core.api.state import module_state
from mtb_core.api.values import Piece, State
from mtb_core.ckpt.manager import CheckpointManager
from mtb_core.ckpt.opened import open_checkpoint

from .ckpt_ranks import Training, run_ranks, saved, sharded_state


def whole(**tensors):
    return State({k: [Piece(t, tuple(t.shape), (0,) * t.dim())] for k, t in tensors.items()})


def save(folder, state):
    manager = CheckpointManager(folder, asynchronous=False)
    manager.preflight()
    manager.save(1, state)
    return manager, folder / "step_00000001"


def test_missing_and_unexpected(tmp_path):
    """FR-29: names that only one side has are both listed."""
    manager, path = save(tmp_path, whole(a=torch.ones(2), gone=torch.ones(2)))
    with pytest.raises(RunFailed, match="missing in it: new; in it but not in this training: gone"):
        manager.load(path, whole(a=torch.ones(2), new=torch.ones(2)))


def test_shapes_and_dtypes(tmp_path):
    """FR-29: another shape, and fp32 into bf16, are errors that list the tensors."""
    manager, path = save(tmp_path, whole(a=torch.ones(2), b=torch.ones(2)))
    target = whole(a=torch.ones(3), b=torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(
        RunFailed,
        match=r"of another shape: a \(stored \[2\], here \[3\]\); of another dtype: b \(stored float32, here bfloat16\)",
    ):
        manager.load(path, target)
    assert target.pieces["b"][0].tensor.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("stored", "wanted", "outcome"),
    [
        ("strategy/ep/m", "strategy/ep/m", None),
        ("strategy/ep/m", None, "only one side has state of strategy/ep"),
        ("strategy/ep/m", "strategy/cp/m", "only one side has state of strategy/cp, strategy/ep"),
    ],
)
def test_state_of_owners(tmp_path, caplog, stored, wanted, outcome):
    """State of a strategy that one side has not at all is left out, said aloud, and not deterministic."""
    manager, path = save(tmp_path, whole(a=torch.ones(2), **({stored: torch.ones(3)} if stored else {})))
    own = torch.full((3,), 7.0)
    loaded = manager.load(path, whole(a=torch.zeros(2), **({wanted: own} if wanted else {})))
    assert (loaded.deterministic, loaded.determinism_reason) == (outcome is None, outcome)
    assert own.tolist() == ([1.0] * 3 if stored == wanted else [7.0] * 3)
    assert (outcome or "") in caplog.text


@pytest.mark.parametrize(("stored", "wanted"), [("plugins/off/w", None), (None, "plugins/on/w")])
def test_run_plugins_come_and_go(tmp_path, caplog, stored, wanted):
    """Tensors of a plugin that is new stay as they are, those of one that is gone are left alone; training goes on exactly."""
    manager, path = save(tmp_path, whole(a=torch.ones(2), **({stored: torch.ones(3)} if stored else {})))
    own = torch.full((3,), 7.0)
    loaded = manager.load(path, whole(a=torch.zeros(2), **({wanted: own} if wanted else {})))
    assert loaded.deterministic
    assert own.tolist() == [7.0] * 3
    assert ("has tensors of plugins/off, which is not part of this run" in caplog.text) is (stored is not None)


def test_a_run_plugin_without_its_tensors(tmp_path):
    """A checkpoint that has a plugin's JSON values and not its tensors is not one from before the plugin was on."""
    manager = CheckpointManager(tmp_path, asynchronous=False)
    manager.preflight()
    manager.save(1, whole(a=torch.ones(2)), sections={"plugins": {"p": {}}})
    with pytest.raises(RunFailed, match=r"missing in it: plugins/p/a"):
        manager.load(tmp_path / "step_00000001", whole(a=torch.zeros(2), **{"plugins/p/a": torch.zeros(3)}))


@pytest.mark.parametrize(
    ("stored", "wanted", "problem"),
    [
        (("strategy/ep/m",), ("strategy/ep/m", "strategy/ep/n"), "missing in it: strategy/ep/n"),
        (("strategy/ep/m", "strategy/ep/n"), ("strategy/ep/m",), "not in this training: strategy/ep/n"),
        (("strategy/ep",), (), "not in this training: strategy/ep"),
        (("strategies/ep/m",), (), "not in this training: strategies/ep/m"),
    ],
)
def test_parts_of_an_owners_state(tmp_path, stored, wanted, problem):
    """State of which only a part is there is refused, as that of model and optimizer is."""
    manager, path = save(tmp_path, whole(a=torch.ones(2), **{key: torch.ones(3) for key in stored}))
    with pytest.raises(RunFailed, match=problem):
        manager.load(path, whole(a=torch.zeros(2), **{key: torch.ones(3) for key in wanted}))


def test_many_names_are_cut(tmp_path):
    """A long list of names is cut, and says how many more there are."""
    manager, path = save(tmp_path, whole(**{f"k{i:03}": torch.ones(1) for i in range(50)}))
    with pytest.raises(RunFailed, match="k019 and 30 more"):
        manager.load(path, whole())


def test_non_contiguous_targets(tmp_path):
    """A piece that is a strided view is filled in place."""
    manager, path = save(tmp_path, whole(a=torch.arange(12.0).reshape(3, 4)))
    base = torch.zeros(4, 3)
    manager.load(path, State({"a": [Piece(base.t(), (3, 4), (0, 0))]}))
    assert base.t().tolist() == torch.arange(12.0).reshape(3, 4).tolist()


@pytest.mark.parametrize("value", [2.0, float("nan")])
def test_expanded_targets(tmp_path, value):
    """A buffer made by expand() is saved and resumed; it stays one element for all, and elements apart do not fit."""
    manager, path = save(tmp_path, whole(a=torch.full((1, 3), value).expand(4, 3)))
    target = torch.zeros(1, 3).expand(4, 3)
    manager.load(path, whole(a=target))
    assert target.stride() == (0, 1)
    torch.testing.assert_close(target, torch.full((4, 3), value), equal_nan=True)
    manager, path = save(tmp_path / "apart", whole(a=torch.arange(12.0).reshape(4, 3)))
    with pytest.raises(RunFailed, match=r"a differs in it along a dimension that is here made by expand\(\)"):
        manager.load(path, whole(a=target))


def test_tied_weights(tmp_path):
    """FR-28: a tied weight is stored once and is still tied after loading."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.emb.weight

    one, other = Tied(), Tied()
    manager, path = save(tmp_path, module_state(one, torch.optim.AdamW(one.parameters())))
    assert [k for k in open_checkpoint(path).entries if k.startswith("model/")] == ["model/emb.weight"]
    manager.load(path, module_state(other, torch.optim.AdamW(other.parameters())))
    assert other.emb.weight is other.head.weight
    assert torch.equal(one.emb.weight, other.head.weight)


def test_frozen_and_empty_groups(tmp_path):
    """Frozen parameters are saved without moments, empty groups and buffers do no harm; what is non-persistent is not."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].weight.requires_grad_(False)
    model.register_buffer("temporary", torch.ones(1), persistent=False)
    groups = [{"params": [p for p in model.parameters() if p.requires_grad]}, {"params": []}]
    optimizer = torch.optim.AdamW(groups)
    _, path = save(tmp_path, module_state(model, optimizer))
    keys = open_checkpoint(path).entries.keys()
    assert {"model/0.weight", "model/1.running_mean", "model/1.num_batches_tracked", "optim/0.bias/exp_avg"} <= keys
    assert not {"optim/0.weight/exp_avg", "model/temporary"} & keys


TENSORS = {
    "model/a": torch.arange(35.0).reshape(7, 5),
    "model/b": torch.arange(7.0).reshape(1, 7),
    "model/c": torch.arange(60, dtype=torch.int64).reshape(3, 4, 5),
    "model/d": torch.tensor(2.5),
    "model/e": torch.arange(5).to(torch.bfloat16),
}


def hop(rank, source, target, world, dim):
    """Load into shards along `dim`, check them, and save them again; the last of 4 ranks has empty shards."""
    filled = {k: torch.zeros_like(t) for k, t in TENSORS.items()}
    state = sharded_state(filled if source else TENSORS, rank, world, dim)
    manager = CheckpointManager(target)
    manager.preflight(state)
    if source is not None:
        manager.load(source / "step_00000001", state)
        for key, pieces in sharded_state(TENSORS, rank, world, dim).pieces.items():
            assert torch.equal(state.pieces[key][0].tensor, pieces[0].tensor), key
    manager.save(1, state)
    manager.finish()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_of_any_number(tmp_path):
    """FR-30: 2 -> 3 -> 4 -> 1 ranks, cut along rows or columns, is exact at every hop, and torch's own reader reads each."""
    source = None
    for world, dim in ((2, 0), (3, 1), (4, 0), (1, 0)):
        target = tmp_path / f"{world}-{dim}"
        run_ranks(world, hop, source, target, world, dim)
        out = {k: torch.zeros_like(t) for k, t in TENSORS.items()}
        dcp.load(out, storage_reader=HuggingFaceStorageReader(str(target / "step_00000001")))
        assert all(torch.equal(out[k], t) for k, t in TENSORS.items())
        if source is not None:
            result = compare_checkpoints(
                open_checkpoint(source / "step_00000001"), open_checkpoint(target / "step_00000001")
            )
            assert result["sections"]["model"]["exact"]
            assert result["digests"]["left"]["model"] == result["digests"]["right"]["model"]
        source = target


def holder(rank, folder):
    """Rank 1 has no parameters at all."""
    state = whole(**TENSORS) if rank == 0 else State({})
    manager = CheckpointManager(folder)
    manager.preflight(state)
    manager.save(1, state)
    manager.finish()
    manager.load(folder / "step_00000001", state)


def test_a_rank_without_parameters(tmp_path):
    """FR-30: a rank that holds nothing takes part in saving and loading."""
    run_ranks(2, holder, tmp_path)
    with safe_open(tmp_path / "step_00000001" / "rank_00001.safetensors", "pt") as file:
        assert list(file.keys()) == []


def partial_copies(rank, folder):
    state = sharded_state({"w": torch.ones(6, 4)}, rank, 3)
    manager = CheckpointManager(folder)
    manager.preflight()
    try:
        manager.save(1, state)
    except RunFailed as error:
        return str(error)
    return None


def test_holes_are_refused(tmp_path):
    """Pieces that do not make up a tensor are refused on all ranks, and nothing is written."""
    one, other = run_ranks(2, partial_copies, tmp_path)
    assert one == other
    assert "'w' of shape (6, 4) is not covered" in one
    assert list(tmp_path.iterdir()) == []


def test_missing_random_state(tmp_path, caplog):
    """Damaged random state is an error; with the explicit option it is a warning, and the run is not deterministic."""
    saved(tmp_path)
    path = tmp_path / "step_00000001"
    (path / "rng" / "rank_00000.json").unlink()
    manager = CheckpointManager(tmp_path)
    with pytest.raises(RunFailed, match=r"rng/rank_00000\.json: it is missing"):
        manager.load(path, Training().state())
    training = Training()
    loaded = training.load(manager, path, allow_missing_rng=True)
    assert not loaded.deterministic
    assert "Going on without it" in caplog.text
    assert manager.determinism == (False, loaded.determinism_reason)
