"""The older layouts of checkpoints, formats 1 and 2, read as if they were of the present one.

Both have ``metadata.json`` instead of a manifest, list no files and no digests, and store tensors under the nested
keys of torch's state dicts: ``model.NAME``, ``optimizer.state.NAME.KEY``, and ``optimizer.param_groups…`` as pickled
bytes, which are never read. Format 1 has no random state, no schedule and no gradient sync mode; format 2 has no
schedule and keeps random state in ``rng_state_rank_00000.pt``, which is read with ``weights_only=True``.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import files
from .layout import LEGACY_MANIFEST, SMALL_FILE_BYTES, DamagedCheckpoint, name_problem
from .opened import RNG_BYTES, Opened, read_json
from .storage import Storage

_MODEL, _OPTIMIZER = "model.", "optimizer.state."
_GROUPS = "optimizer.param_groups"


def open_legacy(path: Path, storage: Storage) -> Opened:
    """A checkpoint of format 1 or 2, with its tensors in the checkpoint format `storage`.

    Raises:
        DamagedCheckpoint: not such a checkpoint, or entries in it that would need unpickling.
    """
    stored = read_json(path, LEGACY_MANIFEST, SMALL_FILE_BYTES)
    version = stored.get("format_version")
    if type(version) is not int or version not in {1, 2}:
        raise DamagedCheckpoint(path, LEGACY_MANIFEST, f"its format version is {version!r}; 1 or 2 is expected there")
    for key in ("global_step", "world_size", "samples_seen"):
        if type(stored.get(key)) is not int or stored[key] < (key == "world_size"):
            raise DamagedCheckpoint(
                path, LEGACY_MANIFEST, f"the value of {key!r} is missing, no whole number or negative"
            )
    tokens = stored.get("tokens_seen")
    if tokens is not None and (type(tokens) is not int or tokens < 0):
        raise DamagedCheckpoint(path, LEGACY_MANIFEST, "the value of 'tokens_seen' is no whole number or negative")
    if problem := name_problem(path, stored["global_step"]):
        raise DamagedCheckpoint(path, LEGACY_MANIFEST, problem)
    renamed = {}
    for key, entry in storage.entries(path).items():
        if key.startswith(_MODEL):
            renamed["model/" + key.removeprefix(_MODEL)] = entry
        elif key.startswith(_OPTIMIZER):
            name, _, kind = key.removeprefix(_OPTIMIZER).rpartition(".")
            renamed[f"optim/{name}/{kind}"] = entry
        elif not key.startswith(_GROUPS):
            raise DamagedCheckpoint(path, storage.index_files[0], f"it has the unknown tensor {key!r}")
    step, samples = stored["global_step"], stored["samples_seen"]
    reason = "checkpoints of format 1 hold no random state" if version == 1 else None
    values = {
        **stored,
        "step": step,
        "gradient_sync_mode": "every" if version == 1 else stored.get("gradient_sync_mode"),
        "deterministic": version == 2,
        "determinism_reason": reason,
    }
    sections = {
        "train_state": {"global_step": step, "samples_seen": samples, "tokens_seen": tokens},
        "data": {"samples_seen": samples},
        "scheduler": None,
        "optimizer": None,
    }
    return Opened(path, version, storage, values, None, sections, renamed)


def legacy_rng(path: Path, rank: int) -> Mapping[str, Any]:
    """The random state of `rank` in a checkpoint of format 2, in the form of `mtb_core.ranks.rng`.

    Raises:
        DamagedCheckpoint: missing, or not such a state. Nothing in the file is executed.
    """
    import torch  # noqa: PLC0415  (only this old file needs it)

    from mtb_core.ranks.rng import plain  # noqa: PLC0415  (needs torch)

    name = f"rng_state_rank_{rank:05d}.pt"
    try:
        data = files.read_small(path, name, RNG_BYTES)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if sum(member.file_size for member in archive.infolist()) > len(data):
                raise ValueError("it is compressed")  # and would take any amount of memory
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return plain(state["torch"], None, state["numpy"], state["python"])
    except FileNotFoundError as error:
        raise DamagedCheckpoint(path, name, "it is missing") from error
    except Exception as error:
        raise DamagedCheckpoint(path, name, f"it cannot be read ({type(error).__name__})") from error
