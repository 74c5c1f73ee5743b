import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.data.examples import MOST_NOTES, EncodeCounts, Encoded, Examples, join_sources


def example(example_id, tokens, weights=None, source=0) -> Encoded:
    weights = [0, *[1] * (len(tokens) - 1)] if weights is None else weights
    return Encoded(example_id, np.array(tokens, np.int32), np.array(weights, np.float32), source)


def values(each: Encoded):
    return each.example_id, each.tokens.tolist(), each.weights.tolist(), each.source


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 3))))
def test_what_is_laid_end_to_end_is_read_again(given_examples):
    encoded = [example(number, tokens, source=source) for number, tokens, source in given_examples]
    store = Examples.of(encoded)
    assert [values(each) for each in store] == [values(each) for each in encoded]
    assert [values(store[i - len(store)]) for i in range(len(store))] == [values(each) for each in encoded]
    assert [values(each) for each in store[1:4:2]] == [values(each) for each in encoded[1:4:2]]
    assert store.lengths.tolist() == [len(each.tokens) for each in encoded]
    dtypes = {name: getattr(store, name).dtype.name for name in ("tokens", "weights", "starts", "ids", "sources")}
    assert dtypes == {"tokens": "int32", "weights": "float32", "starts": "int64", "ids": "int64", "sources": "int32"}
    for beyond in (len(store), -len(store) - 1):
        with pytest.raises(IndexError):
            store[beyond]


def test_the_layout_by_hand():
    store = Examples.of([example(4, [7, 8, 9]), example(5, [7, 5]), example(6, [7, 1, 2, 3])])
    assert store.tokens.tolist() == [7, 8, 9, 7, 5, 7, 1, 2, 3]
    assert store.weights.tolist() == [0, 1, 1, 0, 1, 0, 1, 1, 1]
    assert store.starts.tolist() == [0, 3, 5, 9]
    assert Examples.of([]).starts.tolist() == [0]


def test_sources_are_numbered_and_ids_go_on():
    first = Examples.of([example(0, [1, 2]), example(3, [3, 4, 5])], EncodeCounts(rows=2, kept=2))  # 1 and 2 held out
    none = Examples.of([], EncodeCounts(rows=1, dropped_too_long=1))
    last = Examples.of([example(1, [6, 7]), example(2, [8, 9])], EncodeCounts(rows=3, kept=2, dropped_no_target=1))
    joined = join_sources([first, none, last])
    assert [values(each) for each in joined] == [
        (0, [1, 2], [0, 1], 0),
        (3, [3, 4, 5], [0, 1, 1], 0),
        (5, [6, 7], [0, 1], 2),
        (6, [8, 9], [0, 1], 2),
    ]
    assert joined.starts.tolist() == [0, 2, 5, 7, 9]
    assert (joined.counts.rows, joined.counts.kept, joined.counts.dropped) == (6, 4, 2)
    assert joined.starts.dtype == joined.ids.dtype == np.int64 and joined.sources.dtype == np.int32
    assert [values(each) for each in join_sources([first])] == [values(each) for each in first]
    assert len(join_sources([Examples.of([]), Examples.of([])])) == 0


@pytest.mark.parametrize(
    ("weights", "prompt"),
    [
        ([0, 0, 0, 1, 1], 3),
        ([0, 1, 0, 0.5, 0], 3),
        ([0, 1, 1, 1, 1], 1),
        ([0, 0, 0, 0, 1], 4),
        ([0, 0, 0, 0, 0], 5),
        ([0, 1, 0, 1, 1], 3),
    ],
)
def test_the_prompt_is_what_comes_before_the_last_answer(weights, prompt):
    assert example(0, [5, 6, 7, 8, 9], weights).prompt.tolist() == [5, 6, 7, 8, 9][:prompt]


def test_counts_add_up_and_keep_the_first_notes():
    left = EncodeCounts(rows=5, kept=3, dropped_too_long=1, dropped_unreadable=1, dropped_pieces=4, notes=["a", "b"])
    right = EncodeCounts(rows=2, dropped_no_target=1, dropped_few_trained=1, tokens=7, notes=list("cdefgh"))
    both = left + right
    assert (left.dropped, right.dropped, both.dropped) == (2, 2, 4)
    assert (both.rows, both.kept, both.dropped_pieces, both.tokens) == (7, 3, 4, 7)
    assert both.notes == ["a", "b", "c", "d", "e"] and MOST_NOTES == 5
    assert left.notes == ["a", "b"], "adding changes neither"
    assert EncodeCounts(dropped_identical=1).dropped == 1
