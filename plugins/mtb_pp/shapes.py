"""Shapes and dtypes of the tensors between stages, found without computing anything.

torch's pipeline can find out by itself, by running each stage once more in its first step and after each evaluation,
forward and backward, on memory that nobody has written. That changes the model's buffers and wakes its hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from mtb_core import ConfigError


def outputs(
    model: nn.Module, parts: Sequence[Sequence[str]], shape: tuple[int, int], device: torch.device, *, bf16: bool
) -> list[Tensor]:
    """By stage but the last, a tensor on ``meta`` with the shape and dtype of its output.

    The model is copied for it, tensors excepted, so that nothing that forward changes is changed.

    Args:
        parts: by stage, names of the modules that make it up.
        shape: of the inputs: samples of a micro-batch, positions.
        bf16: whether forward runs under autocast.

    Raises:
        ConfigError: something else than a floating-point tensor comes out, or the modules cannot run without data.
    """
    tensors = [*model.parameters(), *model.buffers()]
    spare = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    found: list[Tensor] = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        x = torch.zeros(shape, dtype=torch.int64, device=device)
        for part in parts[:-1]:
            for name in part:
                x = _called(spare.get_submodule(name), name, x, device)
            if not isinstance(x, Tensor) or not x.is_floating_point():
                raise ConfigError(
                    f"strategy 'pp' cuts the model behind '{part[-1]}', which returns "
                    f"{x.dtype if isinstance(x, Tensor) else type(x).__name__}; there it must return one floating-point tensor."
                )
            found.append(x)
    return [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in found]


def _called(module: nn.Module, name: str, x: Tensor, device: torch.device) -> Tensor:
    values = {
        key: torch.empty(t.shape, dtype=t.dtype, device=device)
        for key, t in (*module.named_parameters(), *module.named_buffers())
    }
    try:
        out: Tensor = functional_call(module, values, (x,))
    except Exception as error:
        raise ConfigError(
            f"strategy 'pp' must know the shapes that travel between stages, and could not find out: '{name}' of the model "
            f"does not run without data ({type(error).__name__}: {error}). Its shapes must not depend on values."
        ) from error
    return out
