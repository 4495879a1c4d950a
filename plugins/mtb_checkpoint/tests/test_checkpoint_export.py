"""Tests of mtb_checkpoint.export: safetensors files, read back here by the format's own definition."""

import json

import pytest
import torch
from torch import nn

from mtb_checkpoint import export_safetensors
from mtb_core.api.errors import ConfigError
from mtb_core.api.values import Piece, State
from mtb_core.ckpt.layout import DamagedCheckpoint
from mtb_core.ckpt.manager import CheckpointManager
from mtb_core.ckpt.opened import open_checkpoint
from mtb_core.tests.ckpt_ranks import saved

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "BOOL": torch.bool}


def read(path):
    """The tensors of a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    assert header.pop("__metadata__") == {"format": "pt"}
    assert max((e["data_offsets"][1] for e in header.values()), default=0) == len(body)
    return {
        name: torch.frombuffer(bytearray(body[slice(*e["data_offsets"])]), dtype=DTYPES[e["dtype"]]).reshape(e["shape"])
        for name, e in header.items()
    }


def test_weights_for_plain_torch(tmp_path):
    """A plain module loads the exported weights, to the bit; optimizer state is left out."""
    training = saved(tmp_path / "c")
    written = export_safetensors(open_checkpoint(tmp_path / "c" / "step_00000001"), tmp_path / "out" / "w.safetensors")
    assert written == [tmp_path / "out" / "w.safetensors"]
    plain = nn.Sequential(nn.Linear(5, 7), nn.Dropout(), nn.Tanh(), nn.Linear(7, 1))
    plain.load_state_dict(read(written[0]))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), training.model.parameters(), strict=True))


def test_sharded(tmp_path):
    """Several files of limited size and their index hold the same."""
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)} | {
        "b": torch.ones(3).bool(),
        "h": torch.ones(2).bfloat16(),
    }
    manager = CheckpointManager(tmp_path / "c", asynchronous=False)
    manager.preflight()
    manager.save(1, State({f"model/{k}": [Piece(t, tuple(t.shape), (0,))] for k, t in tensors.items()}))
    *files, index = export_safetensors(open_checkpoint(tmp_path / "c" / "step_00000001"), tmp_path / "out", 80)
    assert [f.name for f in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    listed = json.loads(index.read_text())
    assert listed["metadata"] == {"total_size": 5 * 40 + 3 + 4}
    together = {name: tensor for file in files for name, tensor in read(file).items()}
    assert together.keys() == listed["weight_map"].keys() == tensors.keys()
    assert all(torch.equal(together[k], t) for k, t in tensors.items())
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in [*files, index])


def test_nothing_is_overwritten(tmp_path):
    """An existing output is refused."""
    saved(tmp_path / "c")
    (tmp_path / "w").touch()
    with pytest.raises(ConfigError, match="exists; name a new file"):
        export_safetensors(open_checkpoint(tmp_path / "c" / "step_00000001"), tmp_path / "w")


def test_damaged(tmp_path):
    """A damaged checkpoint is not exported, and no file is left."""
    saved(tmp_path / "c")
    opened = open_checkpoint(tmp_path / "c" / "step_00000001")
    shard = opened.path / "rank_00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match="rank_00000"):
        export_safetensors(opened, tmp_path / "w")
    assert not (tmp_path / "w").exists()


def test_dtype_without_a_name(tmp_path):
    """A dtype that the format does not know is named before anything is written."""
    pytest.importorskip("mtb_dcp", reason="the default checkpoint format knows no such dtype either")
    manager = CheckpointManager(tmp_path / "c", asynchronous=False, format_name="dcp")
    manager.preflight()
    manager.save(1, State({"model/z": [Piece(torch.ones(1, dtype=torch.complex128), (1,), (0,))]}))
    with pytest.raises(ConfigError, match="model/z is complex128"):
        export_safetensors(open_checkpoint(tmp_path / "c" / "step_00000001"), tmp_path / "w")
