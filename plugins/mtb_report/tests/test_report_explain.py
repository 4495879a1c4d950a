"""`mtb explain`: each rule speaks where it must, and is silent where it must."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mtb_report.report.explain import explained
from mtb_report.results import read_record, record_of

SAMPLES = Path(__file__).parent / "test_report_samples"
#: A run in which nothing is unusual.
CALM: dict[str, Any] = {
    "schema_version": 1,
    "benchmark": "training",
    "exit_reason": "done",
    "strategy": "ddp",
    "strategy_options": {},
    "world_size": 2,
    "precision": "fp32",
    "device": "cpu",
    "parameters": 1_000_000,
    "steps": 20,
    "warmup_steps": 5,
    "repeat_count": 3,
    "global_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "resolved_gradient_sync_mode": "last",
    "tokens_per_sec": 1000.0,
    "step_time_ms": 100.0,
    "data_time_ms": 1.0,
    "forward_backward_ms": 80.0,
    "optimizer_step_ms": 18.0,
    "max_memory_mib": 300.0,
    "memory_kind": "process_rss",
    "mfu": 0.4,
    "flops_convention": "palm",
    "comm_bytes_per_step": {"all_reduce": 4_000_000, "agreement": 48},
    "loss": 5.0,
    "loss_first": 5.5,
    "grad_norm": 1.0,
    "grad_norm_max": 2.0,
    "clipped_steps": 0,
    "skipped_steps": 0,
    "config": {"model": "gpt", "vocab_size": 256, "seq_length": 16, "optimizer": "adamw"},
    "summary": {
        "tokens_per_sec": {"mean": 1000.0, "std": 4.0, "min": 996.0, "max": 1004.0, "n": 3, "ci95": [990.0, 1010.0]}
    },
    "runtime": {"resumed": False, "restarts": 0},
    "provenance": {"git_dirty": False, "missing_fields": [], "complete": True},
    "performance_valid": True,
}


def rules(raw: dict[str, Any]) -> dict[str, str]:
    found = explained(record_of(raw, path=Path("/x/result.json"), digest=""))
    return {finding.rule: finding.text for finding in found.findings}


def unusual(raw: dict[str, Any]) -> set[str]:
    found = explained(record_of(raw, path=Path("/x/result.json"), digest=""))
    return {finding.rule for finding in found.part("unusual")}


def test_nothing_is_unusual_in_a_calm_run() -> None:
    """A run with every figure in its normal range has no warning."""
    assert unusual(CALM) == set()


def test_what_the_numbers_mean() -> None:
    """The meaning names size, speed, certainty, parts, memory, traffic, MFU and loss with the run's own figures."""
    said = rules(CALM)
    assert (
        "1,000,000 parameters on 2 ranks (cpu) in fp32. 20 steps were measured, after 5 of warm-up" in said["what-ran"]
    )
    assert "step of 8 sequences of 16 tokens takes 100.00 ms" in said["speed"]
    assert "1,000 tokens a second, 500 for each rank" in said["speed"]
    assert "Over 3 independent trials" in said["certainty"]
    assert "±1.0%" in said["certainty"]
    assert "80% is forward and backward" in said["parts"]
    assert "18% the optimizer, 1.0% waiting for data" in said["parts"]
    assert "300 MiB: the process's peak resident set" in said["memory"]
    assert "4,000,048 bytes to collectives (all-reduce, agreement), 4.0 for each parameter" in said["communication"]
    assert "40.0% of the devices' peak (MFU, palm convention)" in said["mfu"]
    assert "from 5.5000 at its first step to 5.0000" in said["loss"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"summary": {}, "repeats": []}, {"single-trial"}),
        ({"summary": {"tokens_per_sec": {"ci95": [900.0, 1100.0], "n": 3}}}, {"wide-interval"}),
        ({"summary": {**CALM["summary"], "max_memory_mib": {"min": 100.0, "max": 106.0}}}, {"memory-spread"}),
        ({"data_time_ms": 3.0, "forward_backward_ms": 78.0}, {"data-wait"}),
        ({"optimizer_step_ms": 35.0, "forward_backward_ms": 63.0}, {"optimizer-share"}),
        ({"forward_backward_ms": 70.0}, {"gap"}),
        ({"mfu": 1.2}, {"mfu-above-one"}),
        ({"loss": None, "loss_nonfinite": "nan"}, {"loss-not-finite"}),
        ({"loss": 6.0}, {"loss-rises"}),
        ({"loss_first": 9.0}, {"first-loss"}),
        ({"grad_norm_max": 11.0}, {"norm-peak"}),
        ({"clipped_steps": 11}, {"much-clipping"}),
        ({"skipped_steps": 1}, {"skipped"}),
        ({"steps": 9}, {"few-steps"}),
        ({"warmup_steps": 0}, {"no-warmup"}),
        ({"runtime": {"restarts": 2}}, {"restarts"}),
        ({"runtime": {"resumed": True, "resume_deterministic": False}}, {"inexact-resume"}),
        ({"exit_reason": "stopped"}, {"ended-early"}),
        ({"performance_valid": False}, {"not-valid"}),
        ({"performance_valid": None}, {"validity-unknown"}),
        ({"provenance": {"git_dirty": True, "missing_fields": [], "complete": True}}, {"dirty"}),
        ({"provenance": {"missing_fields": ["image_ref"], "complete": False}}, {"provenance"}),
        ({"provenance": {}}, {"provenance"}),
    ],
)
def test_each_rule_speaks_alone(change: dict[str, Any], expected: set[str]) -> None:
    """One figure out of its range gives exactly the warning of that figure."""
    assert unusual({**CALM, **change}) == expected


