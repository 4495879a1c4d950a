"""Options, DeepSpeed files, what is planned and what is refused before any rank starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

from mtb_core import ConfigError, TrainConfig, World, load_reference, parse_options
from mtb_core.cli import main
from mtb_deepspeed.options import DeepSpeedOptions, complete, settled
from mtb_deepspeed.plugin import mtb_commands, mtb_doctor_checks, mtb_strategies, plan


def parsed(options: dict[str, Any]) -> DeepSpeedOptions:
    found: DeepSpeedOptions = parse_options(DeepSpeedOptions, options, owner="strategy 'deepspeed'")
    return found


def file(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize(("stage", "mode"), [(0, "last"), (1, "last"), (2, "every"), (3, "every")])
def test_when_gradients_are_reduced(stage: int, mode: str) -> None:
    """Stages 0 and 1 wait for the last micro-batch, 2 and 3 reduce at every one; nothing else is offered."""
    found = plan(parsed({"stage": str(stage)}), TrainConfig(), World(4, 4))
    assert (found.sync_modes, found.auto_sync) == ((mode,), mode)
    assert found.layout.axes == (("dp", 4),)
    assert found.exact
    assert found.sharded == (stage > 0)


@pytest.mark.parametrize(
    ("options", "precision", "dtype"),
    [({"stage": 2}, "fp32", "fp32"), ({"stage": 2}, "bf16", "bf16"), ({"stage": 0}, "bf16", "fp32")],
)
def test_the_dtype_on_the_wire_is_stated(options: dict[str, Any], precision: str, dtype: str) -> None:
    """bf16 gradients are reduced in bf16; at stage 0 parameters and gradients are fp32."""
    assert plan(parsed(options), TrainConfig(precision=precision), World(2, 2)).reduce_dtype == dtype


def test_a_file_says_the_same_as_options(tmp_path: Path) -> None:
    """Each entry leads to its option; "auto" leaves the decision to the run."""
    content = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "reduce_scatter": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 5e8,
            "allgather_bucket_size": 200,
            "stage3_prefetch_bucket_size": 7,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 100,
            "stage3_max_reuse_distance": "auto",
            "offload_optimizer": {"device": "cpu"},
        },
    }
    given = settled(parsed({"config": file(tmp_path, content)}), TrainConfig(precision="bf16"))
    expected = parsed(
        {
            "stage": 3,
            "overlap_comm": False,
            "reduce_scatter": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 500_000_000,
            "allgather_bucket_size": 200,
            "prefetch_bucket_size": 7,
            "param_persistence_threshold": 0,
            "max_live_parameters": 100,
            "offload_optimizer": "cpu",
            "grad_accum_dtype": "bf16",
            "config_digest": given.config_digest,
        }
    )
    assert given == expected
    assert given.config_digest


def test_what_a_file_says_is_planned(tmp_path: Path) -> None:
    """The plan holds the file's values and digest in its place, and is the same when planned with these alone."""
    other = file(tmp_path, {"zero_optimization": {"stage": 3}})
    first = plan(parsed({"config": other}), TrainConfig(), World(2, 2))
    again = plan(first.options, TrainConfig(precision="bf16"), World(2, 2))
    assert (first.options.stage, first.options.config) == (3, None)
    assert again.options == first.options
    changed = file(tmp_path, {"zero_optimization": {"stage": 3}, "bf16": "auto"})
    assert plan(parsed({"config": changed}), TrainConfig(), World(2, 2)).options != first.options
    with pytest.raises(ConfigError, match="config_digest="):
        plan(parsed({"config": changed, "config_digest": first.options.config_digest}), TrainConfig(), World(2, 2))


def test_what_is_recorded_serves_another_stage() -> None:
    """Defaults that depend on the stage or the precision are not recorded as if they had been asked for."""
    found = settled(parsed({"stage": 3}), TrainConfig(precision="bf16"))
    assert (found.offload_optimizer, found.overlap_comm, found.grad_accum_dtype) == ("none", None, None)
    assert settled(attrs.evolve(found, stage=0), TrainConfig()).stage == 0
    whole = complete(found, TrainConfig(precision="bf16"))
    assert (whole.overlap_comm, whole.grad_accum_dtype) == (True, "bf16")


