"""The configuration of a training run: one frozen value, declared once.

The command line, TOML files, ``mtb init`` and the reference page are all made from the fields below. A name is the
same everywhere (``--batch-size`` is ``batch_size``). None means "decided later", by rules in the field's help text.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any

import attrs

from mtb_core.api.errors import ConfigError
from mtb_core.api.options import divisors, nearest

#: Label of targets that count neither in the loss nor as valid tokens.
IGNORE_LABEL = -100

GROUPS = (
    "Ranks and strategy",
    "Length of the run",
    "Batch",
    "Numerics",
    "Model",
    "Data",
    "Optimizer and schedule",
    "Checkpoints",
    "Output",
    "Plugins",
)


@attrs.frozen
class Setting:
    """Help text, valid values and command-line form of one field."""

    group: str
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    metavar: str | None = None
    repeatable: bool = False
    off_name: str | None = None  # name of the flag that switches a boolean off
    training: bool = True  # whether it changes what is trained (and so belongs to the fingerprint)


def setting(default: Any, group: str, help: str, **kwargs: Any) -> Any:
    """A field of `TrainConfig`."""
    assert group in GROUPS, group
    meta = {"setting": Setting(group, help, **kwargs)}
    if callable(default):
        return attrs.field(factory=default, metadata=meta)
    return attrs.field(default=default, metadata=meta)


RANKS, LENGTH, BATCH, NUMERICS, MODEL, DATA, OPTIM, CHECKPOINTS, OUTPUT, PLUGINS = GROUPS


@attrs.frozen(kw_only=True)
class TrainConfig:
    """Everything that decides a training run. Values are checked on construction; raises `ConfigError`."""

    strategy: str = setting(
        "single", RANKS, "Parallel strategy; `mtb plugins list` shows those installed.", training=False
    )
    strategy_opt: Mapping[str, Any] = setting(
        dict,
        RANKS,
        "Option of the strategy, see `mtb plugins show NAME`.",
        metavar="KEY=VALUE",
        repeatable=True,
        training=False,
    )
    nproc: int = setting(1, RANKS, "Worker processes (ranks) on this node.", minimum=1, training=False)
    nnodes: str = setting("1", RANKS, "Nodes: N, or MIN:MAX for an elastic run.", metavar="N|MIN:MAX", training=False)
    rdzv_endpoint: str | None = setting(
        None, RANKS, "Where nodes meet; needed for more than one node.", metavar="HOST:PORT", training=False
    )
    launcher: str = setting(
        "local", RANKS, "Starts the ranks: local, or one of a plugin.", metavar="NAME", training=False
    )
    max_restarts: int = setting(
        0, RANKS, "Restarts of all workers after a failure before giving up.", minimum=0, training=False
    )
    start_method: str = setting(
        "auto",
        RANKS,
        "How workers start; auto: fork where it is safe, else spawn.",
        choices=("auto", "fork", "spawn"),
        training=False,
    )
    device: str = setting(
        "auto", RANKS, "Device; auto: cuda if this machine has one.", choices=("auto", "cpu", "cuda"), training=False
    )
    backend: str = setting(
        "auto",
        RANKS,
        "Communication backend; auto: nccl on cuda, gloo on cpu.",
        choices=("auto", "gloo", "nccl"),
        training=False,
    )

    steps: int | None = setting(
        None, LENGTH, "Measured optimizer steps of this invocation. [default: 50]", minimum=1, training=False
    )
    until_step: int | None = setting(
        None, LENGTH, "Train until this global step (instead of --steps).", minimum=1, training=False
    )
    warmup_steps: int | None = setting(
        None,
        LENGTH,
        "Benchmark warm-up: steps that train first but are not in the averages. [default: 5; 0 with --resume]",
        minimum=0,
        training=False,
    )
    repeat: int = setting(1, LENGTH, "Independent trials, everything rebuilt each time.", minimum=1, training=False)

    batch_size: int | None = setting(
        None, BATCH, "Samples per rank and micro-batch. [default: 8]", minimum=1, training=False
    )
    global_batch_size: int | None = setting(
        None, BATCH, "Samples per optimizer step over all ranks and micro-batches.", minimum=1
    )
    grad_accum_steps: int | None = setting(
        None, BATCH, "Micro-batches per optimizer step. [default: 1]", minimum=1, training=False
    )
    gradient_sync_mode: str = setting(
        "auto",
        BATCH,
        "When gradients are synchronised: at every micro-batch, the last only, or as the strategy prefers.",
        choices=("auto", "every", "last"),
        training=False,
    )
    activation_checkpointing: bool = setting(
        False, BATCH, "Recompute each block's activations in backward, to save memory.", training=False
    )

    precision: str = setting("fp32", NUMERICS, "bf16: autocast with fp32 master weights.", choices=("fp32", "bf16"))
    compile: bool = setting(False, NUMERICS, "Compile each block with torch.compile.")
    on_nonfinite: str = setting(
        "stop",
        NUMERICS,
        "After a non-finite loss or gradient: stop all ranks, or skip the update.",
        choices=("stop", "skip"),
    )
    seed: int = setting(0, NUMERICS, "Seed of weights, data order and dropout.", minimum=0, maximum=2**63 - 1)

    model: str = setting("gpt", MODEL, "Built-in or plugin model, or your own factory.", metavar="NAME|FILE.py:FACTORY")
    model_opt: Mapping[str, Any] = setting(
        dict, MODEL, "Option of the model, see `mtb plugins show NAME`.", metavar="KEY=VALUE", repeatable=True
    )
    seq_length: int = setting(128, MODEL, "Tokens per sample.", minimum=1)
    vocab_size: int | None = setting(None, MODEL, "Vocabulary. [default: the data's]", minimum=2)
    d_model: int = setting(128, MODEL, "Width of the residual stream.", minimum=1)
    n_heads: int = setting(4, MODEL, "Attention heads.", minimum=1)
    n_layers: int = setting(2, MODEL, "Blocks.", minimum=1)
    dropout: float = setting(0.0, MODEL, "Dropout probability.", minimum=0.0, maximum=0.99)
    qk_norm: bool = setting(False, MODEL, "Normalise queries and keys per head.")
    tie_embeddings: bool = setting(False, MODEL, "Use the token embedding as the output layer's weight.")

    data: str = setting(
        "synthetic", DATA, "synthetic, a prepared token file, a text file, or a folder.", metavar="synthetic|PATH"
    )
    data_opt: Mapping[str, Any] = setting(
        dict, DATA, "Option of the named data set, see `mtb plugins show NAME`.", metavar="KEY=VALUE", repeatable=True
    )
    eval_data: str | None = setting(None, DATA, "Data for evaluation.", metavar="PATH", training=False)
    eval_every: int = setting(
        0, DATA, "Evaluate after every N steps and at the end; 0: at the end only.", minimum=0, training=False
    )
    eval_batches: int = setting(
        0, DATA, "Batches (of batch-size samples on every rank) per evaluation; 0: all.", minimum=0, training=False
    )

    optimizer: str = setting("adamw", OPTIM, "Optimizer: adamw, sgd, or a plugin's.", metavar="NAME")
    optimizer_opt: Mapping[str, Any] = setting(
        dict, OPTIM, "Option of the optimizer, see `mtb plugins show NAME`.", metavar="KEY=VALUE", repeatable=True
    )
    learning_rate: float = setting(1e-3, OPTIM, "Peak learning rate.", above=0.0)
    weight_decay: float = setting(0.1, OPTIM, "Weight decay of parameters with two or more dimensions.", minimum=0.0)
    momentum: float = setting(0.0, OPTIM, "Momentum of sgd.", minimum=0.0, maximum=0.9999)
    adam_eps: float = setting(1e-8, OPTIM, "Epsilon of adamw.", above=0.0)
    lr_scheduler: str = setting(
        "constant", OPTIM, "Learning-rate schedule: constant, cosine, or a plugin's.", metavar="NAME"
    )
    lr_scheduler_opt: Mapping[str, Any] = setting(
        dict, OPTIM, "Option of the schedule, see `mtb plugins show NAME`.", metavar="KEY=VALUE", repeatable=True
    )
    lr_warmup_steps: int = setting(
        0, OPTIM, "Steps of linear learning-rate warm-up; not the benchmark's warm-up.", minimum=0
    )
    lr_decay_steps: int | None = setting(
        None, OPTIM, "Step at which the schedule reaches its minimum. [default: the run's last step]", minimum=1
    )
    min_learning_rate: float = setting(0.0, OPTIM, "Floor of the schedule.", minimum=0.0)
    max_grad_norm: float = setting(0.0, OPTIM, "Clip the global gradient norm to this; 0 measures only.", minimum=0.0)

    checkpoint_dir: str | None = setting(None, CHECKPOINTS, "Folder of the checkpoints.", metavar="DIR", training=False)
    save_every: int = setting(
        0,
        CHECKPOINTS,
        "Save after every N steps and after the last one; 0: only when stopped by a signal.",
        minimum=0,
        training=False,
    )
    keep_last: int = setting(3, CHECKPOINTS, "Complete checkpoints to keep; 0 keeps all.", minimum=0, training=False)
    keep_every: int = setting(
        0, CHECKPOINTS, "Keep those of steps divisible by N for good; 0: none.", minimum=0, training=False
    )
    async_save: bool = setting(
        True,
        CHECKPOINTS,
        "Write checkpoints in the background; training pauses only to copy its state.",
        off_name="sync-save",
        training=False,
    )
    checkpoint_format: str = setting(
        "safetensors",
        CHECKPOINTS,
        "How tensors lie in the files of new checkpoints; `mtb plugins list` shows the formats installed.",
        metavar="NAME",
        training=False,
    )
    resume: str | None = setting(
        None,
        CHECKPOINTS,
        "Go on from the newest complete checkpoint (latest; auto: or start anew, if there is none), or from a path.",
        metavar="latest|auto|PATH",
        training=False,
    )
    allow_config_change: tuple[str, ...] = setting(
        tuple,
        CHECKPOINTS,
        "On resume, let this setting differ from the checkpoint's; recorded in the next ones.",
        metavar="KEY",
        repeatable=True,
        training=False,
    )
    allow_missing_rng: bool = setting(
        False, CHECKPOINTS, "Resume although random state is missing or damaged; not bit for bit.", training=False
    )

    sink: tuple[str, ...] = setting(
        lambda: ("console", "jsonl"),
        OUTPUT,
        "Where metrics go, NAME or NAME:KEY=VALUE,…  [default: console, jsonl]",
        metavar="NAME",
        repeatable=True,
        training=False,
    )
    flops_convention: str = setting(
        "palm",
        OUTPUT,
        "How attention counts in MFU: over the full square of the sequence (palm) or its causal half.",
        choices=("palm", "causal"),
        training=False,
    )
    run_dir: str | None = setting(
        None,
        OUTPUT,
        "The run's folder. [default: runs/<UTC time>-<strategy>-w<world size>]",
        metavar="DIR",
        training=False,
    )
    output: str | None = setting(None, OUTPUT, "Write result.json here too.", metavar="FILE", training=False)
    formal: bool = setting(
        False,
        OUTPUT,
        "Begin only where the result could be published: clean tree, known revision, quiet machine.",
        training=False,
    )
    debug: bool = setting(False, OUTPUT, "Show tracebacks and the ranks' own logging.", training=False)

    plugin_opt: Mapping[str, Any] = setting(
        dict,
        PLUGINS,
        "Option of a run plugin, which takes part where one is given.",
        metavar="PLUGIN.KEY=VALUE",
        repeatable=True,
        training=False,
    )
    no_plugin: tuple[str, ...] = setting(
        tuple, PLUGINS, "Leave this plugin out.", metavar="NAME", repeatable=True, training=False
    )

    def __attrs_post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in attrs.fields(type(self)):
            value = _checked(field.name, getattr(self, field.name), hints[field.name], field.metadata["setting"])
            object.__setattr__(self, field.name, value)
        _check_combinations(self)

    @property
    def max_nodes(self) -> int:
        """The largest number of nodes."""
        return int(self.nnodes.rpartition(":")[2])

    @property
    def min_nodes(self) -> int:
        """The smallest number of nodes."""
        return int(self.nnodes.partition(":")[0])


def settings() -> dict[str, Setting]:
    """All settings by name, in order."""
    return {f.name: f.metadata["setting"] for f in attrs.fields(TrainConfig)}


def option_name(name: str) -> str:
    """The command-line spelling of a setting."""
    return "--" + name.replace("_", "-")


def value_type(name: str) -> type:
    """The plain type of a setting's value: int, float, str, bool, tuple or dict."""
    return _plain(typing.get_type_hints(TrainConfig)[name])


