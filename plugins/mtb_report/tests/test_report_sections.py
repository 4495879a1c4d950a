"""Sections of a report: every kind of result has its own, and no row is lost or dressed up."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtb_report.report.blocks import Listing, Plot, Report, Section, Table, Text
from mtb_report.report.build import build
from mtb_report.report.markdown import markdown
from mtb_report.report.terminal import terminal
from mtb_report.results import Found, Record, find_records, record_of

SAMPLES = Path(__file__).parent / "test_report_samples"
SNAPSHOT = ("single-w1", "ddp-w2", "busy-w2", "nan-w2")


def report(*names: str) -> Report:
    return build(find_records([SAMPLES / name for name in names]), "Samples")


def section(made: Report, name: str) -> Section:
    return next(s for s in made.sections if s.name == name)


def table(made: Report, name: str, caption: str) -> Table:
    return next(b for b in section(made, name).blocks if isinstance(b, Table) and b.caption == caption)


def column(made: Report, name: str, caption: str, title: str) -> list[str]:
    found = table(made, name, caption)
    index = [c.title for c in found.columns].index(title)
    return [row[index].text for row in found.rows]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("older/ddp_1.json", "training"),
        ("older/communication.json", "communication"),
        ("older/moe_routing.json", "moe"),
        ("older/tensor_parallel.json", "tensor-parallel"),
        ("older/tensor_parallel_mlp.json", "tensor-parallel"),
        ("older/sequence_parallel.json", "tensor-parallel"),
        ("older/checkpoint_verification.json", "verification"),
        ("older/fault_tolerance.json", "failures"),
        ("older/small_ddp_8gpu.json", "pressure"),
        ("older/megatron/records/tp1_pp2.json", "megatron"),
        ("older/megatron/manifest.json", "megatron"),
        ("newer/ddp-w2", "training"),
        ("newer/comm.json", "communication"),
        ("newer/moe.json", "moe"),
        ("newer/trace.json", "profile"),
        ("newer/conformance.json", "conformance"),
        ("newer/sweep/sweep.json", "sweeps"),
        ("newer/compare.json", "comparisons"),
        ("newer/verify-one.json", "verification"),
        ("newer/verify-two.json", "verification"),
    ],
)
def test_every_kind_has_its_section(file: str, name: str) -> None:
    """A result alone makes its own section, which names it, and its environment."""
    made = report(file)
    names = {s.name for s in made.sections}
    assert {name, "environment"} <= names
    assert "files" not in names
    assert any(isinstance(block, Table) and block.rows for block in section(made, name).blocks)


def test_an_unknown_kind_is_listed() -> None:
    """A result of a kind without a section is named at the end with the reason."""
    found = find_records([SAMPLES / "newer/comm.json"])
    raw = {**found.records[0].raw, "benchmark": "plan"}
    made = build(Found([_record(raw)], []), "x")
    assert column(made, "files", "1 file without a section", "Why") == ["kind 'plan' has no section"]


def _record(raw: dict[str, Any]) -> Any:
    return record_of(raw, path=Path("/x/plan.json"), digest="")


def test_invalid_measurements_have_dashes_and_a_reason() -> None:
    """A row that is not valid has - in every column of performance, keeps its loss, and its reason is listed."""
    made = report("newer/busy-w2", "newer/ddp-w2")
    caption = "Throughput and scaling"
    for title in ("Tokens/s", "per rank", "Step ms", "Efficiency", "Memory MiB"):
        assert column(made, "training", caption, title)[0] == "-"
        assert column(made, "training", caption, title)[1] != "-"
    assert column(made, "training", caption, "Loss")[0] == "5.2000"
    for title in ("Data", "Forward and backward", "Optimizer", "Whole step", "Checkpoint pause"):
        assert column(made, "training", "Where a step's time goes", title)[0] == "-"
    assert column(made, "comparability", "Not valid as measurements of performance", "Reasons") == [
        "load average 9.1 on 2 cores"
    ]


def test_the_figures_of_an_invalid_run_are_nowhere() -> None:
    """No renderer shows 777 tokens/s or 251.5 MiB of the run that is not valid."""
    made = report("newer/busy-w2", "newer/ddp-w2", "newer/single-w1")
    for text in (markdown(made), terminal(made, 200)):
        assert "777" not in text
        assert "251.5" not in text


TIMES = ("mean ms", "min ms", "p50 ms", "p95 ms", "max ms", "algbw GB/s", "busbw GB/s", "Latency µs", "Bandwidth GB/s")
PHASES = ("gate", "dispatch", "expert", "backward", "forward and backward", "Communication", "Tokens/s")


@pytest.mark.parametrize(
    ("file", "name", "titles", "kept"),
    [
        ("newer/comm.json", "communication", (*TIMES, "±"), ("S", "Calls", "Wrong", "Status")),
        ("newer/moe.json", "moe", PHASES, ("Slots dropped", "Imbalance", "Padding", "Bytes", "Check")),
    ],
)
def test_other_kinds_show_no_figure_either(file: str, name: str, titles: Any, kept: Any) -> None:
    """Collectives and routing that are not valid: no column of a time or rate, and no plot of them; the rest stays.

    Where a file does not say whether it is valid its figures are shown.
    """
    raw = json.loads((SAMPLES / file).read_text())
    cells: dict[Any, dict[str, set[str]]] = {}
    plots = {}
    for valid in (False, None):
        record = record_of({**raw, "performance_valid": valid}, path=Path("/x.json"), digest="")
        blocks = section(build(Found([record], []), "x"), name).blocks
        cells[valid] = {
            column.title: {row[i].text for row in block.rows}
            for block in blocks
            if isinstance(block, Table)
            for i, column in enumerate(block.columns)
        }
        plots[valid] = [block.title for block in blocks if isinstance(block, Plot)]
    for title in titles:
        assert title not in cells[False], title
        assert "-" not in cells[None][title], title
    for title in kept:
        assert cells[False][title] == cells[None][title]
    assert not any("busbw" in title for title in plots[False])
    assert plots[None]


def test_megatron_rows_without_validity_show_no_figure() -> None:
    """A compatibility run shows what it was, not how fast."""
    made = report("older/megatron/records/tp1_pp2.json")
    titles = {c.title for c in table(made, "megatron", "Configurations").columns}
    assert not titles & {"Tokens/s", "Step ms", "Memory MiB"}
    assert column(made, "megatron", "Configurations", "Status") == ["success"]


def test_rows_that_ran_out_of_memory_are_kept() -> None:
    """An OOM row stands in its tier, with the failure and unknown figures; the plot says that one is missing."""
    made = report("older/small_ddp_8gpu.json", "older/stress_ddp_8gpu.json")
    assert column(made, "pressure", "Tier stress", "Status") == ["oom"]
    assert column(made, "pressure", "Tier stress", "Memory MiB") == ["unknown"]
    assert column(made, "pressure", "Tier stress", "Failure") == ["cuda_oom: CUDA out of memory"]
    plot = next(b for b in section(made, "pressure").blocks if isinstance(b, Plot))
    assert "1 of 2 runs have no figure" in plot.text


def test_rows_without_a_number_do_not_disturb_the_order(tmp_path: Path) -> None:
    """Runs are in the order of ranks; null and nan neither vanish nor move the others."""
    raw = json.loads((SAMPLES / "newer/ddp-w2/result.json").read_text())
    for name, ranks, loss in (("a", 8, 5.0), ("b", 2, None), ("c", 4, 5.1), ("d", None, 5.3), ("e", 1, 5.2)):
        flag = {"loss_nonfinite": "nan"} if loss is None else {}
        (tmp_path / f"{name}.json").write_text(json.dumps({**raw, "world_size": ranks, "loss": loss, **flag}))
    made = build(find_records([tmp_path]), "x")
    assert column(made, "training", "Throughput and scaling", "Ranks") == ["1", "2", "4", "8", "unknown"]
    assert column(made, "training", "Throughput and scaling", "Loss") == ["5.2000", "nan", "5.1000", "5.0000", "5.3000"]


def test_efficiency_names_its_definition() -> None:
    """Each efficiency says whether it is strong or weak, and the definition stands below the table."""
    made = report("newer/single-w1", "newer/ddp-w2", "older/ddp_1.json", "older/ddp_2.json")
    assert column(made, "training", "Throughput and scaling", "Efficiency") == [
        "100.0%",
        "80.0% strong",
        "100.0%",
        "88.9% weak",
    ]
    assert any("T1 / (n · Tn)" in note for note in table(made, "training", "Throughput and scaling").notes)


def test_confidence_is_shown_where_there_are_trials() -> None:
    """± is half the interval; an older file's is computed from its trials; a single trial has none."""
    made = report("older/ddp_2.json", "older/zero3_2.json", "newer/ddp-w2")
    shown = column(made, "training", "Throughput and scaling", "Tokens/s")
    assert shown == ["72,000 ± 2,484", "9,000", "1,600 ± 40"]
    assert column(made, "trials", "Spread over trials", "n") == ["3"] * 5


