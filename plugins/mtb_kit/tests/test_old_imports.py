"""The kit under its former name."""

from __future__ import annotations

import pytest

import mtb_core.testing
import mtb_kit
from mtb_kit import launches


def test_the_former_place_gives_the_same_with_a_warning() -> None:
    """Names and modules that were documented are those of `mtb_kit`."""
    with pytest.warns(DeprecationWarning, match="mtb_core.testing is mtb_kit now"):
        from mtb_core.testing import StrategyConformance
    assert StrategyConformance is mtb_kit.StrategyConformance
    with pytest.warns(DeprecationWarning, match="mtb_kit"):
        assert mtb_core.testing.launches is launches
    with pytest.warns(DeprecationWarning, match="mtb_kit"), pytest.raises(AttributeError):
        _ = mtb_core.testing.nothing


def test_without_the_kit_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old import of a plugin's tests tells what is missing."""
    monkeypatch.setitem(__import__("sys").modules, "mtb_kit", None)
    with pytest.raises(ImportError, match="pip install mtb-kit"):
        _ = mtb_core.testing.Capabilities