def _plain(hint: Any) -> type:
    origin = typing.get_origin(hint)
    if origin is tuple:
        return tuple
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return dict
    inner = [a for a in typing.get_args(hint) if a is not type(None)]
    return inner[0] if inner else hint  # type: ignore[no-any-return]


def _checked(name: str, given: Any, hint: Any, meta: Setting) -> Any:
    value: Any = given
    label = option_name(name)
    if value is None:
        if type(None) in typing.get_args(hint):
            return None
        msg = f"{label} has no value; {_valid(meta, _plain(hint))}."
        raise ConfigError(msg)
    kind = _plain(hint)
    if kind is tuple:
        if isinstance(value, str) or not all(isinstance(v, str) for v in value):
            msg = f"{label} is {value!r}; it must be a list of names."
            raise ConfigError(msg)
        return tuple(value)
    if kind is dict:
        if not isinstance(value, Mapping):
            msg = f"{label} is {value!r}; it must be a table of options, KEY = VALUE."
            raise ConfigError(msg)
        return dict(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    right: bool = type(value) is kind  # not isinstance: True is no number
    if not right:
        msg = f"{label} is {value!r}; {_valid(meta, kind)}."
        raise ConfigError(msg)
    bad = bool(
        (meta.choices and value not in meta.choices)
        or (meta.minimum is not None and not value >= meta.minimum)
        or (meta.maximum is not None and not value <= meta.maximum)
        or (meta.above is not None and not value > meta.above)
        or (kind is float and value in (float("inf"), float("-inf")))
    )
    if bad:
        hint_text = nearest(str(value), meta.choices)
        msg = f"{label} is {value!r}; {_valid(meta, kind)}.{hint_text}"
        raise ConfigError(msg)
    return value


def _valid(meta: Setting, kind: type) -> str:
    if meta.choices:
        return f"valid: {', '.join(meta.choices)}"
    noun = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]
    bounds = []
    if meta.above is not None:
        bounds.append(f"above {meta.above:g}")
    if meta.minimum is not None:
        bounds.append(f"at least {meta.minimum:g}")
    if meta.maximum is not None:
        bounds.append(f"at most {meta.maximum:g}")
    return f"it must be {noun}{' ' if bounds else ''}{' and '.join(bounds)}"


