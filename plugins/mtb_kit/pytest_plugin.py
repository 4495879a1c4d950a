"""The kit's pytest plugin, loaded by pytest wherever mtb-core is installed; it does nothing without a `StrategyConformance`."""

from __future__ import annotations

import sys

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Make known the marker of the tests in `StrategyConformance`; without pytest-timeout it does nothing."""
    config.addinivalue_line("markers", "timeout(seconds): end a test that takes longer (needs pytest-timeout)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each subclass of `StrategyConformance` one test a check and number of ranks."""
    conformance = sys.modules.get("mtb_kit.conformance")
    if conformance is not None:
        conformance.parametrize(metafunc)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was skipped because the plan does not promise it."""
    if "mtb_kit.conformance" not in sys.modules:
        return
    skipped: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if "not promised: " in reason:
            owner = report.nodeid.rpartition("::test_conformance")[0]
            text = f"{owner}: {reason.removeprefix('Skipped: ')}"
            skipped[text] = skipped.get(text, 0) + 1
    if skipped:
        terminalreporter.section("conformance checks of what the strategy's plan does not promise")
        for text, count in skipped.items():
            terminalreporter.line(f"{text} ({count} checks)")
