import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.data.config import DataConfig
from burnish.data.examples import Encoded, Examples
from burnish.data.packing import Piece, batch_arrays, pack, plan_rows

ROW = 12


def example(example_id: int, tokens, weights, source: int = 0) -> Encoded:
    return Encoded(example_id, np.array(tokens, np.int32), np.array(weights, np.float32), source)


@st.composite
def stores(draw, longest: int = ROW):
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=20))
    # Token 0 is drawn often: it is also what padding is filled with, and must not be taken for it.
    return Examples.of(
        example(
            draw(st.integers(0, 2**31 - 1)),
            draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)),
            [0, *draw(st.lists(st.sampled_from([0, 0.5, 1, 2]), min_size=n - 1, max_size=n - 1))],
            draw(st.integers(0, 3)),
        )
        for n in lengths
    )


# Plans


def pack_slowly(lengths, row_length, open_rows, max_segments, first_fit):
    """The same by looking at every row for every example."""
    rows, closed = [], set()

    def space(row):
        return row_length - sum(lengths[i] for i in rows[row])

    for i, length in enumerate(lengths):
        fitting = [row for row in range(len(rows)) if row not in closed and space(row) >= length]
        if not fitting:
            rows.append([])
            fitting = [len(rows) - 1]
        chosen = min(fitting) if first_fit else min(fitting, key=lambda row: (space(row), row))
        rows[chosen].append(i)
        if space(chosen) == 0 or len(rows[chosen]) == max_segments:
            closed.add(chosen)
        still_open = [row for row in range(len(rows)) if row not in closed]
        if len(still_open) > open_rows:
            closed.add(min(still_open) if first_fit else min(still_open, key=lambda row: (space(row), row)))
    return rows


@given(
    st.lists(st.integers(1, 20), max_size=60),
    st.integers(1, 8) | st.just(1024),
    st.none() | st.integers(1, 4),
    st.booleans(),
)
def test_a_plan_is_what_looking_at_every_row_gives(lengths, open_rows, max_segments, first_fit):
    rows = pack(np.array(lengths, np.int64), 20, open_rows, max_segments, first_fit)
    assert rows == pack_slowly(lengths, 20, open_rows, max_segments, first_fit)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[i] for i in row) <= 20 for row in rows)
    assert all(row == sorted(row) and len(row) <= (max_segments or len(row)) for row in rows)


def test_best_and_first_fit_by_hand():
    # After 7 and 5 the rows have 3 and 5 free: 3 goes to the first, though the second would hold it too.
    assert pack([7, 5, 3, 5], 10) == [[0, 2], [1, 3]]
    # Rows with 6 and 3 free: the best fit for 3 is the second, the first that fits is the first.
    assert pack([4, 7, 3, 6], 10) == [[0, 3], [1, 2]]
    assert pack([4, 7, 3, 6], 10, first_fit=True) == [[0, 2], [1], [3]]
    # Beyond one open row best fit closes the fuller, so the last 3 finds no room there; first fit closes the older.
    assert pack([7, 5, 3], 10, open_rows=1) == [[0], [1, 2]]
    assert pack([2, 9, 1, 1], 10, open_rows=1, first_fit=True) == [[0], [1, 2], [3]]
    assert pack([2, 2, 2, 2], 10, max_segments=3) == [[0, 1, 2], [3]]


def test_a_length_that_fits_no_row_is_refused():
    for length in (0, 11):
        with pytest.raises(ValueError, match=f"example 1 has {length} tokens"):
            pack([3, length], 10)


def test_packing_is_tight_and_fast():
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 400, 20_000)
    assert lengths.sum() / (1024 * len(pack(lengths, 1024))) > 0.97
    tiny = rng.integers(2, 40, 100_000)
    started = time.process_time()
    plan_rows(range(100_000), tiny, DataConfig(max_length=1024))
    assert time.process_time() - started < 1  # about 0.2 s


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"packing": "none"}, [[(2, 0, 5)], [(0, 0, 3)], [(1, 0, 4)], [(3, 0, 6)]]),
        ({"packing": "best_fit"}, [[(2, 0, 5), (0, 0, 3)], [(1, 0, 4)], [(3, 0, 6)]]),
        ({"packing": "best_fit", "max_segments": 1}, [[(2, 0, 5)], [(0, 0, 3)], [(1, 0, 4)], [(3, 0, 6)]]),
        ({"packing": "concat"}, [[(2, 0, 5), (0, 0, 3)], [(1, 0, 4), (3, 0, 4)], [(3, 3, 6)]]),
        ({"packing": "concat", "max_segments": 1}, [[(2, 0, 5)], [(0, 0, 3)], [(1, 0, 4)], [(3, 0, 6)]]),
    ],
)
def test_the_config_chooses_the_plan(options, expected):
    lengths = np.array([3, 4, 5, 6])
    assert plan_rows(iter([2, 0, 1, 3]), lengths, DataConfig(max_length=8, **options)) == expected
    assert plan_rows([], lengths, DataConfig(max_length=8, **options)) == []