def test_savings_against_ddp() -> None:
    """FSDP's memory and time are set against DDP's, which is named."""
    made = report("older/ddp_2.json", "older/fsdp_2.json", "older/zero3_2.json")
    caption = "Sharding against DDP"
    assert column(made, "sharding", caption, "Memory saved") == ["40.0%", "-80.0%"]
    assert column(made, "sharding", caption, "DDP run") == ["ddp ×2", "ddp ×2"]


def trained(**change: Any) -> Record:
    """A run on two ranks, changed."""
    raw = find_records([SAMPLES / "newer/ddp-w2"]).records[0].raw
    return _record({**raw, **change})


def test_a_run_without_a_base_is_listed_with_the_reason() -> None:
    """Where one run has a DDP run to be set against, one that has none is not passed over."""
    fsdp = trained(strategy="fsdp", strategy_options={})
    zero1 = trained(strategy_options={"zero1": True})
    made = build(Found([trained(), fsdp, zero1, trained(strategy="fsdp", world_size=3)], []), "x")
    caption = "Sharding against DDP"
    runs = [name.split(" ·")[0] for name in column(made, "sharding", caption, "Run")]
    assert runs == ["fsdp ×2", "fsdp ×3", "ddp ×2"]
    assert column(made, "sharding", caption, "Step time") == ["+0.0%", "no DDP run", "+0.0%"]
    assert column(made, "sharding", caption, "DDP run")[1] == "no DDP run"
    alone = build(Found([fsdp], []), "x")
    assert "sharding" not in [s.name for s in alone.sections]


