"""Model ``moe``: a decoder like the built-in one, with a mixture of experts in place of each block's MLP."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import Tensor, nn

from mtb_core import ConfigError, Loss, ModelSpec
from mtb_ep.plugin import MoEOptions, check_moe
from mtb_ep.routing import FIGURES, route

if TYPE_CHECKING:
    from mtb_core import TrainConfig

#: Targets that do not count.
IGNORE_LABEL = -100
#: Standard deviation of embeddings, and of the logits at the start.
EMBEDDING_STD, LOGIT_STD = 0.02, 0.1

#: Tensor parallelism splits the attention; norm2 is left out, for the experts need whole plain tensors.
_ROLES = {
    **dict.fromkeys(("q", "k", "v"), "colwise"),
    "o": "rowwise",
    **dict.fromkeys(("norm1", "norm"), "norm"),
    **dict.fromkeys(("drop", "drop1", "drop2"), "dropout"),
    "experts": "experts",
}


class Experts(nn.Module):
    """MLPs with GELU, d -> f -> d: rows [n, d], those of the first expert first, and int64 counts [E] -> [n, d]."""

    def __init__(self, experts: int, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, d_model, d_ff))
        self.down = nn.Parameter(torch.empty(experts, d_ff, d_model))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Every expert runs, also on no row at all: its gradients are then zeros rather than missing."""
        parts = rows.split(counts.tolist())
        # Unbound once: indexing would make each expert's gradient as large as all of them.
        weights = zip(parts, self.up.unbind(0), self.down.unbind(0), strict=True)
        return torch.cat([F.gelu(part @ up) @ down for part, up, down in weights])


class MoE(nn.Module):
    """[B, T, d] -> the weighted sum of each token's experts [B, T, d], and the routing's figures, fp32 [B, 5]."""

    def __init__(self, d_model: int, options: MoEOptions) -> None:
        super().__init__()
        self.options = options
        self.router = nn.Linear(d_model, options.experts, bias=False)
        self.experts = Experts(options.experts, d_model, options.d_ff or 4 * d_model)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The router computes in fp32, for it decides rather than blends. Dropped tokens get zeros."""
        k, n_experts, width = self.options.top_k, self.options.experts, x.shape[-1]
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.router.weight.float())
            routed = route(logits, k, self.options.capacity_factor)
        expert = routed.experts if routed.placed is None else routed.experts.where(routed.placed, n_experts)
        expert = expert.flatten()
        order = expert.argsort(stable=True)  # slots, one for each token and choice, by expert
        counts = torch.bincount(expert, minlength=n_experts + 1)[:n_experts]
        if routed.placed is not None:
            order = order[: int(counts.sum())]
        # Each row is taken from, and put back to, a slot of its own: so no two gradients meet in one place, and sums
        # over a token's slots have a fixed order.
        slots = x.reshape(-1, 1, width).expand(-1, k, -1).reshape(-1, width)
        rows = self._compute(_lowered(slots.index_select(0, order)), counts)
        back = rows.new_zeros(slots.shape).index_copy(0, order, rows)
        out = (back.view(-1, k, width) * routed.weights.view(-1, k, 1)).sum(dim=1)
        return out.to(x.dtype).view_as(x), routed.figures

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the numbers of rows differ from call to call
    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        done: Tensor = self.experts(rows, counts)
        return done


def _lowered(rows: Tensor) -> Tensor:
    """Under autocast in its dtype, which the experts compute in anyway: so half the bytes travel to them."""
    kind = rows.device.type
    return rows.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else rows


class Block(nn.Module):
    """Attention and experts, each added to the residual stream: [B, T, d] -> [B, T, d], and the routing's figures."""

    def __init__(self, config: TrainConfig, options: MoEOptions) -> None:
        super().__init__()
        d_model = config.d_model
        self.head_dim, self.dropout, self.qk_norm = d_model // config.n_heads, config.dropout, config.qk_norm
        self.norm1 = nn.LayerNorm(d_model, bias=False)
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)
        self.norm2 = nn.LayerNorm(d_model, bias=False)
        self.moe = MoE(d_model, options)
        self.drop1 = nn.Dropout(config.dropout)
        self.drop2 = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Heads are counted from what the layers give: a rank may hold some of them only."""
        batch, length, _ = x.shape
        h = self.norm1(x)
        shape = (batch, length, -1, self.head_dim)
        q, k, v = (layer(h).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.qk_norm:
            q, k = (F.rms_norm(part, (self.head_dim,)).to(v.dtype) for part in (q, k))
        drop = self.dropout if self.training else 0.0
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=drop, is_causal=True)
        x = x + self.drop1(self.o(a.transpose(1, 2).reshape(batch, length, -1)))
        m, figures = self.moe(self.norm2(x))
        return x + self.drop2(m), figures


class MoEGPT(nn.Module):
    """Token ids [B, T] (int64) -> logits [B, T, vocab_size], and each sample's `FIGURES`, fp32 [B, 5]."""

    def __init__(self, config: TrainConfig, options: MoEOptions) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.seq_length, config.d_model)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, options) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.d_model, bias=False)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Position t of the logits predicts token t + 1; T is at most the model's sequence length."""
        x = self.drop(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        figures = []
        for block in self.blocks:
            x, of_block = block(x)
            figures.append(of_block)
        return self.head(self.norm(x)), torch.stack(figures).mean(dim=0)


def moe(config: TrainConfig, options: MoEOptions) -> ModelSpec:
    """The model of the configured size.

    Raises:
        ConfigError: the vocabulary is not known, or options contradict each other.
    """
    if config.vocab_size is None:
        raise ConfigError(
            "The model 'moe' needs a vocabulary and none is known; set --vocab-size, or use --data that names one."
        )
    check_moe(options)
    return ModelSpec(
        build=functools.partial(MoEGPT, config, options),
        init=functools.partial(_initialise, config=config),
        loss=functools.partial(_loss, options=options),
        blocks=tuple(f"blocks.{i}" for i in range(config.n_layers)),
        role=_role,
        metrics=FIGURES,
        flops_per_token=_flops_per_token(config, options),
        vocab_size=config.vocab_size,
    )


def _role(module_name: str) -> str | None:
    return _ROLES.get(module_name.rpartition(".")[2])


def _loss(output: tuple[Tensor, Tensor], targets: Tensor, *, options: MoEOptions) -> Loss:
    """Cross-entropy; the router's losses and figures of each sample count as often as it has valid tokens.

    So their means over the global batch do not depend on how its samples are spread over ranks and micro-batches.
    """
    logits, figures = output
    cross_entropy = F.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE_LABEL, reduction="sum"
    )
    totals = targets.ne(IGNORE_LABEL).sum(dim=1).to(figures.dtype) @ figures
    extra = options.aux_loss * totals[0] + options.z_loss * totals[1]
    return Loss(cross_entropy, extra, dict(zip(FIGURES, totals.detach().unbind(), strict=True)))


