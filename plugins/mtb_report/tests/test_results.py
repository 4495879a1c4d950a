"""Results of all kinds, of today and older, are read without loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtb_core import ConfigError
from mtb_report.results import find_records, metrics_of, read_record

_PLACE = {"cuda": "13.0", "cudnn": "91501", "driver": "580.1", "gpu": "NVIDIA A100", "gpu_count": 8, "nccl": "2.28.9", "python": "3.12.3", "torch": "2.10.0"}  # fmt: skip


def write(path: Path, **values: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return path


def older_training(**more: Any) -> dict[str, Any]:
    row = {"step_time_ms": 10.0, "tokens_per_sec": 100.0, "max_cuda_memory_mb": 481.5, "grad_norm_mean": 2.0}
    rows = [{**row, "step_time_ms": t} for t in (9.0, 10.0, 11.0)]
    return {
        "benchmark": "training",
        "strategy": "ddp",
        "world_size": 2,
        "device": "cuda:0",
        "step_time_ms": 10.0,
        "tokens_per_sec": 100.0,
        "max_cuda_memory_mb": 481.5,
        "repeat_count": 3,
        "repeats": rows,
        "summary": {"step_time_ms": {"mean": 10.0, "std": 0.816497, "min": 9.0, "max": 11.0}},
        "environment": _PLACE,
        **more,
    }


def test_older_training_has_todays_names_and_units(tmp_path: Path) -> None:
    """Memory is in MiB under its name of today, the device without a number, GPUs one by one; raw stays."""
    record = read_record(write(tmp_path / "a.json", **older_training()))
    assert record.older
    assert record.kind == "training"
    assert record.get("max_memory_mib") == 481.5
    assert record.get("memory_kind") == "cuda_allocated"
    assert record.get("device") == "cuda"
    assert [d["name"] for d in record.environment["cuda"]["devices"]] == ["NVIDIA A100"] * 8
    assert record.trials[0]["max_memory_mib"] == 481.5
    assert record.trials[0]["grad_norm"] == 2.0
    assert record.raw["max_cuda_memory_mb"] == 481.5
    assert any("MiB" in note for note in record.conversions)


@pytest.mark.parametrize("name", ["result.json", "sweep.json", "comparison.json", "run/result.json"])
def test_a_folder_is_read_by_its_result(tmp_path: Path, name: str) -> None:
    """Of a run, a sweep and a comparison; a trial of `compare --run` and a cell of a sweep have it one level below."""
    write(tmp_path / "x" / name, **older_training())
    assert read_record(tmp_path / "x").path == tmp_path / "x" / name


def test_older_spread_is_made_the_samples(tmp_path: Path) -> None:
    """The file's population deviation is kept by name; today's is the sample's, from the trials."""
    spread = read_record(write(tmp_path / "a.json", **older_training())).summary["step_time_ms"]
    assert spread["std"] == pytest.approx(1.0)
    assert spread["std_population"] == 0.816497
    assert spread["std_kind"] == "sample"
    assert spread["ci95"] is not None


def test_older_spread_without_trials_stays_labelled(tmp_path: Path) -> None:
    """Where the trials are not in the file, the population's deviation is shown as such."""
    record = read_record(write(tmp_path / "a.json", **older_training(repeats=[{"loss": 1.0}] * 3)))
    assert record.summary["step_time_ms"]["std_kind"] == "population"


def test_what_a_file_does_not_say_is_unknown(tmp_path: Path) -> None:
    """An absent figure is None, not 0, and so are validity and completeness."""
    record = read_record(write(tmp_path / "a.json", benchmark="training", strategy="ddp"))
    assert record.get("max_memory_mib") is None
    assert record.get("grad_norm") is None
    assert record.performance_valid is None
    assert record.execution_complete is None
    assert record.status is None
    assert list(record.trials) == []


@pytest.mark.parametrize("version", [2, "1", 0])
def test_another_schema_is_refused(tmp_path: Path, version: Any) -> None:
    """Its keys may mean something else."""
    with pytest.raises(ConfigError, match=r"schema_version '[012]'; this mtb reads 1"):
        read_record(write(tmp_path / "a.json", schema_version=version, benchmark="training"))


