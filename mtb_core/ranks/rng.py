"""Random state of one rank: torch CPU, torch CUDA (the rank's device), numpy and python, as plain JSON.

At the same world size each rank gets its own state back, to the bit. At another world size there is no such state;
the rule then is: every stream of every rank is seeded anew from (digest of rank 0's saved state, step, new world
size, rank, stream), so the continuation is reproducible and no two ranks, and no two streams, are alike.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mtb_core.api.errors import RunFailed


def capture_rng(device: str = "cpu") -> dict[str, Any]:
    """This process's random state; of CUDA, that of `device` (``"cuda:N"``)."""
    cuda = torch.cuda.get_rng_state(device) if device.startswith("cuda") else None
    return plain(torch.get_rng_state(), cuda, np.random.get_state(legacy=True), random.getstate())  # noqa: NPY002


def plain(cpu: torch.Tensor, cuda: torch.Tensor | None, numpy: Any, python: Any) -> dict[str, Any]:
    """As JSON, the states that torch, ``numpy.random.get_state`` (of the legacy form) and ``random.getstate`` give."""
    kind, keys, position, has_gauss, gauss = numpy
    version, words, next_gauss = python
    return {
        "torch_cpu": cpu.numpy().tobytes().hex(),
        "torch_cuda": None if cuda is None else cuda.numpy().tobytes().hex(),
        "numpy": {
            "kind": str(kind),
            "keys": np.asarray(keys, "<u4").tobytes().hex(),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss).hex(),
        },
        "python": {
            "version": version,
            "words": np.asarray(words, "<u4").tobytes().hex(),
            "gauss": None if next_gauss is None else float(next_gauss).hex(),
        },
    }


def restore_rng(state: Mapping[str, Any], device: str = "cpu") -> None:
    """Put this process's random state back to what `capture_rng` gave.

    Everything is checked before anything is changed.

    Raises:
        RunFailed: not such a state, or one that lacks the state of a CUDA device that is needed here.
    """
    try:
        cpu = _tensor(state["torch_cpu"], torch.get_rng_state().numel())
        cuda = None
        if device.startswith("cuda"):
            if state["torch_cuda"] is None:
                raise ValueError("it was saved without CUDA, and this rank runs on CUDA")
            cuda = _tensor(state["torch_cuda"], torch.cuda.get_rng_state(device).numel())
        np_state, words = state["numpy"], np.frombuffer(bytes.fromhex(state["python"]["words"]), "<u4")
        keys = np.frombuffer(bytes.fromhex(np_state["keys"]), "<u4")
        for_numpy = (np_state["kind"], keys, int(np_state["position"]), int(np_state["has_gauss"]))
        numpy_gauss = float.fromhex(np_state["gauss"])
        gauss = state["python"]["gauss"]
        for_python = (
            state["python"]["version"],
            tuple(int(word) for word in words),
            None if gauss is None else float.fromhex(gauss),
        )
        np.random.RandomState().set_state((*for_numpy, numpy_gauss))
        random.Random().setstate(for_python)  # noqa: S311
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunFailed(
            f"A saved random state is damaged or incomplete ({type(error).__name__}: {error}). Resume from another "
            "checkpoint."
        ) from error
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, device)
    np.random.set_state((*for_numpy, numpy_gauss))  # noqa: NPY002
    random.setstate(for_python)


def reseed(saved: Sequence[Mapping[str, Any] | None], *, step: int, world_size: int, rank: int, device: str) -> None:
    """Seed this rank's streams by the rule for another world size; `saved` are the states of the old ranks."""
    origin = hashlib.blake2b(json.dumps(saved[0] if saved else None, sort_keys=True).encode()).hexdigest()

    def seed(stream: str, bits: int) -> int:
        text = f"mtb-rng/{origin}/{step}/{world_size}/{rank}/{stream}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=bits // 8).digest(), "little")

    torch.default_generator.manual_seed(seed("torch_cpu", 64))
    if device.startswith("cuda"):
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed("torch_cuda", 64))
    np.random.seed(seed("numpy", 32))  # noqa: NPY002
    random.seed(seed("python", 64))


def _tensor(text: str, size: int) -> torch.Tensor:
    data = bytearray.fromhex(text)
    if len(data) != size:
        raise ValueError(f"a state of {len(data)} bytes; {size} are expected by this version of torch")
    return torch.frombuffer(data, dtype=torch.uint8)
