"""Examples longer than a row. What to keep is recomputed here token by token."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from burnish.data.config import DataConfig
from burnish.data.cut import cut
from burnish.data.encode import Tokens

BOS = 0


def tokens(weights: list[float], bos: bool = True) -> Tokens:
    """Ids that tell every token from every other; BOS, if any, is the first."""
    ids = np.arange(len(weights), dtype=np.int32) + (0 if bos else 1)
    return Tokens(ids, np.array([0.0, *weights[1:]], np.float32))


def config(length: int, truncate: str, **more) -> DataConfig:
    return DataConfig(max_length=length, truncate=truncate, **more)


def pairs(pieces: list[Tokens]) -> list[list[tuple[int, float]]]:
    return [list(zip(piece.ids.tolist(), piece.weights.tolist(), strict=True)) for piece in pieces]


ONES = [1.0] * 10


@pytest.mark.parametrize("truncate", ["keep_end", "keep_start", "split", "drop"])
def test_what_fits_is_left_as_it_is(truncate):
    whole = tokens(ONES)
    for length in (10, 11, 1000):
        (same,) = cut(whole, config(length, truncate), BOS)
        assert same is whole
    assert pairs([whole]) == pairs([tokens(ONES)])


def test_by_hand():
    long = tokens([0, 0, 0, 1, 1, 0.5])
    assert pairs(cut(long, config(4, "keep_end"), BOS)) == [[(0, 0), (3, 1), (4, 1), (5, 0.5)]]
    assert pairs(cut(long, config(4, "keep_end"), None)) == [[(2, 0), (3, 1), (4, 1), (5, 0.5)]]
    assert pairs(cut(long, config(4, "keep_start"), BOS)) == [[(0, 0), (1, 0), (2, 0), (3, 1)]]
    assert cut(long, config(5, "drop"), BOS) == []
    split = [[(0, 0), (1, 0), (2, 0), (3, 1)], [(0, 0), (3, 0), (4, 1), (5, 0.5)]]
    assert pairs(cut(long, config(4, "split"), BOS)) == split
    split = [[(0, 0), (1, 0), (2, 0), (3, 1)], [(2, 0), (3, 0), (4, 1), (5, 0.5)]]
    assert pairs(cut(long, config(4, "split", overlap=2), None)) == split


def test_the_first_token_of_an_end_follows_nothing():
    assert pairs(cut(tokens(ONES), config(3, "keep_end"), None)) == [[(7, 0), (8, 1), (9, 1)]]


def test_a_first_token_is_bos_by_its_id_only():
    """A BOS elsewhere, or another token first, is nothing to keep."""
    whole = tokens(ONES, bos=False)
    assert pairs(cut(whole, config(3, "keep_end"), 5)) == [[(8, 0), (9, 1), (10, 1)]]
    assert pairs(cut(whole, config(3, "keep_end"), 1)) == [[(1, 0), (9, 1), (10, 1)]]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=40),
    st.integers(2, 12),
    st.integers(0, 10),
    st.booleans(),
)
@example(ONES, 2, 0, True)
@example(ONES, 2, 0, False)
@example(ONES, 3, 1, True)
def test_split_learns_every_token_once_and_shows_it_what_came_before(weights, length, overlap, bos):
    overlap = min(overlap, length - 2)
    whole = tokens(weights, bos)
    pieces = cut(whole, config(length, "split", overlap=overlap), BOS if bos else None)
    learned = [pair for piece in pairs(pieces) for pair in piece if pair[1]]
    assert learned == [pair for pair in pairs([whole])[0] if pair[1]]
    for piece, after in pairwise(pieces):
        assert len(piece.ids) == length  # none is shorter than it need be, but the last
        fresh = after.ids[bos:].tolist()
        again = min(max(1, overlap), length - bos - 1)
        assert fresh[:again] == piece.ids[len(piece.ids) - again :].tolist()
        assert fresh == list(range(fresh[0], fresh[0] + len(fresh)))
        assert not after.weights[: bos + again].any()
    for piece in pieces:
        assert 2 <= len(piece.ids) <= length and piece.weights[0] == 0
        assert (piece.ids == BOS).nonzero()[0].tolist() == [0] * bos
        assert piece.ids.dtype == np.int32 and piece.weights.dtype == np.float32


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=30), st.integers(2, 12), st.booleans())
def test_one_piece(weights, length, bos):
    whole = tokens(weights, bos)
    (every,) = pairs([whole])
    bos_id = BOS if bos else None
    fits = len(every) <= length
    (start,) = pairs(cut(whole, config(length, "keep_start"), bos_id))
    assert start == every[:length]
    (end,) = pairs(cut(whole, config(length, "keep_end"), bos_id))
    if fits:
        right = every
    elif bos:
        right = [every[0], *every[len(every) - length + 1 :]]
    else:
        first, *rest = every[-length:]
        right = [(first[0], 0.0), *rest]
    assert end == right
    assert len(cut(whole, config(length, "drop"), bos_id)) == int(fits)
    assert pairs([whole]) == [every], "what was given is not changed"