@pytest.mark.parametrize(
    ("change", "silent"),
    [
        ({"data_time_ms": 2.0, "forward_backward_ms": 80.0}, "data-wait"),
        ({"grad_norm_max": 10.0}, "norm-peak"),
        ({"clipped_steps": 10}, "much-clipping"),
        ({"steps": 10}, "few-steps"),
        ({"warmup_steps": 0, "runtime": {"resumed": True, "resume_deterministic": True}}, "no-warmup"),
        ({"loss_first": 9.0, "runtime": {"resumed": True}}, "first-loss"),
        ({"loss_first": 9.0, "config": {"model": "mine.py:make", "vocab_size": 256}}, "first-loss"),
        ({"mfu": 1.0}, "mfu-above-one"),
    ],
)
def test_rules_are_silent_at_their_bounds(change: dict[str, Any], silent: str) -> None:
    """What is just normal is not unusual, and a rule that does not apply says nothing."""
    assert silent not in unusual({**CALM, **change})


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({}, "one-rank"),
        ({}, "profile"),
        ({"world_size": 1}, "more-ranks"),
        ({"strategy": "fsdp"}, "ddp-base"),
        ({"gradient_accumulation_steps": 4, "resolved_gradient_sync_mode": "every"}, "sync-last"),
        ({"summary": {}}, "repeat"),
        ({"steps": 5}, "more-steps"),
        ({"warmup_steps": 0}, "warm-up"),
        ({"performance_valid": False}, "make-valid"),
        ({"data_time_ms": 5.0, "forward_backward_ms": 76.0}, "data-path"),
        ({"loss": None, "loss_nonfinite": "inf"}, "find-nonfinite"),
    ],
)
def test_what_to_measure_next(change: dict[str, Any], rule: str) -> None:
    """Each next step follows from what is there or missing."""
    found = explained(record_of({**CALM, **change}, path=Path("/x/result.json"), digest=""))
    assert rule in {finding.rule for finding in found.part("next")}


OF_SPEED = {
    "speed", "certainty", "parts", "memory", "mfu", "best-busbw", "larger-sizes", "data-wait", "wide-interval",
    "optimizer-share", "gap", "memory-spread", "moe-communication",
}  # fmt: skip


