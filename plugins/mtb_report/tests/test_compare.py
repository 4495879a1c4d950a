"""`mtb compare`: right verdicts, few false ones, unlike things named, gates that hold."""

from __future__ import annotations

import errno
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mtb_core import CheckFailed, ConfigError, RunFailed, student_quantile
from mtb_report.compare.command import compare
from mtb_report.compare.document import make_document
from mtb_report.compare.metrics import METRICS
from mtb_report.compare.verdict import compare_trials
from mtb_report.results import read_record
from mtb_report.training import Attempt

TIME, SPEED, MEMORY = (METRICS[name] for name in ("step_time_ms", "tokens_per_sec", "max_memory_mib"))

#: Step times (ms) of 40 trials of one tiny training in a row, as measured on a loaded machine of two cores: skewed, and
#: each like the one before it.
MEASURED = (
    1.747, 2.009, 3.631, 4.269, 2.925, 3.765, 4.23, 5.501, 3.397, 3.027, 3.098, 2.805, 0.737, 1.527, 1.068, 1.467,
    1.571, 1.132, 1.304, 1.514, 1.154, 1.698, 1.438, 1.268, 1.72, 1.708, 2.092, 1.968, 1.9, 1.481, 1.264, 1.042, 2.112,
    3.665, 0.742, 1.145, 2.25, 0.718, 0.712, 0.727,
)  # fmt: skip


def draw(rng: random.Random, n: int, interleaved: bool) -> tuple[list[float], list[float]]:
    """Trials of A and of A again from the measured noise."""
    if not interleaved:
        return rng.choices(MEASURED, k=n), rng.choices(MEASURED, k=n)
    start = rng.randrange(len(MEASURED))  # a stretch of the recording, which may wrap: A B A B
    run = [MEASURED[(start + i) % len(MEASURED)] for i in range(2 * n)]
    return run[::2], run[1::2]


@pytest.mark.parametrize("n", [3, 5, 10])
@pytest.mark.parametrize("interleaved", [True, False])
def test_a_thing_against_itself_has_few_false_verdicts(n: int, interleaved: bool) -> None:
    """Of 1000 comparisons (five times 200) of measured noise with itself, at most 5% end in a verdict."""
    rng = random.Random(n)
    verdicts = []
    for _ in range(1000):
        a, b = draw(rng, n, interleaved)
        verdicts.append(compare_trials(a, b, paired=interleaved, metric=TIME).verdict)
    assert sum(v != "no difference seen" for v in verdicts) <= 50


@pytest.mark.parametrize("paired", [True, False])
def test_what_is_said_to_be_seen_is_seen(paired: bool) -> None:
    """An effect of the size named as visible leads to the right verdict in about 80 of 100 cases."""
    rng = random.Random(1)
    sizes = []
    for _ in range(400):
        a, b = ([math.exp(rng.gauss(0, 0.02)) for _ in range(8)] for _ in range(2))
        sizes.append(compare_trials(a, b, paired=paired, metric=SPEED).seen_from)
    effect = 1 + sorted(sizes)[200]
    right = 0
    for _ in range(400):
        a = [math.exp(rng.gauss(0, 0.02)) for _ in range(8)]
        b = [effect * math.exp(rng.gauss(0, 0.02)) for _ in range(8)]
        right += compare_trials(a, b, paired=paired, metric=SPEED).verdict == "faster"
    assert 0.7 < right / 400 < 0.9


def test_direction_and_ratio() -> None:
    """Half the step time is twice the speed; fewer tokens a second are slower."""
    found = compare_trials([2.0, 2.02, 1.98], [1.0, 1.01, 0.99], paired=False, metric=TIME)
    assert found.ratio == pytest.approx(2.0, rel=1e-3)
    assert found.verdict == "faster"
    assert found.low < 2.0 < found.high
    assert compare_trials([2.0, 2.02], [1.0, 1.02], paired=True, metric=SPEED).verdict == "slower"


