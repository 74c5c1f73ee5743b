"""Encoded examples, kept end to end in a few flat arrays: quick to batch, to save, and to map from a file.

tokens   7 8 9 | 7 5 | 7 1 2 3       starts  0 3 5 9
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import overload

import numpy as np

MOST_NOTES = 5


@dataclass(frozen=True)
class Encoded:
    """An example as tokens.

    Attributes:
        example_id: the record's index in its data set.
        tokens: int32 [length].
        weights: float32 [length]; the loss weight of learning the token, 0 where it is not learned. The first token
            follows nothing, so nothing predicts it: its weight is 0.
        source: which of several sources it came from, from 0.
    """

    example_id: int
    tokens: np.ndarray
    weights: np.ndarray
    source: int = 0

    @property
    def prompt(self) -> np.ndarray:
        """The tokens before the last answer: what generation is given to write it."""
        learned = np.append(self.weights != 0, False)
        starts = np.flatnonzero(learned[1:] & ~learned[:-1])
        return self.tokens[: int(starts[-1]) + 1] if len(starts) else self.tokens


@dataclass
class EncodeCounts:
    """What became of the rows: `rows == kept + dropped`, always.

    One row may make several examples (split in pieces, or turn by turn), some of which may be dropped while it is kept.
    `notes` are the first few reasons for dropping rows that could not be read.
    """

    rows: int = 0
    kept: int = 0
    examples: int = 0
    truncated: int = 0  # of those kept
    split: int = 0  # of those kept, too long for one example
    split_turns: int = 0  # of those kept, whose template rewrites turns
    special_in_text: int = 0  # of those kept, whose text spells a special token, which then is one
    dropped_too_long: int = 0
    dropped_no_target: int = 0  # nothing to learn in it, or cutting took that away
    dropped_few_trained: int = 0
    dropped_identical: int = 0  # a preferred answer that is the same as the other
    dropped_unreadable: int = 0
    dropped_pieces: int = 0  # of rows that are kept
    tokens: int = 0
    trained_tokens: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def dropped(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self) if _DROPPED in each.name) - self.dropped_pieces

    def __add__(self, other: "EncodeCounts") -> "EncodeCounts":
        both = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        return EncodeCounts(**{**both, "notes": both["notes"][:MOST_NOTES]})


_DROPPED = "dropped_"


@dataclass(frozen=True)
class Examples(Sequence[Encoded]):
    """A sequence of `Encoded`, and what became of the rows they were made from.

    Attributes:
        tokens: int32 [all tokens]; weights: float32 of the same shape.
        starts: int64 [examples + 1], where each begins and the last one ends.
        ids: int64 [examples], `example_id` of each; sources: int32 [examples].
        counts: of all rows; source_counts: of each source's, where several were joined.
    """

    tokens: np.ndarray
    weights: np.ndarray
    starts: np.ndarray
    ids: np.ndarray
    sources: np.ndarray
    counts: EncodeCounts = field(default_factory=EncodeCounts)
    source_counts: tuple[EncodeCounts, ...] = ()

    @classmethod
    def of(cls, encoded: Iterable[Encoded], counts: EncodeCounts | None = None) -> "Examples":
        """Lays examples end to end."""
        encoded = list(encoded)
        lengths = [len(example.tokens) for example in encoded]
        return cls(
            tokens=np.concatenate([np.zeros(0, np.int32), *(example.tokens for example in encoded)]),
            weights=np.concatenate([np.zeros(0, np.float32), *(example.weights for example in encoded)]),
            starts=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
            ids=np.array([example.example_id for example in encoded], np.int64),
            sources=np.array([example.source for example in encoded], np.int32),
            counts=counts or EncodeCounts(),
        )

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example."""
        return np.diff(self.starts)

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> Encoded: ...
    @overload
    def __getitem__(self, index: slice) -> list[Encoded]: ...
    def __getitem__(self, index: int | slice) -> Encoded | list[Encoded]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        tokens = slice(self.starts[at], self.starts[at + 1])
        return Encoded(int(self.ids[at]), self.tokens[tokens], self.weights[tokens], int(self.sources[at]))

    def __iter__(self) -> Iterator[Encoded]:
        return (self[index] for index in range(len(self)))


def join_sources(parts: Sequence[Examples]) -> Examples:
    """Several sources as one: `sources` number them, and ids go on from one's largest to the next."""
    if len(parts) == 1:
        return parts[0]
    first_ids = np.cumsum([0, *(int(part.ids.max(initial=-1)) + 1 for part in parts)])
    first_tokens = np.cumsum([0, *(len(part.tokens) for part in parts)])
    return Examples(
        tokens=np.concatenate([part.tokens for part in parts]),
        weights=np.concatenate([part.weights for part in parts]),
        starts=np.concatenate(
            [*(p.starts[:-1] + at for p, at in zip(parts, first_tokens, strict=False)), first_tokens[-1:]]
        ),
        ids=np.concatenate([part.ids + first for part, first in zip(parts, first_ids, strict=False)]),
        sources=np.concatenate([np.full(len(part), number, np.int32) for number, part in enumerate(parts)]),
        counts=sum((part.counts for part in parts), EncodeCounts()),
        source_counts=tuple(part.counts for part in parts),
    )