def test_throughput_of_a_rank_needs_the_number_of_ranks() -> None:
    """The whole throughput is not put in its place."""
    made = build(Found([trained(world_size=None)], []), "x")
    assert column(made, "training", "Throughput and scaling", "per rank") == ["unknown"]


@pytest.mark.parametrize(("time", "said"), [(1.0, True), (1000.0, False)])
def test_an_efficiency_above_one_is_explained(time: float, said: bool) -> None:
    """A reader must not take it for a gift."""
    rate = 8 * 16 / time * 1e3
    records = [trained(world_size=1, step_time_ms=100.0, global_batch_size=8), trained(step_time_ms=time, tokens_per_sec=rate, global_batch_size=8)]  # fmt: skip
    notes = table(build(Found(records, []), "x"), "training", "Throughput and scaling").notes
    assert any("above 100%" in note for note in notes) is said


def test_the_fastest_run_is_of_like_runs_only() -> None:
    """The headline names no small model as the fastest, and no run that failed."""
    slow, fast = trained(tokens_per_sec=10.0), trained(tokens_per_sec=20.0)
    labels = [fact.label for fact in build(Found([slow, fast], []), "x").facts]
    assert any("most tokens/s" in label for label in labels)
    unlike = build(Found([slow, trained(tokens_per_sec=20.0, parameters=3)], []), "x").facts
    assert not any("most tokens/s" in fact.label for fact in unlike)
    facts = build(Found([slow, trained(tokens_per_sec=20.0, exit_reason="failed")], []), "x").facts
    assert [fact.value for fact in facts if "most tokens/s" in fact.label] == ["10"]


def test_differences_between_rows_are_warned_of() -> None:
    """What keeps rows from being compared is listed with how many have what."""
    made = report("older", "newer")
    said = markdown(Report("x", [], [section(made, "comparability")]))
    assert "Results differ in torch: 2.10.0+cu130" in said
    assert "Training runs differ in parameters: " in said
    assert "do not say whether the measurement was valid" in said
    assert "made from a working tree with changes" in said


def test_a_switch_that_differs_is_named_in_words() -> None:
    """Yes and no, not 1 and 0."""
    made = build(Found([trained(activation_checkpointing=on) for on in (True, False)], []), "x")
    assert "recomputation: yes (1); no (1)" in markdown(made)


def test_the_speed_of_a_broken_training_is_warned_of() -> None:
    """Its row stays among the others, and its throughput is not to be set beside theirs."""
    said = "The loss of 1 training run was not finite"
    assert said in markdown(report("newer/nan-w2"))
    assert said not in markdown(report("newer/ddp-w2"))