def test_pairs_take_out_what_both_share() -> None:
    """A drift that both halves of a pair have hides nothing; unpaired, it does."""
    drift = [1.0, 1.3, 0.8, 1.6, 1.1]
    a, b = drift, [1.05 * d * (1 + 0.001 * i) for i, d in enumerate(drift)]
    assert compare_trials(a, b, paired=True, metric=SPEED).verdict == "faster"
    assert compare_trials(a, b, paired=False, metric=SPEED).verdict == "no difference seen"


def test_welch_is_as_published() -> None:
    """Standard error and degrees of freedom of Welch's test for unlike spreads, worked out by hand."""
    a, b = [math.exp(x) for x in (0.0, 2.0)], [math.exp(x) for x in (5.0, 5.2, 5.4)]
    found = compare_trials(a, b, paired=False, metric=SPEED, confidence=0.95)
    error = math.sqrt(2 / 2 + 0.04 / 3)
    degrees = (1 + 0.04 / 3) ** 2 / (1 / 1 + (0.04 / 3) ** 2 / 2)
    assert math.log(found.high / found.low) / 2 == pytest.approx(student_quantile(0.975, degrees) * error)


def test_one_trial_is_undetermined() -> None:
    """One trial of a side gives a ratio, no interval, and no verdict."""
    found = compare_trials([1.0], [2.0, 2.0], paired=False, metric=SPEED)
    assert (found.ratio, found.low, found.seen_from) == (2.0, None, None)
    assert found.verdict == "undetermined"


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_figures_without_a_ratio_are_refused(value: float) -> None:
    """Only positive, finite figures have a ratio."""
    with pytest.raises(ValueError, match="positive"):
        compare_trials([1.0, value], [1.0, 1.0], paired=False, metric=SPEED)


def result(path: Path, times: list[float], **more: Any) -> str:
    values = {
        "schema_version": 1,
        "benchmark": "training",
        "exit_reason": "done",
        "strategy": "ddp",
        "world_size": 2,
        "parameters": 1000,
        "precision": "fp32",
        "reduce_dtype": "fp32",
        "global_batch_size": 8,
        "device": "cpu",
        "config": {"model": "gpt", "d_model": 16},
        "repeats": [{"step_time_ms": t, "tokens_per_sec": 1000 / t} for t in times],
        "environment": {"torch": "2.13.0", "cpu_model": "X"},
        "execution_complete": True,
        "performance_valid": True,
        **more,
    }
    path.write_text(json.dumps(values))
    return str(path)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(compare, list(words), standalone_mode=False)


def document(*words: str) -> dict[str, Any]:
    done = invoke(*words, "--json")
    assert done.exception is None, done.exception
    return json.loads(done.stdout)


def test_document(tmp_path: Path) -> None:
    """The JSON has ratio, interval, verdict, trials, method and visible effect; both files' digests."""
    a = result(tmp_path / "a.json", [10.0, 10.1, 9.9])
    b = result(tmp_path / "b.json", [5.0, 5.1, 4.9], strategy="fsdp")
    got = document(a, b)
    assert got["verdict"] == "faster"
    assert got["ratio_interval"][0] < got["ratio"] < got["ratio_interval"][1]
    assert got["ratio"] == pytest.approx(2.0, rel=0.01)
    assert (got["n"], got["like"]) == ([3, 3], True)
    assert got["seen_from_percent"] > 0
    assert [d["name"] for d in got["differences"]] == ["strategy"]
    assert len(got["a"]["files"][0]["digest"]) == 64
    assert got["a"]["files"][0]["path"] == "a.json"
    assert document(a, b, "--metric", "step_time_ms")["ratio"] == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(
    ("change", "name", "group"),
    [
        ({"precision": "bf16"}, "precision", "numerics"),
        ({"reduce_dtype": "bf16"}, "reduce_dtype", "numerics"),
        ({"device": "cuda"}, "device", "place"),
        ({"environment": {"torch": "2.12.0", "cpu_model": "X"}}, "environment.torch", "place"),
        ({"environment": {"torch": "2.13.0"}}, "environment.cpu_model", "place"),
        ({"provenance": {"git_revision": "x"}}, "git_revision", "place"),
        ({"plugins": [{"name": "ddp", "version": "2"}]}, "plugins.ddp", "place"),
        ({"strategy_options": {"bucket_cap_mb": 1}}, "strategy_options", "setting"),
        ({"config": {"model": "gpt", "d_model": 16, "learning_rate": 0.5}}, "learning_rate", "setting"),
        ({"config": {"model": "gpt", "d_model": 16, "a_setting_of_tomorrow": 1}}, "a_setting_of_tomorrow", "setting"),
    ],
)
def test_each_difference_is_listed(tmp_path: Path, change: dict[str, Any], name: str, group: str) -> None:
    """What A and B are unlike in is named with its kind, whatever the verdict."""
    a = result(tmp_path / "a.json", [10.0, 10.1, 9.9])
    b = result(tmp_path / "b.json", [10.0, 10.1, 9.9], **change)
    got = document(a, b)
    assert [(d["name"], d["group"]) for d in got["differences"]] == [(name, group)]
    assert got["like"] is (group == "setting")
    assert name in invoke(a, b).stdout