def test_figures_of_a_measurement_that_is_not_valid_are_not_told() -> None:
    """What rests on times, rates or memory is left out, as tables show "-"; what was trained and the losses are said."""
    slow = {**CALM, "mfu": 0.4, "data_time_ms": 9.0, "optimizer_step_ms": 60.0, "forward_backward_ms": 2.0}
    assert len(OF_SPEED & set(rules(slow))) >= 8
    said = rules({**slow, "performance_valid": False, "performance_invalid_reasons": ["load 9"]})
    assert not OF_SPEED & set(said)
    assert {"what-ran", "loss", "not-valid"} <= set(said)


@pytest.mark.parametrize(
    "file",
    sorted(
        path.relative_to(SAMPLES).as_posix()
        for path in (SAMPLES / "newer").rglob("*.json")
        if path.stem not in ("sweep", "compare")  # these say of their parts whether they are valid
    ),
)
def test_no_figure_of_any_kind_is_told_where_it_is_not_valid(file: str) -> None:
    """Whatever the kind, no sentence has a bandwidth, a time or an amount of memory; the file's own words apart."""
    raw = json.loads((SAMPLES / file).read_text())
    found = explained(record_of({**raw, "performance_valid": False}, path=Path("/x/result.json"), digest=""))
    told = " ".join(finding.text for finding in found.findings if finding.rule not in ("verdict", "evidence"))
    assert not re.search(r"\d (GB/s|ms|MiB|tokens a second)", told), told


def test_a_profile_is_not_to_be_made_valid() -> None:
    """It never is, by what it does: nothing is there to remove."""
    said = rules({**CALM, "benchmark": "profile", "performance_valid": False})
    assert "not-valid" in said
    assert "make-valid" not in said
    assert said["not-valid"].endswith("What is said of its step is of the step as it was profiled.")


def test_a_tier_that_fits_is_said_to_fit_though_its_memory_is_not_told() -> None:
    """That it fits does not depend on how busy the machine was."""
    raw = {
        "schema_version": 1, "benchmark": "memory_pressure", "status": "success", "tier": "small",
        "max_memory_mib": 512.0, "performance_valid": True,
    }  # fmt: skip
    assert rules(raw)["fits"] == "The small tier fits: the fullest rank peaked at 512 MiB."
    assert rules({**raw, "performance_valid": False})["fits"] == "The small tier fits."


def test_a_run_without_a_measured_step() -> None:
    """It is said once, and nothing follows from figures that are not there."""
    none = dict.fromkeys(("tokens_per_sec", "step_time_ms", "data_time_ms", "forward_backward_ms", "optimizer_step_ms"))
    raw = {
        **CALM, **none, "steps": 0, "warmup_steps": 0, "summary": {}, "loss": None, "loss_first": None, "grad_norm": None,
        "mfu": None, "mfu_reason": "the peak of a CPU is not known", "max_memory_mib": None, "comm_bytes_per_step": None,
        "performance_valid": False, "performance_invalid_reasons": ["no measured step"],
    }  # fmt: skip
    said = rules(raw)
    assert "No step was measured." in said["what-ran"]
    assert said["speed"] == "It holds no speed."
    assert unusual(raw) == {"no-step"}
    assert {rule for rule in said if rule not in ("what-ran", "speed", "no-step")} == {"more-steps"}
    assert "loss" not in rules({**raw, "loss": 4.0, "loss_first": 4.0})  # of the warm-up
    resumed = rules({**raw, "global_step": 3, "runtime": {"resumed": True, "resume_deterministic": True}})
    assert "more-steps" not in resumed
    assert "from, step 3, was at the planned end already: name a later --until-step" in resumed["later-step"]
    failed = rules({**raw, "exit_reason": "failed"})
    assert {"later-step", "more-steps", "one-rank"}.isdisjoint(failed)
    assert "run-to-the-end" in failed


def test_a_single_step_is_singular() -> None:
    """Words agree with the number."""
    said = rules({**CALM, "steps": 1})
    assert "One step was measured" in said["what-ran"]
    assert said["few-steps"].startswith("Only a single step was measured")


