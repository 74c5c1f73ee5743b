"""Windows of a stream: as many examples as are packed at a time, drawn from several sources by weight.

    sources -> rows shuffled in blocks -> drawn by weight -> encoded -> a window of examples, and the rows they make

Everything is a pure function of the seed and of how far each source was read (`State`).
"""

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from burnish.data.batches import Shard
from burnish.data.config import DataConfig
from burnish.data.examples import EncodeCounts, Encoded, Examples
from burnish.data.packing import Row, plan_rows
from burnish.data.parts import Part, unique_names
from burnish.data.rows import NumberedRow, RowEncoder, nothing_left
from burnish.errors import InputError

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer

_DRAWS = 4096  # drawn at a time


@dataclass
class Place:
    """How far a source has been read: whole passes, the first row of the block in use, rows of it given out.

    `useful` is whether any row of it was kept, by whichever process.
    """

    passes: int = 0
    start: int = 0
    used: int = 0
    ended: bool = False
    useful: bool = False


class _Reader:
    """One source's rows without end (or once), each block of them shuffled."""

    def __init__(self, number: int, part: Part, config: DataConfig) -> None:
        self._number, self._part, self._config = number, part, config
        self.restore(Place())

    def restore(self, place: Place) -> None:
        """Goes to a place it was at."""
        self.place = place
        self._rows: Iterator[NumberedRow] | None = None
        self._block: list[NumberedRow] | None = None

    def __next__(self) -> NumberedRow:
        place = self.place
        while not place.ended:
            if self._block is None:
                self._block = self._read()
            if place.used < len(self._block):
                place.used += 1
                return self._block[place.used - 1]
            if self._block:
                place.start, place.used = place.start + len(self._block), 0
            elif place.start == 0:
                raise InputError(f"{self._part.place} holds no records; docs/data.md says what one is")
            elif self._config.repeat:
                place.passes, place.start, self._rows = place.passes + 1, 0, None
            else:
                place.ended = True
            self._block = None
        raise StopIteration

    def _read(self) -> list[NumberedRow]:
        if self._rows is None:
            self._rows = self._part.rows(self.place.start)
        block = list(islice(self._rows, self._config.shuffle_buffer))
        seed = (self._config.seed, self._number, self.place.passes, self.place.start)
        return [block[i] for i in np.random.default_rng(seed).permutation(len(block))]


@dataclass
class State:
    """How many examples were drawn, how far each source was read, and what had become of its rows."""

    draws: int
    places: list[Place]
    counts: list[EncodeCounts]

    @classmethod
    def first(cls, sources: int) -> "State":
        """That of a stream nothing was read of."""
        return cls(0, [Place() for _ in range(sources)], [EncodeCounts() for _ in range(sources)])


class Window(NamedTuple):
    """Examples, the rows they make, and the state before and after they were drawn; no rows at the stream's end."""

    before: State
    after: State
    examples: Examples
    rows: list[Row]


class Windows:
    """One window after the other, each made while the one before is used up. See `StreamBatches`."""

    def __init__(self, parts: Sequence[Part], tokenizer: "Tokenizer", config: DataConfig, shard: Shard) -> None:
        self._config, self._shard = config, shard
        self._names = unique_names([part.name for part in parts])
        self._weights = np.array([part.weight or 1.0 for part in parts])
        self._encoders = [RowEncoder(tokenizer, config, part.form) for part in parts]
        self._readers = [_Reader(number, part, config) for number, part in enumerate(parts)]
        self._drawn: tuple[int, np.ndarray] = (-1, np.zeros(0))
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="burnish-data")
        self._ahead: Future[Window] | None = None
        self.restart(State.first(len(parts)))

    def restart(self, state: State) -> None:
        """Goes to where it was in this state."""
        if self._ahead is not None and not self._ahead.cancel():
            wait([self._ahead])  # it moves the readers
        self._ahead = None
        for reader, place in zip(self._readers, state.places, strict=True):
            reader.restore(copy.copy(place))
        self._draws, self._counts = state.draws, copy.deepcopy(state.counts)

    def __next__(self) -> Window:
        self._ahead = self._ahead or self._worker.submit(self._make)
        window = self._ahead.result()  # raises again at every call: the readers have moved on
        self._ahead = self._worker.submit(self._make) if window.rows else None
        return window

    def _make(self) -> Window:
        before = self._state()
        found: list[Encoded] = []
        while len(found) < self._config.lookahead:
            source = self._draw()
            if source is None:
                break
            found += self._next_of(source)
        examples = Examples.of(found)
        return Window(before, self._state(), examples, plan_rows(range(len(found)), examples.lengths, self._config))

    def _state(self) -> State:
        places = [copy.copy(reader.place) for reader in self._readers]
        return State(self._draws, places, copy.deepcopy(self._counts))

    def _next_of(self, source: int) -> list[Encoded]:
        """The examples of the source's next row, where it is this process's."""
        number = self._draws - 1
        row, place = next(self._readers[source], None), self._readers[source].place
        mine = number % self._shard.count == self._shard.index
        if (place.passes or place.ended) and not place.useful:
            raise InputError(f"{self._names[source]}: {nothing_left(self._counts[source], self._config)}")
        # Others' rows are looked at until one is useful, so that all processes find out the same at the same draw.
        if row is None or not (mine or not place.useful):
            return []
        encoded = self._encode(row, source, self._counts[source] if mine else EncodeCounts())
        place.useful = place.useful or bool(encoded)
        return [replace(each, example_id=number % 2**31, source=source) for each in encoded if mine]

    def _draw(self) -> int | None:
        """The source of the next example; None when all have ended."""
        alive = np.array([not reader.place.ended for reader in self._readers])
        if not alive.any():
            return None
        block, at = divmod(self._draws, _DRAWS)
        if self._drawn[0] != block:
            self._drawn = block, np.random.default_rng((self._config.seed, block)).random(_DRAWS)
        self._draws += 1
        share = np.cumsum(np.where(alive, self._weights, 0))
        return int(np.searchsorted(share, self._drawn[1][at] * share[-1], side="right"))

    def _encode(self, row: NumberedRow, source: int, counts: EncodeCounts) -> list[Encoded]:
        encoder = self._encoders[source]
        return [each for record in encoder.records([row], counts) for each in encoder.encode(record, counts)]
