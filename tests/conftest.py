"""What the tests of the whole repository share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # ranks import the strategies in `broken` by name


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def generate() -> ModuleType:
    """The module that writes the reference."""
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
