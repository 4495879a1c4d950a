"""Contiguous ranges of elements as rectangles."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtb_core import fragment_pieces
from mtb_core.api.flat import boxes


@st.composite
def fragments(draw):
    """(shape, start, stop), empty ranges and empty tensors included."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(fragments())
def test_pieces_hold_the_elements_of_the_range(fragment):
    """Written into the whole tensor at their offsets, the pieces are exactly the range; there are few of them."""
    shape, start, stop = fragment
    flat = torch.arange(start, stop)
    whole = torch.full(shape, -1)
    pieces = fragment_pieces(flat, shape, start)
    for piece in pieces:
        assert piece.shape == shape
        assert piece.tensor.numel() > 0
        box = whole
        for dim, (offset, size) in enumerate(zip(piece.offset, piece.tensor.shape, strict=True)):
            box = box.narrow(dim, offset, size)
        assert bool((box == -1).all()), "two pieces overlap"
        box.copy_(piece.tensor)
    expected = torch.full((math.prod(shape),), -1)
    expected[start:stop] = flat
    assert torch.equal(whole.reshape(-1), expected)
    assert len(pieces) <= max(2 * (len(shape) - 1) + 1, 1)


@given(fragments())
def test_filling_the_pieces_fills_the_fragment(fragment):
    """Pieces are live views, of a parameter that requires a gradient as well, and are filled in place."""
    shape, start, stop = fragment
    flat = torch.nn.Parameter(torch.zeros(stop - start))
    with torch.no_grad():
        for piece in fragment_pieces(flat, shape, start):
            piece.tensor.fill_(1)
    assert flat.sum() == stop - start


@pytest.mark.parametrize(
    ("shape", "start", "stop", "expected"),
    [
        ((), 0, 1, [((), ())]),
        ((), 0, 0, []),
        ((7,), 2, 6, [((2,), (4,))]),
        ((3, 4), 4, 12, [((1, 0), (2, 4))]),
        ((3, 4), 1, 3, [((0, 1), (1, 2))]),
        ((3, 4), 1, 10, [((0, 1), (1, 3)), ((1, 0), (1, 4)), ((2, 0), (1, 2))]),
        (
            (4, 2, 3),
            4,
            23,
            [((0, 1, 1), (1, 1, 2)), ((1, 0, 0), (2, 2, 3)), ((3, 0, 0), (1, 1, 3)), ((3, 1, 0), (1, 1, 2))],
        ),
    ],
)
def test_boxes(shape, start, stop, expected):
    """Whole rows make one box, partial rows before and after them their own."""
    assert list(boxes(shape, start, stop)) == expected


@pytest.mark.parametrize(("flat", "start"), [(torch.zeros(5), 8), (torch.zeros(1), -1), (torch.zeros(2, 2), 0)])
def test_what_is_no_fragment_is_refused(flat, start):
    """A range that reaches beyond the tensor, padding for instance, is refused with what was seen."""
    with pytest.raises(ValueError, match=r"\[3, 4\] \(12 elements\)"):
        fragment_pieces(flat, (3, 4), start)
