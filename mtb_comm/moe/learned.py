"""A router that was learned: a small byte model, trained on a text, whose hidden layer is the mixture of experts.

The model predicts a byte from the `CONTEXT` bytes before it. Their embeddings are summed and normalised; these are
the activations that the router sees. The mixture of experts is added to them, and an output layer follows.
All ranks train it together, each on its own positions of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import Tensor, nn

from mtb_core import RankContext

from .exchange import Exchange
from .layer import MoELayer
from .seeds import generator
from .settings import RouteSettings

#: Bytes that the next one is predicted from.
CONTEXT = 4

_LEARNING_RATE, _BETA1, _BETA2, _EPS = 3e-3, 0.9, 0.98, 1e-8


@attrs.frozen
class Learned:
    """Result of training: the layer's weights and activations [T, d] of this rank, first and last loss."""

    weights: dict[str, Tensor]
    activations: Tensor
    loss_first: float
    loss_last: float


class ByteModel(nn.Module):
    """Everything around the layer, the same on all ranks."""

    def __init__(self, seed: int, hidden: int) -> None:
        super().__init__()
        random = generator(seed, "bytes")
        self.embedding = nn.Parameter(torch.randn(CONTEXT, 256, hidden, generator=random))
        self.head = nn.Parameter(torch.randn(hidden, 256, generator=random) * 0.1 * hidden**-0.5)

    def activations(self, context: Tensor) -> Tensor:
        """[n, d] of contexts [n, CONTEXT] (int64)."""
        embedded = self.embedding[torch.arange(CONTEXT, device=context.device), context]
        return F.layer_norm(embedded.sum(dim=1), self.head.shape[:1])


def learn(settings: RouteSettings, ctx: RankContext, before_step: Callable[[], None]) -> Learned:
    """Train for ``settings.router_steps`` steps; called by all ranks. `before_step` may raise on all ranks, to stop."""
    assert settings.data is not None
    wide = attrs.evolve(settings, dtype="fp64" if settings.dtype == "fp64" else "fp32")
    layer = MoELayer(wide, Exchange(lambda _phase: None), ctx.device)
    model = ByteModel(settings.seed, settings.hidden_size).to(ctx.device, layer.router.dtype)
    text = torch.from_numpy(np.fromfile(Path(settings.data), dtype=np.uint8).astype(np.int64))
    shared = [*model.parameters(), layer.router]
    optimizer = _Adam([*shared, *layer.experts.parameters()])
    losses = []
    for step in range(settings.router_steps):
        before_step()
        context, target = _draw(text, settings, ctx, f"step {step}")
        losses.append(_train_step(model, layer, context, target, ctx.world_size))
        for parameter in shared:
            dist.all_reduce(parameter.grad)
        optimizer.step()
    context, _ = _draw(text, settings, ctx, "measured")
    with torch.no_grad():
        activations = model.activations(context)
    ends = torch.tensor([losses[0], losses[-1]], dtype=torch.float64)  # on the CPU, whatever the device
    dist.all_reduce(ends)
    return Learned(layer.state_dict(), activations, *ends.tolist())


def _draw(text: Tensor, settings: RouteSettings, ctx: RankContext, what: str) -> tuple[Tensor, Tensor]:
    """Contexts [n, CONTEXT] and the byte after each, at positions that the seed, `what` and the rank decide."""
    random = generator(settings.seed, f"text {what}", ctx.rank)
    start = torch.randint(len(text) - CONTEXT, (settings.tokens_per_rank,), generator=random)
    windows = text[start[:, None] + torch.arange(CONTEXT + 1)].to(ctx.device)
    return windows[:, :-1], windows[:, -1]


def _train_step(model: ByteModel, layer: MoELayer, context: Tensor, target: Tensor, ranks: int) -> float:
    """Forward and backward; this rank's share of the mean cross-entropy."""
    total = len(context) * ranks
    for parameter in (*model.parameters(), *layer.parameters()):
        parameter.grad = None
    x = model.activations(context)
    passed = layer(x, total=total)
    share = F.cross_entropy((x + passed.output) @ model.head, target, reduction="sum") / total
    settings = layer.settings
    (share + settings.aux_weight * passed.load_balancing + settings.z_weight * passed.z_loss).backward()
    return share.item()


class _Adam:
    """Adam (Kingma and Ba, arXiv:1412.6980), by hand: torch's own would first import its compiler, which takes seconds."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._state = [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
        self._steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients."""
        self._steps += 1
        for parameter, mean, square in self._state:
            assert parameter.grad is not None
            mean.lerp_(parameter.grad, 1 - _BETA1)
            square.lerp_(parameter.grad.square(), 1 - _BETA2)
            unbiased = (square / (1 - _BETA2**self._steps)).sqrt_().add_(_EPS)
            parameter.addcdiv_(mean / (1 - _BETA1**self._steps), unbiased, value=-_LEARNING_RATE)
