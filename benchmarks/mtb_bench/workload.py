"""What all contenders share: sizes, the model's code, the data and the way bare loops draw batches."""

from __future__ import annotations

import os
import sysconfig
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)

from mtb_core import TrainConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LEARNING_RATE = 1e-3
VOCAB = 256

#: Environment: the text file that is trained on, one byte a token.
DATA = "MTB_BENCH_DATA"


def write_data(file: Path) -> None:
    """The Python standard library's top-level sources in one text file."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    file.write_bytes(b"\n".join(source.read_bytes() for source in sources))


def sizes() -> dict[str, Any]:
    """The settings of the small model and its batch; a step takes 5 to 10 ms on one core."""
    return {
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "seq_length": 32,
        "batch_size": 4,
        "vocab_size": VOCAB,
        "learning_rate": LEARNING_RATE,
        "dropout": 0.0,
        "device": "cpu",
        "seed": 0,
    }


def build_model() -> torch.nn.Module:
    """The built-in model, filled as MiniTrainBench fills it."""
    from mtb_core.model.gpt import gpt_spec

    spec = gpt_spec(TrainConfig(**sizes()))
    assert spec.init is not None
    module, generator = spec.build(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spec.init(name, parameter, generator)
    return module


@cache
def tokens() -> npt.NDArray[np.uint8]:
    """The data, memory-mapped."""
    import numpy as np

    return np.memmap(Path(os.environ[DATA]), dtype=np.uint8, mode="r")


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """A random batch the way nanoGPT draws it: inputs and the tokens that follow, each of shape [batch, seq]."""
    data, given = tokens(), sizes()
    length = given["seq_length"]
    starts = torch.randint(len(data) - length, (given["batch_size"],)).tolist()
    x = torch.stack([torch.from_numpy(data[i : i + length].astype("int64")) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + length].astype("int64")) for i in starts])
    return x, y


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy, mean over tokens."""
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
