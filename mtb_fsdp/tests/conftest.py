"""The case of the kit that takes longest is a slow test here: it is about how core publishes, and fast with `ddp`."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent and item.name.startswith("test_conformance[checkpoints.crash"):
            item.add_marker(pytest.mark.slow)
