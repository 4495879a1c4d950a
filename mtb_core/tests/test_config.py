"""The configuration: what is valid, files and the command line, and what follows from what was asked."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtb_core import ConfigError, Layout, NoOptions, Plan, StrategyInfo, TrainConfig, World, load_config, option
from mtb_core.config import fingerprint, resolve, settings, starter_toml, write_toml
from mtb_core.config.schema import GROUPS, value_type

INFO = StrategyInfo("any", "", "m:c", lambda _options, _config, world: Plan(Layout((("dp", world.size),))), NoOptions)


def resolved(world: int = 1, **values: Any):
    return resolve(TrainConfig(**values), INFO, World(world, world), vocab_size=256)


def values_of(name: str) -> st.SearchStrategy[Any]:
    """Valid values of one setting, by its declaration."""
    meta, kind = settings()[name], value_type(name)
    if meta.choices:
        return st.sampled_from(meta.choices)
    if kind is bool:
        return st.booleans()
    low = meta.minimum if meta.minimum is not None else meta.above
    if kind is int:
        return st.integers(int(low or 0), int(meta.maximum or 2**31))
    if kind is float:
        return st.floats(
            low or 0.0, meta.maximum or 1e6, exclude_min=meta.above is not None, allow_nan=False, allow_infinity=False
        )
    if kind is tuple:
        return st.lists(st.text(min_size=1), max_size=3).map(tuple)
    if kind is dict:
        return st.dictionaries(st.text(min_size=1), st.one_of(st.booleans(), st.integers(-9, 9), st.text()), max_size=3)
    return st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@st.composite
def configurations(draw: st.DrawFn) -> TrainConfig:
    """Any valid configuration."""
    chosen = draw(st.sets(st.sampled_from(sorted(settings())), max_size=12))
    given_values = {name: draw(values_of(name)) for name in sorted(chosen) if name != "nnodes"}
    try:
        return TrainConfig(**given_values)
    except ConfigError:
        return TrainConfig()


@given(configurations())
def test_a_written_file_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, config: TrainConfig) -> None:
    """TOML out and in gives an equal configuration, whatever is set."""
    path = tmp_path_factory.getbasetemp() / "round.toml"
    path.write_text(write_toml(config), encoding="utf-8")
    assert load_config(file=path) == config


def test_the_starter_file_is_the_defaults(tmp_path: Path) -> None:
    """The commented starter reads as the defaults with the preset on top, and names every setting but tables."""
    path = tmp_path / "mtb.toml"
    path.write_text(starter_toml({"nproc": 2, "strategy": "ddp"}))
    assert load_config(file=path) == TrainConfig(nproc=2, strategy="ddp")
    text = path.read_text()
    assert all(f"{name} =" in text for name in settings() if value_type(name) is not dict)


@pytest.mark.parametrize("name", sorted(settings()))
def test_every_setting_is_documented_and_typed(name: str) -> None:
    """Each has a help text of one sentence or more, a group, and a default of its type."""
    meta = settings()[name]
    assert len(meta.help.split()) > 1 or meta.help.endswith(".")
    assert meta.group in GROUPS
    value = getattr(TrainConfig(), name)
    optional = type(None) in typing.get_args(typing.get_type_hints(TrainConfig)[name])
    assert isinstance(value, value_type(name)) or (value is None and optional)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"steps": 0}, "--steps is 0; it must be a whole number at least 1"),
        ({"steps": 2.5}, "a whole number"),
        ({"steps": True}, "a whole number"),
        ({"learning_rate": 0}, "above 0"),
        ({"learning_rate": float("nan")}, "a number"),
        ({"dropout": 1.5}, "at most 0.99"),
        ({"precision": "bf61"}, "Did you mean 'bf16'"),
        ({"d_model": 1 << 60, "n_heads": 3}, r"valid numbers of heads: \[1, 2, 4, .*, 1024\]"),
        ({"d_model": 30, "n_heads": 4}, r"does not divide --d-model 30; valid numbers of heads: \[1, 2, 3, 5, 6"),
        ({"min_learning_rate": 1.0}, "above --learning-rate"),
        ({"lr_warmup_steps": 2}, "no meaning with --lr-scheduler constant"),
        ({"lr_decay_steps": 2}, "no meaning with --lr-scheduler constant"),
        ({"min_learning_rate": 1e-5}, "no meaning with --lr-scheduler constant"),
        ({"lr_scheduler": "cosine", "lr_warmup_steps": 5, "lr_decay_steps": 5}, "must be greater than"),
        ({"save_every": 5}, "needs --checkpoint-dir"),
        ({"resume": "latest"}, "needs --checkpoint-dir"),
        ({"repeat": 2, "save_every": 1, "checkpoint_dir": "x"}, "exclude each other"),
        ({"repeat": 2, "resume": "auto", "checkpoint_dir": "x"}, "exclude each other"),
        ({"steps": 5, "until_step": 5}, "give one of them"),
        ({"nnodes": "3:2", "rdzv_endpoint": "a:1"}, "MIN:MAX"),
        ({"nnodes": "2"}, "needs --rdzv-endpoint"),
        ({"device": "cpu", "backend": "nccl"}, "valid on cpu: gloo"),
        ({"eval_every": 5}, "need --eval-data"),
        ({"optimizer": "adamw", "momentum": 0.9}, "belongs to --optimizer sgd"),
        ({"optimizer": "sgd", "adam_eps": 1e-3}, "belongs to --optimizer adamw"),
        ({"sink": "jsonl"}, "a list of names"),
    ],
)
def test_what_is_refused(values: dict[str, Any], text: str) -> None:
    """The message names the option, the value seen and what is valid."""
    with pytest.raises(ConfigError, match=text):
        TrainConfig(**values)


def test_files(tmp_path: Path) -> None:
    """An unknown key names the nearest one; broken and missing files are named; what is given wins."""
    path = tmp_path / "a.toml"
    path.write_text("batchsize = 4\n")
    with pytest.raises(ConfigError, match=r"Unknown key 'batchsize' in .*a.toml. Did you mean 'batch_size'"):
        load_config(file=path)
    path.write_text("steps = = 4\n")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(file=path)
    with pytest.raises(ConfigError, match="Cannot read"):
        load_config(file=tmp_path / "none.toml")
    path.write_text('steps = 4\nstrategy = "ddp"\n[strategy_opt]\nzero1 = true\nbucket_cap_mb = 5\n')
    config = load_config({"strategy_opt": {"bucket_cap_mb": 7}, "seed": 3}, file=path)
    assert (config.steps, config.seed, config.strategy_opt) == (4, 3, {"zero1": True, "bucket_cap_mb": 7})
    assert load_config({"strategy": "single"}, file=path).strategy_opt == {}
    assert load_config({"until_step": 9}, file=path).steps is None


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_any_two_of_the_batch_settings_give_the_third(batch: int, accumulation: int, world: int) -> None:
    """Whichever two are given, the same three come out."""
    total = batch * accumulation * world
    whole = {"batch_size": batch, "grad_accum_steps": accumulation, "global_batch_size": total}
    for left_out in whole:
        config = resolved(world, **{k: v for k, v in whole.items() if k != left_out}).config
        assert {k: getattr(config, k) for k in whole} == whole


def test_batches_that_do_not_divide() -> None:
    """The nearest valid global batch sizes are named; three that contradict each other are told."""
    with pytest.raises(
        ConfigError, match=r"--global-batch-size 10 is not a multiple of .* = 4; nearest valid: 8 or 12"
    ):
        resolved(2, global_batch_size=10, batch_size=2)
    with pytest.raises(ConfigError, match="contradict each other"):
        resolved(2, global_batch_size=8, batch_size=2, grad_accum_steps=3)


@attrs.frozen
class _Options:
    level: int | None = option(None, help="A level.")
    other: str | None = option(None, help="Another thing.")


def test_a_plan_fills_in_options(tmp_path: Path) -> None:
    """What the plan says of the options is what runs, and what a file of the resolved configuration holds."""

    def plan(options: _Options, config: TrainConfig, world: World) -> Plan:
        return Plan(Layout((("dp", world.size),)), options=attrs.evolve(options, level=options.level or 2))

    info = StrategyInfo("filled", "help", "a:b", plan, _Options)
    run = resolve(TrainConfig(strategy="filled"), info, World(1, 1), vocab_size=256)
    assert run.options == _Options(level=2)
    path = tmp_path / "config.toml"
    path.write_text(write_toml(run.config))
    assert load_config({}, file=path).strategy_opt == {"level": 2}
    assert resolve(load_config({}, file=path), info, World(1, 1)).plan == run.plan


def test_a_resolved_file_serves_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Reused on more ranks, the global batch stays and the rank's batch gives way."""
    path = tmp_path / "config.toml"
    path.write_text(write_toml(resolved(2, global_batch_size=12).config))
    config = resolve(load_config({"nproc": 3}, file=path), INFO, World(3, 3)).config
    assert (config.global_batch_size, config.batch_size, config.grad_accum_steps) == (12, 4, 1)


def test_length_and_schedule() -> None:
    """Warm-up comes first; on resume there is none unless asked; cosine ends with the run by default."""
    run = resolved(steps=20, lr_scheduler="cosine")
    assert (run.warmup_until, run.last_step, run.config.lr_decay_steps) == (5, 25, 25)
    run = resolve(TrainConfig(steps=20, resume="auto", checkpoint_dir="x"), INFO, World(1, 1), start_step=7)
    assert (run.warmup_until, run.last_step) == (7, 27)
    assert resolved(until_step=3).warmup_until == 0
    with pytest.raises(ConfigError, match="leaves no measured step"):
        resolved(until_step=3, warmup_steps=3)


def test_fingerprint() -> None:
    """It tells what is trained, not how: ranks, split and length leave it alone."""
    base = resolved(1, global_batch_size=8).config
    same = resolved(2, global_batch_size=8, grad_accum_steps=2, steps=7, gradient_sync_mode="every").config
    assert fingerprint(base) == fingerprint(same)
    assert fingerprint(base) != fingerprint(attrs.evolve(base, seed=1))
    assert fingerprint(base) != fingerprint(attrs.evolve(base, learning_rate=2e-3))