def test_lookahead_and_first_fit_reach_the_plan():
    lengths = np.array([4, 7, 3, 6])

    def examples_of(**options):
        rows = plan_rows(range(4), lengths, DataConfig(max_length=10, **options))
        return [[piece.example for piece in row] for row in rows]

    assert examples_of() == [[0, 3], [1, 2]]
    assert examples_of(packing="first_fit") == [[0, 2], [1], [3]]
    assert examples_of(lookahead=1) == [[0, 2], [1], [3]]


# Concatenation


@given(
    st.lists(st.integers(2, 30), min_size=1, max_size=20),
    st.integers(2, 12),
    st.none() | st.integers(1, 3),
    st.randoms(use_true_random=False),
)
def test_concatenated_documents_lose_nothing_and_predict_every_token_once(lengths, row_length, max_segments, random):
    order = list(range(len(lengths)))
    random.shuffle(order)
    config = DataConfig(max_length=row_length, packing="concat", max_segments=max_segments)
    rows = plan_rows(order, np.array(lengths), config)
    pieces = [piece for row in rows for piece in row]
    assert list(dict.fromkeys(piece.example for piece in pieces)) == order
    predicted = Counter((piece.example, at) for piece in pieces for at in range(piece.start + 1, piece.end))
    assert predicted == Counter((i, at) for i, n in enumerate(lengths) for at in range(1, n))
    assert all(piece.end - piece.start >= 2 for piece in pieces), "one token alone predicts nothing"
    used = [sum(piece.end - piece.start for piece in row) for row in rows]
    assert max(used) <= row_length and max(map(len, rows)) <= (max_segments or 99)
    assert all(row_length - n < 2 or len(row) == max_segments for n, row in zip(used[:-1], rows, strict=False))

    # The documents again, read off the arrays: a row goes on with the last token of the one before.
    first = np.cumsum([0, *lengths])
    store = Examples.of(example(i, first[i] + np.arange(n), [0] + [1] * (n - 1)) for i, n in enumerate(lengths))
    batch = batch_arrays(store, rows, row_length)
    documents: dict[int, list[int]] = {}
    for tokens, segments, example_ids in zip(batch["tokens"], batch["segment_ids"], batch["example_ids"], strict=True):
        for segment in range(1, segments.max() + 1):
            slots = segments == segment
            document = documents.setdefault(int(example_ids[slots][0]), [])
            part = tokens[slots].tolist()
            assert not document or document[-1] == part[0]
            document += part[bool(document) :]
    assert documents == {i: list(range(first[i], first[i + 1])) for i in range(len(lengths))}
    assert sorted(batch["targets"][batch["weights"] > 0]) == sorted(set(range(first[-1])) - set(first[:-1]))


# Arrays


def arrays_slowly(examples, rows, row_length):
    """The same slot by slot."""
    names = ("tokens", "targets", "weights", "segment_ids", "positions", "example_ids", "source_ids")
    batch = {name: [[-1 if name in names[-2:] else 0] * row_length for _ in rows] for name in names}
    for r, row in enumerate(rows):
        slot = 0
        for segment, (index, start, end) in enumerate(row, start=1):
            one = examples[index]
            for at in range(start, end):
                batch["tokens"][r][slot] = int(one.tokens[at])
                batch["segment_ids"][r][slot] = segment
                batch["positions"][r][slot] = at - start
                batch["example_ids"][r][slot] = one.example_id
                batch["source_ids"][r][slot] = one.source
                if at + 1 < end:
                    batch["targets"][r][slot] = int(one.tokens[at + 1])
                    batch["weights"][r][slot] = float(one.weights[at + 1])
                slot += 1
    return batch


