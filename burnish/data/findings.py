"""The rows most likely to be wrong: too long, hardly trained, repeated, contradictory, empty, or badly decoded.

None of these is an error. A person looks at a few of each kind and decides.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burnish.data.characters import KINDS, excerpt, odd_characters
from burnish.data.records import ChatRecord, Record, TextRecord, TokensRecord
from burnish.data.survey import SeenRow, Survey

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer

LONG = 4  # times the median
HARDLY_TRAINED = 0.05  # of a row's tokens
NEAR_EMPTY = 3  # tokens of an answer


@dataclass(frozen=True)
class Case:
    """One row of a finding: where it is, what is with it, and a little of its text."""

    place: str
    source: int
    what: str
    excerpt: str


@dataclass(frozen=True)
class Finding:
    """Rows of one kind: how many, and the first or worst few of them."""

    kind: str
    title: str
    count: int
    cases: tuple[Case, ...]


class _Hit(NamedTuple):
    """A row that belongs to a finding, what is with it, and the text that shows it; None: how the row begins."""

    row: SeenRow
    what: str
    text: str | None = None


def findings(survey: Survey, tokenizer: "Tokenizer", most: int) -> list[Finding]:
    """Every kind that there are rows of, with at most `most` cases each; the longest and the least trained always.

    Unreadable rows come first; `what` is then the whole message, its place included.
    """
    rows = [row for row in survey.rows if row.record is not None]
    bad = [_Hit(row, row.counts.notes[0]) for row in survey.rows if row.counts.dropped_unreadable]
    kinds = [_finding("unreadable", "rows that cannot be read", bad, most)]
    kinds.append(_finding("cut", "rows cut to data.max_length", _cut(rows), most))
    kinds += [_finding(kind, title, found, most) for kind, title, found in _dropped(survey.rows)]
    kinds += [_longest(rows, most), _least_trained(rows, most)]
    kinds.append(_finding("duplicates", "rows that are there before, word for word", _duplicates(rows), most))
    kinds.append(_finding("contradictions", "rows whose prompt has another answer elsewhere", _disagreeing(rows), most))
    kinds.append(_near_empty(survey, tokenizer, most))
    spelt = [_Hit(row, "a special token is spelt in the text") for row in rows if row.counts.special_in_text]
    kinds.append(_finding("special_tokens", "rows whose text spells special tokens, which they become", spelt, most))
    kinds += _odd(rows, most)
    return [found for found in kinds if found.cases or found.count]


def _finding(kind: str, title: str, hits: Sequence[_Hit], most: int) -> Finding:
    cases = tuple(
        Case(row.place, row.source, what, _opening(row) if text is None else text) for row, what, text in hits[:most]
    )
    return Finding(kind, title, len(hits), cases)


# Length and masks


def _cut(rows: list[SeenRow]) -> list[_Hit]:
    found = [row for row in rows if row.counts.truncated or row.counts.split]
    return [
        _Hit(row, f"{row.length} tokens, in {len(row.examples)} pieces" if row.counts.split else _kept_of(row))
        for row in sorted(found, key=lambda row: -row.length)
    ]


def _kept_of(row: SeenRow) -> str:
    return f"{row.length} tokens, {max(len(example.tokens) for example in row.examples)} kept"


def _dropped(rows: list[SeenRow]) -> Iterator[tuple[str, str, list[_Hit]]]:
    """Rows that were read and dropped, by reason."""
    reasons = {
        "dropped_too_long": "rows dropped as longer than data.max_length",
        "dropped_no_target": "rows dropped with nothing left to learn",
        "dropped_few_trained": "rows dropped with fewer tokens to learn than data.min_trained_tokens",
        "dropped_identical": "rows dropped as chosen and rejected are the same",
    }
    for name, title in reasons.items():
        found = [row for row in rows if getattr(row.counts, name)]
        yield name, title, [_Hit(row, f"{row.length} tokens" if row.length else "") for row in found]


def _longest(rows: list[SeenRow], most: int) -> Finding:
    rows = sorted((row for row in rows if row.length), key=lambda row: -row.length)
    median = float(np.median([row.length for row in rows])) if rows else 0.0
    over = sum(row.length > LONG * median for row in rows)
    shown = _finding("longest", "", [_Hit(row, f"{row.length} tokens") for row in rows], most)
    title = f"the longest rows; of over {LONG} times the median of {median:g} tokens before cutting there are"
    return replace(shown, title=title, count=over)


def _least_trained(rows: list[SeenRow], most: int) -> Finding:
    kept = [row for row in rows if row.counts.kept]
    shares = {id(row): row.counts.trained_tokens / row.counts.tokens for row in kept}
    kept.sort(key=lambda row: shares[id(row)])
    hardly = sum(share < HARDLY_TRAINED for share in shares.values())
    said = [_Hit(row, f"{row.counts.trained_tokens} of {row.counts.tokens} tokens trained") for row in kept]
    shown = _finding("least_trained", "", said, most)
    title = f"the least trained rows; with under {HARDLY_TRAINED:.0%} of their tokens trained there are"
    return replace(shown, title=title, count=hardly)


def _near_empty(survey: Survey, tokenizer: "Tokenizer", most: int) -> Finding:
    """Rows with a trained stretch of fewer than 3 tokens besides what ends a turn; cut ones end anywhere."""
    examples, owners = survey.examples, [row for row in survey.rows for _ in row.examples]
    trained = examples.weights != 0
    # An example's first token is never trained, so no stretch goes over from one to the next.
    edges = np.diff(np.concatenate([[0], trained.astype(np.int8), [0]]))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    said = np.concatenate([[0], np.cumsum(trained & ~np.isin(examples.tokens, tokenizer.stop_ids))])
    sizes = said[ends] - said[starts]
    hits: dict[int, _Hit] = {}
    for stretch in np.flatnonzero(sizes < NEAR_EMPTY).tolist():
        row = owners[int(np.searchsorted(examples.starts, starts[stretch], side="right")) - 1]
        if row.whole and id(row) not in hits:
            answer = tokenizer.decode(examples.tokens[starts[stretch] : ends[stretch]], skip_special=False)
            hits[id(row)] = _Hit(row, f"tokens to learn besides the end: {sizes[stretch]}", excerpt(answer))
    return _finding("near_empty", f"rows with an answer of fewer than {NEAR_EMPTY} tokens", list(hits.values()), most)


# Repetition


def _duplicates(rows: list[SeenRow]) -> list[_Hit]:
    first: dict[bytes, SeenRow] = {}
    found = []
    for row in rows:
        assert row.record is not None
        earlier = first.setdefault(_digest(replace(row.record, index=0, place="").__dict__), row)
        if earlier is not row:
            found.append(_Hit(row, f"the same as {earlier.place}"))
    return found


def _disagreeing(rows: list[SeenRow]) -> list[_Hit]:
    """Rows of one prompt with several answers, one row an answer, rows of a prompt beside each other."""
    by_prompt: defaultdict[bytes, dict[bytes, SeenRow]] = defaultdict(dict)
    for row in rows:
        sides = _sides(row.record)
        if sides is not None:
            by_prompt[_digest(sides[0])].setdefault(_digest(sides[1]), row)
    found = []
    for answers in by_prompt.values():
        one, *others = answers.values()
        if others:
            found.append(_Hit(one, f"answered otherwise in {others[0].place}"))
            found += [_Hit(row, f"answered otherwise in {one.place}") for row in others]
    return found


def _sides(record: Record | None) -> tuple[Any, Any] | None:
    """What is before the last answer, and that answer; None where there is no prompt."""
    if isinstance(record, TextRecord):
        return None if record.raw else (record.prompt, record.completion)
    if isinstance(record, ChatRecord):
        last = max(n for n, message in enumerate(record.messages) if message["role"] == "assistant")
        return [record.messages[:last], record.tools], record.messages[last]
    if isinstance(record, TokensRecord):
        learned = [weight != 0 for weight in record.weights]
        start = next((n for n in range(len(learned) - 1, 0, -1) if learned[n] and not learned[n - 1]), 0)
        return (record.tokens[:start], record.tokens[start:]) if start else None
    return None


def _digest(value: Any) -> bytes:
    """The same for equal values, in 16 bytes: a whole data set's are held at once."""
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


