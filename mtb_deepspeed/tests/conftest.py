"""DeepSpeed is imported once, before ranks are forked; in each of them it would take seconds."""

from __future__ import annotations

import pytest

from mtb_deepspeed.engine import import_deepspeed


@pytest.fixture(scope="session", autouse=True)
def _imported() -> None:
    import_deepspeed("cpu")