def test_options_of_unlike_strategies_are_one_difference(tmp_path: Path) -> None:
    """An option that the other strategy has not is nothing that a file does not say."""
    a = result(tmp_path / "a.json", [10.0, 10.1], strategy_options={"bucket_cap_mb": 25, "comm_hook": None})
    b = result(tmp_path / "b.json", [10.0, 10.1], strategy="single", strategy_options={})
    got = document(a, b)["differences"]
    assert [d["name"] for d in got] == ["strategy", "strategy_options"]
    assert (got[1]["a"], got[1]["b"]) == ({"bucket_cap_mb": 25, "comm_hook": None}, {})
    said = invoke(a, b).stdout
    assert "bucket_cap_mb=25, comm_hook=none" in said
    assert "not known" not in said
    assert "None" not in said


@pytest.mark.parametrize(
    "change", [{"parameters": 2000}, {"global_batch_size": 16}, {"config": {"model": "gpt", "d_model": 32}}]
)
def test_other_work_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """Another model or batch is refused with its name and both values; it can be asked for."""
    a = result(tmp_path / "a.json", [10.0, 10.1])
    b = result(tmp_path / "b.json", [10.0, 10.1], **change)
    done = invoke(a, b)
    assert isinstance(done.exception, ConfigError)
    assert "--allow-unlike" in str(done.exception)
    assert document(a, b, "--allow-unlike")["like"] is False


def test_a_pair_without_a_figure_is_left_out_as_a_whole(tmp_path: Path) -> None:
    """The halves of the other pairs stay beside each other, and a note says how many pairs are missing."""
    times = {"a": [None, 10.0, 20.0, 30.0], "b": [5.0, None, 22.0, 33.0]}
    sides = tuple(
        [
            read_record(result(tmp_path / f"{side}{i}.json", [time or 1.0], **_without(time)))
            for i, time in enumerate(all_)
        ]
        for side, all_ in times.items()
    )
    got = make_document(sides, paired=True, metric="step_time_ms", confidence=0.9, allow_unlike=True, argv=["mtb"])
    assert (got["a"]["trials"], got["b"]["trials"]) == ([20.0, 30.0], [22.0, 33.0])
    assert got["ratio"] == pytest.approx(1 / 1.1)
    assert "left out: 2 of 4 pairs" in got["notes"][-1]


def _without(time: float | None) -> dict[str, Any]:
    return {} if time else {"repeats": [{"step_time_ms": None, "tokens_per_sec": None}]}


@pytest.mark.parametrize("side", ["A", "B"])
def test_invalid_performance_is_said_before_the_verdict(tmp_path: Path, side: str) -> None:
    """A side that says that its times are not valid is named, with its reasons, in text and JSON."""
    bad = result(tmp_path / "bad.json", [20.0, 20.1], performance_valid=False, performance_invalid_reasons=["load 9"])
    good = result(tmp_path / "good.json", [10.0, 10.1])
    words = (bad, good) if side == "A" else (good, bad)
    got = document(*words)
    assert got["performance_valid"] is False
    assert got["performance_invalid_reasons"] == [f"{side}: load 9"]
    keys = list(got)
    assert keys.index("performance_valid") < keys.index("verdict")
    said = invoke(*words).stdout
    assert said.index(f"{side}: load 9") < said.index("Verdict")
    assert "Verdict, of measurements that are not valid" in said
    done = invoke(*words, "--fail-if", "slower:1%" if side == "B" else "faster:1%")
    assert isinstance(done.exception, CheckFailed)
    assert f"Not valid: {side}: load 9" in str(done.exception)


