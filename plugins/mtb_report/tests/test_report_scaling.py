"""Scaling efficiency and savings against DDP: by definition, among like runs only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtb_report.report.naming import named
from mtb_report.report.scaling import against_ddp, efficiency
from mtb_report.results import Record, record_of

#: Settings that make the same model other work.
OTHER_SETTINGS = {
    "optimizer": "sgd", "compile": True, "dropout": 0.5, "data": "bytes", "tie_embeddings": True, "qk_norm": True,
    "model": "mine:Net",
}  # fmt: skip


def run(ranks: int, time: float | None, batch: int, path: str = "set/{}", **more: Any) -> Record:
    values = {
        "schema_version": 1,
        "benchmark": "training",
        "strategy": "ddp",
        "strategy_options": {},
        "world_size": ranks,
        "parameters": 1000,
        "global_batch_size": batch,
        "step_time_ms": time,
        "tokens_per_sec": None if time is None else batch * 10 / time * 1e3,
        "max_memory_mib": 100.0,
        "memory_kind": "cuda_allocated",
        "device": "cuda",
        "config": {"seq_length": 10},
        **more,
    }
    place = path.format(f"{values['strategy']}{ranks}")
    return record_of(values, path=Path("/r") / place / "result.json", digest="")


def test_strong_scaling() -> None:
    """With the same global batch it is T1 / (n Tn)."""
    one, four = run(1, 100.0, 8), run(4, 40.0, 8)
    found = efficiency(four, [one, four])
    assert (found.value, found.kind, found.base) == (100.0 / (4 * 40.0), "strong", one)
    assert efficiency(one, [one, four]).value == 1.0


def test_weak_scaling() -> None:
    """With the same batch per rank it is the ratio of throughput per rank."""
    one, four = run(1, 100.0, 8), run(4, 125.0, 32)
    found = efficiency(four, [one, four])
    assert (found.value, found.kind) == (pytest.approx(0.8), "weak")


def test_neither() -> None:
    """With another batch, whole and per rank, there is no efficiency, and the reason is said."""
    one, four = run(1, 100.0, 8), run(4, 100.0, 24)
    assert efficiency(four, [one, four]).value is None
    assert efficiency(four, [one, four]).reason == "other batch at 1 rank"


@pytest.mark.parametrize(
    "other",
    [
        {"parameters": 999},
        {"config": {"seq_length": 20}},
        {"precision": "bf16"},
        {"reduce_dtype": "bf16"},
        {"device": "cpu"},
        {"device_name": "B"},
        {"activation_checkpointing": True},
        *({"config": {"seq_length": 10, name: value}} for name, value in OTHER_SETTINGS.items()),
        {"environment": {"torch": "2.12.0"}},
        {"strategy": "fsdp"},
        {"strategy_options": {"zero1": True}},
        {"gradient_sync_mode": "every"},
    ],
)
def test_a_run_of_other_work_is_no_base(other: dict[str, Any]) -> None:
    """What was computed, on what, and how it was spread must agree."""
    four = run(4, 40.0, 8)
    assert efficiency(four, [run(1, 100.0, 8, **other), four]).reason == "no 1-rank run"


def test_threads_are_part_of_the_work_of_a_cpu() -> None:
    """On a CPU a run with more threads is no base, and that is the reason; a GPU's work is not done by them."""
    for device, reason in (("cpu", "1-rank run has other threads"), ("cuda", "")):
        one = run(1, 100.0, 8, device=device, environment={"torch_threads": 2})
        two = run(2, 60.0, 8, device=device, environment={"torch_threads": 1})
        assert efficiency(two, [one, two]).reason == reason


def test_a_run_that_failed_has_and_gives_no_efficiency() -> None:
    """What did not succeed is no base, though its files hold a time; a run beside it that did is taken."""
    bad, two = run(1, 3.0, 8, exit_reason="failed"), run(2, 60.0, 8)
    assert efficiency(two, [bad, two]).reason == "1-rank run: failed"
    assert efficiency(bad, [bad, two]).value is None
    good = run(1, 100.0, 8, path="other/{}", exit_reason="done")
    assert efficiency(two, [bad, good, two]).base is good
    stopped = run(2, 60.0, 8, exit_reason="stopped")
    assert efficiency(stopped, [good, stopped]).reason == "run: partial"


def test_single_is_the_base_where_a_strategy_has_none() -> None:
    """A run of `single` stands in; the strategy's own comes first."""
    one, alone, two = run(1, 90.0, 8), run(1, 100.0, 8, strategy="single"), run(2, 60.0, 8)
    assert efficiency(two, [alone, two]).base is alone
    assert efficiency(two, [alone, one, two]).base is one


def test_an_invalid_base_gives_no_efficiency() -> None:
    """An invalid measurement is no base, and not silently passed over; a valid one beside it is taken."""
    bad, two = run(1, 90.0, 8, performance_valid=False), run(2, 60.0, 8)
    assert efficiency(two, [bad, two]).reason == "1-rank run not valid"
    good = run(1, 100.0, 8, path="other/{}")
    assert efficiency(two, [bad, good, two]).base is good