@pytest.mark.parametrize(("most", "said"), [(105.0, False), (106.0, True)])
def test_memory_that_differs_between_trials_is_warned_of(most: float, said: bool) -> None:
    """What is saved of a mean of such peaks means little."""
    run = trained(summary={"max_memory_mib": {"min": 100.0, "max": most, "mean": 103.0, "n": 3}})
    assert ("differs by more than 5% between trials" in markdown(build(Found([run], []), "x"))) is said


def test_planned_trials_are_no_trials() -> None:
    """What was to be repeated, and was not, knows no noise; a spread without its trials is shown as what it is."""
    once = trained(repeat_count=3, summary={}, repeats=[{"tokens_per_sec": 1.0}])
    assert "The noise of 1 training run is not known" in markdown(build(Found([once], []), "x"))
    spread = {"tokens_per_sec": {"mean": 5.0, "std": 1.0, "n": None, "ci95": None, "std_kind": "population"}}
    made = build(Found([trained(summary=spread, repeats=[])], []), "x")
    assert column(made, "trials", "Spread over trials", "Std") == ["1 (pop.)"]
    assert column(made, "trials", "Spread over trials", "CI low") == ["unknown"]


def test_one_set_of_like_rows_is_not_warned_of() -> None:
    """Runs that agree in all that counts give no warning of differences."""
    made = report("newer/ddp-w2", "newer/nan-w2")
    assert "differ in" not in markdown(made)


def test_environments_that_look_alike_say_what_tells_them_apart() -> None:
    """What the table has no column for is named; what one file does not record is no difference."""
    raw = find_records([SAMPLES / "newer/ddp-w2"]).records[0].raw
    environment = {**raw["environment"], "variables": {"OMP_NUM_THREADS": "1"}, "governor": "performance"}
    others = ({"variables": {}, "governor": None}, {"torch": "2.99"}, {"variables": {"OMP_NUM_THREADS": "2"}}, {})
    records = [_record({**raw, "environment": environment | other}) for other in ({}, *others)]
    made = build(Found(records, []), "x")
    assert len(table(made, "environment", "Environments").rows) == 4
    (listed,) = [b for b in section(made, "environment").blocks if isinstance(b, Listing)]
    assert listed.items == (
        "B differs from A in OMP_NUM_THREADS: 1 and not set",
        "D differs from A in OMP_NUM_THREADS: 1 and 2",
    )


def test_checkpoints_that_differ_or_are_damaged_are_told() -> None:
    """Parts that differ, and what is damaged, are named; older and newer documents stand in one table."""
    made = report("newer/verify-two.json", "newer/verify-one.json", "older/checkpoint_verification.json")
    caption = "The same training state?"
    assert column(made, "verification", caption, "rng") == ["no", "yes"]
    assert column(made, "verification", caption, "train state") == ["unknown", "yes"]
    assert column(made, "verification", caption, "Exact") == ["no", "yes"]
    assert column(made, "verification", "As it was published?", "Problems") == ["READY: it is missing"]


def test_a_comparison_of_an_invalid_side_shows_no_ratio() -> None:
    """The verdict's numbers are dashes where a side was not valid; differences are listed."""
    found = find_records([SAMPLES / "newer/compare.json"])
    raw = found.records[0].raw
    bad = _record({**raw, "b": {**raw["b"], "performance_valid": False}})
    made = build(Found([found.records[0], bad], []), "x")
    assert column(made, "comparisons", "B against A", "Ratio") == ["1.0500", "-"]
    assert column(made, "comparisons", "B against A", "CI low") == ["1.0200", "-"]
    assert column(made, "comparisons", "B against A", "Mean of A") == ["2.000 ± 0.100 ms", "-"]
    assert "strategy differs: ddp and fsdp" in markdown(made)


def test_columns_without_a_valid_row_are_left_out() -> None:
    """Where no row is valid, tables name the columns that they lack, and a table of nothing else is one sentence."""
    made = report("newer/busy-w2")
    found = table(made, "training", "Throughput and scaling")
    assert [c.title for c in found.columns] == ["Run", "Ranks", "Loss", "Outcome", "Valid"]
    assert len(found.notes) == 1
    assert found.notes[0].endswith("left out: Tokens/s, per rank, Step ms, Efficiency, Memory MiB.")
    said = [b.text for b in section(made, "training").blocks if isinstance(b, Text)]
    assert any(text.startswith("Where a step's time goes: no row is a valid measurement") for text in said)
    assert "result.json" in table(made, "comparability", "Not valid as measurements of performance").notes[1]