@pytest.mark.parametrize(
    ("a", "b", "expected"), [(True, True, True), (True, None, None), (True, False, False), (None, False, False)]
)
def test_validity_of_a_comparison(tmp_path: Path, a: bool | None, b: bool | None, expected: bool | None) -> None:
    """It is that of its worse side; what is not known is not said to be valid."""
    first = result(tmp_path / "a.json", [10.0, 10.1], performance_valid=a)
    second = result(tmp_path / "b.json", [10.0, 10.2], performance_valid=b)
    assert document(first, second)["performance_valid"] is expected
    assert ("not valid" in invoke(first, second).stdout) is (b is False)


def test_a_broken_training_is_warned_of(tmp_path: Path) -> None:
    """The speed of a training whose loss was not finite stands beside a warning; so does a file against itself."""
    a = result(tmp_path / "a.json", [10.0, 10.1])
    b = result(tmp_path / "b.json", [5.0, 5.1], loss=None, loss_nonfinite="nan")
    assert "loss of B was nan" in document(a, b)["warnings"][0]
    assert document(a, a)["warnings"] == ["A and B are the same file"]


@pytest.mark.parametrize("paired", [True, False])
def test_trials_without_any_spread_are_undetermined(paired: bool) -> None:
    """An interval of no width would make any difference sure; real trials are never equal to the last bit."""
    found = compare_trials([10.0] * 3, [10.001] * 3, paired=paired, metric=TIME)
    assert (found.verdict, found.low, found.seen_from) == ("undetermined", None, None)
    assert "copies" in found.note


@pytest.mark.parametrize(
    ("times", "gate", "fails"),
    [
        ([10.5, 10.6, 10.4], "slower:3%", True),
        ([10.2, 10.21, 10.19], "slower:3%", False),
        ([9.0, 9.1, 8.9], "slower:3%", False),
        ([9.0, 9.1, 8.9], "faster:3%", True),
        ([10.29, 10.31, 10.3], "slower:2.95%", True),  # by the ratio; a bound of its interval is below
        ([10.29, 10.31, 10.3], "slower:3.05%", False),
        ([10.5, 20.0, 7.0], "slower:3%", False),
    ],
)
def test_gate(tmp_path: Path, times: list[float], gate: str, fails: bool) -> None:
    """The gate closes where a verdict says so and the change is as large; noise alone does not close it."""
    a = result(tmp_path / "a.json", [10.0, 10.01, 9.99])
    done = invoke(a, result(tmp_path / "b.json", times), "--fail-if", gate, "--output", str(tmp_path / "out.json"))
    assert isinstance(done.exception, CheckFailed) is fails
    assert json.loads((tmp_path / "out.json").read_text())["gate"]["passed"] is not fails


@pytest.mark.parametrize(("what", "percent"), [("slower", 3.0), ("faster", 1 / 0.0103 - 100)])
def test_the_change_that_a_gate_looks_at(tmp_path: Path, what: str, percent: float) -> None:
    """The speed of the faster one over that of the slower one, less 1: exchanged sides give the other direction."""
    a = result(tmp_path / "a.json", [99.0, 101.0, 100.0])
    b = result(tmp_path / "b.json", [1.03 * t for t in (99.0, 101.0, 100.0)])
    forward = document(a, b, "--fail-if", f"{what}:50%")["gate"]
    assert forward["change_percent"] == pytest.approx(percent)
    other = "faster" if what == "slower" else "slower"
    assert document(b, a, "--fail-if", f"{other}:50%")["gate"]["change_percent"] == pytest.approx(percent)


