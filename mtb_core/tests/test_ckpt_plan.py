"""Tests of mtb_core.ckpt.plan."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtb_core.ckpt.dtypes import SAFETENSORS
from mtb_core.ckpt.entries import Part
from mtb_core.ckpt.plan import assign


def whole(key, *shape, dtype="float32"):
    return Part(key, dtype, shape, (0,) * len(shape), shape)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 5))
def test_replicated_parts_are_written_once(sizes, world):
    """Every replicated tensor is written by exactly one rank, and the load differs by at most the largest of them."""
    parts = [whole(f"t{i}", n) for i, n in enumerate(sizes)]
    chosen = assign([parts] * world, SAFETENSORS)
    assert sorted(i for indices in chosen for i in indices) == list(range(len(parts)))
    load = [sum(parts[i].nbytes for i in indices) for indices in chosen]
    assert max(load) - min(load) <= max(p.nbytes for p in parts)


def test_shards_are_written_by_their_holders():
    """Each rank writes its own part; empty parts are not written; a rank may have nothing."""
    by_rank = [
        [Part("w", "float32", (5, 7), (0, 0), (3, 7))],
        [Part("w", "float32", (5, 7), (3, 0), (2, 7))],
        [Part("w", "float32", (5, 7), (5, 0), (0, 7))],
        [],
    ]
    assert assign(by_rank, SAFETENSORS) == [[0], [0], [], []]


def test_tensors_without_elements_are_kept():
    """A tensor of no elements still has its entry."""
    assert assign([[whole("empty", 0, 3)]] * 2, SAFETENSORS) == [[0], []]


@pytest.mark.parametrize(
    ("by_rank", "problem"),
    [
        ([[whole("w", 4)], [whole("w", 5)]], "is float32 .5,. on rank 1, but float32 .4,."),
        ([[whole("w", 4)], [whole("w", 4, dtype="bfloat16")]], "bfloat16"),
        ([[Part("w", "float32", (4,), (0,), (2,))], []], "not covered"),
        ([[whole("w", 4)], [Part("w", "float32", (4,), (1,), (2,))]], "overlapping"),
        ([[whole("w", 4, dtype="complex128")]], "is complex128, which the checkpoint format cannot store"),
        (
            [[whole("w", 4, dtype="quint8")]],
            "is quint8, which the checkpoint format cannot store; it can store bfloat16, bool",
        ),
    ],
)
def test_contradictions(by_rank, problem):
    """Ranks that do not make up one tensor are refused, and the key is named."""
    with pytest.raises(ValueError, match=problem) as caught:
        assign(by_rank, SAFETENSORS)
    assert "'w'" in str(caught.value)


def test_keys_that_no_file_can_hold():
    """A key with half of a surrogate pair is refused."""
    with pytest.raises(ValueError, match="surrogate"):
        assign([[whole("w\ud800", 4)]], SAFETENSORS)
