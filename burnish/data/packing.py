"""Which examples share a row, and the rows as arrays.

    lengths 5 3 4 2, row length 8          segment_ids  1 1 1 1 1 2 2 2      tokens of examples 0 and 1
    plan: [[0, 1], [2, 3]]                              1 1 1 1 2 2 0 0      2 and 3, then padding

A batch is a dict of arrays [rows, length]: `tokens`, `targets`, `segment_ids`, `positions`, `example_ids`,
`source_ids` int32 and `weights` float32. `targets[t]` is the next token of the same segment and `weights[t]` the loss
weight of predicting it; both are 0 at a segment's last token and on padding. Segments count from 1 in each
row, 0 is padding; positions restart at 0 in each segment; `example_ids` and `source_ids` are -1 on padding. Nothing
is ever told from a token's id.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from burnish.data.config import DataConfig
from burnish.data.examples import Examples

Batch = dict[str, np.ndarray]


class Piece(NamedTuple):
    """Tokens `start` to `end` of an example (an index into the examples)."""

    example: int
    start: int
    end: int


Row = list[Piece]


def plan_rows(order: Iterable[int], lengths: np.ndarray, config: DataConfig) -> list[Row]:
    """Lays examples in rows of `config.max_length` tokens, in the way `config.packing` names.

    Args:
        order: indices of examples, in the order they come.
        lengths: tokens of each example, by index.
    """
    order = list(order)
    if config.packing == "none":
        return [[Piece(index, 0, int(lengths[index]))] for index in order]
    if config.packing == "concat":
        return _concatenate(order, lengths, config.max_length, config.max_segments)
    plan = pack(lengths[order], config.max_length, config.lookahead, config.max_segments, config.packing == "first_fit")
    return [[Piece(order[place], 0, int(lengths[order[place]])) for place in row] for row in plan]


def pack(
    lengths: Sequence[int] | np.ndarray,
    row_length: int,
    open_rows: int = 1024,
    max_segments: int | None = None,
    first_fit: bool = False,
) -> list[list[int]]:
    """Best-fit packing: each example goes to the open row it leaves the least space in, else to a new row.

    Args:
        lengths: tokens of each example, each at most `row_length`.
        row_length: tokens of a row.
        open_rows: at most this many rows stay open; beyond it the fullest is closed (first-fit: the oldest). 1,024
            pack within 1 % of sorting everything by length, and bound both the time an example takes and how far it
            can move from its place in the shuffled order.
        max_segments: most examples of a row.
        first_fit: take the oldest open row with room instead of the fullest.

    Returns:
        For each row the indices of its examples, in the order they came. Ties go to the older row, so the
        plan is a pure function of the arguments.

    Reference: Johnson et al., "Worst-Case Performance Bounds for Simple One-Dimensional Packing
    Algorithms", SIAM Journal on Computing, 1974.
    """
    rows: list[list[int]] = []
    # (free tokens, row) ascending for best fit; in order of age for first fit.
    spaces: list[tuple[int, int]] = []
    for index, length in enumerate(np.asarray(lengths).tolist()):
        if not 0 < length <= row_length:
            raise ValueError(f"example {index} has {length} tokens; a row holds 1 to {row_length}")
        if first_fit:
            found = next((at for at, (space, _) in enumerate(spaces) if space >= length), len(spaces))
        else:
            found = bisect_left(spaces, (length, -1))
        if found < len(spaces):
            space, row = spaces.pop(found)
        else:
            space, row = row_length, len(rows)
            rows.append([])
        rows[row].append(index)
        if space > length and (max_segments is None or len(rows[row]) < max_segments):
            left = (space - length, row)
            if first_fit:
                insort(spaces, left, key=lambda each: each[1])
            else:
                insort(spaces, left)
        if len(spaces) > open_rows:
            spaces.pop(0)
    return rows


def _concatenate(order: Sequence[int], lengths: np.ndarray, row_length: int, max_segments: int | None) -> list[Row]:
    """Rows filled to the last slot; an example that is cut goes on in the next row.

    It goes on with the last token of its first part, so that every token is predicted once. One token alone at the end
    of a row would predict nothing: the slot stays empty.
    """
    rows: list[Row] = [[]]
    space = row_length
    for index in order:
        start, end = 0, int(lengths[index])
        while True:
            if space < 2 or len(rows[-1]) == max_segments:
                rows.append([])
                space = row_length
            taken = min(space, end - start)
            rows[-1].append(Piece(index, start, start + taken))
            space -= taken
            if start + taken == end:
                break
            start += taken - 1
    return rows if rows[0] else []


def batch_arrays(examples: Examples, rows: Sequence[Row], row_length: int) -> Batch:
    """The arrays of some rows of a plan, each [rows, row_length]; a row without examples is padding."""
    # Every row as its pieces, and what is left of it: (example or -1, first token, length, segment).
    laid: list[tuple[int, int, int, int]] = []
    for row in rows:
        laid += [(piece.example, piece.start, piece.end - piece.start, at) for at, piece in enumerate(row, start=1)]
        laid.append((-1, 0, row_length - sum(piece.end - piece.start for piece in row), 0))
    example, start, length, segment = np.array(laid, np.int64).reshape(-1, 4).T
    real = example >= 0
    inside = np.repeat(real, length)
    positions = np.arange(len(inside)) - np.repeat(np.cumsum(length) - length, length)
    positions[~inside] = 0
    followed = np.append(positions[1:] > 0, False)  # the next token belongs to the same piece
    if real.any():
        ids, sources = examples.ids[example], examples.sources[example]
        found = np.repeat(np.where(real, examples.starts[example] + start, 0), length) + positions
        after = np.where(followed, found + 1, 0)
        tokens, targets, weights = examples.tokens[found], examples.tokens[after], examples.weights[after]
    else:
        ids = sources = example
        tokens = targets = weights = positions
    values = {
        "tokens": (np.where(inside, tokens, 0), np.int32),
        "targets": (np.where(followed, targets, 0), np.int32),
        "weights": (np.where(followed, weights, 0), np.float32),
        "segment_ids": (np.repeat(segment, length), np.int32),
        "positions": (positions, np.int32),
        "example_ids": (np.repeat(np.where(real, ids, -1), length), np.int32),
        "source_ids": (np.repeat(np.where(real, sources, -1), length), np.int32),
    }
    return {name: value.astype(dtype).reshape(len(rows), row_length) for name, (value, dtype) in values.items()}