def test_a_gate_that_would_see_nothing_says_so(tmp_path: Path) -> None:
    """Passing means little where a change as large as the gate's would most likely not be seen."""
    a, noisy = result(tmp_path / "a.json", [10.0, 10.01, 9.99]), result(tmp_path / "b.json", [10.5, 20.0, 7.0])
    assert any("says little" in note for note in document(a, noisy, "--fail-if", "slower:3%")["notes"])
    assert not any("says little" in note for note in document(a, a, "--fail-if", "slower:3%")["notes"])
    assert not any("says little" in note for note in document(a, noisy)["notes"])


def test_intervals_that_say_nothing_are_not_dressed_up(tmp_path: Path) -> None:
    """No row of zeros, and no percentage of ten digits."""
    a, b = result(tmp_path / "a.json", [10.0, 10.1]), result(tmp_path / "b.json", [10.0, 1e5])
    said = invoke(a, b).stdout
    assert "0.0000" not in said
    assert "hardly any change would be seen" in said


def test_a_side_without_spread_is_named(tmp_path: Path) -> None:
    """Its trials may be copies; the other's spread still gives an interval."""
    a, b = result(tmp_path / "a.json", [10.0] * 3), result(tmp_path / "b.json", [10.0, 10.1, 9.9])
    assert "all trials of A are equal" in document(a, b)["notes"][0]


def test_gate_needs_a_verdict(tmp_path: Path) -> None:
    """With one trial a gate does not pass, and says why."""
    a = result(tmp_path / "a.json", [10.0])
    done = invoke(a, a, "--fail-if", "slower:3%")
    assert isinstance(done.exception, CheckFailed)
    assert "--repeat" in str(done.exception)


def test_figures_of_both_sides_are_shown(tmp_path: Path) -> None:
    """Mean, standard deviation of the sample, and unit, a line for each side; one trial has no deviation."""
    a = result(tmp_path / "a.json", [10.0, 11.0, 12.0])
    b = result(tmp_path / "b.json", [5.0])
    got = document(a, b, "--metric", "step_time_ms")
    assert (got["a"]["mean"], got["a"]["std"]) == (11.0, 1.0)
    assert (got["b"]["mean"], got["b"]["std"]) == (5.0, None)
    said = invoke(a, b, "--metric", "step_time_ms").stdout
    assert "A: 11.00 ± 1.00 ms (mean ± standard deviation of the trials)" in said
    assert "B: 5.000 ms (one trial)" in said
    assert "A: 91.41 ± 8.34 tokens/s" in invoke(a, b).stdout


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        (12345.6, 78.9, "12,346 ± 79 MiB"),
        (253.1, 0.02, "253.10 ± 0.02 MiB"),
        (0.012345, None, "0.01235 MiB"),
        (0.0, 0.0, "0.000 ± 0.000 MiB"),
    ],
)
def test_figures_are_shown_with_four_digits(mean: float, std: float | None, expected: str) -> None:
    """The mean's; the deviation has as many places, and shows at least one digit."""
    assert MEMORY.shown(mean, std) == expected


def memory(path: Path, sizes: list[float], kind: str | None = "process_rss") -> str:
    rows = [{"max_memory_mib": size, "tokens_per_sec": 1.0} for size in sizes]
    return result(path, [], repeats=rows, memory_kind=kind)


def test_memory_is_larger_or_smaller(tmp_path: Path) -> None:
    """The ratio is of the memory itself, the verdict in its words, and what the memory is of is said."""
    a, b = memory(tmp_path / "a.json", [100.0, 101.0, 99.0]), memory(tmp_path / "b.json", [80.0, 81.0, 79.0])
    got = document(a, b, "--metric", "max_memory_mib")
    assert (got["verdict"], got["ratio_of"]) == ("smaller", "peak memory of B over peak memory of A")
    assert got["ratio"] == pytest.approx(0.8, rel=1e-3)
    assert any("resident set" in note for note in got["notes"])
    assert document(b, a, "--metric", "max_memory_mib")["verdict"] == "larger"
    assert "B's peak memory is 0.8000 times A's" in invoke(a, b, "--metric", "max_memory_mib").stdout
    gate = document(a, b, "--metric", "max_memory_mib", "--fail-if", "smaller:50%")["gate"]
    assert gate["change_percent"] == pytest.approx(20, rel=1e-2)
    done = invoke(b, a, "--metric", "max_memory_mib", "--fail-if", "larger:20%")
    assert isinstance(done.exception, CheckFailed)
    assert "B is larger than A by 25" in str(done.exception)


