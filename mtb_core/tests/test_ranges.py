"""Ranges that profilers see."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

from mtb_core import TrainConfig, hookimpl, run
from mtb_core.measure.ranges import named_range

RECORDED: list[tuple[str, int]] = []


class Recorder:
    """A run plugin that profiles the trial."""

    @hookimpl
    def mtb_run_started(self):
        self.profiler = profile(activities=[ProfilerActivity.CPU], acc_events=True)
        self.profiler.start()

    @hookimpl
    def mtb_run_finished(self):
        self.profiler.stop()
        RECORDED.extend((row.key, row.count) for row in self.profiler.key_averages())


def test_waiting_for_data_is_a_range(tmp_path):
    """Each step of a profiled run shows its waiting for data as ``mtb:data``."""
    RECORDED.clear()
    config = TrainConfig(steps=3, warmup_steps=0, d_model=16, n_layers=1, seq_length=8, run_dir=str(tmp_path / "run"))
    run(config, quiet=True, plugins={"recorder": Recorder}).check()
    assert dict(RECORDED)["mtb:data"] == 3


def test_no_range_without_a_profiler():
    """Without a profiler nothing is entered; with one, torch's own range is."""
    plain = named_range("x")
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        seen = named_range("x")
    assert (type(plain).__name__, type(seen).__name__) == ("nullcontext", "record_function")
