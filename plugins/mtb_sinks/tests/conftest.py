from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mtb_core import RunInfo, StepRecord, TrainConfig
from mtb_kit.examples import example_record, example_run


@pytest.fixture
def record() -> Callable[..., StepRecord]:
    """`example_record`."""
    return example_record


@pytest.fixture
def info(tmp_path: Path) -> Callable[..., RunInfo]:
    """Makes the RunInfo of a rank; the run's folder is ``<tmp_path>/myrun``."""
    folder = tmp_path / "myrun"
    folder.mkdir()
    return partial(example_run, folder, size=1, config=TrainConfig(strategy="ddp"))