def _flops_per_token(config: TrainConfig, options: MoEOptions) -> dict[str, float]:
    """FLOPs of forward and backward for one token: 6 N, N being the weights that a token is multiplied with, + attention.

    Of the experts those count that a token goes to. Conventions as for the built-in model (docs/model.md).
    """
    d, layers = config.d_model, config.n_layers
    experts = d * options.experts + options.top_k * 2 * d * (options.d_ff or 4 * d)
    active = layers * (4 * d * d + experts) + (config.vocab_size or 0) * d
    square = 12.0 * layers * d * config.seq_length
    return {"palm": 6.0 * active + square, "causal": 6.0 * active + square / 2}


def _initialise(name: str, tensor: Tensor, generator: torch.Generator, *, config: TrainConfig) -> None:
    """Fill one full parameter in the way of the built-in model: the first loss is close to ln(vocabulary).

    Matrices have the deviation 0.5 / sqrt(d); those that write to the residual stream are divided by sqrt(2 L).
    """
    layer = name.removesuffix(".weight").rpartition(".")[2]
    width = config.d_model
    if layer in ("norm", "norm1", "norm2"):
        tensor.fill_(1.0)
        return
    std = 0.5 / math.sqrt(width)
    if layer in ("o", "down"):
        std /= math.sqrt(2 * config.n_layers)
    elif layer == "head":
        std = LOGIT_STD / math.sqrt(width)
    elif layer == "positions" or (layer == "tokens" and not config.tie_embeddings):
        std = EMBEDDING_STD
    elif layer == "tokens":  # it is the output layer too; its inputs have unit variance
        std = min(EMBEDDING_STD, LOGIT_STD / math.sqrt(width))
    tensor.normal_(0.0, std, generator=generator)
