"""From what a caller has (a file, records, examples) to encoded examples for training and for evaluation."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.data.config import DataConfig
from burnish.data.encode import EncodeCounts, Encoded, encode_records
from burnish.data.records import ChatRecord, Record, TextRecord, read_records, records_from_rows
from burnish.data.split import split_holdout

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer

Source = str | Path | Iterable[Mapping[str, Any]] | Sequence[Record]
"""A JSONL file, rows with `messages` or `prompt` and `completion`, or records already read."""


@dataclass(frozen=True)
class Examples:
    """Encoded examples, and what became of the rows they were made from."""

    encoded: list[Encoded] = field(default_factory=list)
    counts: EncodeCounts = field(default_factory=EncodeCounts)


def load_examples(source: Source, tokenizer: "Tokenizer", config: DataConfig) -> Examples:
    """Every row of a source, encoded."""
    return Examples(*encode_records(_records(source), tokenizer, config))


def load_split(
    source: Source, eval_source: Source | None, tokenizer: "Tokenizer", config: DataConfig
) -> tuple[Examples, Examples]:
    """(training, evaluation) examples; without an evaluation source, `config.holdout` of the rows are held out.

    Evaluation examples are empty when there is no source for them and `holdout` is 0.
    """
    records = _records(source)
    if eval_source is not None:
        held = load_examples(eval_source, tokenizer, config)
    else:
        records, held_records = split_holdout(records, config.holdout, config.seed)
        held = Examples(*encode_records(held_records, tokenizer, config)) if held_records else Examples()
    return Examples(*encode_records(records, tokenizer, config)), held


def _records(source: Source) -> list[Record]:
    if isinstance(source, str | Path):
        return read_records(source)
    rows = list(source)
    if rows and all(isinstance(row, ChatRecord | TextRecord) for row in rows):
        return rows  # type: ignore[return-value]
    return records_from_rows(rows)  # type: ignore[arg-type]
