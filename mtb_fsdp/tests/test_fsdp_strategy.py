"""Strategies `fsdp` and `fsdp1` on real ranks: parity, models with something special, evaluation, exceptions."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mtb_core import MicroBatch, Prepared, TrainConfig, hookimpl, run
from mtb_fsdp.strategy import FSDPStrategy

from .whole import TINY, after, before, same, train

MODELS = Path(__file__).parent / "models.py"
PARITY: dict[str, Any] = {"steps": 19, "adam_eps": 1e-6}
_references: dict[str, Any] = {}


def reference(folder: Path, **settings: Any) -> Any:
    """`single` on the same global batch, in one micro-batch; trained once."""
    key = repr(sorted(settings.items()))
    if key not in _references:
        _, (seen,) = train(folder / "reference", strategy="single", **settings)
        _references[key] = seen
    return _references[key]


def options(**given: Any) -> dict[str, Any]:
    return {"strategy": "fsdp", "nproc": 2, "strategy_opt": given}


CASES: dict[str, dict[str, Any]] = {
    "1": {"strategy": "fsdp"},
    "2": options(),
    "3-accumulate": {"strategy": "fsdp", "nproc": 3, "grad_accum_steps": 2},
    "3-last": {"strategy": "fsdp", "nproc": 3, "grad_accum_steps": 4, "gradient_sync_mode": "last"},
    "2-keep": options(reshard_after_forward=False),
    "2-root": options(wrap="root"),
    "2-size": options(wrap="auto-size", wrap_size=1000),
    "2-offload": options(cpu_offload=True),
    "2-prefetch": options(prefetch=2),
    "2-recompute": {**options(), "activation_checkpointing": True},
    "4-spread": {"strategy": "fsdp", "nproc": 4, "strategy_opt": {"reshard_after_forward": 2}},
    "4-hsdp": {"strategy": "fsdp", "nproc": 4, "strategy_opt": {"hsdp": 2}},
    "fsdp1-1": {"strategy": "fsdp1"},
    "fsdp1-2": {"strategy": "fsdp1", "nproc": 2},
    "fsdp1-3-last": {"strategy": "fsdp1", "nproc": 3, "grad_accum_steps": 2, "gradient_sync_mode": "last"},
    "fsdp1-2-grad-op": {"strategy": "fsdp1", "nproc": 2, "strategy_opt": {"sharding": "grad-op"}},
    "fsdp1-2-none": {"strategy": "fsdp1", "nproc": 2, "strategy_opt": {"sharding": "none", "wrap": "root"}},
}


#: The others run with the slow tests.
FAST = ("3-last", "4-hsdp", "fsdp1-3-last")
SGD = ("2", "3-last", "4-hsdp", "fsdp1-3-last")


def check_parity(folder: Path, case: str, settings: dict[str, Any], distance: float) -> None:
    expected = reference(folder, **settings)
    _, seen = train(folder / "case", **settings, **CASES[case])
    assert len(expected.losses) == 20
    assert any(r.clipped for r in expected.records)
    for rank in seen:
        assert rank.losses == pytest.approx(expected.losses, rel=1e-5)
        assert [r.grad_norm for r in rank.records] == pytest.approx([r.grad_norm for r in expected.records], rel=1e-4)
    assert same(before(seen), before([expected]))
    final = after(seen)
    for key, tensor in after([expected]).items():
        if key.startswith("model/"):
            assert (final[key] - tensor).norm() <= distance * tensor.norm(), key


@pytest.mark.parametrize("case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_parity(case: str, tmp_path: Path) -> None:
    """20 losses agree to 1e-5 with `single`, and first weights to the bit.

    Last weights agree to 1e-4 of their norm: AdamW blows up the rounding of gradients that are almost zero, such as
    those of tokens that hardly occur.
    """
    check_parity(tmp_path, case, PARITY, 1e-4)


@pytest.mark.parametrize("case", [c if c == "3-last" else pytest.param(c, marks=pytest.mark.slow) for c in SGD])
def test_parity_sgd(case: str, tmp_path: Path) -> None:
    """The same with SGD, which hides no scale and blows up nothing: last weights agree to 1e-5."""
    check_parity(tmp_path, case, {"steps": 19, "optimizer": "sgd", "learning_rate": 0.1}, 1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        options(),
        pytest.param(options(param_dtype="fp32"), marks=pytest.mark.slow),
        pytest.param({"strategy": "fsdp1", "nproc": 2}, marks=pytest.mark.slow),
    ],
)
def test_bf16_is_near(settings: dict[str, Any], tmp_path: Path) -> None:
    """With bf16 for computing and fp32 for sums, losses are within 2e-2 of `ddp`'s, and weights stay fp32."""
    _, expected = train(tmp_path / "ddp", strategy="ddp", nproc=2, precision="bf16", **PARITY)
    result, seen = train(tmp_path / "case", precision="bf16", **PARITY, **settings)
    assert seen[0].losses == pytest.approx(expected[0].losses, rel=2e-2)
    assert result.reduce_dtype == "fp32"
    assert {t.dtype for t in after(seen).values()} == {torch.float32}


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("fsdp1", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        "Net",
        "FrozenBlock",
        "FrozenStart",
        "TiedBlocks",
        "InPlace",
        "BlockTwice",
        "Temperature",
        "Normalised",
        "filled_normalised",
    ],
)
def test_special_models(name: str, strategy: str, tmp_path: Path) -> None:
    """As `ddp`, step for step and to the bit where nothing was trained; statistics are those of rank 0."""
    settings = {"model": f"{MODELS}:{name}", "vocab_size": 256, "adam_eps": 1e-6, "nproc": 2, "grad_accum_steps": 2}
    if (name, strategy) == ("Temperature", "fsdp1"):
        result = run(TrainConfig(**{**TINY, **settings, "strategy": "fsdp1", "run_dir": str(tmp_path)}), quiet=True)
        assert "'temperature' has no dimensions" in str(result.failure)
        return
    _, expected = train(tmp_path / "ddp", strategy="ddp", gradient_sync_mode="every", **settings)
    _, seen = train(tmp_path / "case", strategy=strategy, **settings)
    assert seen[0].losses == pytest.approx(expected[0].losses, rel=1e-5)
    assert same(before(expected), before(seen))
    first, last, other = before(seen), after(seen), after(expected)
    assert last.keys() == other.keys()
    for key, tensor in other.items():
        if key.startswith("model/"):
            assert torch.equal(first[key], tensor) == torch.equal(first[key], last[key]), key
            torch.testing.assert_close(last[key], tensor, rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.parametrize(
    ("name", "strategy", "text"),
    [
        ("Unused", "fsdp", "on all ranks for 'blocks.1.idle'"),
        ("UnusedOnRank1", "fsdp", r"No gradient on rank 1 .* of module 'blocks.1'"),
        ("BlockUnusedOnRank1", "fsdp", "Module 'blocks.1' did not run on rank 1"),
        ("BlockUnusedOnRank1", "fsdp1", "Module 'blocks.1' did not run on rank 1"),
        ("TwoDtypes", "fsdp", "module 'blocks.1' have dtypes bfloat16, float32"),
    ],
)
def test_what_ranks_do_not_share_ends_all(name: str, strategy: str, text: str, tmp_path: Path) -> None:
    """The rank that lacks something says what; the others, which wait for it, are ended."""
    model = {"model": f"{MODELS}:{name}", "vocab_size": 256, "strategy": strategy, "nproc": 2}
    result = run(TrainConfig(**{**TINY, **model, "run_dir": str(tmp_path)}), quiet=True)
    assert result.exit_reason == "failed"
    assert re.search(text, str(result.failure)), result.failure


def test_trials_are_apart(tmp_path: Path) -> None:
    """A rank that alone leaves a block out is named also where all ranks left it out in the trial before."""
    model = {"model": f"{MODELS}:BlockUnusedInTrials", "vocab_size": 256, **options(unused_parameters=True)}
    result = run(TrainConfig(**{**TINY, **model, "repeat": 2, "run_dir": str(tmp_path)}), quiet=True)
    assert result.exit_reason == "failed"
    assert "Module 'blocks.1' did not run on rank 1 (other ranks have it)" in str(result.failure)


def test_late_ranks_are_waited_for(tmp_path: Path) -> None:
    """Where all ranks leave a block out and one is seconds late, training goes on."""
    model = {"model": f"{MODELS}:LateWithoutBlock", "vocab_size": 256, **options(unused_parameters=True)}
    result = run(TrainConfig(**{**TINY, **model, "run_dir": str(tmp_path)}), quiet=True)
    assert result.exit_reason == "done", result.failure


@pytest.mark.parametrize("name", ["OutsideItsBlock", "CallsForward"])
def test_what_is_used_outside_its_unit(name: str, tmp_path: Path) -> None:
    """The error names the likely cause and the option that helps, which does."""
    model: dict[str, Any] = {"model": f"{MODELS}:{name}", "vocab_size": 256}
    result = run(TrainConfig(**{**TINY, **model, **options(), "run_dir": str(tmp_path / "block")}), quiet=True)
    assert result.exit_reason == "failed"
    assert "used outside of the block's own call" in str(result.failure)
    assert "wrap=root" in str(result.failure)
    allowed = options(wrap="root", unused_parameters=True)  # CallsForward leaves blocks out
    result = run(TrainConfig(**{**TINY, **model, **allowed, "run_dir": str(tmp_path / "root")}), quiet=True)
    assert result.exit_reason == "done", result.failure


def test_unused_parameters_count_as_zero(tmp_path: Path) -> None:
    """With the option a parameter that one rank does not use gets the gradient of the others."""
    model = {"model": f"{MODELS}:UnusedOnRank1", "vocab_size": 256, "adam_eps": 1e-6}
    _, expected = train(
        tmp_path / "ddp", strategy="ddp", nproc=2, strategy_opt={"find_unused_parameters": True}, **model
    )
    _, seen = train(tmp_path / "fsdp", **options(unused_parameters=True), **model)
    assert seen[0].losses == pytest.approx(expected[0].losses, rel=1e-5)


@pytest.mark.parametrize("mode", ["every", "last"])
def test_skipped_updates_leave_nothing_behind(mode: str, tmp_path: Path) -> None:
    """After a step that is left out for a NaN, losses are `ddp`'s."""
    settings = {"model": f"{MODELS}:NaNOnce", "vocab_size": 256, "adam_eps": 1e-6, "nproc": 2, "grad_accum_steps": 2}
    settings |= {"on_nonfinite": "skip", "gradient_sync_mode": mode, "steps": 4}
    _, expected = train(tmp_path / "ddp", strategy="ddp", **settings)
    _, seen = train(tmp_path / "fsdp", strategy="fsdp", **settings)
    skipped = [r.skipped for r in seen[0].records]
    assert skipped == [r.skipped for r in expected[0].records] == [False, True, False, False, False]
    assert seen[0].losses[2:] == pytest.approx(expected[0].losses[2:], rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        options(),
        pytest.param(options(reshard_after_forward=False), marks=pytest.mark.slow),
        pytest.param({"strategy": "fsdp1", "nproc": 2}, marks=pytest.mark.slow),
    ],
)
def test_evaluation_changes_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    """Its loss is that of `single`; training goes on as without it, and is saved and resumed as without it."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(33)) * 20)
    evaluating = {"eval_data": str(text), "eval_every": 1, "eval_batches": 2, "vocab_size": 256}
    single, _ = train(tmp_path / "single", strategy="single", **evaluating, batch_size=12)
    _, expected = train(tmp_path / "without", **settings, vocab_size=256)
    saving = {"checkpoint_dir": str(tmp_path / "saved"), "save_every": 1, "warmup_steps": 0, "steps": None}
    result, _ = train(tmp_path / "with", **settings, **evaluating)
    assert result.eval_loss == pytest.approx(single.eval_loss, rel=1e-5)
    _, first = train(tmp_path / "first", **settings, **evaluating, **saving, until_step=2)
    _, second = train(tmp_path / "second", **settings, **evaluating, **saving, until_step=4, resume="latest")
    assert first[0].losses + second[0].losses == expected[0].losses
    assert same(after(first), before(second))
    assert same(after(second), after(expected))


class Breaks:
    """Leaves the first micro-batch of two steps by an exception, after forward and after backward, and takes it again."""

    def __init__(self) -> None:
        self._left = [False, True]

    @hookimpl(wrapper=True)
    def mtb_micro_batch(
        self, prepared: Prepared, micro: MicroBatch
    ) -> Generator[None, AbstractContextManager[None], AbstractContextManager[None]]:
        context = yield
        if micro.index or not self._left:
            return context
        return self._broken(prepared, context, micro, self._left.pop(0))

    @contextmanager
    def _broken(
        self, prepared: Prepared, context: AbstractContextManager[None], micro: MicroBatch, backward: bool
    ) -> Iterator[None]:
        try:
            with context:
                loss = prepared.module(torch.zeros(1, 8, dtype=torch.int64)).square().sum()
                if backward:
                    loss.backward()
                raise KeyError
        except KeyError:
            for parameter in prepared.trainable:
                parameter.grad = None
        with FSDPStrategy().micro_batch(prepared, micro):
            yield


@pytest.mark.parametrize("mode", ["every", "last"])
def test_exceptions_leave_nothing_behind(mode: str, tmp_path: Path) -> None:
    """After exceptions inside the sync context, gradients that were waiting are gone, and training is as without."""
    settings = {**options(), "grad_accum_steps": 2, "gradient_sync_mode": mode}
    _, expected = train(tmp_path / "clean", **settings)
    _, seen = train(tmp_path / "broken", **settings, plugins={"breaks": Breaks})
    assert seen[0].losses == expected[0].losses
    assert same(after(seen), after(expected))
