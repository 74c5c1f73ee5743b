"""A look at a data set before anything is trained on it: what became of each row, how long they are, how they pack.

Rows are read past the cache and one by one, so that every example is known by its place: "train.jsonl, line 3".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from burnish.data.batches import TrainBatches, efficiency
from burnish.data.config import DataConfig
from burnish.data.examples import EncodeCounts, Encoded, Examples
from burnish.data.formats import check_format
from burnish.data.parts import Part, unique_names
from burnish.data.records import Record
from burnish.data.rows import RowEncoder
from burnish.errors import InputError

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer

QUANTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_MOST_BINS = 12
_NO_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class SeenRow:
    """A row and what became of it.

    Attributes:
        place: "train.jsonl, line 3"; source: its source's number.
        record: what it says; None where it could not be read.
        examples: what is trained on; none where it is dropped.
        counts: the counters of this row alone.
        length: tokens of its longest example before cutting; 0 where it has none.
    """

    place: str
    source: int
    record: Record | None
    examples: tuple[Encoded, ...]
    counts: EncodeCounts
    length: int

    @property
    def whole(self) -> bool:
        """Whether all of it is trained on, uncut."""
        return bool(self.counts.kept and not self.counts.truncated and not self.counts.split)


@dataclass(frozen=True)
class Bin:
    """How many lengths are from `first` to `last` tokens, both included."""

    first: int
    last: int
    count: int


@dataclass(frozen=True)
class Packed:
    """An epoch's rows in batches.

    Attributes:
        rows: rows of batches; steps: batches.
        efficiency: real tokens over slots, as the recipe packs.
        padded: the same where each example had a row as long as the longest of its batch.
    """

    rows: int
    steps: int
    efficiency: float
    padded: float


@dataclass(frozen=True)
class Survey:
    """All that was seen.

    Attributes:
        names: of the sources.
        rows: in order, those that were dropped included.
        counts: of each source.
        unfinished: why the rest of a source could not be read, one line each.
        limited: how many rows of each source were looked at; None for all.
        examples: all examples, in order.
        packed: None where a source has no examples, which training refuses.
    """

    names: tuple[str, ...]
    rows: list[SeenRow]
    counts: list[EncodeCounts]
    unfinished: list[str]
    limited: int | None
    examples: Examples
    packed: Packed | None

    @property
    def total(self) -> EncodeCounts:
        """The counters of all sources."""
        return self.examples.counts

    @property
    def trained_share(self) -> float:
        """Trained tokens over tokens."""
        return self.total.trained_tokens / max(self.total.tokens, 1)


def survey(
    parts: Sequence[Part], tokenizer: "Tokenizer", config: DataConfig, batch_size: int, limit: int | None = None
) -> Survey:
    """Reads and encodes every row, or the first `limit` of each source; bad rows are kept and said, never refused.

    Raises:
        InputError: nothing at all can be read; or options that do not go together.
    """
    rows: list[SeenRow] = []
    counts, unfinished = [], []
    for number, part in enumerate(parts):
        check_format(part.form)
        found, problem = _read(part, number, tokenizer, config, limit)
        counts.append(sum((row.counts for row in found), EncodeCounts()))
        if not found:
            raise problem or InputError(f"{part.place} holds no records")
        rows += found
        unfinished += [str(problem)] if problem else []
    total = sum(counts, EncodeCounts())
    if total.dropped_unreadable == total.rows:
        raise InputError(f"none of the {total.rows} rows can be read; the first: {total.notes[0]}")
    examples = Examples.of((example for row in rows for example in row.examples), total)
    packed = _pack(examples, parts, config, batch_size) if all(each.examples for each in counts) else None
    names = unique_names([part.name for part in parts])
    return Survey(names, rows, counts, unfinished, limit, examples, packed)


def _read(
    part: Part, source: int, tokenizer: "Tokenizer", config: DataConfig, limit: int | None
) -> tuple[list[SeenRow], InputError | None]:
    """A source's rows, and why they end before the source does, if they do."""
    encoder = RowEncoder(tokenizer, config.model_copy(update={"bad_rows": "drop"}), part.form)
    endless = config.model_copy(update={"bad_rows": "drop", "max_length": _NO_LIMIT})
    uncut = RowEncoder(tokenizer, endless, part.form)
    rows: list[SeenRow] = []
    try:
        for numbered in islice(part.rows(), limit):
            counts, record, examples = EncodeCounts(), None, []
            for record in encoder.records([numbered], counts):  # one, or none
                examples = encoder.encode(record, counts)
            seen = examples
            if record is not None and (counts.truncated or counts.split or not counts.kept):
                seen = uncut.encode(record, EncodeCounts())
            length = max((len(example.tokens) for example in seen), default=0)
            mine = tuple(Encoded(each.example_id, each.tokens, each.weights, source) for each in examples)
            rows.append(SeenRow(numbered[1], source, record, mine, counts, length))
    except InputError as error:
        return rows, error
    return rows, None


def _pack(examples: Examples, parts: Sequence[Part], config: DataConfig, batch_size: int) -> Packed:
    weights = [part.weight for part in parts]
    plan = TrainBatches(examples, batch_size, config, weights=weights).plan(0)
    alone = TrainBatches(examples, batch_size, config.model_copy(update={"packing": "none"}), weights=weights).plan(0)
    lengths = examples.lengths
    used = slots = 0
    for step in range(alone.steps):
        batch = lengths[[piece.example for row in alone.batch_rows(step) for piece in row]]
        used, slots = used + int(batch.sum()), slots + int(batch.max()) * len(batch)
    return Packed(len(plan.rows), plan.steps, efficiency(plan, config), used / slots)


def quantiles(lengths: np.ndarray) -> dict[str, int]:
    """{"p0": the shortest, ..., "p50": the median, ..., "p100": the longest}; none of no lengths."""
    if not len(lengths):
        return {}
    found = np.percentile(lengths, QUANTILES, method="nearest").tolist()
    return {f"p{q}": int(value) for q, value in zip(QUANTILES, found, strict=True)}


def histogram(lengths: np.ndarray) -> list[Bin]:
    """Lengths counted in at most 12 bins of equal and round width, from the shortest's to the longest's."""
    if not len(lengths):
        return []
    low, high = int(lengths.min()), int(lengths.max())
    widths = (factor * 10**power for power in range(10) for factor in (1, 2, 5))
    width = next(width for width in widths if high // width - low // width < _MOST_BINS)
    counts = np.bincount(lengths // width - low // width).tolist()
    first = low // width * width
    return [Bin(first + at * width, first + (at + 1) * width - 1, count) for at, count in enumerate(counts)]
