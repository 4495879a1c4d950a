"""Hold parallel layers against one process, on every rank, and say how far they are from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from mtb_core import ConfigError, CountCollectives, RankContext, gather_objects
from mtb_tp import by_hand
from mtb_tp.layers import LAYERS, Collectives, Settings, make_tensor, part
from mtb_tp.mistakes import MISTAKES, Mistake
from mtb_tp.plugin import check_sizes

#: Largest error allowed, by dtype, in units of the largest element of the reference, or of 1 where that is less.
TOLERANCES = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 6e-2}
IMPLEMENTATIONS = ("explicit", "torch")


@attrs.frozen
class Error:
    """Largest distance of one quantity from the reference, over ranks and elements.

    Attributes:
        max_abs: largest absolute difference.
        max_rel: the same over the largest absolute element of the reference.
        tolerance: what `max_abs` may be.
    """

    max_abs: float
    max_rel: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """True if it is within the tolerance; NaN is not."""
        return self.max_abs <= self.tolerance


@attrs.frozen
class Outcome:
    """Results of one implementation of a layer.

    Attributes:
        errors: by quantity: ``output``, and the gradient of each input and parameter.
        collectives: (calls, message bytes) by kind, for each pass, as counted on rank 0.
        expected: the same by theory.
        refused: why the layer did not run at all; its other fields are empty then.
    """

    implementation: str
    layer: str
    errors: Mapping[str, Error]
    collectives: Collectives
    expected: Collectives
    refused: str | None = None

    @property
    def ok(self) -> bool:
        """True if all is as it should be."""
        return self.refused is None and self.collectives == self.expected and all(e.ok for e in self.errors.values())


@attrs.frozen
class Detection:
    """A mistake made on purpose, and the quantities that gave it away; none: it went unseen."""

    mistake: str
    layer: str
    seen_in: tuple[str, ...]


@attrs.frozen
class Request:
    """Input of the ranks; `ranks`: the number that there must be, None: any."""

    settings: Settings
    self_test: bool
    ranks: int | None


@attrs.frozen
class Report:
    """Results of all ranks; `detections` are those of the self-test."""

    ranks: int
    device: str
    backend: str
    outcomes: tuple[Outcome, ...]
    detections: tuple[Detection, ...]

    @property
    def ok(self) -> bool:
        """True if every layer is right and every mistake was seen."""
        return all(o.ok for o in self.outcomes) and all(d.seen_in for d in self.detections)


def check_on_rank(request: Request, ctx: RankContext, _worker: Any) -> Report:
    """The function that runs on every rank; called by all, returns the same on all.

    Raises:
        ConfigError: there are not as many ranks as were asked for, which an external launcher decides.
    """
    settings = request.settings
    if request.ranks not in (None, ctx.world_size) or ctx.world_size < 2:
        asked = "two or more" if request.ranks is None else f"--tp {request.ranks}"
        raise ConfigError(f"mtb tp was started on {ctx.world_size} ranks, but needs {asked}; start it on as many.")
    check_sizes(attrs.asdict(settings), ctx.world_size)
    bench = _Bench(settings, ctx)
    outcomes = [bench.outcome(layer, name) for layer in settings.layers for name in IMPLEMENTATIONS]
    detections = [bench.detection(m) for m in MISTAKES if m.layer in settings.layers] if request.self_test else []
    return Report(ctx.world_size, ctx.device, str(ctx.backend), tuple(outcomes), tuple(detections))


class _Bench:
    """Everything that the checks of one rank share."""

    def __init__(self, settings: Settings, ctx: RankContext) -> None:
        assert ctx.mesh is not None
        self._settings, self._ctx, self._mesh = settings, ctx, ctx.mesh
        self._group = self._mesh.get_group()

    def outcome(self, layer: str, implementation: str) -> Outcome:
        """Run and compare one layer."""
        tensors = self._tensors(layer)
        run = self._explicit if implementation == "explicit" else self._torch
        found, counted = run(layer, tensors)
        expected = LAYERS[layer].collectives(self._settings, implementation)
        return Outcome(implementation, layer, self._errors(layer, tensors, found), counted, expected)

    def detection(self, mistake: Mistake) -> Detection:
        """Make `mistake` and see which quantities are wrong. One that cannot even run on a rank is seen as well."""
        settings = _square(self._settings)
        bench = _Bench(settings, self._ctx)
        tensors = bench._tensors(mistake.layer)
        with mistake.made():
            found, _ = bench._explicit(mistake.layer, tensors)
        errors = bench._errors(mistake.layer, tensors, found)
        return Detection(mistake.what, mistake.layer, tuple(name for name, error in errors.items() if not error.ok))

    def _tensors(self, layer: str) -> dict[str, Tensor]:
        shapes = LAYERS[layer].shapes(self._settings)
        return {name: make_tensor(self._settings, name, shape).to(self._ctx.device) for name, shape in shapes.items()}

    def _explicit(self, layer: str, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Collectives]:
        leaves = by_hand.own_parts(layer, tensors, self._group)
        output, counted = self._passes(
            layer, lambda: by_hand.run_layer(layer, leaves, self._settings, self._group), lambda: None
        )
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        return _quantities(output, gradients), counted

    def _torch(self, layer: str, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Collectives]:
        from mtb_tp.by_torch import TorchLayer  # noqa: PLC0415  (DTensor takes a second to import)

        made = TorchLayer(layer, tensors, self._settings, self._mesh)
        output, counted = self._passes(layer, made.forward, made.finish_backward)
        return _quantities(output, made.gradients()), counted

    def _passes(
        self, layer: str, forward: Callable[[], Tensor], finish: Callable[[], None]
    ) -> tuple[Tensor, Collectives]:
        """Forward, then backward from a gradient that is the same in every implementation."""
        with CountCollectives() as in_forward:
            output = forward()
        gradient = self._mine(layer, "output", self._output_gradient(layer))
        with CountCollectives() as in_backward:
            output.backward(gradient.reshape(output.shape))
            finish()
        return output.detach(), {"forward": _counts(in_forward), "backward": _counts(in_backward)}

    def _reference(self, layer: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        output = LAYERS[layer].reference(leaves, self._settings, self._ctx.world_size)
        output.backward(self._output_gradient(layer))
        return _quantities(output.detach(), {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None})

    def _output_gradient(self, layer: str) -> Tensor:
        settings, x = self._settings, LAYERS[layer].shapes(self._settings)["x"]
        width = settings.hidden_size if layer == "sequence" else settings.out_features
        return make_tensor(settings, "output_gradient", (*x[:-1], width)).to(self._ctx.device)

    def _mine(self, layer: str, tensor: str, full: Tensor) -> Tensor:
        return part(full, LAYERS[layer].splits[tensor], self._ctx.rank, self._ctx.world_size)

    def _errors(self, layer: str, tensors: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> dict[str, Error]:
        """Each rank compares what it holds with its part of the reference; the worst of all ranks counts."""
        reference = self._reference(layer, tensors)
        own = {
            name: _difference(found[name], self._mine(layer, name.removesuffix("_grad"), whole))
            for name, whole in reference.items()
        }
        ranks = gather_objects(self._ctx, own)
        return {name: self._error(whole, [rank[name] for rank in ranks]) for name, whole in reference.items()}

    def _error(self, reference: Tensor, differences: Sequence[float]) -> Error:
        # Not max(): it loses a NaN that does not come first.
        worst = math.nan if any(math.isnan(d) for d in differences) else max(differences)
        largest = float(reference.abs().amax())
        atol = self._settings.atol
        allowed = TOLERANCES[self._settings.dtype] * max(1.0, largest) if atol is None else atol
        return Error(worst, worst / largest if largest else math.inf if worst else 0.0, allowed)


def _square(settings: Settings) -> Settings:
    """For the self-test: square layers, so that a weight that is split the wrong way still fits.

    What the user sets for the layers must not blind it: half of all elements are dropped, and the tolerance is that of
    the dtype.
    """
    size = 24
    return attrs.evolve(
        settings,
        in_features=size,
        out_features=size,
        hidden_features=size,
        hidden_size=size,
        dropout=0.5,
        atol=None,
    )


def _quantities(output: Tensor, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"output": output, **{f"{name}_grad": gradient for name, gradient in gradients.items()}}


def _difference(found: Tensor, wanted: Tensor) -> float:
    """Largest absolute difference; infinite where the shapes differ."""
    if found.shape != wanted.shape:
        return math.inf
    return float((found.double() - wanted.double()).abs().amax()) if wanted.numel() else 0.0


def _counts(counter: CountCollectives) -> dict[str, tuple[int, int]]:
    return {kind: (calls, counter.message_bytes[kind]) for kind, calls in counter.calls.items()}


def wire_bytes(collectives: Mapping[str, tuple[int, int]], ranks: int) -> int:
    """Bytes that each rank sends in ring algorithms, which reach the lower bound (Patarasuk and Yuan, 2009).

    All-gather and reduce-scatter send (n - 1) / n of the message, all-reduce, which is the two in turn, twice that.
    """
    share = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    return round(sum(share[kind] * size * (ranks - 1) / ranks for kind, (_, size) in collectives.items()))
