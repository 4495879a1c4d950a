"""Building, filling by (seed, name), and changes in place."""

import copy
import gc
import inspect
import os
import subprocess
import sys
import weakref
from pathlib import Path

import attrs
import pytest
import torch
from torch import nn

from mtb_core import ConfigError, ModelSpec, TrainConfig
from mtb_core.model.gpt import gpt_spec
from mtb_core.model.loss import loss_sum
from mtb_core.model.services import build_module, in_place, materialize

SMALL = {"d_model": 20, "n_heads": 2, "n_layers": 2, "vocab_size": 33, "seq_length": 8}


def config(**settings):
    return TrainConfig(**{**SMALL, **settings})


def filled(seed=0, **settings):
    spec = gpt_spec(config(**settings))
    return materialize(build_module(spec, seed, "cpu"), spec, seed, "cpu")


def weights(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


# --- weights ---


def test_weights_depend_on_seed_and_name_only():
    """Neither the process's random state nor another layer changes a name's weights; another seed changes all."""
    two = weights(filled())
    torch.manual_seed(1234)
    assert same(two, weights(filled()))
    three = weights(filled(n_layers=3))
    inner = [n for n in two if n.endswith((".q.weight", ".up.weight")) or n in ("tokens.weight", "head.weight")]
    assert len(inner) == 6
    assert all(torch.equal(two[n], three[n]) for n in inner)
    other = weights(filled(seed=1))
    assert not any(torch.equal(two[n], other[n]) for n in inner)
    assert len({two[n].flatten()[:4].numpy().tobytes() for n in inner}) == len(inner)


def test_filling_leaves_the_random_state_alone():
    """Neither kind of building consumes the run's random numbers."""
    own = ModelSpec(build=lambda: nn.Linear(3, 2))
    for spec in (gpt_spec(config()), own):
        before = torch.get_rng_state()
        materialize(build_module(spec, 0, "cpu"), spec, 0, "cpu")
        assert torch.equal(torch.get_rng_state(), before)


def test_a_module_without_init_is_initialised_under_the_seed():
    """A bare module has its own initialisation: equal for equal seeds, different for others, untouched after."""
    spec = ModelSpec(build=lambda: nn.Linear(3, 2))
    first, again, other = (build_module(spec, seed, "cpu") for seed in (5, 5, 6))
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    before = weights(first)
    assert materialize(first, spec, 5, "cpu") is first
    assert same(weights(first), before)


def test_build_is_on_meta_and_tied_stays_tied():
    """With an init nothing is allocated before `materialize`, after which tied parameters are one again."""
    spec = gpt_spec(config(tie_embeddings=True))
    module = build_module(spec, 0, "cpu")
    assert all(p.is_meta for p in module.parameters())
    materialize(module, spec, 0, "cpu")
    assert module.head.weight is module.tokens.weight
    assert len(list(module.parameters())) == len(list(filled(tie_embeddings=False).parameters())) - 1


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(5), persistent=False)


def fill_all(name, tensor, generator):
    if name == "weight":
        tensor.normal_(generator=generator)
    elif name == "table":
        torch.arange(5.0, out=tensor)
    else:
        tensor.fill_(7)


def test_buffers_are_filled_too():
    """Init is asked for persistent and non-persistent buffers, integer ones included, and types stay."""
    spec = ModelSpec(build=WithBuffers, init=fill_all)
    module = materialize(build_module(spec, 0, "cpu"), spec, 0, "cpu")
    assert module.mean.tolist() == [7.0] * 3
    assert (module.count.item(), module.count.dtype) == (7, torch.int64)
    assert module.table.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert list(module.state_dict()) == ["weight", "mean", "count"]


def test_unfilled_tensor_is_named():
    """An init that forgets a tensor is refused by that tensor's name, not trained on memory's leftovers."""
    spec = ModelSpec(build=WithBuffers, init=lambda name, tensor, _: None if name == "mean" else tensor.fill_(0))
    with pytest.raises(ConfigError, match="'mean'"):
        materialize(build_module(spec, 0, "cpu"), spec, 0, "cpu")


def test_low_precision_parameters_are_rounded_from_the_same_numbers():
    """A bf16 parameter holds the rounded values of the fp32 one, not other random numbers."""
    spec = gpt_spec(config())
    module = build_module(spec, 0, "cpu").to(torch.bfloat16)
    materialize(module, spec, 0, "cpu")
    full = weights(filled())
    assert all(torch.equal(p, full[n].bfloat16()) for n, p in module.named_parameters())


