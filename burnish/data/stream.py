"""Batches of rows that are read as they are needed: files larger than memory, and mixtures of them.

The state is a few numbers: those at the start of the window that is being used up (`burnish.data.windows`), and how
many of its rows have been given out. A restored iterator reads that window's rows again.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from burnish.data.batches import Shard, check_made_from, order_options, row_length
from burnish.data.config import DataConfig
from burnish.data.examples import EncodeCounts, Examples
from burnish.data.packing import Batch, Row, batch_arrays
from burnish.data.parts import Part
from burnish.data.windows import Place, State, Window, Windows
from burnish.errors import InputError

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer


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
        self._fingerprint = tokenizer.fingerprint
        self._windows = Windows(parts, tokenizer, config, shard)
        self._state = State.first(len(parts))  # at the start of the window in use
        self._given = 0  # rows of it that are in earlier batches
        self._window: Window | None = None

    @property
    def counts(self) -> EncodeCounts:
        """What became of the rows read so far, those of the window in use included."""
        return sum(self._counts, EncodeCounts())

    @property
    def source_counts(self) -> tuple[EncodeCounts, ...]:
        """The same for each source, where there are several."""
        return tuple(self._counts) if len(self._counts) > 1 else ()

    @property
    def _counts(self) -> list[EncodeCounts]:
        return self._state.counts if self._window is None else self._window.after.counts

    def __next__(self) -> Batch:
        parts: list[tuple[Examples, list[Row]]] = []
        wanted = self._batch_size // self._shard.count
        while wanted:
            if self._window is None:
                self._window = next(self._windows)
            if self._given == len(self._window.rows):
                self._window = next(self._windows)
                self._state, self._given = self._window.before, 0
            if not self._window.rows:
                break
            taken = self._window.rows[self._given : self._given + wanted]
            parts.append((self._window.examples, taken))
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
        places = [Place(**place) for place in state["places"]]
        counts = [EncodeCounts(**each) for each in state["counts"]]
        self._state = State(state["draws"], places, counts)
        self._windows.restart(self._state)
        self._given, self._window = state["given"], None

    @property
    def _made_from(self) -> dict[str, Any]:
        """Names and sizes stand for the content: a stream is too long to be read for its state."""
        described = repr([part.identity() for part in self._parts])
        return {
            "batch_size": self._batch_size,
            **order_options(self._config),
            **self._config.encoding(),
            "shuffle_buffer": self._config.shuffle_buffer,
            "repeat": self._config.repeat,
            "weights": [part.weight for part in self._parts],
            "processes": self._shard.count,
            "tokenizer": self._fingerprint[:16],
            "data": described if len(described) < 200 else hashlib.sha256(described.encode()).hexdigest()[:16],
        }
