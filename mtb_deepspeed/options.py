"""Options of strategy ``deepspeed``, given one by one or as a DeepSpeed JSON file. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from mtb_core import ConfigError, nearest, option, parse_options

if TYPE_CHECKING:
    from mtb_core import TrainConfig

#: What holds where neither an option nor the file says anything.
DEFAULT_STAGE = 2
DEFAULT_BUCKET = 50_000_000


@attrs.frozen
class DeepSpeedOptions:
    """Options of strategy ``deepspeed``; None: DeepSpeed's default, or the one that the help names."""

    stage: int | None = option(
        None, help="ZeRO stage: what is split over ranks, see docs/deepspeed.md. [default: 2]", choices=(0, 1, 2, 3)
    )
    offload_optimizer: str | None = option(
        None, help="Where fp32 weights and optimizer state live and are updated.", choices=("cpu",)
    )
    contiguous_gradients: bool | None = option(None, help="Copy gradients into one buffer as they come.")
    overlap_comm: bool | None = option(
        None, help="Reduce gradients while backward runs. [default: true at stage 3, else false]"
    )
    reduce_scatter: bool | None = option(None, help="Stage 3: reduce-scatter gradients instead of all-reducing them.")
    reduce_bucket_size: int | None = option(
        None, help=f"Elements of gradients reduced at a time. [default: {DEFAULT_BUCKET}]", minimum=2
    )
    allgather_bucket_size: int | None = option(
        None, help=f"Stages 1, 2: elements of weights gathered at a time, even. [default: {DEFAULT_BUCKET}]", minimum=2
    )
    grad_accum_dtype: str | None = option(
        None,
        help="Stages 2, 3 with --precision bf16: dtype in which gradients are accumulated. [default: bf16]",
        choices=("bf16", "fp32"),
    )
    prefetch_bucket_size: int | None = option(
        None, help="Stage 3: elements of parameters gathered ahead of their use.", minimum=0
    )
    param_persistence_threshold: int | None = option(
        None, help="Stage 3: parameters of up to this many elements stay gathered.", minimum=0
    )
    max_live_parameters: int | None = option(
        None, help="Stage 3: most elements of parameters that are gathered at a time.", minimum=0
    )
    max_reuse_distance: int | None = option(
        None, help="Stage 3: keep a parameter gathered if it is used again within this many elements.", minimum=0
    )
    config: str | None = option(None, help="DeepSpeed JSON file that says these things instead.")


#: Where the entries of a DeepSpeed file lead to.
_ENTRIES = {
    "zero_optimization.stage": "stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer",
    "zero_optimization.contiguous_gradients": "contiguous_gradients",
    "zero_optimization.overlap_comm": "overlap_comm",
    "zero_optimization.reduce_scatter": "reduce_scatter",
    "zero_optimization.reduce_bucket_size": "reduce_bucket_size",
    "zero_optimization.allgather_bucket_size": "allgather_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold": "param_persistence_threshold",
    "zero_optimization.stage3_max_live_parameters": "max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance": "max_reuse_distance",
    "data_types.grad_accum_dtype": "grad_accum_dtype",
}

#: Entries that the run decides, and by what.
_OWNED = {
    "train_batch_size": "--global-batch-size",
    "train_micro_batch_size_per_gpu": "--batch-size",
    "gradient_accumulation_steps": "--grad-accum-steps",
    "optimizer": "--optimizer, --learning-rate, --weight-decay, --momentum and --adam-eps",
    "scheduler": "--lr-scheduler and the options that belong to it",
    "gradient_clipping": "--max-grad-norm",
    "bf16": "--precision",
    "bfloat16": "--precision",
    "fp16": "--precision",
    "amp": "--precision",
    "torch_autocast": "--precision",
    "activation_checkpointing": "--activation-checkpointing",
}

_AUTO = "auto"  # what other trainers' files say where the trainer is to decide


def settled(options: DeepSpeedOptions, config: TrainConfig) -> DeepSpeedOptions:
    """The options with what their file says and with defaults filled in, checked against each other and the run.

    Raises:
        ConfigError: the file cannot be read, says what is not supported, what the run decides, or what an option says
            too; or the options do not go together. The message names both sides.
    """
    if options.config is not None:
        options = _with_file(options, Path(options.config))
    options = _with_defaults(options, config)
    _check(options, config)
    return options


