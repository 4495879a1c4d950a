"""Model FLOPs per token of a decoder, by stated convention.

*Model* FLOPs are what the mathematics needs, not what a run happens to execute: activation checkpointing, sharding
and padding do not change them. A multiply-add counts as two; backward costs twice the forward.

``palm``
    6 N + 12 L d T (Chowdhery et al., PaLM, 2022, appendix B): attention counted over the full square of T x T.
``causal``
    6 N + 6 L d T: attention counted over the lower triangle only, which is what a causal kernel computes.

N is the number of weights that tokens are multiplied with. Looking up an embedding is not a multiplication and does
not count; the output layer is one and counts once, also where it shares its weight with the embedding.
"""

from __future__ import annotations

CONVENTIONS = ("palm", "causal")


def decoder_flops_per_token(matmul_weights: int, n_layers: int, d_model: int, seq_length: int) -> dict[str, float]:
    """FLOPs of forward and backward for one token, by convention.

    Args:
        matmul_weights: N, see above.
        n_layers: L, attention layers.
        d_model: d, heads times head dimension.
        seq_length: T, tokens that attend to each other.
    """
    square = 12.0 * n_layers * d_model * seq_length
    return {"palm": 6.0 * matmul_weights + square, "causal": 6.0 * matmul_weights + square / 2}