def test_older_zero_stage_is_an_option(tmp_path: Path) -> None:
    """`deepspeed_zero3` is the strategy deepspeed with its stage."""
    record = read_record(write(tmp_path / "a.json", **older_training(strategy="deepspeed_zero3")))
    assert (record.get("strategy"), record.get("strategy_options")) == ("deepspeed", {"stage": 3})
    assert record.label == "deepspeed stage 3 ×2"


def test_older_bandwidth_becomes_busbw(tmp_path: Path) -> None:
    """`bandwidth_gbps` is algbw; busbw follows by the factor of each operation."""
    rows = [
        {"operation": name, "bandwidth_gbps": 80.0, "bytes": 32768, "latency_ms": 0.2, "world_size": 8, "status": "ok"}
        for name in ("all_reduce", "all_gather", "all_to_all")
    ]
    record = read_record(write(tmp_path / "c.json", benchmark="communication", results=rows, dtype="float32"))
    assert [row["algbw_gb_per_sec"] for row in record.rows] == [80.0] * 3
    assert [row["busbw_gb_per_sec"] for row in record.rows] == [140.0, 70.0, 70.0]
    assert record.rows[0]["time_ms"]["mean"] == 0.2
    assert record.rows[0]["time_ms"]["p95"] is None
    assert record.rows[0]["size_bytes"] == 32768


def test_older_out_of_memory_is_kept(tmp_path: Path) -> None:
    """A cell that ran out of memory has a status and no figures."""
    record = read_record(
        write(
            tmp_path / "m.json",
            benchmark="memory_pressure",
            status="oom",
            failure_type="cuda_oom",
            returncode=1,
            config={"tier": "stress"},
        )
    )
    assert record.status == "oom"
    assert record.get("tier") == "stress"
    assert record.get("exit_code") == 1
    assert record.get("max_memory_mib") is None


def test_older_megatron_takes_figures_from_its_summary(tmp_path: Path) -> None:
    """Means of trials, memory of the whole device, reasons why performance is not valid."""
    metrics = {"step_time_ms": 51.0, "tokens_per_sec": 3000.0, "peak_device_memory_mb": 5672.0}
    record = read_record(
        write(
            tmp_path / "g.json",
            benchmark="megatron",
            name="tp1_pp1",
            status="success",
            trials=[{"metrics": metrics}],
            summary={"step_time_ms": {"mean": 51.0, "std": 0.0, "min": 51.0, "max": 51.0}},
            performance_valid=False,
            performance_invalid_reasons=["compatibility_smoke"],
        )
    )
    assert (record.get("step_time_ms"), record.get("max_memory_mib")) == (51.0, 5672.0)
    assert record.get("memory_kind") == "device_used"
    assert record.performance_valid is False
    assert record.performance_invalid_reasons == ["compatibility_smoke"]


@pytest.mark.parametrize(
    ("values", "status", "rows"),
    [
        ({"benchmark": "checkpoint_verification", "exact_match": False}, "failed", 0),
        ({"benchmark": "checkpoint_verification", "exact_match": True}, "success", 0),
        ({"benchmark": "fault_tolerance", "failure_handling": [{"status": "recovered_exact"}]}, "success", 1),
        ({"benchmark": "fault_tolerance", "failure_handling": [{"status": "lost"}]}, "failed", 1),
        ({"benchmark": "megatron_matrix", "status": "compatibility_smoke", "records": [{}, {}]}, "success", 2),
        ({"benchmark": "moe_routing", "status": "ok"}, "success", 0),
        ({"benchmark": "tensor_parallel_mlp", "status": "failed"}, "failed", 0),
    ],
)
def test_other_older_kinds(tmp_path: Path, values: dict[str, Any], status: str, rows: int) -> None:
    """Each older kind has its status and its rows."""
    record = read_record(write(tmp_path / "x.json", **values))
    assert (record.status, len(record.rows)) == (status, rows)