# Text


def _odd(rows: list[SeenRow], most: int) -> Iterator[Finding]:
    hits: dict[str, list[_Hit]] = {kind: [] for kind in KINDS}
    for row in rows:
        first: dict[str, _Hit] = {}
        for text in _strings(row.record):
            for odd in odd_characters(text):
                first.setdefault(odd.kind, _Hit(row, odd.which, excerpt(text, at=odd.at)))
        for kind, hit in first.items():
            hits[kind].append(hit)
    for kind, title in KINDS.items():
        yield _finding(kind, f"rows with {title}", hits[kind], most)


def _strings(value: Any) -> Iterator[str]:
    """Every text of a record, keys of objects left out."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, TextRecord):
        yield from (value.prompt, value.completion)
    elif isinstance(value, ChatRecord):
        yield from _strings(value.messages)
    elif isinstance(value, dict):
        yield from (text for item in value.values() for text in _strings(item))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in _strings(item))


def _opening(row: SeenRow) -> str:
    """A little of the prompt, or of the text where there is none, and of the answer."""
    sides = _sides(row.record)
    if isinstance(row.record, TokensRecord):
        return excerpt(" ".join(map(str, row.record.tokens[:30])))
    if isinstance(row.record, ChatRecord) and sides is not None:
        before = sides[0][0]
        return f"{excerpt(_said(before[-1]) if before else '')} → {excerpt(_said(sides[1]))}"
    if isinstance(row.record, TextRecord):
        text = row.record
        return excerpt(text.completion, 120) if text.raw else f"{excerpt(text.prompt)} → {excerpt(text.completion)}"
    return ""


def _said(message: dict[str, Any]) -> str:
    """A message's text, or its calls where it has none."""
    return message.get("content") or json.dumps(message.get("tool_calls", ""), ensure_ascii=False)
