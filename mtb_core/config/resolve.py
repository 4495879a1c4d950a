"""From what was asked to what will run: batch arithmetic, length, schedule. Pure; before any rank starts."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import attrs

from mtb_core.api.errors import ConfigError
from mtb_core.api.layout import World
from mtb_core.api.options import parse_options
from mtb_core.api.values import Plan, SyncMode

from .schema import TrainConfig, settings
from .toml import config_values

DEFAULT_BATCH_SIZE = 8
DEFAULT_STEPS = 50
DEFAULT_WARMUP_STEPS = 5


@attrs.frozen
class ResolvedRun:
    """A run that has been checked as a whole.

    Attributes:
        config: batch sizes, steps and schedule filled in; `write_toml` of it reproduces the run.
        options: instance of the strategy's options class, with all that its plan filled in.
        sync_mode: resolved gradient sync mode.
        warmup_until: the global step after which steps are measured.
        last_step: the global step at which the run is done.
    """

    config: TrainConfig
    world: World
    plan: Plan
    options: Any
    sync_mode: SyncMode
    warmup_until: int
    last_step: int


def resolve(
    config: TrainConfig, strategy: Any, world: World, *, vocab_size: int | None = None, start_step: int = 0
) -> ResolvedRun:
    """Check `config` against its strategy (a `StrategyInfo`) and world, and fill in what follows from them.

    `vocab_size` is the data's, used where the configuration names none; `start_step` is that of the checkpoint to go
    on from.

    Raises:
        ConfigError: anything that cannot run, with what would be valid.
    """
    options = parse_options(strategy.options, config.strategy_opt, owner=f"strategy '{strategy.name}'")
    plan: Plan = strategy.plan(options, config, world)
    if plan.options is not None:
        options = plan.options
        whole = {name: value for name, value in attrs.asdict(options).items() if value is not None}
        config = attrs.evolve(config, strategy_opt=whole)
    if plan.layout.size != world.size:
        msg = f"strategy '{strategy.name}' plans for {plan.layout.size} ranks, but there are {world.size}."
        raise ConfigError(msg)
    mode = plan.auto_sync if config.gradient_sync_mode == "auto" else config.gradient_sync_mode
    if mode not in plan.sync_modes:
        msg = (
            f"--gradient-sync-mode {mode} is not possible with strategy '{strategy.name}' and these options; "
            f"valid: auto, {', '.join(plan.sync_modes)}."
        )
        raise ConfigError(msg)
    batch, total, accumulation = _batch(config, plan.layout.data_size)
    _check_plan(plan, config, strategy.name, accumulation)
    warmup = config.warmup_steps
    if warmup is None:
        warmup = DEFAULT_WARMUP_STEPS if config.resume is None else 0
    steps = config.steps
    if steps is None and config.until_step is None:
        steps = DEFAULT_STEPS
    if config.until_step is not None and warmup >= config.until_step:
        if config.warmup_steps is not None:
            msg = f"--warmup-steps {warmup} leaves no measured step before --until-step {config.until_step}."
            raise ConfigError(msg)
        warmup = 0
    decay = config.lr_decay_steps
    if config.lr_scheduler != "constant" and decay is None:
        decay = config.until_step if config.until_step is not None else start_step + warmup + (steps or 0)
        if decay <= config.lr_warmup_steps:
            msg = (
                f"--lr-warmup-steps {config.lr_warmup_steps} leaves no room before the run's last step {decay}, "
                "where the schedule ends by default; set --lr-decay-steps above the warm-up, or train longer."
            )
            raise ConfigError(msg)
    vocabulary = config.vocab_size if config.vocab_size is not None else vocab_size
    if vocab_size is not None and vocabulary is not None and vocabulary < vocab_size:
        msg = f"--vocab-size {vocabulary} is smaller than the data's {vocab_size}; leave it out or make it larger."
        raise ConfigError(msg)
    resolved = attrs.evolve(
        config,
        batch_size=batch,
        global_batch_size=total,
        grad_accum_steps=accumulation,
        steps=steps,
        warmup_steps=warmup,
        lr_decay_steps=decay,
        vocab_size=vocabulary,
    )
    warmup_until = start_step + warmup
    last = config.until_step if config.until_step is not None else warmup_until + (steps or 0)
    return ResolvedRun(resolved, world, plan, options, mode, warmup_until, last)


def _check_plan(plan: Plan, config: TrainConfig, name: str, accumulation: int) -> None:
    """Refuse what the strategy's plan does not promise."""
    least = plan.least_micro_batches
    asked = (
        (bool(config.max_grad_norm) and not plan.clipping, f"--max-grad-norm {config.max_grad_norm:g}", "leave it out"),
        (config.precision == "bf16" and not plan.bf16, "--precision bf16", "valid: --precision fp32"),
        (config.tie_embeddings and not plan.tied_weights, "--tie-embeddings", "leave it out"),
        (accumulation > 1 and not plan.accumulation, f"{accumulation} micro-batches a step", "valid: 1"),
        (
            accumulation < least,
            f"{accumulation} micro-batch{'' if accumulation == 1 else 'es'} a step",
            f"it needs at least {least}: --grad-accum-steps {least}",
        ),
    )
    for wrong, what, valid in asked:
        if wrong:
            raise ConfigError(f"{what} is not possible with strategy '{name}' and these options; {valid}.")


def _batch(config: TrainConfig, data_size: int) -> tuple[int, int, int]:
    """(samples per rank and micro-batch, per step over all, micro-batches): any two of the three give the third."""
    batch, total, accumulation = config.batch_size, config.global_batch_size, config.grad_accum_steps
    if total is None:
        batch = DEFAULT_BATCH_SIZE if batch is None else batch
        accumulation = 1 if accumulation is None else accumulation
        return batch, batch * accumulation * data_size, accumulation
    if batch is None:
        accumulation = 1 if accumulation is None else accumulation
        _divides(
            total, accumulation * data_size, f"--grad-accum-steps {accumulation} x {data_size} data-parallel ranks"
        )
        return total // (accumulation * data_size), total, accumulation
    derived, rest = divmod(total, batch * data_size)
    if rest or not derived:
        _divides(total, batch * data_size, f"--batch-size {batch} x {data_size} data-parallel ranks")
    if accumulation is not None and accumulation != derived:
        msg = (
            f"--global-batch-size {total}, --batch-size {batch} and --grad-accum-steps {accumulation} contradict each "
            f"other on {data_size} data-parallel ranks ({batch} x {accumulation} x {data_size} = "
            f"{batch * accumulation * data_size}); give two of them."
        )
        raise ConfigError(msg)
    return batch, total, derived


def _divides(total: int, unit: int, what: str) -> None:
    if total % unit:
        below, above = total // unit * unit, (total // unit + 1) * unit
        valid = f"{below} or {above}" if below else f"{above}"
        msg = f"--global-batch-size {total} is not a multiple of {what} = {unit}; nearest valid: {valid}."
        raise ConfigError(msg)


def fingerprint(config: TrainConfig) -> str:
    """Digest of the settings that decide what is trained; equal for runs that must train alike.

    World size, batch split, length, output and the like are left out: they change how, not what.
    """
    names = [name for name, meta in settings().items() if meta.training]
    values = config_values(config)
    # A table of options that is empty says nothing, so that a new one leaves older digests as they are.
    kept = {name: values.get(name) for name in names if values.get(name) != {}}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16).hexdigest()
