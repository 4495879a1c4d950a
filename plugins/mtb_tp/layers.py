"""The layers that ``mtb tp`` checks: their tensors, how they are split, one process's result, theory's collectives."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import attrs
import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from torch import Tensor

from mtb_tp.explicit import keep_mask

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}

#: (calls, message bytes) by kind, of the passes ``"forward"`` and ``"backward"``.
Collectives = Mapping[str, Mapping[str, tuple[int, int]]]


@attrs.frozen
class Settings:
    """Settings of a check. Sizes in elements; `layers` are keys of `LAYERS`."""

    layers: tuple[str, ...]
    in_features: int
    out_features: int
    hidden_features: int
    hidden_size: int
    batch_size: int
    seq_length: int
    dropout: float
    seed: int
    dtype: str
    atol: float | None

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize


@attrs.frozen
class Layer:
    """A layer, by its whole tensors.

    Attributes:
        shapes: of inputs and parameters; ``"x"`` is the input.
        splits: the dimension along which ranks share a tensor or ``"output"``; None: each rank holds all of it.
        reference: ``reference(tensors, settings, ranks)``: what one process computes.
        collectives: ``collectives(settings, implementation)``: (calls, message bytes) of each pass, by kind.
    """

    shapes: Callable[[Settings], dict[str, tuple[int, ...]]]
    splits: Mapping[str, int | None]
    reference: Callable[[Mapping[str, Tensor], Settings, int], Tensor]
    collectives: Callable[[Settings, str], Collectives]


def seeded(settings: Settings, *name: object) -> torch.Generator:
    """A random stream that depends on the seed and `name` only."""
    text = "/".join(map(str, (settings.seed, *name)))
    return torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1)


def make_tensor(settings: Settings, name: str, shape: tuple[int, ...]) -> Tensor:
    """The whole tensor `name`, the same on every rank. Weights are scaled to keep outputs near one."""
    full = torch.randn(shape, generator=seeded(settings, name), dtype=torch.float64)
    if name.endswith("weight"):
        full = full / shape[-1] ** 0.5 if len(shape) > 1 else 1 + full / 10
    return full.to(DTYPES[settings.dtype])


def part(full: Tensor, dim: int | None, rank: int, ranks: int) -> Tensor:
    """Rank `rank`'s part of `full`, that of ``torch.chunk``; perhaps empty. A view."""
    if dim is None:
        return full
    size = -(-full.shape[dim] // ranks)
    start = min(rank * size, full.shape[dim])
    return full.narrow(dim, start, min(size, full.shape[dim] - start))


def dropout_generator(settings: Settings, rank: int) -> torch.Generator:
    """The stream of `rank`'s dropout in the sequence region."""
    return seeded(settings, "dropout", rank)


def _mlp(tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
    hidden = F.gelu(F.linear(x, tensors["up_weight"], tensors["up_bias"]))
    return F.linear(hidden, tensors["down_weight"], tensors["down_bias"])


def _linear_reference(tensors: Mapping[str, Tensor], _settings: Settings, _ranks: int) -> Tensor:
    return F.linear(tensors["x"], tensors["weight"], tensors["bias"])


def _mlp_reference(tensors: Mapping[str, Tensor], _settings: Settings, _ranks: int) -> Tensor:
    return _mlp(tensors, tensors["x"])


def _sequence_reference(tensors: Mapping[str, Tensor], settings: Settings, ranks: int) -> Tensor:
    """Every rank's mask of its positions, side by side, is the mask of the whole."""
    x = F.layer_norm(tensors["x"], (settings.hidden_size,), tensors["norm_weight"], tensors["norm_bias"])
    if settings.dropout:
        parts = [
            keep_mask(part(x.detach(), 1, rank, ranks), settings.dropout, dropout_generator(settings, rank))
            for rank in range(ranks)
        ]
        x = x * torch.cat(parts, dim=1) / (1 - settings.dropout)
    return _mlp(tensors, x)


def _linear_shapes(s: Settings) -> dict[str, tuple[int, ...]]:
    return {
        "x": (s.batch_size, s.in_features),
        "weight": (s.out_features, s.in_features),
        "bias": (s.out_features,),
    }


def _mlp_weights(inner: int, hidden: int, outer: int) -> dict[str, tuple[int, ...]]:
    return {
        "up_weight": (hidden, inner),
        "up_bias": (hidden,),
        "down_weight": (outer, hidden),
        "down_bias": (outer,),
    }


def _mlp_shapes(s: Settings) -> dict[str, tuple[int, ...]]:
    return {"x": (s.batch_size, s.in_features), **_mlp_weights(s.in_features, s.hidden_features, s.out_features)}


def _sequence_shapes(s: Settings) -> dict[str, tuple[int, ...]]:
    d = s.hidden_size
    return {
        "x": (s.batch_size, s.seq_length, d),
        "norm_weight": (d,),
        "norm_bias": (d,),
        **_mlp_weights(d, s.hidden_features, d),
    }


def _column_collectives(s: Settings, _implementation: str) -> Collectives:
    return {"forward": {}, "backward": {"all_reduce": (1, s.batch_size * s.in_features * s.element_bytes)}}


def _row_collectives(s: Settings, _implementation: str) -> Collectives:
    return {"forward": {"all_reduce": (1, s.batch_size * s.out_features * s.element_bytes)}, "backward": {}}


def _mlp_collectives(s: Settings, implementation: str) -> Collectives:
    row, column = _row_collectives(s, implementation), _column_collectives(s, implementation)
    return {"forward": row["forward"], "backward": column["backward"]}


def _sequence_collectives(s: Settings, implementation: str) -> Collectives:
    """Backward also sums the gradients of vectors that ranks hold in common and use for their own positions only.

    Those are the norm's weight and bias and, by hand, the last bias. Torch adds a share of that one before the
    reduce-scatter, whose backward gathers its whole gradient.
    """
    size = s.batch_size * s.seq_length * s.hidden_size * s.element_bytes
    vectors = 3 if implementation == "explicit" else 2
    pair = {"all_gather": (1, size), "reduce_scatter": (1, size)}
    return {"forward": pair, "backward": {**pair, "all_reduce": (vectors, vectors * s.hidden_size * s.element_bytes)}}


_MLP_SPLITS = {"up_weight": 0, "up_bias": 0, "down_weight": 1, "down_bias": None}

LAYERS: dict[str, Layer] = {
    "column": Layer(
        _linear_shapes, {"x": None, "weight": 0, "bias": 0, "output": -1}, _linear_reference, _column_collectives
    ),
    "row": Layer(
        _linear_shapes, {"x": -1, "weight": 1, "bias": None, "output": None}, _linear_reference, _row_collectives
    ),
    "mlp": Layer(_mlp_shapes, {"x": None, **_MLP_SPLITS, "output": None}, _mlp_reference, _mlp_collectives),
    "sequence": Layer(
        _sequence_shapes,
        {"x": 1, "norm_weight": None, "norm_bias": None, **_MLP_SPLITS, "output": 1},
        _sequence_reference,
        _sequence_collectives,
    ),
}