def test_the_closest_run_is_the_base() -> None:
    """The same set of runs comes before an earlier one of another folder; then the same number of steps, then the batch."""
    other, here = run(1, 50.0, 8, path="a/{}"), run(1, 100.0, 8, path="b/{}")
    two = run(2, 60.0, 8, path="b/{}")
    assert efficiency(two, [other, here, two]).base is here
    few, many = run(1, 50.0, 8, steps=5), run(1, 100.0, 8, path="set/second-{}", steps=20)
    assert efficiency(run(2, 60.0, 8, steps=20), [few, many]).base is many
    wide, alike = run(1, 50.0, 8, batch_size_per_rank=8), run(1, 100.0, 8, batch_size_per_rank=4)
    assert efficiency(run(2, 60.0, 8, batch_size_per_rank=4), [wide, alike]).base is alike


def test_unknown_stays_unknown() -> None:
    """Without a time there is no efficiency."""
    one, two = run(1, 100.0, 8), run(2, None, 8)
    assert efficiency(two, [one, two]).reason == "unknown"
    assert efficiency(run(2, 50.0, 8), [run(1, None, 8)]).reason == "unknown"


def test_against_ddp() -> None:
    """Memory saved and longer steps are relative to DDP on as many ranks with the same batch."""
    base = run(2, 50.0, 8, max_memory_mib=200.0)
    fsdp = run(2, 60.0, 8, strategy="fsdp", max_memory_mib=150.0)
    found = against_ddp(fsdp, [base, fsdp])
    assert (found.memory_saving, found.step_difference) == (0.25, pytest.approx(0.2))
    for other in (run(4, 50.0, 8), run(2, 50.0, 16)):
        assert against_ddp(fsdp, [other, fsdp]).reason == "no DDP run"


@pytest.mark.parametrize("options", [{"zero1": True}, {"comm_hook": "fp16"}])
def test_only_plain_ddp_is_the_measure_of_sharding(options: dict[str, Any]) -> None:
    """DDP that shards its optimizer state or compresses gradients saves something itself."""
    other = run(2, 50.0, 8, path="a/{}", strategy_options=options, max_memory_mib=150.0)
    plain = run(2, 50.0, 8, path="b/{}", strategy_options={"zero1": False, "comm_hook": "none"}, max_memory_mib=200.0)
    fsdp = run(2, 60.0, 8, strategy="fsdp", max_memory_mib=100.0)
    assert against_ddp(fsdp, [other, plain, fsdp]).memory_saving == 0.5
    assert against_ddp(fsdp, [other, fsdp]).reason == "no DDP run"
    assert against_ddp(other, [other, plain, fsdp]).memory_saving == 0.25


def test_batches_that_are_not_known_are_not_alike() -> None:
    """Two unknowns are not the same batch."""
    base, fsdp = (run(2, 50.0, 8, strategy=name, global_batch_size=None) for name in ("ddp", "fsdp"))
    assert against_ddp(fsdp, [base, fsdp]).base is None


def test_unlike_memory_is_not_compared() -> None:
    """Resident set against the allocator's peak says nothing about memory; the time is still compared."""
    base = run(2, 50.0, 8, memory_kind="process_rss")
    found = against_ddp(run(2, 60.0, 8, strategy="fsdp"), [base])
    assert (found.memory_saving, found.step_difference) == (None, pytest.approx(0.2))


def test_no_saving_between_unlike_runs() -> None:
    """Other work has no saving; another batch at a time leaves the step, and not the memory, comparable."""
    fsdp = run(2, 60.0, 8, strategy="fsdp", batch_size_per_rank=4)
    for name, value in OTHER_SETTINGS.items():
        other = run(2, 50.0, 8, batch_size_per_rank=4, config={"seq_length": 10, name: value})
        assert against_ddp(fsdp, [other, fsdp]).reason == "no DDP run"
    small = run(2, 50.0, 8, batch_size_per_rank=2)
    found = against_ddp(fsdp, [small, fsdp])
    assert (found.memory_saving, found.step_difference) == (None, pytest.approx(0.2))
    assert found.reason == "other batch per rank"
    alike = run(2, 50.0, 8, path="other/{}", batch_size_per_rank=4)
    assert against_ddp(fsdp, [small, alike, fsdp]).base is alike


def test_no_saving_against_a_run_that_failed() -> None:
    """A DDP run that was invalid or did not succeed is named as the reason."""
    fsdp = run(2, 60.0, 8, strategy="fsdp")
    assert against_ddp(fsdp, [run(2, 50.0, 8, performance_valid=False)]).reason == "DDP run not valid"
    assert against_ddp(fsdp, [run(2, 50.0, 8, exit_reason="failed")]).reason == "DDP run: failed"
    bad = run(2, 60.0, 8, strategy="fsdp", exit_reason="failed")
    assert against_ddp(bad, [run(2, 50.0, 8)]).reason == "run: failed"


def test_names_are_unique_and_no_longer_than_needed() -> None:
    """Alike runs get as much of their place as tells them apart, and nothing of the folders above."""
    rows = named([run(2, 1.0, 8, path="a/x"), run(2, 1.0, 8, path="b/x"), run(4, 1.0, 8, path="b/y")])
    assert [row.name for row in rows] == ["ddp ×2 · a/x", "ddp ×2 · b/x", "ddp ×4"]
