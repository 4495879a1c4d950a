"""What the tests share."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tracing():
    """The module that makes small traces."""
    path = Path(__file__).parent / "tracing.py"
    spec = importlib.util.spec_from_file_location("mtb_profile_tests_tracing", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
