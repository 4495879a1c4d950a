from __future__ import annotations

import math
import subprocess
import sys

import pytest

from mtb_core import Result
from mtb_core.cli.show import print_result

RESULT = {
    "schema_version": 1,
    "benchmark": "training",
    "exit_reason": "done",
    "strategy": "ddp",
    "strategy_options": {"zero1": True, "bucket_cap_mb": 25},
    "world_size": 2,
    "precision": "bf16",
    "reduce_dtype": "fp32",
    "device": "cpu",
    "backend": "gloo",
    "parameters": 418816,
    "steps": 50,
    "warmup_steps": 5,
    "repeat_count": 1,
    "batch_size_per_rank": 8,
    "global_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "resolved_gradient_sync_mode": "last",
    "tokens_per_sec": 123456.7,
    "step_time_ms": 12.345,
    "data_time_ms": 0.01,
    "forward_backward_ms": 10.2,
    "optimizer_step_ms": 1.2,
    "max_memory_mib": 345.6,
    "memory_kind": "process_rss",
    "model_flops_per_token": 1e6,
    "flops_convention": "full",
    "mfu": None,
    "mfu_reason": "this device's peak is not known",
    "loss": 2.9,
    "loss_first": 5.54,
    "eval_loss": None,
    "grad_norm": 1.25,
    "grad_norm_max": 4.5,
    "clipped_steps": 3,
    "skipped_steps": 1,
    "global_step": 55,
    "config": {"model": "gpt"},
    "summary": {"tokens_per_sec": {"mean": 123456.0, "std": 1234.0}, "step_time_ms": {"mean": 12.0, "std": 0.5}},
    "performance_valid": True,
    "performance_invalid_reasons": [],
}


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


def rows(text):
    """The table's rows: name -> text."""
    cells = [
        [cell.strip() for cell in line.strip("│|").split(line[0])] for line in text.splitlines() if line[0] in "│|"
    ]
    return dict(cells)


def test_the_table_tells_what_was_run_and_what_came_out(capsys):
    """Every figure people look for has its row."""
    print_result(RESULT, folder="runs/x", file="runs/x/result.json")
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0] == "training with ddp on 2 ranks: done"
    assert rows(out) == {
        "strategy": "ddp (zero1=true, bucket_cap_mb=25)",
        "model": "gpt, 418,816 parameters",
        "ranks": "2, cpu, gloo, bf16, gradients reduced in fp32",
        "batch": "32 samples: 8 per rank and micro-batch, 2 micro-batches a step, gradients synchronised at last",
        "steps": "50 measured, 5 warm-up before, now at step 55",
        "loss": "5.5400 -> 2.9000",
        "gradient norm": "1.25, at most 4.5, clipped steps: 3, skipped steps: 1",
        "step time": "12.35 ms (data 0.01, forward-backward 10.20, optimizer 1.20)",
        "throughput": "123,457 tokens/s",
        "peak memory": "346 MiB on the fullest rank, resident set of the process",
        "MFU": "not known: this device's peak is not known",
        "run folder": "runs/x",
        "result file": "runs/x/result.json",
    }


def test_mfu_is_a_share_with_its_convention_or_the_reason_why_not(capsys):
    """Never a guess."""
    print_result(RESULT | {"mfu": 0.4321})
    assert rows(capsys.readouterr().out)["MFU"] == "43.2%, FLOPs by the convention 'full'"


def test_repeats_show_mean_and_spread(capsys):
    """From two trials on."""
    print_result(RESULT | {"repeat_count": 3})
    expected = "3 trials (mean +/- standard deviation), 123,456 +/- 1,234 tokens/s, 12.00 +/- 0.50 ms a step"
    assert rows(capsys.readouterr().out)["repeats"] == expected


def test_a_value_that_was_not_finite_is_told(capsys):
    """Whether it is still a float or already null with a flag."""
    print_result(RESULT | {"loss": None, "loss_nonfinite": "nan", "grad_norm": math.inf})
    shown = rows(capsys.readouterr().out)
    assert shown["loss"] == "5.5400 -> nan"
    assert shown["gradient norm"].startswith("inf,")


def test_a_measurement_that_is_not_valid_says_why(capsys):
    """Reasons stand in the table, not in a file nobody opens."""
    print_result(RESULT | {"performance_valid": False, "performance_invalid_reasons": ["no measured steps", "debug"]})
    assert rows(capsys.readouterr().out)["not to compare"] == "no measured steps; debug"


def test_a_failed_run_shows_what_there_is(capsys):
    """A result without figures is no error; markup in a value stays text."""
    print_result(Result(exit_reason="failed", strategy="x[bold]", strategy_options={}, world_size=1, precision="fp32"))
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "training with x[bold] on 1 rank: failed"
    assert "loss" not in rows(out)


def test_a_failed_run_does_not_show_what_tells_nothing(capsys):
    """No measured steps and no MFU are a matter of course there; what it did reach is shown."""
    nothing = RESULT | {"exit_reason": "failed", "steps": 0, "warmup_steps": 0, "global_step": 0}
    print_result(nothing)
    assert {"steps", "MFU"}.isdisjoint(rows(capsys.readouterr().out))
    print_result(nothing | {"global_step": 3})
    assert rows(capsys.readouterr().out)["steps"] == "now at step 3"
    print_result(nothing | {"steps": 7, "global_step": 12, "warmup_steps": 5})
    assert rows(capsys.readouterr().out)["steps"] == "7 measured, 5 warm-up before, now at step 12"


@pytest.mark.parametrize("columns", ["30", "40", "80"])
def test_no_line_is_wider_than_the_terminal(capsys, monkeypatch, columns):
    """Long values are wrapped, none is cut off."""
    monkeypatch.setenv("COLUMNS", columns)
    print_result(RESULT, folder="runs/" + "x" * 90)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= int(columns)
    assert out.count("x") >= 90


def test_a_pipe_gets_no_escape_sequences(capsys):
    """Colours are for terminals."""
    print_result(RESULT)
    assert "\x1b" not in capsys.readouterr().out


PROGRAM = """
import sys
from mtb_core.cli.show import print_result
result = {"strategy": "ddp", "loss": 1.0, "exit_reason": "done"}
if sys.argv[1] == "ascii":
    print_result(result, folder="runs/größe")
else:
    try:
        for _ in range(2000):
            print_result(result)
    except BrokenPipeError:
        sys.stderr.write("caught")
        sys.stderr.flush()
        import os
        os._exit(0)
"""


def test_an_encoding_that_lacks_a_letter_is_no_reason_to_fail(monkeypatch):
    """The C locale gets a table in ASCII."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = subprocess.run([sys.executable, "-c", PROGRAM, "ascii"], check=True, capture_output=True, timeout=240)
    assert b"runs/gr??e" in done.stdout
    assert done.stdout.isascii()


def test_a_reader_that_has_gone_is_the_callers_to_handle():
    """`mtb … | head -1`: a BrokenPipeError, not rich's own way out."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "pipe"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == "caught"
    assert process.returncode == 0
