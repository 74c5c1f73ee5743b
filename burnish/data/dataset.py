"""From what a caller has (files, rows, records) to examples for training and for evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from burnish.data.batches import Shard, TrainBatches
from burnish.data.cache import cached
from burnish.data.config import DataConfig
from burnish.data.examples import EncodeCounts, Examples, join_sources
from burnish.data.parts import Part, Source, sources_of, unique_names
from burnish.data.rows import RowEncoder
from burnish.data.split import split_holdout
from burnish.data.stream import StreamBatches
from burnish.errors import InputError

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Dataset:
    """What to train on and to evaluate on, of one or more sources.

    Attributes:
        parts: the sources to train on; their number is what `Examples.sources` holds.
        train: their examples; None where they are read as training goes on (`data.streaming`).
        held_out: examples to evaluate on; may be empty.
        held_out_names: what the sources of those are called.
    """

    parts: Sequence[Part]
    train: Examples | None
    held_out: Examples
    held_out_names: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """What the sources to train on are called."""
        return unique_names([part.name for part in self.parts])

    def by_source(self, counts: Sequence[EncodeCounts]) -> dict[str, EncodeCounts]:
        """Counts of the sources to train on, by their names; empty where they are not told apart."""
        return dict(zip(self.names, counts, strict=False))

    def batches(
        self, tokenizer: "Tokenizer", batch_size: int, config: DataConfig, shard: Shard = Shard()
    ) -> TrainBatches | StreamBatches:
        """Training batches of `batch_size` rows, over all processes."""
        if self.train is None:
            return StreamBatches(self.parts, tokenizer, batch_size, config, shard)
        weights = [part.weight for part in self.parts]
        return TrainBatches(self.train, batch_size, config, weights=weights, shard=shard)


def load_dataset(source: Source, eval_source: Source | None, tokenizer: "Tokenizer", config: DataConfig) -> Dataset:
    """Encodes what is given; of a stream only what it is evaluated on.

    Without an evaluation source, `config.holdout` of each source's rows are held out; `held_out` is empty when there is
    no source for it and `holdout` is 0.

    Raises:
        InputError: rows that cannot be read, none that are left, or rows to be held out of a stream.
    """
    parts = sources_of(source, config)
    holdout = config.holdout if eval_source is None else 0.0
    if config.streaming and "holdout" not in config.model_fields_set:
        holdout = 0.0
    if config.streaming and holdout:
        raise InputError("data.holdout: a stream is read once; give data.eval_path, or set data.holdout=0")
    if len(parts) < 2 and config.temperature is not None:
        raise InputError("data.temperature mixes several sources, and there is one; take it away")
    sides = [] if config.streaming else [_load(part, tokenizer, config, holdout) for part in parts]
    train = join_sources([side["train"] for side in sides]) if sides else None
    if eval_source is None:
        held_parts = parts
        held = join_sources([side["held_out"] for side in sides] or [Examples.of([])])
    else:
        held_parts = sources_of(eval_source, config)
        held = join_sources([_load(part, tokenizer, config, 0.0)["train"] for part in held_parts])
    return Dataset(parts, train, held, unique_names([part.name for part in held_parts]))


def load_examples(source: Source, tokenizer: "Tokenizer", config: DataConfig) -> Examples:
    """Every row of a source, encoded."""
    return join_sources([_load(part, tokenizer, config, 0.0)["train"] for part in sources_of(source, config)])


def _load(part: Part, tokenizer: "Tokenizer", config: DataConfig, holdout: float) -> dict[str, Examples]:
    """{"train": examples, "held_out": examples}; from the cache where there is a file behind it."""

    def make() -> dict[str, Examples]:
        return _encode(part, tokenizer, config, holdout)

    if part.file is None or not config.cache:
        return make()
    key = {
        "rows": part.file.fingerprint(),
        # Notes on rows that are dropped name their file.
        "place": part.place if config.bad_rows == "drop" else None,
        "form": part.form.model_dump(include={"format", "columns"}),
        "tokenizer": tokenizer.fingerprint,
        "options": config.encoding(),
        "concat": config.packing == "concat",
        "holdout": [holdout, config.seed if holdout else 0],
    }
    return cached(key, make)


def _encode(part: Part, tokenizer: "Tokenizer", config: DataConfig, holdout: float) -> dict[str, Examples]:
    encoder, counts = RowEncoder(tokenizer, config, part.form), EncodeCounts()
    records = list(encoder.records(part.rows(), counts))
    if not records and not counts.rows:
        raise InputError(f"{part.place} holds no records; docs/data.md says what one is")
    kept, held = split_holdout(records, holdout, config.seed, part.place) if records else ([], [])
    return {
        "train": encoder.encode_all(kept, counts, part.place),
        "held_out": encoder.examples(held, EncodeCounts()),
    }
