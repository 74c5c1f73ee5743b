"""Batches of rows that are read as they are needed: files larger than memory, and mixtures of them.

    sources -> rows shuffled in blocks -> drawn by weight -> encoded -> packed in windows -> batches

Everything is a pure function of the seed and of how far each source was read, so the state is a few numbers: those at
the start of the window that is being used up, and how many of its rows have been given out. A restored iterator reads
that window's rows again.
"""

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from burnish.data.batches import Shard, check_made_from, order_options, row_length
from burnish.data.config import DataConfig
from burnish.data.examples import EncodeCounts, Encoded, Examples
from burnish.data.packing import Batch, Row, batch_arrays, plan_rows
from burnish.data.parts import Part, unique_names
from burnish.data.rows import NumberedRow, RowEncoder, nothing_left
from burnish.errors import InputError

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer

_DRAWS = 4096  # drawn at a time


@dataclass
class _Place:
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
        self.restore(_Place())

    def restore(self, place: _Place) -> None:
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
                raise InputError(f"{self._part.place} holds no records")
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
class _State:
    """Where the window in use begins, and what had become of the rows before it."""

    draws: int = 0
    places: list[_Place] = field(default_factory=list)
    counts: list[EncodeCounts] = field(default_factory=list)


class StreamBatches(grain.DatasetIterator[Batch]):
    """Training batches from sources that are read as they go. See `TrainBatches` for the rest.

    Args:
        parts: the sources; each has a weight, or there is one alone.
        batch_size: rows of an optimizer step, over all processes.
        config: `shuffle_buffer`, `repeat`, `lookahead` (examples packed at a time), and what `TrainBatches` reads.
        shard: which process this is. Draws are dealt out in turn, so a state is of so many processes.

    Raises:
        InputError: sources without weights; rows that cannot be read; a state taken over other data or options.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        tokenizer: "Tokenizer",
        batch_size: int,
        config: DataConfig,
        shard: Shard = Shard(),
    ) -> None:
        super().__init__()
        shard.check(batch_size)
        weights = [part.weight for part in parts]
        if len(parts) > 1 and any(weight is None for weight in weights):
            raise InputError("data.sources: a stream does not know how large they are; give each one a weight")
        if shard.count > 1 and not config.repeat:
            raise InputError("data.repeat=false: several processes would not end at the same step; set it to true")
        self._parts, self._batch_size, self._config, self._shard = parts, batch_size, config, shard
        self._names = unique_names([part.name for part in parts])
        self._weights = np.array([weight or 1.0 for weight in weights])
        self._encoders = [RowEncoder(tokenizer, config, part.form) for part in parts]
        self._readers = [_Reader(number, part, config) for number, part in enumerate(parts)]
        self._fingerprint = tokenizer.fingerprint
        self._drawn: tuple[int, np.ndarray] = (-1, np.zeros(0))
        self._restart(_State(0, [_Place() for _ in parts], [EncodeCounts() for _ in parts]), given=0)

    def _restart(self, state: _State, given: int) -> None:
        self._state = state
        for reader, place in zip(self._readers, state.places, strict=True):
            reader.restore(copy.copy(place))
        self._draws, self._counts = state.draws, copy.deepcopy(state.counts)
        self._given = given  # rows of the window that are in earlier batches
        self._window: tuple[Examples, list[Row]] | None = None

    @property
    def counts(self) -> EncodeCounts:
        """What became of the rows read so far, those of the window in use included."""
        return sum(self._counts, EncodeCounts())

    @property
    def source_counts(self) -> tuple[EncodeCounts, ...]:
        """The same for each source, where there are several."""
        return tuple(self._counts) if len(self._counts) > 1 else ()

    def __next__(self) -> Batch:
        parts: list[tuple[Examples, list[Row]]] = []
        wanted = self._batch_size // self._shard.count
        while wanted:
            if self._window is None:
                self._window = self._next_window()
            if self._given == len(self._window[1]):
                self._state, self._given = self._now(), 0
                self._window = self._next_window()
            examples, rows = self._window
            if not rows:
                break
            taken = rows[self._given : self._given + wanted]
            parts.append((examples, taken))
            self._given += len(taken)
            wanted -= len(taken)
        if not parts:
            raise StopIteration
        parts[-1] = (parts[-1][0], [*parts[-1][1], *([[]] * wanted)])
        alone = self._shard.count == 1
        length = (
            row_length([row for _, rows in parts for row in rows], self._config) if alone else self._config.max_length
        )
        made = [batch_arrays(examples, rows, length) for examples, rows in parts]
        return {name: np.concatenate([batch[name] for batch in made]) for name in made[0]}

    def _now(self) -> _State:
        places = [copy.copy(reader.place) for reader in self._readers]
        return _State(self._draws, places, copy.deepcopy(self._counts))

    def _next_window(self) -> tuple[Examples, list[Row]]:
        """As many examples as are packed at a time, and their rows; both empty when the sources are."""
        found: list[Encoded] = []
        while len(found) < self._config.lookahead:
            source = self._draw()
            if source is None:
                break
            number = self._draws - 1
            row, place = next(self._readers[source], None), self._readers[source].place
            mine = number % self._shard.count == self._shard.index
            # Others' rows are looked at until one is useful, so that all processes find out the same at the same draw.
            if row is not None and (mine or not place.useful):
                encoded = self._encode(row, source, self._counts[source] if mine else EncodeCounts())
                place.useful = place.useful or bool(encoded)
                found += [replace(each, example_id=number % 2**31, source=source) for each in encoded if mine]
            if (place.passes or place.ended) and not place.useful:
                raise InputError(f"{self._names[source]}: {nothing_left(self._counts[source], self._config)}")
        examples = Examples.of(found)
        return examples, plan_rows(range(len(found)), examples.lengths, self._config)

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

    @property
    def longest(self) -> int:
        """Slots of the longest rows there may be."""
        return self._config.max_length

    def get_state(self) -> dict[str, Any]:
        """A few numbers, JSON-able; see the module."""
        return {
            "draws": self._state.draws,
            "places": [asdict(place) for place in self._state.places],
            "counts": [asdict(counts) for counts in self._state.counts],
            "given": self._given,
            "made_from": self._made_from,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        check_made_from(state, self._made_from)
        places = [_Place(**place) for place in state["places"]]
        counts = [EncodeCounts(**each) for each in state["counts"]]
        self._restart(_State(state["draws"], places, counts), state["given"])

    @property
    def _made_from(self) -> dict[str, Any]:
        """Names and sizes stand for the content: a stream is too long to be read for its state."""
        described = [part.identity() for part in self._parts]
        return {
            "batch_size": self._batch_size,
            **order_options(self._config),
            **self._config.encoding(),
            "shuffle_buffer": self._config.shuffle_buffer,
            "repeat": self._config.repeat,
            "weights": self._weights.tolist(),
            "processes": self._shard.count,
            "tokenizer": self._fingerprint[:16],
            "data": hashlib.sha256(repr(described).encode()).hexdigest()[:16],
        }
