"""The base class of a strategy's own conformance tests under pytest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from mtb_core.api.descriptions import StrategyInfo
from mtb_core.registry.discovery import discover

from .capabilities import Capabilities
from .checking import Case, cases, run_case
from .lab import Lab, Stopped


class StrategyConformance:
    """Every check of the kit, as one test each: subclass it, name the strategy, and the numbers of ranks.

    ::

        class TestMine(StrategyConformance):
            strategy = "mine"
            options = {"buckets": "4"}
            capabilities = Capabilities(world_sizes=(1, 2, 3))

    Attributes:
        strategy: name of an installed strategy, or a `StrategyInfo`.
        options: of the strategy, as on the command line.
        capabilities: what is declared beside the plan; what the plan does not promise is skipped and listed.
        settings: settings of `TrainConfig` that every run of the kit needs (model sizes, say).
        only: patterns of the checks to run, as for ``mtb plugins check --only``; empty: all. `ESSENTIAL` and `NUMBERS`
            are such selections.
    """

    strategy: ClassVar[str | StrategyInfo]
    options: ClassVar[Mapping[str, Any]] = {}
    capabilities: ClassVar[Capabilities] = Capabilities()
    settings: ClassVar[Mapping[str, Any]] = {}
    only: ClassVar[Sequence[str]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def lab(cls) -> Iterator[Lab]:
        """The laboratory of this class; runs are shared between its tests."""
        info = cls.strategy if isinstance(cls.strategy, StrategyInfo) else discover().strategy(cls.strategy)
        with Lab(info, cls.options, capabilities=cls.capabilities, settings=cls.settings) as lab:
            yield lab

    @pytest.mark.timeout(300)
    def test_conformance(self, lab: Lab, case: Case) -> None:
        """One check of the kit at a number of ranks."""
        try:
            outcome = run_case(lab, case)
        except Stopped as stopped:
            pytest.exit(str(stopped), returncode=stopped.exit_code)
        if outcome.status == "skipped":
            pytest.skip(outcome.reason)
        if outcome.status == "failed":
            pytest.fail(outcome.text, pytrace=False)


def parametrize(metafunc: pytest.Metafunc) -> None:
    """Give `StrategyConformance.test_conformance` its cases; called by the kit's pytest plugin."""
    own = metafunc.cls
    if own is None or not issubclass(own, StrategyConformance) or "case" not in metafunc.fixturenames:
        return
    chosen = cases(own.capabilities.world_sizes, own.only) if hasattr(own, "strategy") else []
    metafunc.parametrize("case", chosen, ids=[case.name for case in chosen])