@st.composite
def rows_of_pieces(draw):
    examples = draw(stores())
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        row, space = [], ROW
        for index in draw(st.lists(st.integers(0, len(examples) - 1), max_size=5)):
            length = int(examples.lengths[index])
            start = draw(st.integers(0, length - 1))
            end = draw(st.integers(start + 1, length))
            if end - start <= space:
                row.append(Piece(index, start, end))
                space -= end - start
        rows.append(row)
    return examples, rows


@given(rows_of_pieces())
def test_arrays_are_what_filling_them_slot_by_slot_gives(case):
    examples, rows = case
    batch = batch_arrays(examples, rows, ROW)
    assert {name: array.tolist() for name, array in batch.items()} == arrays_slowly(examples, rows, ROW)
    assert {name: array.dtype.name for name, array in batch.items()} == {
        **dict.fromkeys(("tokens", "targets", "segment_ids", "positions", "example_ids", "source_ids"), "int32"),
        "weights": "float32",
    }


def unpack(batch):
    """The examples of a batch: (example id, source, tokens, weights), sorted."""
    found = []
    for row in range(len(batch["tokens"])):
        segments = batch["segment_ids"][row]
        for segment in range(1, segments.max() + 1):
            slots = np.flatnonzero(segments == segment)
            assert slots.tolist() == list(range(slots[0], slots[-1] + 1)), "a segment is contiguous"
            assert batch["positions"][row][slots].tolist() == list(range(len(slots))), "positions restart at 0"
            assert batch["weights"][row][slots[-1]] == 0, "the last token of a segment predicts nothing"
            (example_id,), (source,) = (set(batch[name][row][slots].tolist()) for name in ("example_ids", "source_ids"))
            weights = [0, *batch["weights"][row][slots[:-1]].tolist()]
            found.append((example_id, source, batch["tokens"][row][slots].tolist(), weights))
    return sorted(found)


@given(stores(), st.sampled_from(["best_fit", "first_fit", "none"]))
def test_every_token_of_every_example_appears_exactly_once(examples, packing):
    rows = plan_rows(range(len(examples)), examples.lengths, DataConfig(max_length=ROW, packing=packing))
    batch = batch_arrays(examples, [*rows, []], ROW)
    assert unpack(batch) == sorted((e.example_id, e.source, e.tokens.tolist(), e.weights.tolist()) for e in examples)
    padding = batch["segment_ids"] == 0
    assert (~padding).sum() == examples.lengths.sum() and padding[-1].all()
    for name in ("tokens", "targets", "weights", "positions"):
        assert not batch[name][padding].any(), name
    assert (batch["example_ids"][padding] == -1).all() and (batch["source_ids"][padding] == -1).all()


def test_hand_values():
    # A first token marked as learned is still predicted by nothing, least of all by the example before.
    examples = Examples.of([example(7, [5, 6, 2], [0, 1, 0.5], source=1), example(9, [2, 2], [1, 1])])
    batch = batch_arrays(examples, [[Piece(0, 0, 3), Piece(1, 0, 2)], [], [Piece(0, 1, 3)]], 6)
    assert batch["tokens"].tolist() == [[5, 6, 2, 2, 2, 0], [0] * 6, [6, 2, 0, 0, 0, 0]]
    assert batch["targets"].tolist() == [[6, 2, 0, 2, 0, 0], [0] * 6, [2, 0, 0, 0, 0, 0]]
    assert batch["weights"].tolist() == [[1, 0.5, 0, 1, 0, 0], [0] * 6, [0.5, 0, 0, 0, 0, 0]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 0], [0] * 6, [1, 1, 0, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 0], [0] * 6, [0, 1, 0, 0, 0, 0]]
    assert batch["example_ids"].tolist() == [[7, 7, 7, 9, 9, -1], [-1] * 6, [7, 7, -1, -1, -1, -1]]
    assert batch["source_ids"].tolist() == [[1, 1, 1, 0, 0, -1], [-1] * 6, [1, 1, -1, -1, -1, -1]]


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_rows_without_examples_are_all_padding(rows):
    batch = batch_arrays(Examples.of([]), [[]] * rows, 4)
    assert all(array.shape == (rows, 4) for array in batch.values())
    assert not batch["segment_ids"].any() and not batch["weights"].any() and (batch["source_ids"] == -1).all()