def _with_file(options: DeepSpeedOptions, path: Path) -> DeepSpeedOptions:
    found = _read(path)
    for name in found:
        value = getattr(options, name)
        if value is not None:
            entry = next(entry for entry, target in _ENTRIES.items() if target == name)
            raise ConfigError(
                f"strategy 'deepspeed' has {name}={value}, and its file {path} says {entry} = {found[name]!r}; say it in "
                "one place only."
            )
    parsed = parse_options(DeepSpeedOptions, found, owner=f"strategy 'deepspeed' (from {path})")
    return attrs.evolve(options, **{name: getattr(parsed, name) for name in found})


def _read(path: Path) -> dict[str, Any]:
    """Option names and values that the file `path` gives."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"Cannot read the DeepSpeed file {path}: {reason}.") from error
    except ValueError as error:
        raise ConfigError(f"The DeepSpeed file {path} is not valid JSON: {error}.") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"The DeepSpeed file {path} holds {type(values).__name__}; it must be a JSON object.")
    found: dict[str, Any] = {}
    for entry, value in _flat(values):
        owner = _OWNED.get(entry.partition(".")[0])
        if value == _AUTO:
            continue
        if owner is not None:
            raise ConfigError(
                f"The DeepSpeed file {path} says {entry} = {value!r}, but the run decides that, by {owner}. Remove the "
                f'entry (or make it "{_AUTO}") and use the option.'
            )
        if entry not in _ENTRIES:
            raise ConfigError(
                f"The DeepSpeed file {path} says {entry} = {value!r}, which strategy 'deepspeed' does not "
                f"support.{nearest(entry, _ENTRIES)} Valid: {', '.join(_ENTRIES)}. Remove the entry."
            )
        if entry.endswith(".device") and value == "none":
            continue
        found[_ENTRIES[entry]] = _number(value)
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _number(value: Any) -> Any:
    """Sizes are often written as 5e8, which JSON reads as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"the key {twice!r} is there twice")
    return dict(pairs)


def _with_defaults(options: DeepSpeedOptions, config: TrainConfig) -> DeepSpeedOptions:
    stage = DEFAULT_STAGE if options.stage is None else options.stage
    filled: dict[str, Any] = {"stage": stage}
    if options.overlap_comm is None:
        filled["overlap_comm"] = stage == 3
    for name in ("reduce_bucket_size", "allgather_bucket_size"):
        if getattr(options, name) is None:
            filled[name] = DEFAULT_BUCKET
    if options.grad_accum_dtype is None:
        filled["grad_accum_dtype"] = "bf16" if config.precision == "bf16" and stage else "fp32"
    return attrs.evolve(options, **filled)


_STAGE_3_ONLY = (
    "reduce_scatter",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
)


def _check(options: DeepSpeedOptions, config: TrainConfig) -> None:
    stage, who = options.stage, "strategy 'deepspeed' has"
    if stage != 3:
        for name in _STAGE_3_ONLY:
            if getattr(options, name) is not None:
                raise ConfigError(
                    f"{who} {name}={getattr(options, name)} and stage={stage}; {name} belongs to stage=3."
                )
    if stage == 0:
        for name in ("offload_optimizer", "contiguous_gradients"):
            if getattr(options, name) is not None:
                raise ConfigError(f"{who} {name}={getattr(options, name)} and stage=0; it belongs to stages 1 to 3.")
        if options.overlap_comm:
            raise ConfigError(f"{who} overlap_comm=True and stage=0; it belongs to stages 1 to 3.")
    if (options.allgather_bucket_size or 0) % 2:
        raise ConfigError(
            f"{who} allgather_bucket_size={options.allgather_bucket_size}; it must be even, as DeepSpeed demands."
        )
    if options.grad_accum_dtype == "fp32" and config.precision == "bf16" and stage == 1:
        raise ConfigError(
            f"{who} grad_accum_dtype=fp32, stage=1 and --precision bf16; DeepSpeed does that with another optimizer, "
            "which is not supported. Use stage=2 or 3, or leave grad_accum_dtype out."
        )
    wrong = "bf16" if config.precision == "fp32" or not stage else None
    if options.grad_accum_dtype == wrong:
        raise ConfigError(
            f"{who} grad_accum_dtype=bf16 where parameters are fp32 (--precision {config.precision}, stage={stage}); "
            "leave it out."
        )
    if config.compile:
        raise ConfigError(
            "--compile is not supported with strategy 'deepspeed', whose hooks break the graph; leave it out."
        )
