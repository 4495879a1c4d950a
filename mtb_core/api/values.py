"""The values that travel between core and strategies.

Vocabulary, used everywhere: a *step* is always an optimizer step; a *micro-batch* is what one forward and backward
sees on one rank; the *global batch* is what all ranks and micro-batches of one step see together. ``torch`` is
imported for types only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

from .layout import Layout, World

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import Store
    from torch.distributed.device_mesh import DeviceMesh

    from mtb_core.config.schema import TrainConfig

    from .work import Loss

SyncMode = Literal["every", "last"]


@attrs.frozen
class Plan:
    """Promises of a strategy for given options, configuration and world; made before any rank starts.

    Core refuses a run that asks for more than its plan promises, before any rank starts.

    Attributes:
        layout: the arrangement of ranks.
        sync_modes: gradient sync modes it can honour.
        auto_sync: what ``--gradient-sync-mode auto`` means here.
        sums_gradients: after ``mtb_accumulate`` every gradient is the SUM over all ranks and micro-batches. False for
            strategies whose replicas differ between synchronisations (local SGD).
        exact: losses equal those of ``single`` on the same global batch, up to rounding.
        reduce_dtype: dtype in which gradients are summed over ranks, ``"fp32"`` or ``"bf16"``…
        process_group: a process group is needed even at one rank.
        exact_resume: the state that a checkpoint holds is all that later steps depend on.
        resharding: its checkpoints can be resumed on another number of ranks and by other strategies.
        missing_gradients: the strategy copes with parameters that get no gradient on some ranks.
        finds_missing_gradients: the strategy, which leaves no ``.grad`` for core to look at, raises `MissingGradient`
            itself in backward.
        sharded: no rank holds all of the model and its optimizer, where there are several data ranks.
        accumulation: several micro-batches a step are possible.
        least_micro_batches: the smallest number of micro-batches a step.
        clipping: ``--max-grad-norm`` is possible.
        bf16: ``--precision bf16`` is possible.
        tied_weights: models whose modules share a parameter are possible.
        custom_models: any `ModelSpec` is possible, not only one that names the modules' roles.
        metrics: names of the figures that ``mtb_accumulate`` adds to `Loss.metrics`.
        options: the options with what they leave open filled in (from a file that one of them names, or by defaults
            that depend on others); None: they are whole as given. It is these that the strategy gets and that
            results and ``config.toml`` record; planned again with them, the plan must be the same.
    """

    layout: Layout
    sync_modes: tuple[SyncMode, ...] = ("every", "last")
    auto_sync: SyncMode = "last"
    sums_gradients: bool = True
    exact: bool = True
    reduce_dtype: str = "fp32"
    process_group: bool = True
    exact_resume: bool = True
    resharding: bool = True
    missing_gradients: bool = False
    finds_missing_gradients: bool = False
    sharded: bool = False
    accumulation: bool = True
    least_micro_batches: int = 1
    clipping: bool = True
    bf16: bool = True
    tied_weights: bool = True
    custom_models: bool = True
    metrics: tuple[str, ...] = ()
    options: Any = None


@attrs.frozen
class RankContext:
    """A rank among the others: number, device, mesh and store; made in one place and closed in one place.

    Attributes:
        device: ``"cpu"`` or ``"cuda:N"``.
        backend: ``"gloo"``, ``"nccl"``, or None without a process group.
        mesh: device mesh with the layout's axes; None without a process group.
        store: the run's key-value store; for the rare message outside collectives; None without a process group.
    """

    rank: int
    local_rank: int
    world: World
    device: str
    backend: str | None
    layout: Layout
    mesh: DeviceMesh | None = None
    store: Store | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.world.size

    @property
    def data_rank(self) -> int:
        """Index of this rank's sample stream."""
        return self.layout.data_rank(self.rank)

    @property
    def counts_loss(self) -> bool:
        """True if this rank's losses, metrics and valid tokens go into the sums over ranks."""
        return self.layout.counts_loss(self.rank)

    @property
    def counts_samples(self) -> bool:
        """True if this rank's samples go into the sums over ranks."""
        return self.layout.counts_samples(self.rank)


@attrs.frozen
class ModelSpec:
    """A model as a strategy sees it; the value of ``--model``.

    Attributes:
        build: makes the module, on whatever ``torch.device`` context is active (core uses ``meta`` if `init` is set).
        init: ``init(name, tensor, generator)`` fills the full tensor of one parameter or buffer in place, all of it;
            weights then depend on (seed, name) only. None: the module's own initialisation under the run's seed.
        loss: ``loss(output, targets)`` gives the SUM over valid tokens, a scalar; or a `Loss`, which has room for
            auxiliary losses and metrics. None: see `mtb_core.model.loss`.
        blocks: qualified names of the repeated blocks: the units of activation checkpointing, sharding, compilation.
        role: a module's qualified name to its role under model parallelism, or None. Under tensor parallelism ``"colwise"`` and
            ``"rowwise"``: linear layers, split by output and by input features. For sequence parallelism also
            ``"stem"``: what gives the first [batch, length, features] of the residual stream, and ``"norm"``: what
            stands between the stream and colwise layers or the head, and treats each position alone. For a
            vocabulary split over ranks ``"embedding"`` and ``"head"``. ``"dropout"``: an ``nn.Dropout`` on the stream,
            called once a forward. For context parallelism ``"attention"``: causal attention, called with (q, k, v,
            dropout), the first three [batch, heads, length, features]; and a ``"stem"`` must take ``positions``, int64
            [length], as a keyword. For expert parallelism ``"experts"``: called with (rows, counts): rows
            [rows, features], those of the first expert first, and counts, int64 [experts] on any device, the rows of
            each; it gives as many rows. The first dimension of its parameters is the expert.
        chain: qualified names of modules whose composition, in order, is the model's forward. A pipeline cuts the model
            between them. Empty: it cannot be cut.
        metrics: names of the figures that `loss` gives as `Loss.metrics`.
        flops_per_token: model FLOPs of forward and backward for one token, by convention name
            (see `mtb_core.model.flops`); empty where unknown.
        vocab_size: None where the model has no vocabulary.
    """

    build: Callable[[], nn.Module]
    init: Callable[[str, torch.Tensor, torch.Generator], None] | None = None
    loss: Callable[[Any, torch.Tensor], torch.Tensor | Loss] | None = None
    blocks: tuple[str, ...] = ()
    role: Callable[[str], str | None] | None = None
    chain: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    flops_per_token: Mapping[str, float] = attrs.field(factory=dict)
    vocab_size: int | None = None