_SLOW_DATA = {"data_time_ms": 5.0, "forward_backward_ms": 76.0}
_NAN = {"loss": None, "loss_nonfinite": "nan"}
_EVERY = {"gradient_accumulation_steps": 4, "resolved_gradient_sync_mode": "every"}


@pytest.mark.parametrize(
    ("change", "rule", "words", "unfit"),
    [
        ({**_SLOW_DATA, "config": {"data": "tokens"}}, "data-path", "--data synthetic", "already"),
        ({**_SLOW_DATA, "config": {"data": "synthetic"}}, "data-path", "synthetic already", "--data"),
        ({**_NAN, "precision": "bf16"}, "find-nonfinite", "--precision fp32", None),
        (_NAN, "find-nonfinite", "--max-grad-norm", "--precision"),
        ({**_NAN, "config": {"max_grad_norm": 1.0}}, "find-nonfinite", "lower --learning-rate.", "--max-grad-norm"),
        ({"loss": 6.0}, "lower-rate", "--lr-warmup-steps", None),
        ({"loss": 6.0, "config": {"lr_warmup_steps": 5}}, "lower-rate", "--learning-rate.", "--lr-warmup-steps"),
        ({"world_size": 1, "strategy": "single"}, "more-ranks", "--strategy ddp --nproc 2", None),
        ({"world_size": 1, "strategy": "fsdp"}, "more-ranks", "(--nproc 2)", "--strategy ddp"),
        ({"summary": {}}, "repeat", "again with --repeat 5", "checkpoints"),
        ({"summary": {}, "runtime": {"checkpoint_dir": "ck"}}, "repeat", "without checkpoints, with --repeat 5", None),
        ({"exit_reason": "stopped", "steps": 5}, "more-steps", None, None),
        ({"exit_reason": "stopped"}, "one-rank", None, None),
        ({}, "one-rank", "OMP_NUM_THREADS", None),
        ({"environment": {"variables": {"OMP_NUM_THREADS": "1"}}}, "one-rank", "--nproc 1", "OMP_NUM_THREADS"),
        ({"device": "cuda"}, "one-rank", "--nproc 1", "OMP_NUM_THREADS"),
        ({}, "ddp-base", None, None),
        ({"strategy_options": {"zero1": True}}, "ddp-base", "no options", None),
        ({**_EVERY, "strategy": "fsdp"}, "sync-last", "--gradient-sync-mode last", None),
        ({**_EVERY, "strategy": "deepspeed"}, "sync-last", None, None),
        ({**_EVERY, "strategy_options": {"static_graph": True}}, "sync-last", None, None),
    ],
)
def test_advice_fits_the_run(change: dict[str, Any], rule: str, words: str | None, unfit: str | None) -> None:
    """What a run has or cannot have is not advised; no words: the rule is silent."""
    said = rules({**CALM, **change})
    assert (rule in said) is (words is not None)
    assert words is None or words in said[rule]
    assert unfit is None or unfit not in said[rule]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "Shard more (fsdp, deepspeed stage 3), or recompute activations (--activation-checkpointing), or take"),
        ({"strategy": "fsdp"}, "Shard over more ranks, or recompute"),
        ({"strategy": "deepspeed_zero3"}, "Shard over more ranks, or recompute"),
        ({"config": {"activation_checkpointing": True, "batch_size": 1}}, "Shard more (fsdp, deepspeed stage 3)."),
    ],
)
def test_advice_for_what_does_not_fit(change: dict[str, Any], text: str) -> None:
    """What was done already is not advised again."""
    raw = json.loads((SAMPLES / "older/stress_ddp_8gpu.json").read_text())
    assert rules({**raw, **change})["shard"].startswith(text)


