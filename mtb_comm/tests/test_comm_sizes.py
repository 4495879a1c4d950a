"""Sizes and splits as written on the command line."""

from __future__ import annotations

import math

import pytest

from mtb_comm.sizes import drawn_splits, parse_size, parse_splits, size_text, swept_sizes
from mtb_core import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [("8", 8), ("4K", 4096), ("64M", 2**26), ("1g", 2**30), ("2KiB", 2048), (" 3 ", 3), ("1MB", 2**20)],
)
def test_sizes_are_powers_of_1024(text, size):
    """The suffixes mean what they mean in nccl-tests."""
    assert parse_size(text, "-b") == size


@pytest.mark.parametrize("text", ["9000000T", "9" * 5000])
def test_sizes_that_torch_cannot_count(text):
    """A size that does not fit into 64 bits is refused."""
    with pytest.raises(ConfigError, match="less than 2\\^63"):
        parse_size(text, "-b")


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5M", "4Q", "0", "1 2"])
def test_other_sizes_are_refused(text):
    """The option, the value and what is valid are named."""
    with pytest.raises(ConfigError, match="-b is"):
        parse_size(text, "-b")


def test_size_text_reads_back():
    """A printed size can be typed as an option."""
    for size in (1, 8, 1000, 1024, 3 * 2**20, 2**30):
        assert parse_size(size_text(size), "-b") == size


def test_sweep():
    """Both ends are in, and a fractional factor repeats no size."""
    assert swept_sizes(8, 64, 2) == [8, 16, 32, 64]
    assert swept_sizes(8, 100, 4) == [8, 32]
    assert swept_sizes(1, 4, 1.2) == [1, 2, 3, 4]


def test_sweep_that_cannot_be():
    """Swapped ends and a factor that does not grow are refused."""
    with pytest.raises(ConfigError, match="swap"):
        swept_sizes(64, 8, 2)
    for factor in (1, 0.5, math.nan, math.inf):
        with pytest.raises(ConfigError, match=r"-f is .* above 1"):
            swept_sizes(8, 64, factor)
    with pytest.raises(ConfigError, match=r"-f is 1.0000000000000002, which makes .* at most 10000"):
        swept_sizes(8, 64, 1.0000000000000002)
    with pytest.raises(ConfigError, match="at most 10000"):
        swept_sizes(1, 2**62, 1.001)


def test_splits_by_hand():
    """One row is for all ranks; zero is a part like any other."""
    assert parse_splits("1K,0", 2, ()) == ((1024, 0), (1024, 0))
    assert parse_splits("1K,3K;4K,0", 2, (4096,)) == ((1024, 3072), (4096, 0))


@pytest.mark.parametrize(
    ("text", "sizes", "words"),
    [
        ("1K,1K,1K", (), "3 entries for 2 ranks"),
        ("1K,1K;1K,1K;1K,1K", (), "3 rows for 2 ranks"),
        ("1K,1K;1K,2K", (), "Row 1 .* adds up to 3072"),
        ("1K,1K", (4096,), "adds up to 2048 bytes, but every rank sends 4096"),
        ("1K,1K", (2048, 4096), "2 sizes"),
        ("0,0", (), "nothing at all"),
    ],
)
def test_splits_that_do_not_add_up(text, sizes, words):
    """Each kind of mistake is named with the numbers seen."""
    with pytest.raises(ConfigError, match=words):
        parse_splits(text, 2, sizes)


def test_drawn_splits():
    """Rows add up exactly, the same seed draws the same, and zero-sized parts occur."""
    table = drawn_splits(1001, 8, seed=3)
    assert all(sum(row) == 1001 and len(row) == 8 and min(row) >= 0 for row in table)
    assert table == drawn_splits(1001, 8, seed=3) != drawn_splits(1001, 8, seed=4)
    assert any(part == 0 for row in table for part in row)


def test_drawn_splits_of_one_element():
    """However little there is, nothing gets lost."""
    assert all(sum(row) == 1 for seed in range(20) for row in drawn_splits(1, 5, seed=seed))
