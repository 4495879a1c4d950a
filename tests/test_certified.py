"""A part of the conformance kit for every strategy whose whole certificate is slow; the rest is in the plugins' own tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mtb_core.testing import Capabilities, StrategyConformance

#: Training, its figures and exact resuming against `single`.
ESSENTIAL = ("discovery.plan", "parity.losses", "parity.weights", "processes.result", "checkpoints.exact_resume")


class Certified(StrategyConformance):
    """On two ranks."""

    only: ClassVar[Sequence[str]] = ESSENTIAL
    capabilities = Capabilities(world_sizes=(2,))


class TestDeepSpeed(Certified):
    """ZeRO stage 2."""

    strategy = "deepspeed"
    options: ClassVar[Mapping[str, Any]] = {"stage": "2"}


class TestTensorParallel(Certified):
    """Layers over both ranks."""

    strategy = "tp"


class TestPipeline(Certified):
    """A stage on each rank."""

    strategy = "pp"


class TestContextParallel(Certified):
    """Half of each sequence on each rank."""

    strategy = "cp"
    settings: ClassVar[Mapping[str, Any]] = {"seq_length": 8}


class TestExpertParallel(Certified):
    """Half of the experts on each rank."""

    strategy = "ep"
    settings: ClassVar[Mapping[str, Any]] = {"model": "moe", "model_opt": {"experts": 4, "d_ff": 32}}