def test_trials_that_are_not_in_the_file_or_have_no_spread() -> None:
    """A spread without trials is not a single trial, and equal trials know no noise."""
    population = {"tokens_per_sec": {"mean": 1.0, "std": 0.1, "std_kind": "population", "ci95": None}}
    said = rules({**CALM, "summary": population, "repeats": []})["single-trial"]
    assert "does not hold the figures of two" in said
    assert "a single trial" in rules({**CALM, "repeat_count": 1, "summary": {}})["single-trial"]
    equal = {"tokens_per_sec": {"ci95": [1000.0, 1000.0], "n": 3}}
    assert unusual({**CALM, "summary": equal}) == {"no-spread"}
    assert "certainty" not in rules({**CALM, "summary": equal})


@pytest.mark.parametrize("file", ["conformance.json", "verify-one.json", "sweep/sweep.json", "trace.json"])
def test_what_has_no_times_is_not_asked_whether_they_are_valid(file: str) -> None:
    """A certificate needs no quiet machine."""
    raw = json.loads((SAMPLES / "newer" / file).read_text())
    assert "validity-unknown" not in rules({**raw, "performance_valid": None})


def test_the_state_of_an_unsharded_model_is_named_where_memory_is_the_allocators() -> None:
    """16 bytes for each parameter under DDP with AdamW on CUDA; not where the optimizer is sharded."""
    cuda = {**CALM, "memory_kind": "cuda_allocated", "parameters": 2**20}
    assert "fp32 are 16 MiB of it" in rules(cuda)["memory"]
    for other in ({"strategy_options": {"zero1": True}}, {"strategy": "fsdp"}, {"config": {"optimizer": "sgd"}}):
        assert "of it" not in rules({**cuda, **other})["memory"]


def test_the_first_cause_of_a_failure_is_told() -> None:
    """The failure's own text is in the page."""
    raw = json.loads((SAMPLES / "newer/crash-w2/result.json").read_text())
    assert rules(raw)["ended-early"] == "The run failed: Rank 1: the loss of step 3 is nan."


def sample(name: str) -> dict[str, list[str]]:
    found = explained(read_record(SAMPLES / name))
    out: dict[str, list[str]] = {}
    for finding in found.findings:
        out.setdefault(finding.rule, []).append(finding.text)
    return out


def test_communication() -> None:
    """The best bandwidth, a limit that was not reached, times that jump and points left out are named."""
    said = sample("newer/comm.json")
    assert said["best-busbw"] == ["all_reduce on 2 ranks: at most 0.6 GB/s busbw, at 4M."]
    assert "still rises at 4M" in said["larger-sizes"][0]
    assert "up to 1.5 times the median" in said["unstable-times"][0]
    assert said["skipped-points"] == ["1 point skipped: not on this backend."]
    assert "wrong" not in said


def test_wrong_elements_are_the_first_thing_to_know() -> None:
    """A point with wrong elements is unusual."""
    raw = json.loads((SAMPLES / "newer/comm.json").read_text())
    raw["results"][0]["wrong"] = 3
    assert "wrong" in unusual(raw)


def test_moe() -> None:
    """Imbalance, drops and the share of communication are put in words."""
    said = sample("newer/moe.json")
    assert "1.67 times the mean" in said["imbalance"][0]
    assert "wastes 40%" in said["imbalanced"][0]
    assert "25.0% of the slots" in said["drops"][0]
    assert "takes 55%" in said["moe-communication"][0]
    assert "imbalanced" not in sample("older/moe_routing.json")


def test_memory_pressure() -> None:
    """What fits, and what does not, with the way out."""
    assert "fits: the fullest rank peaked at 568 MiB" in sample("older/small_ddp_8gpu.json")["fits"][0]
    said = sample("older/stress_ddp_8gpu.json")
    assert "stress tier does not fit with strategy ddp" in said["does-not-fit"][0]
    assert "shard" in said


def test_profile() -> None:
    """Verdict, evidence, straggler and advice are those of the analysis."""
    said = sample("newer/trace.json")
    assert said["verdict"] == ["By its traces the step is straggler-bound. Rank 1 is waited for."]
    assert "Rank 1 is slower than the others in data, 50% of the step." in said["straggler"]
    assert said["advice"] == ["Look at the data of rank 1."]


