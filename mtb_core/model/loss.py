"""From what a model returns to the SUM of the loss over valid tokens.

A model is called in one of two ways. Either it takes the inputs alone, or it also takes the targets: then the second
positional parameter of its ``forward`` is named ``targets``, ``target`` or ``y``. The targets are shifted already:
position t holds the token after input t, or the ignore label -100. A parameter named ``labels`` does not count,
because by the convention of Hugging Face's models such a model shifts by itself, and shifting twice trains it to
predict the token after the next.

It may return logits, a mean loss over the valid tokens (a scalar), a pair of the two in either order, or an object or
mapping with ``loss`` or ``logits``. A loss of the model's own wins over its logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import Tensor, nn

from mtb_core.api.errors import ConfigError, RunFailed
from mtb_core.api.values import ModelSpec
from mtb_core.api.work import Loss
from mtb_core.config.schema import IGNORE_LABEL

from .aside import undisturbed

TARGET_NAMES = ("targets", "target", "y")


def takes_targets(module: nn.Module) -> bool:
    """True if `module` takes the targets as its second argument.

    Raises:
        ConfigError: its ``forward`` needs an argument that nobody can give.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(module.forward).parameters.values())
    positional = [p for p in parameters if p.kind in kinds]
    takes = len(positional) > 1 and positional[1].name in TARGET_NAMES
    given = positional[: 2 if takes else 1]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [p.name for p in parameters if p not in given and p.default is p.empty and p.kind not in variadic]
    if missing:
        raise ConfigError(
            f"{type(module).__name__}.forward needs the argument '{missing[0]}', which training cannot give. It is "
            f"called with the inputs, and with the targets if its second parameter is named "
            f"{' or '.join(TARGET_NAMES)}; give other parameters a default."
        )
    return takes


class LossFunction:
    """Forward and loss of one micro-batch, for models of every kind.

    Args:
        core: the bare module; wrappers hide the signature of its forward.
    """

    def __init__(self, spec: ModelSpec, core: nn.Module) -> None:
        self._spec = spec
        self._takes_targets = takes_targets(core)

    def of(self, output: Any, targets: Tensor, valid: int) -> Loss:
        """The loss of what the model returned."""
        found = loss_sum(self._spec, output, targets, valid)
        return found if isinstance(found, Loss) else Loss(found)

    def forward(self, module: nn.Module, inputs: Tensor, targets: Tensor, valid: int) -> Loss:
        """The same as a `Loss`."""
        found = self(module, inputs, targets, valid)
        return found if isinstance(found, Loss) else Loss(found)

    def __call__(self, module: nn.Module, inputs: Tensor, targets: Tensor, valid: int) -> Tensor | Loss:
        """Call `module` (`core`, or what wraps it); arguments and value otherwise as in `loss_sum`.

        A model that averages over no valid target at all returns NaN, with NaN gradients. So that the share of such a
        micro-batch can be exactly zero, the model sees token 0 for every target instead, and `loss_sum` multiplies
        its mean by 0.
        """
        if not self._takes_targets:
            return loss_sum(self._spec, module(inputs), targets, valid)
        output = module(inputs, targets if valid else targets.clamp(min=0))
        return loss_sum(self._spec, output, targets, valid)

    def check_ignores(self, module: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        """Try a model that makes its own loss, in eval mode, on one sample with ignored targets.

        Data may bring such targets late, at the ragged end of an epoch; better to know before the first step.

        Raises:
            RunFailed: the model fails on them.
        """
        if not self._takes_targets:
            return
        targets = targets[:1].clone()
        targets[:, 1:] = IGNORE_LABEL
        try:
            with undisturbed(module, str(inputs.device)), torch.no_grad():
                module(inputs[:1], targets)
        except (IndexError, RuntimeError) as error:
            raise RunFailed(
                f"The model's own loss cannot ignore targets: {error} Targets that do not count are {IGNORE_LABEL}, as "
                f"they are by default in cross_entropy; remove another ignore_index from the model, or return logits."
            ) from error


def loss_sum(spec: ModelSpec, output: Any, targets: Tensor, valid: int) -> Tensor | Loss:
    """SUM of the loss over the valid tokens of a micro-batch: a scalar in fp32, connected to the graph.

    Args:
        spec: its own `loss` wins over everything else.
        output: what the model returned; logits are [..., V] with the shape of `targets` before V.
        targets: int64, the ignore label -100 where a position does not count.
        valid: how many targets count; turns a mean into a sum.

    Raises:
        RunFailed: `output` is none of the kinds above.
    """
    if spec.loss is not None:
        return spec.loss(output, targets)
    result = _loss_or_logits(output)
    if result.dim() == 0:
        return result.float() * valid
    if result.shape[:-1] != targets.shape:
        raise RunFailed(
            f"The model returned a tensor of shape {list(result.shape)} for targets of shape {list(targets.shape)}; "
            f"valid: logits of shape {[*targets.shape, 'vocabulary']}, or a scalar loss."
        )
    logits = result.reshape(-1, result.shape[-1]).float()
    return F.cross_entropy(logits, targets.reshape(-1), ignore_index=IGNORE_LABEL, reduction="sum")


def _loss_or_logits(output: Any) -> Tensor:
    """The scalar loss where there is one, else the logits."""
    if isinstance(output, Tensor):
        return output
    candidates: list[Any]
    if isinstance(output, Mapping):
        candidates = [output.get("loss"), output.get("logits")]
    elif isinstance(output, tuple | list):
        candidates = [t for t in output[:2] if isinstance(t, Tensor)]
        candidates.sort(key=lambda t: t.dim() > 0)
    else:
        candidates = [getattr(output, "loss", None), getattr(output, "logits", None)]
    for candidate in candidates:
        if isinstance(candidate, Tensor):
            return candidate
    raise RunFailed(
        f"The model returned {type(output).__name__}, in which no loss was found; valid: logits, a scalar loss, a "
        "pair (logits, loss), or an object or mapping with 'loss' or 'logits'."
    )