@pytest.mark.parametrize(("size", "verdict"), [(100.0, "no difference seen"), (101.0, "larger"), (99.0, "smaller")])
@pytest.mark.parametrize("paired", [True, False])
def test_memory_repeats_exactly(size: float, verdict: str, paired: bool) -> None:
    """An allocator's peaks are equal in all trials: then a difference is one, however small."""
    found = compare_trials([100.0] * 3, [size] * 3, paired=paired, metric=MEMORY)
    assert (found.verdict, found.seen_from) == (verdict, None)
    assert found.low == found.high == pytest.approx(size / 100)


def test_memory_of_another_kind_is_refused(tmp_path: Path) -> None:
    """A resident set and an allocator's peak have no ratio, also where unlike sides are allowed."""
    a, b = memory(tmp_path / "a.json", [1.0, 1.1]), memory(tmp_path / "b.json", [1.0, 1.1], "cuda_allocated")
    error = invoke(a, b, "--metric", "max_memory_mib", "--allow-unlike").exception
    assert isinstance(error, ConfigError)
    assert "process_rss, and of B cuda_allocated" in str(error)


@pytest.mark.parametrize("value", ["abc", True, 10**400, [1.0]])
def test_a_figure_that_is_no_number_is_refused(tmp_path: Path, value: Any) -> None:
    """With the file and the value; a truth is no figure of 1."""
    a = result(tmp_path / "a.json", [10.0, 11.0])
    b = result(tmp_path / "b.json", [10.0, 11.0], repeats=[{"tokens_per_sec": value}, {"tokens_per_sec": 10.0}])
    error = invoke(a, b).exception
    assert isinstance(error, ConfigError)
    assert "b.json is a broken result: 'tokens_per_sec' is " in str(error)


def test_wrong_usage_is_refused(tmp_path: Path) -> None:
    """A gate that cannot be read, a run that failed, options of --run without it, a missing file."""
    a = result(tmp_path / "a.json", [10.0])
    failed = result(tmp_path / "f.json", [10.0], exit_reason="failed")
    oom = tmp_path / "old.json"
    oom.write_text(json.dumps({"benchmark": "training", "status": "oom", "repeats": [{"tokens_per_sec": 1.0}]}))
    for words in (
        (a, a, "--fail-if", "slower"),
        (a, a, "--fail-if", "larger:3%"),
        (a, a, "--fail-if", "slower:3%", "--metric", "max_memory_mib"),
        (a,),
        ("--run", "a.toml"),
        (a, failed),
        (a, str(oom)),
        (a, a, "--run-dir", "x"),
        (a, str(tmp_path / "none.json")),
    ):
        assert isinstance(invoke(*words).exception, ConfigError), words


def test_older_files_are_compared(tmp_path: Path) -> None:
    """Older results have trials too; what they do not say is no reason to refuse."""
    rows = [{"step_time_ms": t, "tokens_per_sec": 1000 / t} for t in (17.5, 17.7, 17.6)]
    older = tmp_path / "old.json"
    older.write_text(json.dumps({"benchmark": "training", "strategy": "ddp", "world_size": 2, "repeats": rows}))
    got = document(str(older), result(tmp_path / "b.json", [10.0, 10.1, 9.9]))
    assert got["verdict"] == "faster"


def test_wide_intervals_stay_numbers(tmp_path: Path) -> None:
    """Two trials far apart at the highest confidence give finite bounds; a higher one is refused."""
    a = result(tmp_path / "a.json", [1.0, 1000.0])
    got = document(a, a, "--confidence", "0.9999")
    assert all(math.isfinite(x) for x in got["ratio_interval"])
    assert math.isfinite(got["seen_from_percent"])
    assert invoke(a, a, "--confidence", "0.99999").exception is not None


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing could be trained: what is refused is refused before."""

    def train(*_words: Any, **_more: Any) -> None:
        raise AssertionError("a training was started")

    monkeypatch.setattr("mtb_report.compare.interleaved.train", train)


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize("words", [("--output", "file/x.json"), ("--output", "."), ("--timeout-s", "nan"), ()])
def test_what_must_fail_fails_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """A file that cannot be written, a time that is none, and configurations of other work."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "a.toml").write_text("d_model = 16\n")
    (tmp_path / "b.toml").write_text("d_model = 32\n" if not words else "d_model = 16\n")
    done = invoke("--run", "a.toml", "b.toml", *words)
    assert isinstance(done.exception, ConfigError), done.exception
    assert not (tmp_path / "runs").exists()


