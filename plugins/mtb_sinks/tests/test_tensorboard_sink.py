from __future__ import annotations

import math
import socket
import subprocess
import sys

from mtb_sinks.options import TensorboardOptions
from mtb_sinks.tensorboard_sink import TensorboardSink


def _run(info, records, options=None, evaluations=()):
    sink = TensorboardSink(options or TensorboardOptions(every=1))
    sink.mtb_run_started(info)
    for record in records:
        sink.mtb_step_recorded(record)
    for step, loss in evaluations:
        sink.mtb_evaluated(step, loss)
    sink.mtb_run_finished()


def _scalars(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_tensorboard_reads_what_was_written(info, record):
    """TensorBoard's own reader finds every value under its tag and step; float32 is the format's precision."""
    run = info()
    _run(run, [record(1, param_norm=2.5), record(2, memory_mib=1e300)], evaluations=[(2, 4.5)])
    folder = run.folder / "tensorboard"
    assert _scalars(folder, "train/loss") == [(1, 4.875), (2, 4.75)]
    assert _scalars(folder, "train/param_norm") == [(1, 2.5)]
    assert _scalars(folder, "time/step_time_ms") == [(1, 5.0625), (2, 5.0625)]
    assert [(1, 321.5), (2, math.inf)] == _scalars(folder, "memory/memory_mib")
    assert _scalars(folder, "eval/loss") == [(2, 4.5)]


def test_every_thins_out_but_keeps_the_ends_and_what_is_not_finite(info, record):
    """With every=4, steps 4 and 8 are written, and the first, the last, and a non-finite one."""
    run = info()
    records = [record(step) for step in range(1, 11)]
    records[5] = record(6, loss=math.nan, nonfinite=True)
    _run(run, records, TensorboardOptions(every=4))
    written = _scalars(run.folder / "tensorboard", "train/loss")
    assert [step for step, _ in written] == [1, 4, 6, 8, 10]
    assert math.isnan(written[2][1])


def test_steps_taken_again_after_a_resume_replace_the_earlier_ones(info, record):
    """A run resumed after step 2 shows each step once, with the later value."""
    run = info()
    _run(run, [record(step) for step in (1, 2, 3, 4)])
    _run(info(first=3), [record(3, loss=0.5), record(4, loss=0.25)])
    assert _scalars(run.folder / "tensorboard", "train/loss") == [(1, 4.875), (2, 4.75), (3, 0.5), (4, 0.25)]


def test_the_folder_option_keeps_runs_and_trials_apart(info, record, tmp_path):
    """FOLDER/<run's name>, and a sub-folder for the second trial; only rank 0 writes."""
    options = TensorboardOptions(folder=str(tmp_path / "board"), every=1)
    for run in (info(0, size=2), info(1, size=2), info(0, size=2, trial=1)):
        _run(run, [record(1)], options)
    files = sorted(path.relative_to(tmp_path / "board") for path in (tmp_path / "board").rglob("*.tfevents.*"))
    assert [str(path.parent) for path in files] == ["myrun", "myrun/trial_001"]


def test_the_file_name_does_not_tell_the_machine(info, record):
    """Host names are not recorded, neither in the name nor in the content."""
    run = info()
    _run(run, [record(1)])
    (file,) = (run.folder / "tensorboard").iterdir()
    assert socket.gethostname() not in file.name
    assert socket.gethostname().encode() not in file.read_bytes()


def test_neither_torch_nor_tensorflow_is_imported_and_nothing_is_printed(tmp_path):
    """Writing events starts no thread, imports no framework and is silent."""
    program = f"""
import sys, threading
from pathlib import Path
from mtb_sinks.tensorboard_sink import _EventFile
events = _EventFile(Path({str(tmp_path)!r}))
events.start(1)
events.scalars(1, {{"train/loss": 1.0}})
assert threading.active_count() == 1
events.close()
assert not {{"torch", "tensorflow"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
