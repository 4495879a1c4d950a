"""The values that travel between core and strategies.

Vocabulary, used everywhere: a *step* is always an optimizer step; a *micro-batch* is what one forward and backward
sees on one rank; the *global batch* is what all ranks and micro-batches of one step see together. ``torch`` is
imported for types only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import Store
    from torch.distributed.device_mesh import DeviceMesh

    from mtb_core.config.schema import TrainConfig

SyncMode = Literal["every", "last"]


@attrs.frozen
class World:
    """How many ranks there are and how they are spread: ``size`` in all, ``local_size`` on each node."""

    size: int
    local_size: int


@attrs.frozen
class Layout:
    """How ranks are arranged: axes outermost first, ranks row-major over them.

    Pure arithmetic, fixed before any rank exists. `data` names the axes along which samples differ; ranks that
    differ only along other axes (tensor parallel, say) see the same samples.
    """

    axes: tuple[tuple[str, int], ...]
    data: tuple[str, ...] = ("dp",)

    def __attrs_post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        unknown = [name for name in self.data if name not in names]
        if unknown or len(set(names)) != len(names):
            msg = f"Layout needs distinct axes that contain the data axes; got axes {names}, data {list(self.data)}"
            raise ValueError(msg)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    @property
    def data_size(self) -> int:
        """Number of different sample streams."""
        return math.prod(size for name, size in self.axes if name in self.data)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of `rank` on each axis."""
        out: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, out[name] = divmod(rank, size)
        return out

    def data_rank(self, rank: int) -> int:
        """Which sample stream `rank` sees, in ``range(data_size)``."""
        coordinates, index = self.coordinates(rank), 0
        for name, size in self.axes:
            if name in self.data:
                index = index * size + coordinates[name]
        return index

    def leads(self, rank: int) -> bool:
        """Whether `rank` is the one of its sample stream that counts (losses, tokens)."""
        return all(index == 0 for name, index in self.coordinates(rank).items() if name not in self.data)


@attrs.frozen
class Plan:
    """What a strategy promises for given options, configuration and world; made before any rank starts.

    Attributes:
        layout: the arrangement of ranks.
        sync_modes: gradient sync modes it can honour.
        auto_sync: what ``--gradient-sync-mode auto`` means here.
        exact: losses equal those of ``single`` on the same global batch, up to rounding.
        reduce_dtype: dtype in which gradients are summed over ranks, ``"fp32"`` or ``"bf16"``…
        process_group: whether a process group is needed even at one rank.
        exact_resume: whether the state that a checkpoint holds is all that later steps depend on.
        missing_gradients: whether the strategy copes with parameters that get no gradient on some ranks.
        finds_missing_gradients: whether the strategy, which leaves no ``.grad`` for core to look at, raises
            `MissingGradient` itself in backward.
        sharded: no rank holds all of the model and its optimizer, where there are several data ranks.
        custom_models: takes any `ModelSpec`, not only one with a tensor-parallel plan.
        resharding: its checkpoints can be resumed on another number of ranks and by other strategies.
        options: the options with what they leave open filled in (from a file that one of them names, or by defaults
            that depend on others); None: they are whole as given. It is these that the strategy gets and that
            results and ``config.toml`` record; planned again with them, the plan must be the same.
    """

    layout: Layout
    sync_modes: tuple[SyncMode, ...] = ("every", "last")
    auto_sync: SyncMode = "last"
    exact: bool = True
    reduce_dtype: str = "fp32"
    process_group: bool = True
    missing_gradients: bool = False
    exact_resume: bool = True
    finds_missing_gradients: bool = False
    sharded: bool = False
    custom_models: bool = True
    resharding: bool = True
    options: Any = None


@attrs.frozen
class RankContext:
    """What a rank needs to know of the outside world; made in one place and closed in one place.

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
    def leads(self) -> bool:
        """Whether this rank counts for its sample stream."""
        return self.layout.leads(self.rank)


@attrs.frozen
class ModelSpec:
    """What ``--model`` yields: all that a strategy must know of a model.

    Attributes:
        build: makes the module, on whatever ``torch.device`` context is active (core uses ``meta`` if `init` is set).
        init: ``init(name, tensor, generator)`` fills the full tensor of one parameter or buffer in place, all of it;
            weights then depend on (seed, name) only. None: the module's own initialisation under the run's seed.
        loss: ``loss(output, targets)``: SUM over valid tokens, a scalar. None: see `mtb_core.model.loss`.
        blocks: qualified names of the repeated blocks: the units of activation checkpointing, sharding, compilation.
        tensor_parallel: a module's qualified name to its role under tensor parallelism, or None. ``"colwise"`` and
            ``"rowwise"``: linear layers, split by output and by input features. For sequence parallelism also
            ``"stem"``: what gives the first [batch, length, features] of the residual stream, and ``"norm"``: what
            stands between the stream and colwise layers or the head, and treats each position alone. For a
            vocabulary split over ranks ``"embedding"`` and ``"head"``. ``"dropout"``: an ``nn.Dropout`` on the stream,
            called once a forward.
        flops_per_token: model FLOPs of forward and backward for one token, by convention name
            (see `mtb_core.model.flops`); empty where unknown.
        vocab_size: None where the model has no vocabulary.
    """

    build: Callable[[], nn.Module]
    init: Callable[[str, torch.Tensor, torch.Generator], None] | None = None
    loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    blocks: tuple[str, ...] = ()
    tensor_parallel: Callable[[str], str | None] | None = None
    flops_per_token: Mapping[str, float] = attrs.field(factory=dict)
    vocab_size: int | None = None


@attrs.frozen
class OptimizerRecipe:
    """How to make the run's optimizer over any parameters: ``factory(groups, **defaults)``."""

    factory: type[torch.optim.Optimizer]
    defaults: Mapping[str, Any]


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
            without changing parameter names. Returns the module.
        optimizer_groups: ``optimizer_groups(module)``: parameter groups of the trainable parameters; no weight decay
            on parameters of fewer than two dimensions.
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
        parameters: number of elements of all parameters, where `core` holds a part of some of them and does not show
            it; None: core counts.
        trainable: `core`'s trainable parameters; listed once, for walking the modules in every step is not free.
    """

    module: nn.Module
    core: nn.Module
    optimizer: torch.optim.Optimizer
    engine: Any = None
    parameters: int | None = None
    trainable: tuple[nn.Parameter, ...] = attrs.field(init=False, repr=False)

    @trainable.default
    def _list_trainable(self) -> tuple[nn.Parameter, ...]:
        return tuple(p for p in self.core.parameters() if p.requires_grad)


@attrs.frozen
class MicroBatch:
    """Position of a micro-batch in its step; `sync` says whether its gradients are to be synchronised."""

    index: int
    count: int
    sync: bool


@attrs.frozen
class Shards:
    """Gradients for the global norm and clipping: live, plain, local tensors.

    `copies` is how many ranks hold these same elements (1 where every rank holds different ones).
    """

    tensors: list[torch.Tensor]
    copies: int


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
    """What a checkpoint holds of model and optimizer, in terms that every strategy shares.

    Attributes:
        pieces: this rank's parts by key: ``model/NAME`` for parameters and persistent buffers,
            ``optim/NAME/KEY`` for optimizer state (``exp_avg``, ``exp_avg_sq``, ``step``, …). Replicated tensors are
            given by every rank. A tied parameter appears once, under its first name.
        scalars: JSON values, equal on all ranks.
    """

    pieces: Mapping[str, Sequence[Piece]]
    scalars: Mapping[str, Any] = attrs.field(factory=dict)
