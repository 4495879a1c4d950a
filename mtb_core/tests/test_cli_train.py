"""Tests of mtb_core.cli.train and cli.options: from the command line to a configuration, and a result to people."""

import json
import sys
import types

import pytest

from mtb_core.cli import main
from mtb_core.cli.train import train
from mtb_core.config import TrainConfig, settings
from mtb_core.measure.result import Result

#: The contract's options; the command line must keep them.
CONTRACT = """
config strategy strategy-opt nproc nnodes rdzv-endpoint max-restarts start-method device backend precision compile steps
until-step warmup-steps repeat batch-size global-batch-size grad-accum-steps gradient-sync-mode activation-checkpointing
model seq-length vocab-size d-model n-heads n-layers dropout data eval-data eval-every eval-batches seed optimizer
learning-rate weight-decay lr-scheduler lr-warmup-steps lr-decay-steps min-learning-rate max-grad-norm on-nonfinite sink
run-dir output json quiet debug no-plugin checkpoint-dir save-every keep-last keep-every async-save resume
allow-config-change
""".split()  # noqa: SIM905  (names read better so)
#: Beyond the contract's list.
OURS = """qk-norm tie-embeddings momentum adam-eps allow-missing-rng flops-convention formal launcher
model-opt data-opt optimizer-opt lr-scheduler-opt plugin-opt checkpoint-format""".split()  # noqa: SIM905


@pytest.fixture
def ran(monkeypatch):
    """``ran(*arguments)``: the exit code of ``mtb train``, and the configurations that reached `run`, which is faked."""
    calls = []

    def run_train(*arguments, exit_reason="done", reports=True, failure=None):
        def run(config, *, quiet):
            calls.append((config, quiet))
            return Result(
                exit_reason=exit_reason,
                failure=failure,
                strategy=config.strategy,
                strategy_options={},
                world_size=1,
                precision="fp32",
                run_dir="runs/x",
                loss=float("nan"),
            )

        fake = types.ModuleType("mtb_core.running")
        fake.run, fake.reports_here = run, lambda: reports
        monkeypatch.setitem(sys.modules, "mtb_core.running", fake)
        return main(["train", *arguments])

    run_train.calls = calls
    return run_train


def test_options_are_those_of_the_contract():
    """A snapshot of the option names: the contract's, and few more."""
    names = {option.removeprefix("--") for parameter in train.params for option in parameter.opts}
    assert names == {*CONTRACT, *OURS}
    assert "--sync-save" in {option for parameter in train.params for option in parameter.secondary_opts}
    assert set(settings()) == {n.replace("-", "_") for n in names - {"config", "json", "quiet"}}


def test_help_is_grouped(capsys):
    """The help shows every option under its topic, with choices and defaults."""
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.index("\nRanks and strategy:") < out.index("--nproc N") < out.index("\nLength of the run:")
    assert "--precision fp32|bf16" in out
    assert "--compile / --no-compile" in out
    assert "[default: 0.001]" in out


def test_nothing_given_is_the_defaults(ran):
    """Without options the configuration is the default one."""
    assert ran() == 0
    assert ran.calls == [(TrainConfig(), False)]


def test_values_reach_the_configuration(ran):
    """Numbers, flags, repeated options and tables arrive with their types."""
    arguments = ["--steps", "7", "--learning-rate", "3e-4", "--compile", "--sink", "jsonl", "--sink", "csv", "--quiet"]
    options = ["--strategy", "single", "--strategy-opt", "bucket_cap_mb=5", "--strategy-opt", "zero1=a=b"]
    assert ran(*arguments, *options) == 0
    expected = TrainConfig(
        steps=7,
        learning_rate=3e-4,
        compile=True,
        sink=("jsonl", "csv"),
        strategy_opt={"bucket_cap_mb": "5", "zero1": "a=b"},
    )
    assert ran.calls == [(expected, True)]


def test_the_command_line_wins_over_the_file(ran, tmp_path):
    """What is given wins, also a flag that switches off, and a default that is spelt out; the rest is the file's."""
    file = tmp_path / "c.toml"
    file.write_text("steps = 9\ncompile = true\nseed = 4\nn_layers = 3\n")
    assert ran("--config", str(file), "--no-compile", "--seed", "0") == 0
    assert ran.calls == [(TrainConfig(steps=9, compile=False, seed=0, n_layers=3), False)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--steps", "many"], "--steps is 'many'; it must be a whole number"),
        (["--steps", "0"], "--steps is 0; it must be a whole number at least 1"),
        (["--learning-rate", "fast"], "--learning-rate is 'fast'; it must be a number"),
        (["--strategy-opt", "zero1"], "--strategy-opt is 'zero1'; it must be KEY=VALUE"),
        (["--strategy-opt", "=1"], "must be KEY=VALUE"),
        (["--config", "not-there.toml"], "not-there.toml"),
        (["--n-heads", "3"], "--n-heads 3 does not divide --d-model 128"),
        (["--no-plugin", "nothing-like-it"], "there is no such plugin"),
        (["extra"], "unexpected extra argument"),
        (["--steps"], "requires an argument"),
    ],
)
def test_refused(arguments, text, ran, capsys):
    """Wrong values are refused in one paragraph, before anything runs."""
    assert ran(*arguments) == 2
    err = capsys.readouterr().err
    assert text in err
    assert err.startswith("mtb: error: ")
    assert err.count("\n") == 1
    assert ran.calls == []


def test_json_is_one_strict_document(ran, capsys):
    """With --json stdout is exactly one JSON document, without NaN."""
    assert ran("--json") == 0
    document = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert document["exit_reason"] == "done"
    assert document["loss"] is None


def test_table(ran, capsys):
    """Without --json stdout is a table for people."""
    assert ran() == 0
    assert "single" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_failed_run(arguments, ran, capsys):
    """The first failure is told on stderr, the result is shown all the same, and the code is 3."""
    failure = {"text": "Rank 1 failed at step 3: ValueError: boom", "rank": 1, "step": 3}
    assert ran(*arguments, exit_reason="failed", failure=failure) == 3
    captured = capsys.readouterr()
    assert captured.err == "mtb: error: Rank 1 failed at step 3: ValueError: boom\n"
    assert captured.out != ""


def test_a_stopped_run(ran, monkeypatch):
    """4 on request; 0 under torchrun, which would restart any other code."""
    assert ran(exit_reason="stopped") == 4
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    assert ran(exit_reason="stopped") == 0


def test_other_ranks_say_nothing(ran, capsys):
    """Of a launcher's ranks, only the first one reports."""
    assert ran(reports=False) == 0
    assert capsys.readouterr().out == ""
