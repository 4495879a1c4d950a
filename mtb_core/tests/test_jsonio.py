from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtb_core.measure.jsonio import dumps, to_plain, write_json


def strict(text):
    """What a strict parser reads."""

    def refuse(constant):
        raise AssertionError(f"not JSON: {constant}")

    return json.loads(text, parse_constant=refuse)


@attrs.frozen
class Inner:
    place: Path
    rate: float


@attrs.frozen
class Outer:
    name: str
    inner: Inner
    many: tuple[int, ...]
    names: frozenset[str]


def test_a_number_that_is_not_finite_is_null_with_a_flag_beside_it():
    """NaN and both infinities are told apart, at any depth; finite neighbours are unchanged."""
    value = {"loss": math.nan, "ok": 1.5, "row": {"busbw": math.inf, "algbw": -math.inf, "size": 0}}
    assert strict(dumps(value)) == {
        "loss": None,
        "loss_nonfinite": "nan",
        "ok": 1.5,
        "row": {"busbw": None, "busbw_nonfinite": "inf", "algbw": None, "algbw_nonfinite": "-inf", "size": 0},
    }


def test_inside_lists_the_owner_key_gets_the_flag():
    """A list cannot hold a flag: the object that holds the list does, for nested lists too; objects in it do theirs."""
    value = {"repeats": [1.0, math.nan, [math.inf, math.nan]], "rows": [{"a": math.inf}, {"a": 2.0}]}
    assert strict(dumps(value)) == {
        "repeats": [1.0, None, [None, None]],
        "repeats_nonfinite": "nan,inf",
        "rows": [{"a": None, "a_nonfinite": "inf"}, {"a": 2.0}],
    }


def test_what_no_object_holds_is_null():
    """At the top there is no place for a flag."""
    assert strict(dumps([math.nan, 1.0])) == [None, 1.0]
    assert strict(dumps(math.inf)) is None


def test_a_flag_is_never_overwritten():
    """Whichever comes first: the flag, or a key that has its name."""
    for value in ({"a": math.nan, "a_nonfinite": 5}, {"a_nonfinite": 5, "a": math.nan}):
        assert strict(dumps(value)) == {"a": None, "a_nonfinite": "nan"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_any_value_becomes_json_that_a_strict_parser_reads(value):
    """No value whatever makes NaN or Infinity in the text; and writing what was read changes nothing."""
    text = dumps(value)
    assert dumps(strict(text)) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_finite_floats_are_read_back_with_the_same_bits(value):
    """No rounding on the way."""
    assert strict(dumps({"x": value}))["x"].hex() == value.hex()


def test_values_of_the_contract_become_plain():
    """Attrs classes become objects, tuples and sets lists, paths text; keys become text."""
    value = Outer("run", Inner(Path("a/b"), math.inf), (1, 2), frozenset({"z", "a"}))
    expected = {"name": "run", "inner": {"place": "a/b", "rate": math.inf}, "many": [1, 2], "names": ["a", "z"]}
    assert to_plain(value) == expected
    assert to_plain({1: "one"}) == {"1": "one"}


def test_what_has_no_place_in_json_is_named():
    """The error tells the value and its type."""
    with pytest.raises(TypeError, match=r"no place for .* of type complex"):
        dumps({"x": 1j})


def test_a_file_is_replaced_whole_and_nothing_is_left_behind(tmp_path):
    """The folder is made; the second writing replaces the first; no temporary file stays; usual permissions."""
    path = tmp_path / "deep" / "result.json"
    write_json(path, {"n": 1})
    write_json(str(path), {"n": 2, "x": math.nan})
    assert strict(path.read_text()) == {"n": 2, "x": None, "x_nonfinite": "nan"}
    assert [found.name for found in path.parent.iterdir()] == ["result.json"]
    plain = path.with_name("plain")
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_failed_writing_leaves_the_earlier_file(tmp_path, monkeypatch):
    """A full disk (here: a failing fsync) neither harms the file that is there nor leaves a half one."""
    path = tmp_path / "result.json"
    write_json(path, {"n": 1})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_json(path, {"n": 2})
    assert strict(path.read_text()) == {"n": 1}
    assert [found.name for found in tmp_path.iterdir()] == ["result.json"]


def test_a_value_that_cannot_be_written_leaves_the_earlier_file(tmp_path):
    """The text is made before any file is touched."""
    path = tmp_path / "result.json"
    write_json(path, {"n": 1})
    with pytest.raises(TypeError):
        write_json(path, {"n": object()})
    assert strict(path.read_text()) == {"n": 1}


def test_a_link_stays_a_link(tmp_path):
    """What the link points to is replaced."""
    (tmp_path / "real.json").write_text("{}")
    link = tmp_path / "link.json"
    link.symlink_to("real.json")
    write_json(link, {"n": 1})
    assert link.is_symlink()
    assert strict((tmp_path / "real.json").read_text()) == {"n": 1}


def test_odd_names_work(tmp_path):
    """Spaces, non-ASCII letters, and a name as long as file systems allow."""
    for name in ("a b=c.json", "größe-结果.json", "x" * 250 + ".json"):
        write_json(tmp_path / name, {"n": name})
        assert strict((tmp_path / name).read_text(encoding="utf-8")) == {"n": name}


def test_a_device_is_written_to_directly():
    """`--output /dev/stdout` must not replace the device."""
    program = "from mtb_core.measure.jsonio import write_json; write_json('/dev/stdout', {'n': 1})"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=240)
    assert strict(done.stdout) == {"n": 1}
