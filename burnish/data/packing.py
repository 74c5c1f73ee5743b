"""Which examples share a row, and the rows as arrays.

    lengths 5 3 4 2, row length 8          segment_ids  1 1 1 1 1 2 2 2      tokens of examples 0 and 1
    plan: [[0, 1], [2, 3]]                              1 1 1 1 2 2 0 0      2 and 3, then padding

A batch is a dict of arrays [rows, length]: `tokens`, `targets`, `segment_ids`, `positions`, `example_ids`
int32 and `weights` float32. `targets[t]` is the next token of the same segment and `weights[t]` the loss
weight of predicting it; both are 0 at a segment's last token and on padding. Segments count from 1 in each
row, 0 is padding; positions restart at 0 in each segment; `example_ids` is -1 on padding. Nothing is ever
told from a token's id.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from burnish.data.encode import Encoded

Batch = dict[str, np.ndarray]

# Rows kept open for a later example to fill. 1,024 packs within 1 % of sorting everything by length, and
# bounds both the time an example takes and how far it can move from its place in the shuffled order.
OPEN_ROWS = 1024


def pack(lengths: Sequence[int] | np.ndarray, row_length: int, open_rows: int = OPEN_ROWS) -> list[list[int]]:
    """Best-fit packing: each example goes to the open row it leaves the least space in, else to a new row.

    Args:
        lengths: tokens of each example, each at most `row_length`.
        row_length: tokens of a row.
        open_rows: at most this many rows stay open; beyond it the fullest is closed.

    Returns:
        For each row the indices of its examples, in the order they came. Ties go to the older row, so the
        plan is a pure function of the arguments.

    Reference: Johnson et al., "Worst-Case Performance Bounds for Simple One-Dimensional Packing
    Algorithms", SIAM Journal on Computing, 1974.
    """
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (free tokens, row) of the open rows, ascending
    for index, length in enumerate(np.asarray(lengths).tolist()):
        if not 0 < length <= row_length:
            raise ValueError(f"example {index} has {length} tokens; a row holds 1 to {row_length}")
        found = bisect_left(spaces, (length, -1))
        if found < len(spaces):
            space, row = spaces.pop(found)
        else:
            space, row = row_length, len(rows)
            rows.append([])
        rows[row].append(index)
        if space > length:
            insort(spaces, (space - length, row))
        if len(spaces) > open_rows:
            spaces.pop(0)
    return rows


def batch_arrays(examples: Sequence[Encoded], rows: Sequence[Sequence[int]], row_length: int) -> Batch:
    """The arrays of some rows of a plan, each [rows, row_length]; a row without examples is padding."""
    batch: Batch = {
        name: np.full((len(rows), row_length), fill, dtype=dtype)
        for name, dtype, fill in (
            ("tokens", np.int32, 0),
            ("targets", np.int32, 0),
            ("weights", np.float32, 0),
            ("segment_ids", np.int32, 0),
            ("positions", np.int32, 0),
            ("example_ids", np.int32, -1),
        )
    }
    chosen = [examples[index] for row in rows for index in row]
    if not chosen:
        return batch
    lengths = np.array([len(example.tokens) for example in chosen])
    # Each example's first slot in the flattened batch, then each token's.
    starts = np.concatenate(
        [number * row_length + _offsets(lengths_of_row) for number, lengths_of_row in _by_row(lengths, rows)]
    )
    positions = np.arange(lengths.sum()) - np.repeat(_offsets(lengths), lengths)
    slots = np.repeat(starts, lengths) + positions
    tokens = np.concatenate([example.tokens for example in chosen])
    loss_mask = np.concatenate([example.loss_mask for example in chosen])
    followed = np.append(positions[1:] > 0, False)  # the next token belongs to the same example
    values = {
        "tokens": tokens,
        "targets": np.where(followed, np.roll(tokens, -1), 0),
        "weights": np.where(followed, np.roll(loss_mask, -1), False),
        "segment_ids": np.repeat(np.concatenate([np.arange(len(row)) + 1 for row in rows]), lengths),
        "positions": positions,
        "example_ids": np.repeat([example.example_id for example in chosen], lengths),
    }
    for name, value in values.items():
        batch[name].reshape(-1)[slots] = value
    return batch


def efficiency(batch: Batch) -> float:
    """Real tokens per slot, 0 to 1."""
    return float((batch["segment_ids"] > 0).mean())


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """Where each of several pieces laid end to end starts."""
    return np.cumsum(lengths) - lengths


def _by_row(lengths: np.ndarray, rows: Sequence[Sequence[int]]) -> list[tuple[int, np.ndarray]]:
    """The lengths of each row's examples, with the row's number."""
    ends = np.cumsum([len(row) for row in rows])
    return list(enumerate(np.split(lengths, ends[:-1])))
