"""Options of strategy ``deepspeed``, given one by one or as a DeepSpeed JSON file. Torch-free."""

from __future__ import annotations

import hashlib
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

#: Elements of a bucket, which is allocated whole and sent in one message; some counts on the way are of 32 bits.
MOST_IN_BUCKET = 2_000_000_000


@attrs.frozen
class DeepSpeedOptions:
    """Options of strategy ``deepspeed``; None: DeepSpeed's default, or the one that the help names."""

    stage: int | None = option(
        None, help="ZeRO stage: what is split over ranks, see docs/deepspeed.md. [default: 2]", choices=(0, 1, 2, 3)
    )
    offload_optimizer: str | None = option(
        None,
        help="Where fp32 weights and optimizer state live and are updated; none: where the parameters are. "
        "[default: none]",
        choices=("none", "cpu"),
    )
    contiguous_gradients: bool | None = option(None, help="Copy gradients into one buffer as they come.")
    overlap_comm: bool | None = option(
        None, help="Reduce gradients while backward runs. [default: true at stage 3, else false]"
    )
    reduce_scatter: bool | None = option(None, help="Stage 3: reduce-scatter gradients instead of all-reducing them.")
    reduce_bucket_size: int | None = option(
        None,
        help=f"Elements of gradients reduced at a time. [default: {DEFAULT_BUCKET}]",
        minimum=2,
        maximum=MOST_IN_BUCKET,
    )
    allgather_bucket_size: int | None = option(
        None,
        help=f"Stages 1, 2: elements of weights gathered at a time, even. [default: {DEFAULT_BUCKET}]",
        minimum=2,
        maximum=MOST_IN_BUCKET,
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
        None, help="Stage 3: gather nothing ahead while this many elements of parameters are gathered.", minimum=0
    )
    max_reuse_distance: int | None = option(
        None, help="Stage 3: keep a parameter gathered if it is used again within this many elements.", minimum=0
    )
    config: str | None = option(
        None, help="DeepSpeed JSON file that says these things instead; results record what it says."
    )
    config_digest: str | None = option(
        None, help="Digest of that file, which results record; a file that is given besides must have it."
    )


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
    """The options with what their file says instead of the file, checked against each other and the run.

    Filled in are defaults, too, but for those that follow from the stage or the precision: these stay None, so that
    what is recorded can be used again with another stage or precision. `complete` fills them in.

    Raises:
        ConfigError: the file cannot be read, says what is not supported, what the run decides, or what an option says
            too; or the options do not go together. The message names both sides.
    """
    if options.config is not None:
        options = _with_file(options, Path(options.config))
    constant: dict[str, Any] = {
        "stage": DEFAULT_STAGE,
        "offload_optimizer": "none",
        "reduce_bucket_size": DEFAULT_BUCKET,
        "allgather_bucket_size": DEFAULT_BUCKET,
    }
    options = attrs.evolve(options, **{k: v for k, v in constant.items() if getattr(options, k) is None})
    _check(complete(options, config), config)
    return options


def complete(options: DeepSpeedOptions, config: TrainConfig) -> DeepSpeedOptions:
    """Settled options with the defaults that depend on stage and precision."""
    filled: dict[str, Any] = {}
    if options.overlap_comm is None:
        filled["overlap_comm"] = options.stage == 3
    if options.grad_accum_dtype is None:
        filled["grad_accum_dtype"] = "bf16" if config.precision == "bf16" and options.stage else "fp32"
    return attrs.evolve(options, **filled)


def _with_file(options: DeepSpeedOptions, path: Path) -> DeepSpeedOptions:
    content = _content(path)
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    if options.config_digest not in (None, digest):
        raise ConfigError(
            f"strategy 'deepspeed' has config_digest={options.config_digest}, and its file {path} has the digest {digest}: "
            "it was changed, or is another one. Leave config_digest out, or the file, if what it said is given as options."
        )
    found = _read(path, content)
    for name in found:
        value = getattr(options, name)
        if value is not None:
            entry = next(entry for entry, target in _ENTRIES.items() if target == name)
            raise ConfigError(
                f"strategy 'deepspeed' has {name}={value}, and its file {path} says {entry} = {found[name]!r}; say it in "
                "one place only."
            )
    parsed = parse_options(DeepSpeedOptions, found, owner=f"strategy 'deepspeed' (from {path})")
    said = {name: getattr(parsed, name) for name in found}
    return attrs.evolve(options, **said, config=None, config_digest=digest)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"Cannot read the DeepSpeed file {path}: {error.strerror}.") from error


def _entries(path: Path, content: bytes) -> list[tuple[str, Any]]:
    """All entries of the file, each with its dotted name."""
    try:
        values = json.loads(
            content.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant
        )
        if isinstance(values, Mapping):
            return list(_flat(values))
    except UnicodeDecodeError as error:
        raise ConfigError(f"Cannot read the DeepSpeed file {path}: it is not UTF-8 text.") from error
    except ValueError as error:
        raise ConfigError(f"The DeepSpeed file {path} is not valid JSON: {error}.") from error
    except RecursionError:
        raise ConfigError(
            f"The DeepSpeed file {path} is nested too deeply to be read; its entries are at most 3 deep."
        ) from None
    raise ConfigError(f"The DeepSpeed file {path} holds {type(values).__name__}; it must be a JSON object.")


def _read(path: Path, content: bytes) -> dict[str, Any]:
    """Option names and values that the file `path` gives."""
    found: dict[str, Any] = {}
    for entry, value in _entries(path, content):
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


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"the key {twice!r} is there twice")
    return dict(pairs)


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
        asked = {
            "offload_optimizer": options.offload_optimizer != "none",
            "contiguous_gradients": options.contiguous_gradients is not None,
            "overlap_comm": options.overlap_comm,
        }
        for name in (name for name, is_asked in asked.items() if is_asked):
            raise ConfigError(f"{who} {name}={getattr(options, name)} and stage=0; it belongs to stages 1 to 3.")
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