def _check_combinations(c: TrainConfig) -> None:
    """Refuse combinations that are wrong under every strategy and number of ranks."""
    low, sep, high = c.nnodes.partition(":")
    if not low.isdigit() or (sep and not high.isdigit()) or int(low) < 1 or (sep and int(high) < int(low)):
        msg = f"--nnodes is {c.nnodes!r}; valid: N, or MIN:MAX with 1 <= MIN <= MAX."
        raise ConfigError(msg)
    if c.max_nodes > 1 and c.rdzv_endpoint is None:
        msg = f"--nnodes {c.nnodes} needs --rdzv-endpoint HOST:PORT, the same on every node; the first node hosts it."
        raise ConfigError(msg)
    if c.steps is not None and c.until_step is not None:
        msg = (
            f"--steps {c.steps} and --until-step {c.until_step} are both set; --steps counts from where this "
            "invocation starts, --until-step is absolute: give one of them."
        )
        raise ConfigError(msg)
    if c.d_model % c.n_heads:
        heads = divisors(c.d_model)
        msg = f"--n-heads {c.n_heads} does not divide --d-model {c.d_model}; valid numbers of heads: {heads}."
        raise ConfigError(msg)
    if c.min_learning_rate > c.learning_rate:
        msg = (
            f"--min-learning-rate {c.min_learning_rate:g} is above --learning-rate {c.learning_rate:g}; "
            "it must be at most the learning rate."
        )
        raise ConfigError(msg)
    if c.lr_scheduler == "constant":
        extra = [
            option_name(n)
            for n, unset in (("lr_warmup_steps", 0), ("lr_decay_steps", None), ("min_learning_rate", 0.0))
            if getattr(c, n) != unset
        ]
        if extra:
            msg = (
                f"{', '.join(extra)} has no meaning with --lr-scheduler constant; "
                "leave it out or use another schedule, such as --lr-scheduler cosine."
            )
            raise ConfigError(msg)
    elif c.lr_decay_steps is not None and c.lr_decay_steps <= c.lr_warmup_steps:
        msg = (
            f"--lr-decay-steps {c.lr_decay_steps} must be greater than --lr-warmup-steps {c.lr_warmup_steps}; "
            "decay steps count from the start of training, warm-up included."
        )
        raise ConfigError(msg)
    _check_checkpoints(c)
    if (c.eval_every or c.eval_batches) and c.eval_data is None:
        msg = "--eval-every and --eval-batches need --eval-data PATH."
        raise ConfigError(msg)
    if c.device == "cpu" and c.backend == "nccl":
        msg = "--backend nccl needs --device cuda; valid on cpu: gloo."
        raise ConfigError(msg)
    for name in ("checkpoint_dir", "run_dir", "output", "resume", "data", "eval_data"):
        text = getattr(c, name)
        if text is not None and (not text or not _encodable(text)):
            msg = f"{option_name(name)} is {text!r}; it must be a path or name that is not empty and valid as text."
            raise ConfigError(msg)
    if c.keep_every and not c.save_every:
        msg = f"--keep-every {c.keep_every} has no meaning without --save-every; leave it out or set both."
        raise ConfigError(msg)
    if c.optimizer != "adamw" and c.adam_eps != attrs.fields(TrainConfig).adam_eps.default:
        msg = f"--adam-eps {c.adam_eps:g} belongs to --optimizer adamw; leave it out with {c.optimizer}."
        raise ConfigError(msg)
    if c.momentum and c.optimizer != "sgd":
        msg = f"--momentum {c.momentum:g} belongs to --optimizer sgd; leave it out with {c.optimizer}."
        raise ConfigError(msg)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_checkpoints(c: TrainConfig) -> None:
    named = c.resume is not None and c.resume not in ("latest", "auto")
    if c.checkpoint_dir is None and (c.save_every or (c.resume is not None and not named)):
        what = f"--save-every {c.save_every}" if c.save_every else f"--resume {c.resume}"
        msg = f"{what} needs --checkpoint-dir DIR, the folder where checkpoints are."
        raise ConfigError(msg)
    if c.repeat > 1 and (c.save_every or c.resume is not None):
        what = f"--save-every {c.save_every}" if c.save_every else f"--resume {c.resume}"
        msg = (
            f"--repeat {c.repeat} and {what} exclude each other: repeats are independent trials from the start. "
            "Leave one of them out."
        )
        raise ConfigError(msg)
    if c.resume is None and (c.allow_config_change or c.allow_missing_rng):
        what = "--allow-config-change" if c.allow_config_change else "--allow-missing-rng"
        msg = f"{what} only has a meaning with --resume; leave it out or add --resume latest."
        raise ConfigError(msg)