@attrs.frozen
class OptimizerRecipe:
    """Recipe for the run's optimizer over any parameters: ``factory(groups, **defaults)``.

    Attributes:
        factory: the optimizer's class. If its objects have a method ``initial_state(parameter, group)``, it gives the
            state before the first step, by key, so that a checkpoint can be loaded before any step. Core knows the
            state of torch's AdamW and SGD.
        defaults: keyword arguments besides the groups.
        groups: ``groups(module)`` gives the parameter groups, each with ``initial_lr``, from which the schedule
            computes ``lr``. It goes by names and shapes, for the weights may not be filled yet. None: core's two, with
            and without weight decay.
    """

    factory: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None


@attrs.frozen
class Job:
    """All that a strategy gets for one run. Callables are core's services, so no strategy imports core's inside.

    Attributes:
        options: an instance of the strategy's own options class.
        sync_mode: resolved; never ``"auto"``.
        accumulation: micro-batches per step.
        build: ``build()``: the bare module, parameters on ``meta`` where the model can be filled by name, otherwise
            on the rank's device and already initialised under the run's seed.
        materialize: ``materialize(module)``: allocate what is on ``meta`` and fill it by (seed, name); plain and
            sharded parameters (``DTensor``), without communication. Returns the module.
        in_place: ``in_place(module, autocast=True)``: activation checkpointing, compilation, autocast as configured,
            without changing parameter names. Returns the module, which may be a part of the model that keeps the
            model's names.
        optimizer_groups: ``optimizer_groups(module)``: parameter groups of the trainable parameters; no weight decay
            on parameters of fewer than two dimensions. It goes by names and shapes: a strategy whose parameters lose
            theirs calls it before, on what `build` made, and puts the parameters of the same names into the groups.
        optimizer: the recipe; `make_optimizer` is the two together.
        steps: how many steps this trial is to take; None: not known. It may be stopped before.
    """

    ctx: RankContext
    config: TrainConfig
    plan: Plan
    options: Any
    model: ModelSpec
    sync_mode: SyncMode
    accumulation: int
    build: Callable[[], nn.Module]
    materialize: Callable[[nn.Module], nn.Module]
    in_place: Callable[..., nn.Module]
    optimizer_groups: Callable[[nn.Module], list[dict[str, Any]]]
    optimizer: OptimizerRecipe
    steps: int | None = None

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """The run's optimizer over `module`'s trainable parameters, as they are after wrapping."""
        return self.optimizer.factory(self.optimizer_groups(module), **self.optimizer.defaults)


@attrs.frozen
class Prepared:
    """A built, wrapped, filled model with its optimizer. All state of a run's strategy lives here.

    Attributes:
        module: what is called on a micro-batch.
        core: its ``named_parameters()`` give the plain names, the same for every strategy.
        optimizer: ``param_groups[*]["lr"]`` is written by core before each step.
        engine: whatever else the strategy keeps.
        positions: the positions of a sample that this rank has, in the order in which it has them, where ranks share
            samples along an axis of the role ``"tokens"``; None: all. Core cuts the batches and counts the tokens.
        facts: JSON values for the result, under ``strategy_facts``. Read at the end of the trial, on rank 0.
        trainable: `core`'s trainable parameters; listed once, for walking the modules in every step is not free.
    """

    module: nn.Module
    core: nn.Module
    optimizer: torch.optim.Optimizer
    engine: Any = None
    positions: Sequence[int] | None = None
    facts: dict[str, Any] = attrs.field(factory=dict)
    trainable: tuple[nn.Parameter, ...] = attrs.field(init=False, repr=False)

    @trainable.default
    def _list_trainable(self) -> tuple[nn.Parameter, ...]:
        return tuple(p for p in self.core.parameters() if p.requires_grad)


@attrs.frozen
class Piece:
    """A rectangular part of a tensor in global coordinates: a live view that serves saving and loading.

    Attributes:
        tensor: the local part; read when saving, filled in place when loading.
        shape: of the whole tensor.
        offset: of the part in the whole, one entry a dimension.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]


@attrs.frozen
class State:
    """State of model and optimizer for a checkpoint, in terms that every strategy shares.

    Attributes:
        pieces: this rank's parts by key: ``model/NAME`` for parameters and persistent buffers,
            ``optim/NAME/KEY`` for optimizer state (``exp_avg``, ``exp_avg_sq``, ``step``, …). Replicated tensors are
            given by every rank. A tied parameter appears once, under its first name. State that is a strategy's own
            has keys ``strategy/NAME/…`` with the strategy's name; other strategies leave it out.
        scalars: JSON values of the strategy, equal on all ranks.
    """

    pieces: Mapping[str, Sequence[Piece]]
    scalars: Mapping[str, Any] = attrs.field(factory=dict)