def test_a_failed_write_loses_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found is shown first; that the file could not be written is one paragraph."""

    def full(*_words: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mtb_core.write_json", full)
    a = result(tmp_path / "a.json", [10.0, 10.1])
    done = invoke(a, a, "--json", "--output", str(tmp_path / "out.json"))
    assert isinstance(done.exception, RunFailed)
    assert "No space left" in str(done.exception)
    assert json.loads(done.stdout)["verdict"] == "no difference seen"


def test_two_configurations_are_measured_in_turns(tmp_path: Path) -> None:
    """--run trains A and B in turns, pairs them, keeps every trial, and exits with 0."""
    tiny = "steps = 2\nwarmup_steps = 0\nd_model = 8\nn_heads = 1\nn_layers = 1\nseq_length = 8\nbatch_size = 2\n"
    for name, seed in (("a", 0), ("b", 1)):
        (tmp_path / f"{name}.toml").write_text(f"{tiny}seed = {seed}\n")
    words = ["compare", "--run", "a.toml", "b.toml", "--pairs", "2", "--run-dir", "out", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "mtb_core", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["n"] == [2, 2]
    assert got["method"].startswith("paired")
    assert [d["name"] for d in got["differences"] if d["group"] != "place"] == ["seed"]
    assert len(list((tmp_path / "out").glob("pair_*/[ab]/run/result.json"))) == 4
    assert json.loads((tmp_path / "out/comparison.json").read_text()) == got


def measured(folder: Path, times: dict[str, list[float]]) -> str:
    """A folder as --run leaves it."""
    for side, all_ in times.items():
        for pair, time in enumerate(all_):
            place = folder / f"pair_{pair:03d}" / side / "run"
            place.mkdir(parents=True)
            result(place / "result.json", [time], step_time_ms=time)
    return str(folder)


def test_trials_of_an_earlier_run_are_compared_again(tmp_path: Path) -> None:
    """In their pairs, by any metric, without measuring; one half alone is refused with what to do."""
    folder = measured(tmp_path / "out", {"a": [10.0, 20.0, 30.0], "b": [11.0, 22.0, 33.3]})
    got = document(folder, "--metric", "step_time_ms")
    assert (got["a"]["trials"], got["b"]["trials"]) == ([10.0, 20.0, 30.0], [11.0, 22.0, 33.3])
    assert (got["verdict"], got["method"]) == ("slower", "paired t test of log-ratios")
    (tmp_path / "out/pair_002/b/run/result.json").unlink()
    error = invoke(folder).exception
    assert isinstance(error, ConfigError)
    assert "Remove" in str(error)
    assert "pair_002" in str(error)


def test_a_gate_that_fails_loses_no_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--run leaves comparison.json in its folder, the verdict being what it may."""
    times = iter([10.0, 20.0, 10.1, 20.1])

    def train(folder: Path, *_words: Any, **_more: Any) -> Attempt:
        folder.mkdir(parents=True)
        record = read_record(result(folder / "result.json", [next(times)]))
        return Attempt(
            status="success",
            failure_type=None,
            reason=None,
            exit_code=0,
            command="",
            log_digest="",
            seconds=1.0,
            result=record,
        )

    monkeypatch.setattr("mtb_report.compare.interleaved.train", train)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("d_model = 16\n")
    words = ("--run", "a.toml", "a.toml", "--pairs", "2", "--run-dir", "out", "--fail-if", "slower:3%")
    assert isinstance(invoke(*words).exception, CheckFailed)
    got = read_record("out")
    assert (got.get("verdict"), got.get("gate")["passed"]) == ("slower", False)
