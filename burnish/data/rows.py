"""Rows -> examples, each row counted: what becomes of it is one of the numbers of `EncodeCounts`."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish.data.config import DataConfig, RowFormat
from burnish.data.cut import cut
from burnish.data.encode import Encoder
from burnish.data.examples import MOST_NOTES, EncodeCounts, Encoded, Examples
from burnish.data.formats import DroppedRow, read_row
from burnish.data.records import ChatRecord, Record, TextRecord
from burnish.errors import InputError

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer

NumberedRow = tuple[int, str, Mapping[str, Any] | Record | InputError]
"""A row's number in its source, what errors call it, and the row, the record it was made, or what is wrong with it."""


class RowEncoder:
    """Reads and encodes rows, and counts what it does not keep.

    With `config.bad_rows` "refuse", a row that cannot be read or encoded raises InputError; with "drop" it is counted.
    """

    def __init__(self, tokenizer: "Tokenizer", config: DataConfig, form: RowFormat) -> None:
        self._encoder = Encoder(tokenizer, config)
        # Some call the opening of a turn their BOS (SmolLM2): that is none which every text begins with.
        tokenizer = self._encoder.tokenizer
        begins = tokenizer.adds_bos or "bos_token" in (tokenizer.chat_template or "")
        self._bos_id = tokenizer.bos_id if begins else None
        self._config, self._form = config, form
        special = [tokenizer.backend.id_to_token(id) or "" for id in tokenizer.special_ids]
        self._special = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    def records(self, rows: Iterable[NumberedRow], counts: EncodeCounts) -> Iterator[Record]:
        """The records of rows; those that are none are counted in `counts`."""
        for number, place, row in rows:
            try:
                if isinstance(row, InputError):
                    raise row
                yield row if isinstance(row, Record) else read_row(row, number, place, self._form)
            except InputError as error:
                counts.rows += 1
                self._drop(error, counts)

    def encode(self, record: Record, counts: EncodeCounts) -> list[Encoded]:
        """The examples of one record, none longer than a row of a batch."""
        counts.rows += 1
        try:
            if self._config.packing == "concat" and not (isinstance(record, TextRecord) and record.raw):
                raise InputError(
                    f"{record.place}: data.packing=concat cuts rows anywhere, so it is for rows of `text` alone; "
                    "set data.packing=best_fit"
                )
            wholes = self._encoder.encode(record)
        except InputError as error:
            self._drop(error, counts)
            return []
        concat = self._config.packing == "concat"
        cuts = [[whole] if concat else cut(whole, self._config, self._bos_id) for whole in wholes]
        pieces = [piece for made in cuts for piece in made]
        trained = [int(np.count_nonzero(piece.weights)) for piece in pieces]
        kept = [piece for piece, n in zip(pieces, trained, strict=True) if n >= self._config.min_trained_tokens]
        if not kept:
            if wholes and not pieces:
                counts.dropped_too_long += 1
            elif any(trained):
                counts.dropped_few_trained += 1
            else:
                counts.dropped_no_target += 1
            return []
        counts.kept += 1
        counts.examples += len(kept)
        counts.dropped_pieces += len(pieces) - len(kept) + cuts.count([])
        counts.split_turns += len(wholes) > 1
        counts.special_in_text += any(self._special.search(text) for text in texts_of(record))
        if len(pieces) > len(wholes):
            counts.split += 1
        elif any(made and len(made[0].ids) < len(whole.ids) for made, whole in zip(cuts, wholes, strict=True)):
            counts.truncated += 1
        counts.tokens += sum(len(piece.ids) for piece in kept)
        counts.trained_tokens += sum(n for n in trained if n >= self._config.min_trained_tokens)
        return [Encoded(record.index, piece.ids, piece.weights) for piece in kept]

    def examples(self, records: Iterable[Record], counts: EncodeCounts) -> Examples:
        """The examples of records; there may be none."""
        return Examples.of((example for record in records for example in self.encode(record, counts)), counts)

    def encode_all(self, records: Iterable[Record], counts: EncodeCounts, place: str) -> Examples:
        """The examples of the records of a source, which errors call `place`.

        Raises:
            InputError: none is left.
        """
        examples = self.examples(records, counts)
        if not len(examples):
            raise InputError(f"{place}: {nothing_left(counts, self._config)}")
        return examples

    def _drop(self, error: InputError, counts: EncodeCounts) -> None:
        if isinstance(error, DroppedRow):
            counts.dropped_identical += 1
            return
        if self._config.bad_rows == "refuse":
            raise error
        counts.dropped_unreadable += 1
        if len(counts.notes) < MOST_NOTES and str(error) not in counts.notes:  # a stream comes by again
            counts.notes.append(str(error))


def texts_of(record: Record) -> list[str]:
    """The texts of a record that a template, or nothing, stands around."""
    if isinstance(record, ChatRecord):
        return [message["content"] for message in record.messages]
    return [record.prompt, record.completion] if isinstance(record, TextRecord) and not record.raw else []


def nothing_left(counts: EncodeCounts, config: DataConfig) -> str:
    """Why there is no example, in one line."""
    if counts.rows == 0:
        return "no rows to learn from: the data set is empty"
    reasons = {
        "too long": counts.dropped_too_long,
        "with nothing left to learn": counts.dropped_no_target,
        "with too few tokens to learn": counts.dropped_few_trained,
        "with the same answer chosen and rejected": counts.dropped_identical,
        "unreadable": counts.dropped_unreadable,
    }
    said = ", ".join(f"{number} {reason}" for reason, number in reasons.items() if number)
    first = f"; the first: {counts.notes[0]}" if counts.notes else ""
    mend = "look at them with `burnish inspect`"
    if counts.dropped_too_long:
        mend = "raise data.max_length, set data.truncate=keep_end, or " + mend
    return f"all {counts.rows} rows were dropped at data.max_length={config.max_length} ({said}); {mend}{first}"