def test_no_offloading_can_be_asked_for(tmp_path: Path) -> None:
    """`none` is a choice: alone it holds, in the file too, and against the other place it is refused, naming both."""
    asked, silent = parsed({"offload_optimizer": "none"}), parsed({})
    assert settled(asked, TrainConfig()) == settled(silent, TrainConfig())
    says_none = file(tmp_path, {"zero_optimization": {"offload_optimizer": {"device": "none"}}})
    assert settled(parsed({"config": says_none}), TrainConfig()).offload_optimizer == "none"
    with pytest.raises(ConfigError, match=r"offload_optimizer=cpu.*offload_optimizer.device = 'none'"):
        settled(parsed({"config": says_none, "offload_optimizer": "cpu"}), TrainConfig())
    says_cpu = file(tmp_path, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    with pytest.raises(ConfigError, match=r"offload_optimizer=none.*offload_optimizer.device = 'cpu'"):
        settled(parsed({"config": says_cpu, "offload_optimizer": "none"}), TrainConfig())


@pytest.mark.parametrize(
    ("options", "content", "words"),
    [
        ({"stage": 2}, {"zero_optimization": {"stage": 2}}, ["stage=2", "zero_optimization.stage = 2"]),
        ({}, {"train_micro_batch_size_per_gpu": 4}, ["train_micro_batch_size_per_gpu", "--batch-size"]),
        ({}, {"train_batch_size": 8}, ["train_batch_size", "--global-batch-size"]),
        ({}, {"gradient_accumulation_steps": 2}, ["gradient_accumulation_steps", "--grad-accum-steps"]),
        ({}, {"gradient_clipping": 1.0}, ["gradient_clipping", "--max-grad-norm"]),
        ({}, {"optimizer": {"type": "Adam"}}, ["optimizer", "--optimizer", "--learning-rate"]),
        ({}, {"scheduler": {"type": "WarmupLR"}}, ["scheduler", "--lr-scheduler"]),
        ({}, {"fp16": {"enabled": True}}, ["fp16", "--precision"]),
        (
            {},
            {"zero_optimization": {"stgae": 1}},
            ["zero_optimization.stgae", "Did you mean 'zero_optimization.stage'"],
        ),
        ({}, {"zero_optimization": {"stage": 4}}, ["stage", "0, 1, 2, 3", "ds.json"]),
        ({}, {"zero_optimization": {"stage": "two"}}, ["stage", "whole number"]),
        ({}, '{"zero_optimization": {"stage": 1, "stage": 2}}', ["'stage' is there twice"]),
        ({}, "{", ["not valid JSON"]),
        ({}, '{"zero_optimization": {"reduce_bucket_size": Infinity}}', ["not valid JSON", "Infinity is no number"]),
        ({}, '{"zero_optimization": {"stage": NaN}}', ["not valid JSON", "NaN is no number"]),
        ({}, '{"zero_optimization": {"reduce_bucket_size": 1e999}}', ["reduce_bucket_size", "whole number"]),
        ({}, '{"a":' * 100_000 + "1" + "}" * 100_000, ["nested too deeply"]),
        ({}, {"zero_optimization": {"reduce_bucket_size": 1e15}}, ["reduce_bucket_size", "from 2 to 2000000000"]),
        ({}, [1], ["must be a JSON object"]),
    ],
    ids=lambda value: str(value)[:80],
)
def test_what_a_file_must_not_say(options: dict[str, Any], content: Any, words: list[str], tmp_path: Path) -> None:
    """What is said twice, what the run decides and what is not supported is refused, naming both sides."""
    with pytest.raises(ConfigError) as caught:
        plan(parsed({**options, "config": file(tmp_path, content)}), TrainConfig(), World(2, 2))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "settings", "text"),
    [
        ({"stage": 4}, {}, "valid: 0, 1, 2, 3"),
        ({"stage": 1, "prefetch_bucket_size": 10}, {}, "belongs to stage=3"),
        ({"stage": 0, "offload_optimizer": "cpu"}, {}, "belongs to stages 1 to 3"),
        ({"stage": 0, "overlap_comm": "true"}, {}, "belongs to stages 1 to 3"),
        ({"stage": 1, "grad_accum_dtype": "fp32"}, {"precision": "bf16"}, "Use stage=2 or 3"),
        ({"grad_accum_dtype": "bf16"}, {}, "where parameters are fp32"),
        ({"allgather_bucket_size": 5}, {}, "must be even"),
        ({"offload_optimizer": "nvme"}, {}, "valid: none, cpu"),
        ({"allgather_bucket_size": 10**12}, {}, "from 2 to 2000000000"),
        ({"stages": 1}, {}, "Did you mean 'stage'"),
        ({}, {"compile": True}, "--compile"),
        ({"config": "/nowhere/ds.json"}, {}, "No such file"),
    ],
    ids=str,
)
def test_what_does_not_go_together(options: dict[str, Any], settings: dict[str, Any], text: str) -> None:
    """The message says what is valid."""
    with pytest.raises(ConfigError, match=text):
        plan(parsed(options), TrainConfig(**settings), World(2, 2))


def test_descriptions_lead_to_the_code() -> None:
    """What the plugin names exists."""
    assert load_reference(mtb_strategies()[0].impl).__name__ == "DeepSpeedStrategy"
    assert load_reference(mtb_commands()[0].impl).name == "deepspeed"
    assert callable(load_reference(mtb_doctor_checks()[0].impl))


def test_discovery_imports_neither_torch_nor_deepspeed() -> None:
    """Listing plugins stays quick."""
    code = "import sys, mtb_deepspeed.plugin; print([m for m in ('torch', 'deepspeed', 'click') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_commands_help() -> None:
    """It has the options of `mtb train` but --strategy, and DeepSpeed's."""
    command = load_reference(mtb_commands()[0].impl)
    help_text = CliRunner().invoke(command, ["--help"]).output
    for option in (
        "--zero-stage",
        "--deepspeed-config",
        "--offload-optimizer",
        "--steps",
        "--config",
        "--strategy-opt",
    ):
        assert option in help_text
    assert "strategy" not in [parameter.name for parameter in command.params]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--zero-stage", "5"], "valid: 0, 1, 2, 3"),
        (["--zero-stage", "1", "--strategy-opt", "stage=2"], "say the same thing"),
        (["--reduce-bucket-size", "many"], "whole number"),
    ],
)
def test_the_command_refuses(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong options end with code 2 before anything starts."""
    assert main(["deepspeed", *arguments]) == 2
    said = capsys.readouterr()
    assert text in said.err
    assert not said.out
