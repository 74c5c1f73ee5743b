from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.data.mixture import epoch_counts, epoch_order, shares
from burnish.errors import InputError


def test_shares_by_hand():
    assert shares([5, 5], [None, None], None) is None
    assert shares([5], [None], None) is None
    assert shares([80, 20], [3, 1], None) == pytest.approx([0.75, 0.25])
    assert shares([80, 20], [None, None], 1) == pytest.approx([0.8, 0.2])
    assert shares([80, 20], [None, None], 2) == pytest.approx([2 / 3, 1 / 3])  # roots of 80 and 20
    assert shares([80, 20], [None, None], 0.5) == pytest.approx([16 / 17, 1 / 17])  # squares
    assert shares([80, 20], [None, None], 1000) == pytest.approx([0.5, 0.5], abs=1e-3)


def test_a_mixture_that_says_two_things_is_refused():
    with pytest.raises(InputError, match=r"data\.sources: some have a weight and others none"):
        shares([5, 5, 5], [1, None, 1], None)
    with pytest.raises(InputError, match=r"data\.temperature goes by size, but data\.sources have weights"):
        shares([5, 5], [1, 1], 2)


@pytest.mark.parametrize(
    ("sizes", "weights", "repeated", "once"),
    [
        ([100, 20], [1, 1], [100, 100], [20, 20]),
        ([100, 20], [3, 1], [100, 33], [60, 20]),  # 133.3 and 80 examples in all
        ([100, 20], [1, 3], [100, 300], [7, 20]),
        ([10, 10, 10], [2, 1, 1], [20, 10, 10], [10, 5, 5]),
        ([1000, 1], [1000, 1], [1000, 1], [1000, 1]),
        ([10, 1000], [1e4, 1], [10**7, 1000], [10, 1]),  # never none of a source
        ([7], [5], [7], [7]),
    ],
)
def test_counts_by_hand(sizes, weights, repeated, once):
    share = shares(sizes, weights, None)
    assert epoch_counts(sizes, share, repeat=True) == repeated
    assert epoch_counts(sizes, share, repeat=False) == once


def test_an_epoch_that_would_fill_the_memory_is_refused():
    with pytest.raises(InputError, match=r"data\.sources: an epoch .* 1e\+09 examples"):
        epoch_counts([10, 1000], shares([10, 1000], [1e6, 1], None), repeat=True)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(1, 6),
)
def test_counts_are_kept_in_every_epoch_and_no_example_is_ahead_of_another(sources, seed, epochs):
    sizes, counts = [size for size, _ in sources], [count for _, count in sources]
    source_of = np.repeat(np.arange(len(sizes)), sizes)
    times = np.zeros(sum(sizes), int)
    for epoch in range(epochs):
        order = epoch_order(sizes, counts, seed, epoch)
        assert np.bincount(source_of[order], minlength=len(sizes)).tolist() == counts
        np.add.at(times, order, 1)
        for source in range(len(sizes)):
            assert np.ptp(times[source_of == source]) <= 1, "one came again before all came once"
    assert times.sum() == epochs * sum(counts)


def test_without_a_mixture_all_come_once():
    orders = [epoch_order([30, 10], None, 0, epoch).tolist() for epoch in range(4)]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert len(set(map(tuple, orders))) == 4


def test_sources_are_mixed_and_every_order_differs():
    counts = [50, 50]
    orders = {(seed, epoch): epoch_order([50, 200], counts, seed, epoch) for seed in range(3) for epoch in range(3)}
    for order in orders.values():
        changes = np.count_nonzero(np.diff(order < 50))
        assert 30 < changes < 70, "drawn in turn by chance, not one source after the other"
    assert len({tuple(order) for order in orders.values()}) == 9
    assert all((epoch_order([50, 200], counts, *key) == order).all() for key, order in orders.items())
    # Sources of one size go through their rows in orders of their own.
    order = epoch_order([40, 40], [20, 20], 0, 0)
    assert Counter(order[order < 40]) != Counter(order[order >= 40] - 40)
    # Which examples come in the first half of a source's pass differs from pass to pass.
    halves = {frozenset(epoch_order([40], [20], 0, epoch).tolist()) for epoch in (0, 2, 4)}
    assert len(halves) == 3
