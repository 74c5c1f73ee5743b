import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.data.encode import Encoded
from burnish.data.packing import batch_arrays, efficiency, pack


def example(example_id: int, tokens, loss_mask) -> Encoded:
    return Encoded(example_id, np.array(tokens, np.int32), np.array(loss_mask, bool))


@st.composite
def example_lists(draw, max_length: int = 12):
    lengths = draw(st.lists(st.integers(1, max_length), min_size=1, max_size=30))
    # Token 0 is drawn often: it is also what padding is filled with, and must not be taken for it.
    return [
        example(
            100 + i,
            draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)),
            [False, *draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1))],
        )
        for i, n in enumerate(lengths)
    ]


def unpack(batch):
    """The examples of a batch, read off slot by slot: {example id: (tokens, loss mask)}."""
    found = {}
    for row in range(len(batch["tokens"])):
        segments = batch["segment_ids"][row].tolist()
        for segment in range(1, max(segments) + 1):
            slots = [t for t, s in enumerate(segments) if s == segment]
            assert slots == list(range(slots[0], slots[-1] + 1)), "a segment is contiguous"
            assert batch["positions"][row][slots].tolist() == list(range(len(slots))), "positions restart at 0"
            (example_id,) = set(batch["example_ids"][row][slots].tolist())
            tokens = batch["tokens"][row][slots].tolist()
            weights = batch["weights"][row][slots].tolist()
            assert batch["targets"][row][slots].tolist() == [*tokens[1:], 0], "targets stay in their segment"
            assert weights[-1] == 0, "the last token of a segment predicts nothing"
            assert example_id not in found, "an example is seen once"
            found[example_id] = (tokens, [False, *(w == 1 for w in weights[:-1])])
    return found


@given(example_lists())
def test_every_token_of_every_example_appears_exactly_once(examples):
    rows = pack([len(e.tokens) for e in examples], 12)
    batch = batch_arrays(examples, [*rows, []], 12)
    assert unpack(batch) == {e.example_id: (e.tokens.tolist(), e.loss_mask.tolist()) for e in examples}
    padding = batch["segment_ids"] == 0
    assert (~padding).sum() == sum(len(e.tokens) for e in examples)
    for name in ("tokens", "targets", "weights", "positions"):
        assert not batch[name][padding].any(), name
    assert (batch["example_ids"][padding] == -1).all()
    assert {name: array.dtype.name for name, array in batch.items()} == {
        "tokens": "int32",
        "targets": "int32",
        "weights": "float32",
        "segment_ids": "int32",
        "positions": "int32",
        "example_ids": "int32",
    }


@given(example_lists())
def test_packed_and_padded_hold_the_same(examples):
    packed = batch_arrays(examples, pack([len(e.tokens) for e in examples], 12), 12)
    padded = batch_arrays(examples, [[i] for i in range(len(examples))], 12)
    assert unpack(packed) == unpack(padded)
    assert packed["weights"].sum() == padded["weights"].sum()
    assert efficiency(packed) >= efficiency(padded)


def test_hand_values():
    # A first token marked as learned is still predicted by nothing, least of all by the example before.
    examples = [example(7, [5, 6, 2], [0, 1, 1]), example(9, [2, 2], [1, 1])]
    batch = batch_arrays(examples, [[0, 1], [], [1]], 6)
    assert batch["tokens"].tolist() == [[5, 6, 2, 2, 2, 0], [0] * 6, [2, 2, 0, 0, 0, 0]]
    assert batch["targets"].tolist() == [[6, 2, 0, 2, 0, 0], [0] * 6, [2, 0, 0, 0, 0, 0]]
    assert batch["weights"].tolist() == [[1, 1, 0, 1, 0, 0], [0] * 6, [1, 0, 0, 0, 0, 0]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 0], [0] * 6, [1, 1, 0, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 0], [0] * 6, [0, 1, 0, 0, 0, 0]]
    assert batch["example_ids"].tolist() == [[7, 7, 7, 9, 9, -1], [-1] * 6, [9, 9, -1, -1, -1, -1]]
    assert efficiency(batch) == pytest.approx(7 / 18)


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(1, 8))
def test_a_plan_places_each_example_once_where_it_fits(lengths, open_rows):
    rows = pack(lengths, 20, open_rows)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[i] for i in row) <= 20 for row in rows)
    assert rows == pack(np.array(lengths, dtype=np.int64), 20, open_rows)


def test_the_best_fit_is_taken():
    # After 7 and 5 the rows have 3 and 5 free: 3 goes to the first, though the second would hold it too.
    assert pack([7, 5, 3, 5], 10) == [[0, 2], [1, 3]]
    # Beyond one open row the fuller one is closed, so the last 3 finds no room.
    assert pack([7, 5, 3], 10, open_rows=1) == [[0], [1, 2]]


def test_a_length_that_fits_no_row_is_refused():
    for length in (0, 11):
        with pytest.raises(ValueError, match=f"example 1 has {length} tokens"):
            pack([3, length], 10)


def test_packing_is_tight_and_fast():
    lengths = np.random.default_rng(0).integers(20, 400, 20_000)
    started = time.perf_counter()
    rows = pack(lengths, 1024)
    assert time.perf_counter() - started < 2  # about 0.03 s; a scan over all open rows takes minutes
    assert lengths.sum() / (1024 * len(rows)) > 0.97


@settings(max_examples=20)
@given(st.integers(1, 5))
def test_a_batch_of_empty_rows_is_all_padding(rows):
    batch = batch_arrays([], [[]] * rows, 4)
    assert batch["segment_ids"].shape == (rows, 4)
    assert not batch["segment_ids"].any() and not batch["weights"].any()