def test_checks() -> None:
    """Equal parts, failed checks and errors against what is allowed are told."""
    assert "every part is equal" in sample("older/checkpoint_verification.json")["matches"][0]
    assert sample("newer/conformance.json")["conformance"] == ["Strategy mine: 1 checks passed, 1 failed."]
    assert "1.0e-04, 2.0% of what is allowed" in sample("older/tensor_parallel.json")["error"][0]


def test_sweep() -> None:
    """Cells by outcome, the fastest valid one, and what fits; an invalid cell is not the fastest."""
    said = sample("newer/sweep/sweep.json")
    assert said["cells"] == ["The sweep has 4 cells: 2 success, 1 oom, 1 not run."]
    assert said["fastest"] == ["The fastest valid cell is nproc=1 batch_size=4, with 1,000 tokens a second."]
    assert said["largest"] == ["Of batch_size the largest that fits is 4; 64 does not."]
    assert said["cells-not-valid"] == ["1 cell of 4 gave no valid measurement."]
    assert "cell-failed" not in said
    raw = json.loads((SAMPLES / "newer/sweep/sweep.json").read_text())
    raw["cells"][0].update(status="timeout", reason="it took longer than 5 s.")
    said_of_it = rules(raw)
    assert said_of_it["cell-failed"] == "Cell nproc=1 batch_size=4 ended as timeout: it took longer than 5 s."
    assert "retry" in said_of_it
    assert "fastest" not in said_of_it
    raw["cells"][0].update(status="failed", failure_type="configuration")
    assert {"retry", "correct"} & set(rules(raw)) == {"correct"}


def test_the_fastest_cell_is_of_like_cells_only() -> None:
    """Among models of several sizes the smallest would win; a cell that does not say whether it is valid is not called so."""
    raw = json.loads((SAMPLES / "newer/sweep/sweep.json").read_text())
    raw["cells"][0]["performance_valid"] = None
    assert "cell (not known whether valid) is nproc=1" in rules(raw)["fastest"]
    for number, cell in enumerate(raw["cells"]):
        cell["figures"] = {**(cell["figures"] or {}), "parameters": 1000 + number}
    assert "fastest" not in rules(raw)


def test_where_nothing_fits_no_size_is_named() -> None:
    """None is no size."""
    raw = json.loads((SAMPLES / "newer/sweep/sweep.json").read_text())
    fit = {"labels": {}, "axis": "batch_size", "largest": None, "first_that_does_not": 4, "failed": {}}
    assert rules({**raw, "largest_that_fits": [fit]})["largest"] == "Of batch_size none fits; 4 does not."


@pytest.mark.parametrize(
    ("change", "rule", "text"),
    [
        ({}, "ratio", "B has 1.050 times the speed of A (95% confidence: 1.020 to 1.080). Verdict: faster."),
        ({}, "seen-from", "A difference from 3.0% on would have been seen with these trials."),
        ({"verdict": "undetermined", "ratio_interval": None}, "ratio", "B has 1.050 times the speed of A. Verdict: undetermined."),
        ({"like": False}, "unlike", "A and B are unlike in more than a setting; see the differences in the file."),
        ({"warnings": ["A is not valid."]}, "warning", "A is not valid."),
    ],
)  # fmt: skip
def test_comparison(change: dict[str, Any], rule: str, text: str) -> None:
    """The verdict with its interval, the effect that would be seen, and what speaks against it."""
    raw = json.loads((SAMPLES / "newer/compare.json").read_text())
    assert rules({**raw, **change})[rule] == text


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        ({"verdict": "faster"}, None),
        ({"verdict": "no difference seen"}, "in turns: mtb compare --run"),
        ({"verdict": "no difference seen", "method": "paired t test of log-ratios"}, "more --pairs"),
        ({"verdict": "undetermined", "n": [1, 5]}, "--repeat 5"),
        ({"verdict": "undetermined", "n": [0, 5]}, "another --metric"),
        ({"verdict": "undetermined", "n": [3, 3]}, "copies"),
    ],
)
def test_what_a_comparison_without_a_verdict_needs(change: dict[str, Any], advice: str | None) -> None:
    """More trials where nothing was seen, not where a difference was; nothing that was done already."""
    raw = json.loads((SAMPLES / "newer/compare.json").read_text())
    found = rules({**raw, **change})
    said = {name: found.get(name, "") for name in ("more-trials", "other-metric", "other-trials")}
    assert sum(bool(text) for text in said.values()) == (advice is not None)
    assert advice is None or any(advice in text for text in said.values())


