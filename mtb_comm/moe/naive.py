"""The same layer in one process, token by token: what `layer` computes, written to be read.

No permutation, no sorting, no all-to-all: queues are lists, experts take their tokens in a loop. Tests, and `--check`
of the command, hold the fast layer's outputs and gradients against this one.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from .experts import mlp
from .gating import SMALLEST_SUM
from .placement import capacity_per_expert
from .settings import RouteSettings

#: What slot `choice` of token t counts: ``weights[t][choice]``, scalars.
Weights = Sequence[Sequence[Tensor]]


@attrs.frozen
class NaivePassed:
    """Outputs [T, d], the two losses, the (token, choice) of every expert's slots, and how many slots got no place."""

    output: Tensor
    load_balancing: Tensor
    z_loss: Tensor
    queues: list[list[tuple[int, int]]]
    dropped: int


def moe(
    chunks: Sequence[Tensor],
    router: Tensor,
    experts: Sequence[Sequence[Tensor]],
    preference: Tensor | None,
    settings: RouteSettings,
) -> NaivePassed:
    """All ranks' tokens through all experts.

    Args:
        chunks: the tokens [T_r, d] of each rank. Logits are computed chunk by chunk, as the ranks do it: in another
            shape a product may round differently, and then two nearly equal experts may change places.
        router: [d, E].
        experts: the four weights of each expert, see `experts.mlp`.
        preference: [T, E], or None: the logits.
    """
    x = torch.cat(list(chunks))
    logits = torch.cat([chunk.to(router.dtype) @ router for chunk in chunks])
    if preference is not None:
        logits = logits + preference
    gates = torch.softmax(logits, dim=1) if settings.gate == "softmax" else torch.sigmoid(logits)
    wanted = (logits if preference is None else preference).detach().tolist()
    z_loss = torch.logsumexp(logits, dim=1).square().mean()
    capacity = _capacity(settings, len(x))
    if settings.routing == "expert":
        queues = choose(gates.detach().tolist(), min(capacity, len(x)))
        output = combine(dispatch(x, queues), queues, experts, _table(gates), (), x)
        return NaivePassed(output, gates.new_zeros(()), z_loss, queues, 0)

    queues, chosen, homeless = assign(wanted, settings.top_k, capacity, settings.overflow)
    table = _table(gates)
    weights: Weights = [[table[token][expert] for expert in chosen[token]] for token in range(len(x))]
    if settings.top_k > 1:
        weights = [[w / _divisor(torch.stack(list(row)).sum()) for w in row] for row in weights]
    through = homeless if settings.overflow == "residual" else []
    output = combine(dispatch(x, queues), queues, experts, weights, through, x)
    return NaivePassed(output, _load_balancing(gates, wanted, settings.top_k), z_loss, queues, len(homeless))


def assign(
    wanted: list[list[float]], top_k: int, capacity: int, overflow: str
) -> tuple[list[list[tuple[int, int]]], list[list[int]], list[tuple[int, int]]]:
    """Queues of (token, choice) before each expert, the experts of each token, and the slots without a place."""
    ranking = [_ranking(row) for row in wanted]
    chosen = [row[:top_k] for row in ranking]
    queues: list[list[tuple[int, int]]] = [[] for _ in range(len(wanted[0]) if wanted else 0)]
    homeless = []
    for choice in range(top_k):
        for token, row in enumerate(chosen):
            if len(queues[row[choice]]) < capacity:
                queues[row[choice]].append((token, choice))
            else:
                homeless.append((token, choice))
    if overflow != "next":
        return queues, chosen, sorted(homeless)

    to_ask = [row[top_k:] for row in ranking]
    while True:
        asking = [(choice, token, to_ask[token].pop(0)) for token, choice in sorted(homeless) if to_ask[token]]
        if not asking:
            return queues, chosen, sorted(homeless)
        for choice, token, expert in sorted(asking):
            if len(queues[expert]) < capacity:
                queues[expert].append((token, choice))
                chosen[token][choice] = expert
                homeless.remove((token, choice))


def choose(scores: list[list[float]], capacity: int) -> list[list[tuple[int, int]]]:
    """Every expert's best tokens; the "choice" of a slot is then its expert."""
    queues = []
    for expert in range(len(scores[0]) if scores else 0):
        best = _ranking([row[expert] for row in scores])
        queues.append([(token, expert) for token in sorted(best[:capacity])])
    return queues


def dispatch(x: Tensor, queues: Sequence[Sequence[tuple[int, int]]]) -> list[Tensor]:
    """The tokens [n_e, d] of every expert, taken one by one."""
    tokens = x.unbind(0)  # once: indexing would make every token's gradient as large as all of them
    return [torch.stack([tokens[token] for token, _ in queue]) if queue else x[:0] for queue in queues]


def combine(
    batches: Sequence[Tensor],
    queues: Sequence[Sequence[tuple[int, int]]],
    experts: Sequence[Sequence[Tensor]],
    weights: Weights,
    through: Sequence[tuple[int, int]],
    x: Tensor,
) -> Tensor:
    """[T, d]: the weighted outputs of each token's experts, summed; slots in `through` count the token itself."""
    wide = torch.promote_types(x.dtype, torch.float32)
    parts: list[list[Tensor]] = [[] for _ in range(len(x))]
    for expert, queue in enumerate(queues):
        outputs = mlp(batches[expert], *experts[expert]).to(wide)
        for row, (token, choice) in zip(outputs.unbind(0), queue, strict=True):
            parts[token].append(row * weights[token][choice])
    tokens = x.to(wide).unbind(0)
    for token, choice in through:
        parts[token].append(tokens[token] * weights[token][choice])
    nothing = x.new_zeros(x.shape[1], dtype=wide)
    rows = [sum(part, start=nothing) for part in parts]
    return (torch.stack(rows) if rows else x.to(wide)).to(x.dtype)


def _divisor(total: Tensor) -> Tensor:
    """Gates that all vanish stay zero, as in the layer."""
    return total.clamp_min(SMALLEST_SUM)


def _table(gates: Tensor) -> Weights:
    return [row.unbind(0) for row in gates.unbind(0)]


def _ranking(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def _capacity(settings: RouteSettings, tokens: int) -> int:
    if settings.capacity_factor is None:
        return tokens * settings.top_k
    return capacity_per_expert(settings.capacity_factor, settings.top_k, tokens, settings.num_experts)


def _load_balancing(gates: Tensor, wanted: list[list[float]], top_k: int) -> Tensor:
    tokens, experts = gates.shape
    loss = gates.new_zeros(())
    shares = gates / _divisor(gates.sum(dim=1, keepdim=True))
    for expert in range(experts):
        asked = sum(expert in _ranking(row)[:top_k] for row in wanted)
        loss = loss + experts * (asked / (tokens * top_k)) * shares[:, expert].mean()
    return loss
