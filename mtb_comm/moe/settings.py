"""Settings of a measurement, checked when made. Torch-free: wrong input is refused before any rank starts."""

from __future__ import annotations

import math
from typing import Any

import attrs

from mtb_core import ConfigError

DISTRIBUTIONS = ("uniform", "zipf", "hot", "learned", "counts")
GATES = ("softmax", "sigmoid")
ROUTINGS = ("token", "expert")
OVERFLOWS = ("drop", "residual", "next")
DTYPES = ("fp32", "bf16", "fp64")

#: Factors, exponents and weights: more would change nothing, and ends in infinities of fp32 or beyond 64 bits.
MAX_NUMBER = 1e6


@attrs.frozen(kw_only=True)
class RouteSettings:
    """One point to measure.

    Attributes:
        tokens_per_rank: tokens T/W that each of the W ranks has.
        hidden_size: width of a token.
        ffn_size: inner width of an expert's MLP.
        num_experts: E, over all ranks.
        top_k: experts that a token asks for.
        capacity_factor: None: dropless. Otherwise an expert takes at most ceil(factor * top_k * T / E) tokens.
        overflow: rule for a slot (a token's claim on an expert) if its expert is full. ``"drop"`` adds nothing;
            ``"residual"`` puts the token itself in place of the expert's output; ``"next"`` goes on to the token's
            next-best expert that has room.
        gate: ``"softmax"`` or ``"sigmoid"``.
        routing: ``"token"``: tokens choose experts; ``"expert"``: experts choose tokens.
        distribution: how tokens spread over experts, see `mtb_comm.moe.distributions`.
        zipf_s: exponent of ``"zipf"``.
        hot_share: of ``"hot"``: share of the tokens whose first choice is expert 0.
        counts: of ``"counts"``: shares of the experts, relative to each other.
        data: of ``"learned"``: a file whose bytes are the text.
        router_steps: of ``"learned"``: steps of training before the measurement.
        aux_weight: of the load-balancing loss in the loss that is differentiated.
        z_weight: of the router z-loss.

    Raises:
        ConfigError: a value that cannot be; the message says what is valid.
    """

    tokens_per_rank: int = 512
    hidden_size: int = 64
    ffn_size: int = 256
    num_experts: int = 8
    top_k: int = 2
    capacity_factor: float | None = 1.25
    overflow: str = "drop"
    gate: str = "softmax"
    routing: str = "token"
    distribution: str = "uniform"
    zipf_s: float = 1.0
    hot_share: float = 1.0
    counts: tuple[float, ...] | None = None
    data: str | None = None
    router_steps: int = 50
    aux_weight: float = 0.01
    z_weight: float = 0.001
    dtype: str = "fp32"
    iters: int = 20
    warmup: int = 5
    seed: int = 0
    check: bool = True

    def __attrs_post_init__(self) -> None:
        for name in ("tokens_per_rank", "hidden_size", "ffn_size", "num_experts", "top_k", "iters", "router_steps"):
            _at_least(name, getattr(self, name), 1)
        for name in ("warmup", "seed"):
            _at_least(name, getattr(self, name), 0)
        for name in ("zipf_s", "aux_weight", "z_weight"):
            _at_least(name, getattr(self, name), 0, most=MAX_NUMBER)
        _one_of("distribution", self.distribution, DISTRIBUTIONS)
        _one_of("gate", self.gate, GATES)
        _one_of("routing", self.routing, ROUTINGS)
        _one_of("overflow", self.overflow, OVERFLOWS)
        _one_of("dtype", self.dtype, DTYPES)
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"--top-k is {self.top_k}, but there are only {self.num_experts} experts and a token asks for "
                f"different ones; valid: 1 to {self.num_experts}."
            )
        self._check_capacity()
        self._check_distribution()

    def _check_capacity(self) -> None:
        factor = self.capacity_factor
        if factor is not None and not (0 < factor <= MAX_NUMBER):
            raise ConfigError(
                f"--capacity-factor is {factor}; it must be above 0 and at most {MAX_NUMBER:g} (1.25 leaves room "
                "for a quarter more than the mean). For no limit use --dropless."
            )
        if self.routing == "expert" and factor is None:
            raise ConfigError(
                "With --routing expert every expert takes as many tokens as its capacity, so --dropless has no "
                "meaning; set --capacity-factor, or use --routing token."
            )
        if self.routing == "expert" and self.overflow != "drop":
            raise ConfigError(
                f"--overflow {self.overflow} says where a token goes that its expert has no room for, but with "
                "--routing expert the experts choose and nothing overflows; leave --overflow out."
            )

    def _check_distribution(self) -> None:
        if not 0 <= self.hot_share <= 1:
            raise ConfigError(f"--hot-share is {self.hot_share}; it is a share of the tokens, valid: 0 to 1.")
        if (self.counts is not None) != (self.distribution == "counts"):
            raise ConfigError(
                f"--counts FILE and --distribution counts belong together; --distribution is {self.distribution!r} "
                f"and a file was {'' if self.counts is not None else 'not '}given."
            )
        if (self.data is not None) != (self.distribution == "learned"):
            raise ConfigError(
                f"--data FILE and --distribution learned belong together: the router is learned on the file's bytes; "
                f"--distribution is {self.distribution!r} and a file was {'' if self.data is not None else 'not '}given."
            )
        if self.counts is not None:
            self._check_counts(self.counts)

    def _check_counts(self, counts: tuple[float, ...]) -> None:
        if len(counts) != self.num_experts:
            raise ConfigError(
                f"The file of --counts has {len(counts)} numbers for {self.num_experts} experts; give one for each, "
                f"or set --num-experts {len(counts)}."
            )
        total = math.fsum(counts)
        if min(counts) < 0 or not 0 < total < math.inf:
            raise ConfigError(
                f"The file of --counts has {list(counts)}; valid are finite numbers of at least 0, one above 0."
            )
        expert = max(range(len(counts)), key=counts.__getitem__)
        if counts[expert] * self.top_k > total * (1 + 1e-12):
            raise ConfigError(
                f"The file of --counts gives expert {expert} {counts[expert] / total:.1%} of all slots, but with "
                f"--top-k {self.top_k} a token asks for different experts, so one expert gets at most "
                f"{1 / self.top_k:.1%}; lower its count or --top-k."
            )


def as_fields(settings: RouteSettings) -> dict[str, Any]:
    """The settings under the names that results give them; what does not apply is None."""
    values = attrs.asdict(settings)
    for name, wanted in (("zipf_s", "zipf"), ("hot_share", "hot"), ("router_steps", "learned")):
        if settings.distribution != wanted:
            values[name] = None
    if settings.capacity_factor is None or settings.routing == "expert":
        values["overflow"] = None
    del values["data"], values["check"]  # a path of this machine; the outcome of the check says whether it ran
    return values


def _at_least(name: str, value: float, minimum: int, *, most: float | None = None) -> None:
    if most is not None and value > most:
        raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be a number from {minimum} to {most:g}.")
    if not minimum <= value < math.inf:
        raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be a finite number of at least {minimum}.")


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ConfigError(f"--{name.replace('_', '-')} is {value!r}; valid: {', '.join(valid)}.")