def test_a_comparison_that_is_not_valid_says_so_with_its_verdict() -> None:
    """A verdict of disturbed times is not told as one of good times."""
    raw = json.loads((SAMPLES / "newer/compare.json").read_text())
    said = rules({**raw, "performance_valid": False, "performance_invalid_reasons": ["A: load 9"]})
    assert "Verdict, of measurements that are not valid: faster." in said["ratio"]
    assert "A: load 9" in said["not-valid"]


def test_drill() -> None:
    """What was broken, how it ended, whether the training is the same."""
    said = sample("older/fault_tolerance.json")
    assert said["drill"] == [
        "The drill was a rank crash of rank 1 at step 2; it ended as recovered_exact, by manual_restart."
    ]
    assert said["drill-exact"] == ["The recovered training is the same as one without the crash, part by part."]
    raw = json.loads((SAMPLES / "older/fault_tolerance.json").read_text())
    raw["failure_handling"][0].update(checkpoint_unchanged=False, status="lost")
    raw["verification"]["exact_match"] = False
    assert unusual(raw) >= {"checkpoint-harmed", "drill", "drill-exact"}


def test_megatron() -> None:
    """What was split, and that the bubble is theory; a matrix counts what succeeded."""
    said = sample("older/megatron/records/tp1_pp2.json")
    assert said["split"] == ["Ranks of each group: 1 for tensors, 2 for layers, 4 for data."]
    assert said["bubble"] == ["By theory the pipeline idles 20% of the step, waiting to be filled and drained."]
    assert sample("older/megatron/manifest.json")["matrix"] == ["1 of 1 configurations succeeded."]


def test_a_damaged_checkpoint_is_unusual() -> None:
    """One checkpoint that is not as it was published is named with its problem."""
    assert "it is damaged: READY: it is missing" in sample("newer/verify-one.json")["integrity"][0]
    assert sample("newer/verify-two.json")["matches"][0].endswith("these differ: rng.")


def test_unequal_checkpoints_are_unusual() -> None:
    """The part that differs is named."""
    raw = json.loads((SAMPLES / "older/checkpoint_verification.json").read_text())
    raw["matches"]["rng"] = False
    assert "matches" in unusual(raw)
    assert rules(raw)["matches"].endswith("these differ: rng.")


@pytest.mark.parametrize("path", sorted(SAMPLES.rglob("*.json")), ids=lambda path: str(path.relative_to(SAMPLES)))
def test_every_sample_is_explained(path: Path) -> None:
    """No kind of result is left without a word, and nothing unknown is put as a number or as None."""
    found = explained(read_record(path))
    assert found.findings
    for finding in found.findings:
        assert "None" not in finding.text
        assert finding.text.endswith((".", "?"))
        assert finding.text[0] == finding.text[0].upper() or finding.rule in ("best-busbw", "larger-sizes", "unstable-times", "definition")  # fmt: skip


@pytest.mark.parametrize("kind", ["tensor_parallel", "tensor_parallel_mlp", "sequence_parallel"])
def test_of_what_times_nothing_validity_is_not_asked_for(kind: str) -> None:
    """Errors and collectives do not depend on how busy the machine was."""
    document = {"schema_version": 1, "benchmark": kind, "status": "ok", "performance_valid": None}
    assert "validity-unknown" not in unusual(document)