def test_trials_of_a_comparison_are_not_called_single(tmp_path: Path) -> None:
    """The noise of runs that are pairs of one comparison is known, where its document is among the results."""
    raw = json.loads((SAMPLES / "newer/single-w1/result.json").read_text())
    raw = {**raw, "repeats": raw["repeats"][:1], "summary": {}}
    for place in ("pair_000/a", "pair_000/b", "pair_001/a", "pair_001/b"):
        (tmp_path / place / "run").mkdir(parents=True)
        (tmp_path / place / "run/result.json").write_text(json.dumps({**raw, "seed": len(list(tmp_path.rglob("*")))}))
    said = "The noise of 4 training runs is not known"
    assert said in markdown(build(find_records([tmp_path]), "x"))
    digests = {r.path.parents[1].name: [] for r in find_records([tmp_path]).records}
    for record in find_records([tmp_path]).records:
        digests[record.path.parents[1].name].append({"path": "x", "digest": record.digest})
    compared = json.loads((SAMPLES / "newer/compare.json").read_text())
    sides = {side: {**compared[side], "files": digests[side]} for side in "ab"}
    (tmp_path / "comparison.json").write_text(json.dumps({**compared, **sides}))
    assert "noise" not in markdown(build(find_records([tmp_path]), "x"))


def test_failures_name_the_first_cause() -> None:
    """A run that failed is listed with rank, step and first cause."""
    made = report("newer/crash-w2", "older/fault_tolerance.json")
    row = [cell.text for cell in table(made, "failures", "Ended early").rows[0]]
    assert row[2:] == ["failed", "1", "3", "Rank 1: the loss of step 3 is nan."]
    assert column(made, "failures", "Failure drills", "Outcome") == ["recovered_exact"]


def test_busbw_of_older_files_is_converted() -> None:
    """Bandwidth is by nccl-tests' factor: all-reduce on four ranks 1.5 times algbw."""
    made = report("older/communication.json")
    found = next(b for b in section(made, "communication").blocks if isinstance(b, Table))
    busbw = [row[[c.title for c in found.columns].index("busbw GB/s")].text for row in found.rows]
    assert busbw[1:3] == ["60", "135"]


def test_skipped_and_tiny_points_are_shown_as_they_are() -> None:
    """A skipped point keeps its reason; a small bandwidth is not rounded to zero."""
    made = report("newer/comm.json")
    found = next(b for b in section(made, "communication").blocks if isinstance(b, Table))
    last = dict(zip([c.title for c in found.columns], [cell.text for cell in found.rows[-1]], strict=True))
    assert (last["Status"], last["Reason"]) == ("skipped", "not on this backend")
    assert (last["S"], last["mean ms"]) == ("0", "unknown")
    assert [row[[c.title for c in found.columns].index("busbw GB/s")].text for row in found.rows[:2]] == [
        "0.005",
        "0.4",
    ]


def test_wrong_elements_are_marked() -> None:
    """A point with wrong elements is not like the others."""
    found = find_records([SAMPLES / "newer/comm.json"])
    points = [{**row, "wrong": 2} for row in found.records[0].raw["results"]]
    made = build(Found([_record({**found.records[0].raw, "results": points})], []), "x")
    shown = next(b for b in section(made, "communication").blocks if isinstance(b, Table)).rows[0][-3]
    assert (shown.text, shown.tone) == ("2", "bad")


def test_the_timeline_of_a_profile_has_a_bar_for_each_rank_and_step() -> None:
    """Parts of each bar add up to the span of that step."""
    made = report("newer/trace.json")
    plot = next(b for b in section(made, "profile").blocks if isinstance(b, Plot))
    assert plot.labels == ("step 7 · rank 0", "step 7 · rank 1", "step 8 · rank 0", "step 8 · rank 1")
    assert [sum(series.y[i] for series in plot.series) for i in range(4)] == [100.0] * 4


def test_loss_curves_come_from_metrics_and_break_where_it_was_not_finite() -> None:
    """A null loss is a gap in the line."""
    made = report("newer/ddp-w2")
    plot = next(b for b in section(made, "training").blocks if isinstance(b, Plot) and b.title == "Loss")
    assert plot.series[0].x == [1, 2, 3, 4]
    assert ["gap" if math.isnan(y) else round(y, 2) for y in plot.series[0].y] == [5.55, 5.41, "gap", 5.21]