def test_every_rank_fills_its_part_of_the_same_weights():
    """Shards (FSDP, TP, both; uneven and empty ones) hold exactly their part of the plain weights, and ties survive."""
    script = Path(__file__).with_name("sharded_fill.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checked 24 ranks" in done.stdout


# --- changes in place ---


def gradients(spec, module, seed=3):
    tokens = torch.randint(0, 33, (2, 2, 8), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(seed)
    loss = loss_sum(spec, module(tokens[0]), tokens[1], tokens[1].numel())
    loss.backward()
    found = {n: p.grad.clone() for n, p in module.named_parameters()}
    module.zero_grad()
    return loss.detach(), found, torch.get_rng_state()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activation_checkpointing_is_bitwise_the_same(precision):
    """With dropout: loss, every gradient and the random state after the step equal those without checkpointing."""
    results = []
    for switch in (False, True):
        c = config(dropout=0.5, activation_checkpointing=switch, precision=precision)
        spec = gpt_spec(c)
        module = in_place(filled(dropout=0.5), spec, c, "cpu")
        results.append(gradients(spec, module))
    (loss, grads, state), (loss2, grads2, state2) = results
    assert torch.equal(loss, loss2)
    assert same(grads, grads2)
    assert torch.equal(state, state2)


def test_activation_checkpointing_recomputes_blocks():
    """Each block's forward runs a second time in backward, and once in evaluation."""
    calls = []
    c = config(activation_checkpointing=True)
    spec = gpt_spec(c)
    module = in_place(filled(), spec, c, "cpu")
    module.blocks[0].norm1.register_forward_hook(lambda *_: calls.append(1))
    gradients(spec, module)
    assert len(calls) == 2
    with torch.no_grad():
        module(torch.zeros(1, 8, dtype=torch.int64))
    assert len(calls) == 3


def test_a_part_of_the_model_is_changed_alike():
    """A part that has one of the blocks under its name in the model recomputes it."""
    calls = []
    c = config(activation_checkpointing=True)
    spec = gpt_spec(c)
    part = nn.Module()
    part.blocks = nn.Module()
    part.blocks.add_module("1", filled().blocks[1])
    in_place(part, spec, c, "cpu")
    block = part.get_submodule("blocks.1")
    block.norm1.register_forward_hook(lambda *_: calls.append(1))
    block(torch.zeros(1, 8, SMALL["d_model"])).sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize("field", ["blocks", "chain"])
@pytest.mark.parametrize("init", [None, lambda *_: None])
def test_names_that_the_model_does_not_have(field, init):
    """A block, or a module of the chain, that is none of the model's is named."""
    spec = ModelSpec(build=lambda: nn.Sequential(nn.Linear(2, 2)), init=init, **{field: ("0", "1")})
    with pytest.raises(ConfigError, match=rf"ModelSpec\.{field} of the model \(Sequential\) names '1'"):
        build_module(spec, 0, "cpu")


def test_bf16_is_autocast_over_fp32_master_weights():
    """Logits are bf16, weights, gradients and the loss fp32; without `autocast` nothing changes."""
    c = config(precision="bf16", qk_norm=True)
    spec = gpt_spec(c)
    module = in_place(filled(qk_norm=True), spec, c, "cpu")
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    assert module(tokens).dtype == torch.bfloat16
    loss, grads, _ = gradients(spec, module)
    assert loss.dtype == torch.float32
    assert {g.dtype for g in grads.values()} == {p.dtype for p in module.parameters()} == {torch.float32}
    assert in_place(filled(), spec, c, "cpu", autocast=False)(tokens).dtype == torch.float32


def test_names_do_not_change():
    """All changes together keep the names of parameters, state and modules, the class and forward's signature."""
    c = config(activation_checkpointing=True, compile=True, precision="bf16")
    plain, changed = filled(), in_place(filled(), gpt_spec(c), c, "cpu")
    assert [n for n, _ in changed.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(changed.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in changed.named_modules()] == [n for n, _ in plain.named_modules()]
    assert repr(changed) == repr(plain)
    assert isinstance(changed, type(plain))
    assert inspect.signature(changed.forward) == inspect.signature(plain.forward)
    assert all(block._compiled_call_impl is not None for block in changed.blocks)
    assert changed._compiled_call_impl is None


def test_a_module_without_blocks_is_compiled_as_a_whole():
    """Compilation needs no blocks."""
    spec = ModelSpec(build=lambda: nn.Linear(2, 2))
    module = in_place(build_module(spec, 0, "cpu"), spec, config(compile=True), "cpu")
    assert module._compiled_call_impl is not None


def compiled_equals_eager() -> None:
    """Compiled, with and without checkpointing, loss and gradients equal the eager ones up to rounding."""
    spec = gpt_spec(config())
    loss, grads, _ = gradients(spec, filled())
    for switch in (False, True):
        c = config(compile=True, activation_checkpointing=switch)
        loss2, grads2, _ = gradients(spec, in_place(filled(), spec, c, "cpu"))
        torch.testing.assert_close(loss2, loss)
        for name, gradient in grads.items():
            torch.testing.assert_close(grads2[name], gradient, msg=name, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_compiled_blocks_compute_the_same():
    """`compiled_equals_eager`, in a process of its own: the compiler starts threads that stay."""
    code = f"from {__name__} import compiled_equals_eager as check; check()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr


def test_changed_module_is_freed_and_copied_like_any_other():
    """No reference cycle keeps a changed module alive, and a copy runs on its own weights."""
    c = config(activation_checkpointing=True, precision="bf16")
    spec = gpt_spec(c)
    module = in_place(filled(), spec, c, "cpu")
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.head.weight.zero_()
    assert twin(tokens).dtype == torch.bfloat16
    assert twin(tokens).abs().sum() == 0
    assert module(tokens).abs().sum() > 0
    watch = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert watch() is None
    finally:
        gc.enable()


def test_forward_stored_on_the_instance_is_kept():
    """A forward that someone stored on the module itself still runs, inside autocast."""
    spec = ModelSpec(build=lambda: nn.Linear(2, 2))
    module = build_module(spec, 0, "cpu")
    original = module.forward
    module.forward = lambda x: original(x) + 100
    in_place(module, spec, config(precision="bf16"), "cpu")
    out = module(torch.zeros(1, 2))
    assert out.dtype == torch.bfloat16
    assert out.min() > 90


def test_plain_runs_on_the_cpu_touch_no_cuda_and_import_no_dtensor():
    """Building, filling, checkpointing, autocast and backward on the CPU initialise no CUDA and skip slow imports."""
    code = """
import sys, attrs, torch
from mtb_core import TrainConfig
from mtb_core.ranks.dynamo import avoid_dynamo_import
from mtb_core.model.gpt import gpt_spec
from mtb_core.model.services import build_module, in_place, materialize
avoid_dynamo_import()
def refuse(*a, **k): raise AssertionError("CUDA was touched")
torch.cuda._lazy_init = torch.cuda.init = torch._C._cuda_getDeviceCount = refuse
c = TrainConfig(d_model=8, n_heads=2, vocab_size=8, seq_length=4, precision="bf16", activation_checkpointing=True)
spec = gpt_spec(c)
m = in_place(materialize(build_module(spec, 0, "cpu"), spec, 0, "cpu"), spec, c, "cpu")
m(torch.zeros(1, 4, dtype=torch.int64)).float().sum().backward()
build_module(attrs.evolve(spec, init=None), 0, "cpu")
assert not torch.cuda.is_initialized()
assert "torch.distributed.tensor" not in sys.modules
assert "torch._dynamo.eval_frame" not in sys.modules
"""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr


def test_materialize_leaves_frozen_parameters_frozen():
    """Allocation keeps requires_grad."""

    def build():
        module = nn.Linear(2, 2)
        module.bias.requires_grad_(False)
        return module

    spec = ModelSpec(build=build, init=lambda _, tensor, __: tensor.fill_(1.0))
    module = materialize(build_module(spec, 0, "cpu"), spec, 0, "cpu")
    assert [p.requires_grad for p in module.parameters()] == [True, False]


def test_spec_is_a_value():
    """A spec can be evolved: another init, same everything else."""
    spec = gpt_spec(config())
    zeros = attrs.evolve(spec, init=lambda _, tensor, __: tensor.zero_())
    module = materialize(build_module(zeros, 0, "cpu"), zeros, 0, "cpu")
    assert all(not p.any() for p in module.parameters())
