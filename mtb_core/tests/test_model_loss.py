"""From any model's output to the sum of the loss over valid tokens."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from mtb_core import ConfigError, ModelSpec, RunFailed
from mtb_core.model.loss import LossFunction, loss_sum, takes_targets

SPEC = ModelSpec(build=nn.Identity)
TARGETS = torch.tensor([[1, -100, 2], [0, 3, -100]])
VALID = 4


def logits(requires_grad=True):
    return torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_(requires_grad)


def expected():
    flat, targets = logits(False).reshape(-1, 5), TARGETS.reshape(-1)
    return sum(-F.log_softmax(flat[i], -1)[t] for i, t in enumerate(targets.tolist()) if t != -100)


def test_logits_give_the_sum_over_valid_tokens():
    """Ignored positions add nothing; the rest adds up, in fp32 whatever the logits' type."""
    torch.testing.assert_close(loss_sum(SPEC, logits(), TARGETS, VALID), expected())
    low = logits().bfloat16()
    value = loss_sum(SPEC, low, TARGETS, VALID)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, F.cross_entropy(low.float().flatten(0, 1), TARGETS.flatten(), reduction="sum"))


def test_nothing_valid_is_exactly_zero():
    """A micro-batch without a valid target has loss zero, gradients zero, and stays connected to the graph."""
    x = logits()
    value = loss_sum(SPEC, x, torch.full((2, 3), -100), 0)
    value.backward()
    assert value.item() == 0.0
    assert x.grad.abs().sum() == 0


@pytest.mark.parametrize(
    "wrap",
    [
        lambda logits, mean: mean,
        lambda logits, mean: (logits, mean),
        lambda logits, mean: (mean, logits),
        lambda logits, mean: {"loss": mean, "logits": logits},
        lambda logits, mean: SimpleNamespace(loss=mean, logits=logits),
        lambda logits, mean: (logits, None),
        lambda logits, mean: (None, logits),
        lambda logits, mean: (logits,),
        lambda logits, mean: SimpleNamespace(loss=None, logits=logits),
        lambda logits, mean: {"logits": logits},
    ],
)
def test_all_kinds_of_output_mean_the_same(wrap):
    """Logits, a mean, pairs in both orders, objects and mappings all give the same sum."""
    x = logits()
    mean = F.cross_entropy(x.flatten(0, 1), TARGETS.flatten())
    torch.testing.assert_close(loss_sum(SPEC, wrap(x, mean), TARGETS, VALID), expected())


def test_the_specs_own_loss_wins():
    """A spec's loss sees output and targets and is taken as it is."""
    spec = ModelSpec(build=nn.Identity, loss=lambda output, targets: (output * targets).sum())
    assert loss_sum(spec, torch.ones(2, 3), TARGETS, VALID).item() == TARGETS.sum().item()


def test_wrong_outputs_are_refused():
    """A shape or type that is no loss is named, with what would be valid."""
    with pytest.raises(RunFailed, match=r"\[2, 5, 3\].*\[2, 3\].*\[2, 3, 'vocabulary'\]"):
        loss_sum(SPEC, torch.zeros(2, 5, 3), TARGETS, VALID)
    with pytest.raises(RunFailed, match="returned str"):
        loss_sum(SPEC, "loss", TARGETS, VALID)
    with pytest.raises(RunFailed, match="returned tuple"):
        loss_sum(SPEC, (None, None), TARGETS, VALID)


class Model(nn.Module):
    """A model that averages by hand, as people write it: 0/0 where no target is valid."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 4)

    def forward(self, x, targets=None):
        logits = self.table(x)
        if targets is None:
            return logits
        mask = targets.ne(-100)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten(), reduction="none")
        return (losses * mask.flatten()).sum() / mask.sum()


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def test_a_model_that_returns_its_mean_is_summed():
    """The model is called with the targets through a wrapper too, and its mean becomes the sum of its logits' loss."""
    model = Model()
    inputs = torch.tensor([[0, 1, 2], [3, 2, 1]])
    value = LossFunction(SPEC, model)(Wrapped(model), inputs, TARGETS, VALID)
    torch.testing.assert_close(value, loss_sum(SPEC, model(inputs), TARGETS, VALID))


def test_the_mean_of_nothing_is_zero_with_zero_gradients():
    """Although 0/0 is NaN, a micro-batch without a valid target weighs nothing, and every parameter has a gradient."""
    model = Model()
    nothing = torch.full((1, 3), -100)
    assert model(torch.zeros(1, 3, dtype=torch.int64), nothing).isnan()
    value = LossFunction(SPEC, model)(model, torch.zeros(1, 3, dtype=torch.int64), nothing, 0)
    value.backward()
    assert value.item() == 0.0
    assert model.table.weight.grad.abs().sum() == 0


def forward_module(forward):
    return type("Custom", (nn.Module,), {"forward": forward})()


def test_which_models_get_targets():
    """The name of the second positional parameter decides; labels mean a model that shifts them itself."""
    takes = [
        lambda self, x, targets: 0,
        lambda self, x, target=None: 0,
        lambda self, x, y=None, z=1: 0,
    ]
    alone = [
        lambda self, x: 0,
        lambda self, x, mask=None, targets=None: 0,
        lambda self, x, labels=None: 0,
        lambda self, input_ids=None, attention_mask=None, labels=None: 0,
        lambda self, *args, **kwargs: 0,
        lambda self, x, *, targets=None: 0,
    ]
    assert [takes_targets(forward_module(f)) for f in takes] == [True] * 3
    assert [takes_targets(forward_module(f)) for f in alone] == [False] * 6


def test_arguments_nobody_can_give_are_refused():
    """A forward that needs more is refused before the first step, naming the argument."""
    for forward in (
        lambda self, x, labels: 0,
        lambda self, x, targets, mask: 0,
        lambda self, x, *, mask: 0,
    ):
        with pytest.raises(ConfigError, match=r"'(labels|mask)'"):
            takes_targets(forward_module(forward))