def test_invalid_runs_are_in_no_plot_of_performance() -> None:
    """Lines and points are of valid runs alone."""
    made = report("newer/single-w1", "newer/ddp-w2", "newer/busy-w2")
    plots = [b for b in section(made, "training").blocks if isinstance(b, Plot)]
    assert {plot.title for plot in plots} >= {"Memory against throughput", "Step breakdown", "Loss"}
    for plot in plots:
        assert not any("busy" in label for label in plot.labels)
        assert all(777.0 not in series.y for series in plot.series)


def test_a_value_of_the_wrong_kind_is_named(tmp_path: Path) -> None:
    """A file that says a text where a number belongs is set aside with the reason, and the rest is reported."""
    raw = json.loads((SAMPLES / "newer/ddp-w2/result.json").read_text())
    (tmp_path / "bad.json").write_text(json.dumps({**raw, "tokens_per_sec": "fast"}))
    (tmp_path / "good.json").write_text(json.dumps(raw))
    made = build(find_records([tmp_path]), "x")
    assert column(made, "files", "1 file without a section", "Why") == [
        "'tokens_per_sec' is 'fast', but a number is expected"
    ]
    (tmp_path / "bad.json").write_text(json.dumps({**raw, "collectives_per_step": {"all_reduce": "many"}}))
    made_again = build(find_records([tmp_path]), "x")
    why = column(made_again, "files", "1 file without a section", "Why")[0]
    assert why.startswith("a value is not of the kind that a result of kind 'training' has: ")
    assert len(table(made, "training", "Throughput and scaling").rows) == 1


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a document; of lists the first two elements."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [None, "x", -1, [1], {}], ids=repr)
@pytest.mark.parametrize("path", sorted(SAMPLES.rglob("*.json")), ids=lambda path: path.stem)
def test_no_wrong_value_costs_the_report(path: Path, wrong: Any) -> None:
    """Whatever single value of a file is replaced by one of another kind, the other file's rows are reported."""
    other = _record(json.loads((SAMPLES / "newer/single-w1/result.json").read_text()))
    text = path.read_text()
    for place in places(json.loads(text)):
        raw = json.loads(text)
        *way, last = place
        part = raw
        for key in way:
            part = part[key]
        part[last] = wrong
        try:
            record = record_of(raw, path=path, digest="")
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # the reader of files refuses it
        made = build(Found([record, other], []), "x")
        assert "single ×1" in markdown(made), place


def test_a_report_of_nothing_known_still_stands(tmp_path: Path) -> None:
    """A training that says nothing but its kind gives a row of unknowns, and no zero."""
    (tmp_path / "bare.json").write_text('{"schema_version": 1, "benchmark": "training"}')
    made = build(find_records([tmp_path]), "x")
    for block in (b for s in made.sections for b in s.blocks if isinstance(b, Table)):
        assert not [cell for row in block.rows for cell in row[1:] if cell.text.strip("0.,%") == ""]
    assert column(made, "training", "Throughput and scaling", "Tokens/s") == ["unknown"]


@pytest.mark.parametrize("form", ["md", "txt"])
def test_snapshot(form: str, tmp_path: Path) -> None:
    """Markdown and terminal say exactly this of a small set; written anew by deleting the file and running twice."""
    for name in SNAPSHOT:
        shutil.copytree(SAMPLES / "newer" / name, tmp_path / name)
    made = build(find_records([tmp_path]), "Samples")
    text = markdown(made) if form == "md" else terminal(made, 120)
    expected = SAMPLES / f"expected.{form}"
    if not expected.exists():
        expected.write_text(text, encoding="utf-8")
        pytest.fail(f"{expected} was written: read it, and keep it if it is right")
    assert text == expected.read_text(encoding="utf-8")


def test_markdown_is_escaped(tmp_path: Path) -> None:
    """Text of a result cannot end a cell, begin a tag or a link."""
    raw = json.loads((SAMPLES / "newer/ddp-w2/result.json").read_text())
    raw["performance_valid"] = False
    raw["performance_invalid_reasons"] = ["<script>a|b</script> [x](y) `c`\n# d"]
    raw["provenance"]["command"] = "mtb | `x`"
    (tmp_path / "x.json").write_text(json.dumps(raw))
    text = markdown(build(find_records([tmp_path]), "a|b"))
    assert "<script>" not in text
    assert r"\<script\>a\|b\</script\> \[x\](y) \`c\` \# d" in text
    assert "`` mtb \\| `x` ``" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)
