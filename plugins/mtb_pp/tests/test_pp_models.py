"""Strategy `pp` with models of one's own: buffers, odd and shared parameters; and what fails, told by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pp_states import TINY, ragged, trained, whole

from mtb_core import Result, TrainConfig, run

MODELS = Path(__file__).parent / "pp_models.py"


def model(name: str) -> str:
    return f"{MODELS}:{name}"


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe"},
        pytest.param({"schedule": "1f1b"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_buffers_are_those_of_one_process(options: dict[str, Any], tmp_path: Path) -> None:
    """They are changed once a forward, in the order of micro-batches; neither evaluations count, nor does torch's trial."""
    text = ragged(tmp_path)
    common = {
        "model": model("buffers"),
        "grad_accum_steps": 4,
        "until_step": 4,
        "data": text,
        "eval_data": text,
        "eval_every": 3,
    }
    _, (single,) = trained(tmp_path / "single", strategy="single", **common)
    _, seen = trained(tmp_path / "pp", strategy="pp", nproc=3, strategy_opt=options, **common)
    wanted, found = whole([single.ended]), whole([s.ended for s in seen])
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), key
    assert seen[0].losses == single.losses
    assert seen[0].evaluated == single.evaluated
    assert int(found["model/blocks.1.calls"]) == 4 * 4  # an evaluation leaves buffers as they were


@pytest.mark.parametrize("data_parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_saving_does_not_change_buffers(data_parallel: str, tmp_path: Path) -> None:
    """With buffers that follow each rank's samples, a run that saves in each step takes the steps of one that does not."""
    settings: dict[str, Any] = {
        "strategy": "pp",
        "nproc": 4,
        "strategy_opt": {"pp": 2, "data_parallel": data_parallel},
        "model": model("buffers"),
        "until_step": 5,
        "grad_accum_steps": 2,
    }
    _, plain = trained(tmp_path / "plain", **settings)
    _, saving = trained(tmp_path / "saving", **settings, save_every=1)
    assert saving[3].losses == plain[3].losses
    whole([s.ended for s in saving])  # copies are equal


@pytest.mark.parametrize(
    ("name", "nproc", "options"),
    [
        ("repeated", 3, {}),
        pytest.param("odd", 2, {}, marks=pytest.mark.slow),
        ("odd", 4, {"pp": 2, "data_parallel": "fsdp"}),
        pytest.param("odd", 4, {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("repeated", 3, {"schedule": "gpipe"}, marks=pytest.mark.slow),
    ],
)
def test_odd_models(name: str, nproc: int, options: dict[str, Any], tmp_path: Path) -> None:
    """A block that every stage has, frozen parameters, biases, one without dimensions: as `single` trains them."""
    common = {"model": model(name), "optimizer": "sgd", "learning_rate": 0.1, "until_step": 5}
    _, (single,) = trained(tmp_path / "single", strategy="single", **common)
    _, seen = trained(tmp_path / "pp", strategy="pp", nproc=nproc, strategy_opt=options, grad_accum_steps=4, **common)
    wanted, found = whole([single.ended]), whole([s.ended for s in seen])
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert (found[key] - tensor).norm() <= 1e-5 * tensor.norm().clamp(min=1e-3), key
    for rank in seen:
        assert rank.losses == pytest.approx(single.losses, rel=1e-5)
        assert [r.grad_norm for r in rank.records] == pytest.approx([r.grad_norm for r in single.records], rel=1e-4)


def failed(folder: Path, name: str, nproc: int = 3, **settings: Any) -> Result:
    values: dict[str, Any] = {
        **TINY,
        "strategy": "pp",
        "nproc": nproc,
        "grad_accum_steps": 4,
        "until_step": 3,
        **settings,
    }
    return run(TrainConfig(**values, model=model(name), run_dir=str(folder / "run")), quiet=True)


@pytest.mark.parametrize(
    ("name", "nproc", "message"),
    [
        ("no_chain", 2, r"cannot cut the model \(Net\), for its ModelSpec has no chain"),
        ("looking", 3, "'blocks.0' of the model does not run without data"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("odd", 4, r"pp=4, but the model has 3 blocks, .* valid on 4 ranks: pp=1, 2\."),
                ("stray", 2, "'offset' is in no module of the model's chain"),
                ("stray_buffer", 2, "'offset' is in no module of the model's chain"),
                ("frozen", 3, r"stage 1 of 3 \(blocks.1 to blocks.1\) has no trainable parameter"),
                ("pair", 3, "cuts the model behind 'blocks.0', which returns tuple"),
            )
        ),
    ],
)
def test_models_that_cannot_be_cut(name: str, nproc: int, message: str, tmp_path: Path) -> None:
    """All ranks refuse them alike, before the first step."""
    result = failed(tmp_path, name, nproc)
    assert result.failure is not None
    assert result.failure["rank"] is None
    assert re.search(message, result.failure["text"])


@pytest.mark.parametrize(
    ("name", "rank", "text"),
    [
        ("fails_forward", 1, "Rank 1 failed: ValueError: forward of the middle block"),
        ("nan_gradient", 0, "Non-finite values at step 1 on rank 0: every loss is finite, but its gradient of 'words."),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("fails_backward", 1, "Rank 1 failed: KeyError: 'backward of the middle block'"),
                ("nan_loss", 2, "Non-finite values at step 1 on rank 2: the loss is nan"),
                ("unused", 1, "No gradient at step 1 on rank 1 (other ranks have it) for 'blocks.1.spare'"),
            )
        ),
    ],
)
def test_what_fails_in_a_stage(name: str, rank: int, text: str, tmp_path: Path) -> None:
    """The error is the model's own, on the rank where it is; the others end."""
    result = failed(tmp_path, name)
    assert result.failure is not None
    assert result.failure["rank"] == rank
    assert text in result.failure["text"]
    if name == "fails_forward":
        log = (tmp_path / "run" / "logs" / "rank_00001.log").read_text()
        assert "LookupError: the reason" in log
