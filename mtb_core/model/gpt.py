"""The built-in model: a small GPT-like decoder.

Pre-norm blocks, causal attention through ``scaled_dot_product_attention``, learned positions, a GELU MLP four times
as wide, no biases. Projections are separate linear layers, so that each can be sharded on its own.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import Tensor, nn

from mtb_core.api.errors import ConfigError
from mtb_core.api.values import ModelSpec
from mtb_core.config.schema import TrainConfig

from .flops import decoder_flops_per_token

#: Standard deviation of the embeddings at the start.
EMBEDDING_STD = 0.02
#: Standard deviation of the logits at the start: it raises the first loss over ln(vocabulary) by half its square.
LOGIT_STD = 0.1
#: With tied embeddings: bound of the logit that a position gives its own token at the start.
OWN_LOGIT = 0.4

_PARALLEL_ROLE = {
    "tokens": "embedding",
    "positions": "stem",
    **dict.fromkeys(("drop", "drop1", "drop2"), "dropout"),
    **dict.fromkeys(("norm", "norm1", "norm2"), "norm"),
    "attention": "attention",
    **dict.fromkeys(("q", "k", "v", "up"), "colwise"),
    **dict.fromkeys(("o", "down"), "rowwise"),
    "head": "head",
}


class Positions(nn.Module):
    """Adds a learned vector for each position: [B, T, d] -> [B, T, d]."""

    def __init__(self, length: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, d_model))

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Add the vectors of `positions`, int64 [T]; None: of the first T.

        Raises:
            ValueError: T is larger than the number of positions.
        """
        if positions is not None:
            return x + self.weight[positions]
        length, available = x.shape[1], self.weight.shape[0]
        if length == available:
            return x + self.weight
        if length > available:
            raise ValueError(f"The model has {available} positions; got a sequence of {length} tokens.")
        return x + self.weight[:length]


class Attention(nn.Module):
    """Causal attention of queries, keys and values, each [B, heads, T, features]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Position t of the result is a mean of the values up to t."""
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream: [B, T, d] -> [B, T, d]."""

    def __init__(self, d_model: int, n_heads: int, dropout: float, qk_norm: bool) -> None:
        super().__init__()
        self.head_dim = d_model // n_heads
        self.dropout = dropout
        self.qk_norm = qk_norm
        self.norm1 = nn.LayerNorm(d_model, bias=False)
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.attention = Attention()
        self.o = nn.Linear(d_model, d_model, bias=False)
        self.norm2 = nn.LayerNorm(d_model, bias=False)
        self.up = nn.Linear(d_model, 4 * d_model, bias=False)
        self.down = nn.Linear(4 * d_model, d_model, bias=False)
        self.drop1 = nn.Dropout(dropout)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Sizes are taken from what the layers give: a rank may hold some heads, or some positions of `x`, only."""
        drop = self.dropout if self.training else 0.0
        h = self.norm1(x)
        batch, length, _ = h.shape
        shape = (batch, length, -1, self.head_dim)
        q = self.q(h).view(shape).transpose(1, 2)
        k = self.k(h).view(shape).transpose(1, 2)
        v = self.v(h).view(shape).transpose(1, 2)
        if self.qk_norm:
            # Without weights: nothing that tensor-parallel ranks, each with its own heads, would have to sum.
            q = F.rms_norm(q, (self.head_dim,)).to(v.dtype)
            k = F.rms_norm(k, (self.head_dim,)).to(v.dtype)
        a = self.attention(q, k, v, drop)
        a = self.o(a.transpose(1, 2).reshape(batch, length, -1))
        x = x + (self.drop1(a) if drop else a)
        m: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + (self.drop2(m) if drop else m)


class GPT(nn.Module):
    """Token ids [B, T] (int64) -> logits [B, T, vocab_size]."""

    def __init__(
        self,
        *,
        vocab_size: int,
        seq_length: int,
        d_model: int,
        n_heads: int,
        n_layers: int,
        dropout: float = 0.0,
        qk_norm: bool = False,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.positions = Positions(seq_length, d_model)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(d_model, n_heads, dropout, qk_norm) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model, bias=False)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Position t of the logits predicts token t + 1; T is at most the model's sequence length."""
        x = self.positions(self.tokens(tokens))
        if self.dropout and self.training:
            x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def gpt_spec(config: TrainConfig) -> ModelSpec:
    """The built-in model of the configured size.

    Raises:
        ConfigError: the vocabulary is not known.
    """
    if config.vocab_size is None:
        raise ConfigError(
            "The model 'gpt' needs a vocabulary and none is known; set --vocab-size, or use --data that names one."
        )
    d_model, n_layers = config.d_model, config.n_layers
    build = functools.partial(
        GPT,
        vocab_size=config.vocab_size,
        seq_length=config.seq_length,
        d_model=d_model,
        n_heads=config.n_heads,
        n_layers=n_layers,
        dropout=config.dropout,
        qk_norm=config.qk_norm,
        tie_embeddings=config.tie_embeddings,
    )
    matmul_weights = 12 * n_layers * d_model**2 + config.vocab_size * d_model
    return ModelSpec(
        build=build,
        init=functools.partial(_initialise, d_model=d_model, n_layers=n_layers, tied=config.tie_embeddings),
        blocks=tuple(f"blocks.{i}" for i in range(n_layers)),
        role=_parallel_role,
        chain=("tokens", "positions", "drop", *(f"blocks.{i}" for i in range(n_layers)), "norm", "head"),
        flops_per_token=decoder_flops_per_token(matmul_weights, n_layers, d_model, config.seq_length),
        vocab_size=config.vocab_size,
    )


def _parallel_role(module_name: str) -> str | None:
    return _PARALLEL_ROLE.get(module_name.rpartition(".")[2])


def _initialise(
    name: str, tensor: Tensor, generator: torch.Generator, *, d_model: int, n_layers: int, tied: bool
) -> None:
    """Fill one full parameter so that the first loss is close to ln(vocabulary), whatever the size.

    Matrices of the blocks have deviation 0.5 / sqrt(d) (GPT-2's 0.02 at its width); those that write to the residual
    stream are divided by sqrt(2 L), as in GPT-2. The output layer sees inputs of unit variance, so its deviation
    LOGIT_STD / sqrt(d) gives the logits LOGIT_STD. Where it is tied to the token embedding of deviation s, a position
    that holds this embedding beside a position's vector of deviation p has the logit d s^2 / p for its own token.
    Text repeats itself, so this shows in the loss; s is chosen to keep it at OWN_LOGIT.
    """
    layer = name.removesuffix(".weight").rpartition(".")[2]
    if layer in ("norm", "norm1", "norm2"):
        tensor.fill_(1.0)
    elif layer == "positions":
        tensor.normal_(0.0, EMBEDDING_STD, generator=generator)
    elif layer == "tokens":
        own = math.sqrt(OWN_LOGIT * EMBEDDING_STD / d_model)
        tensor.normal_(0.0, min(EMBEDDING_STD, own) if tied else EMBEDDING_STD, generator=generator)
    elif layer == "head":
        tensor.normal_(0.0, LOGIT_STD / math.sqrt(d_model), generator=generator)
    else:
        depth = math.sqrt(2 * n_layers) if layer in ("o", "down") else 1.0
        tensor.normal_(0.0, 0.5 / math.sqrt(d_model) / depth, generator=generator)