def test_current_training(tmp_path: Path) -> None:
    """A run's folder is its result; trials, spread and validity are as they stand there."""
    write(
        tmp_path / "run" / "result.json",
        schema_version=1,
        benchmark="training",
        exit_reason="done",
        strategy="ddp",
        repeats=[{"step_time_ms": 1.0}, {"step_time_ms": 2.0}],
        summary={"step_time_ms": {"mean": 1.5, "std": 0.7, "n": 2}},
        performance_valid=True,
        execution_complete=True,
    )
    record = read_record(tmp_path / "run")
    assert not record.older
    assert (record.status, len(record.trials), record.performance_valid) == ("success", 2, True)
    assert record.summary["step_time_ms"]["std_kind"] == "sample"
    assert list(record.conversions) == []


def test_folders_are_searched_once_and_broken_results_named(tmp_path: Path) -> None:
    """Results below a folder are found; checkpoints, metrics and other JSON are passed over; a broken one is listed."""
    write(tmp_path / "a" / "result.json", schema_version=1, benchmark="training", exit_reason="failed")
    write(tmp_path / "a" / "metrics" / "x.json", benchmark="training")
    write(tmp_path / "step_00000001" / "manifest.json", benchmark="training")
    write(tmp_path / "other.json", something=1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "result.json").write_text('{"benchmark": "training", ')
    found = find_records([tmp_path, tmp_path / "a" / "result.json"])
    assert [r.status for r in found.records] == ["failed"]
    assert [file.parent.name for file, _ in found.unreadable] == ["b"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"benchmark": 1}', '{"benchmark": "training", "loss": NaN}'])
def test_what_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    """Another JSON, or none, is refused in words that name the file."""
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json"):
        read_record(file)


def test_metrics_of_all_ranks(tmp_path: Path) -> None:
    """Lines by rank; a line that was cut off is left out."""
    result = write(tmp_path / "result.json", schema_version=1, benchmark="training")
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "rank_00001.jsonl").write_text('{"loss": 1}\n{"loss": 2}\n{"lo')
    assert metrics_of(read_record(result)) == {1: [{"loss": 1}, {"loss": 2}]}


_BROKEN = (
    {"repeats": 3}, {"repeats": [1]}, {"summary": []}, {"summary": {"loss": 3}}, {"environment": "x"},
    {"provenance": [1]}, {"performance_invalid_reasons": 3}, {"status": {"a": 1}}, {"config": 3},
    {"strategy_options": [1]}, {"plugins": 3},
)  # fmt: skip
_BROKEN_OLDER = (
    {"environment": {"gpu": "x", "gpu_count": "many"}}, {"results": [3], "benchmark": "communication"},
    {"results": [{"world_size": "x", "operation": "all_reduce"}], "benchmark": "communication"},
    {"repeats": [{"loss": "x"}, {"loss": "y"}], "summary": {"loss": {"std": 1}}}, {"trials": 3, "benchmark": "megatron"},
    {"records": 3, "benchmark": "megatron_matrix"}, {"failure_handling": 3, "benchmark": "fault_tolerance"},
)  # fmt: skip


@pytest.mark.parametrize("broken", [*({"schema_version": 1, **b} for b in _BROKEN), *_BROKEN, *_BROKEN_OLDER], ids=str)
def test_a_value_of_a_form_that_it_cannot_have(tmp_path: Path, broken: dict[str, Any]) -> None:
    """It is refused in words; where others are looked for too, it is listed and they are read."""
    file = write(tmp_path / "a.json", **{"benchmark": "training", **broken})
    write(tmp_path / "b.json", schema_version=1, benchmark="training")
    with pytest.raises(ConfigError, match="broken result"):
        read_record(file)
    found = find_records([tmp_path])
    assert [path.name for path, _ in found.unreadable] == ["a.json"]
    assert [record.path.name for record in found.records] == ["b.json"]


def test_too_deep_a_file_is_refused(tmp_path: Path) -> None:
    """Not by a traceback."""
    (tmp_path / "a.json").write_text("[" * 100000)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_record(tmp_path / "a.json")
