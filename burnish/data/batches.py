"""Batches in an order that is known before the first one is made.

The order of an epoch is a pure function of (seed, epoch, lengths of the examples, mixture): examples in order, then a
packing plan, then rows taken `batch_size` at a time. So the number of steps of an epoch is known, and the iterator's
whole state is an epoch and a step.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import grain
import numpy as np

from burnish.data.config import DataConfig
from burnish.data.examples import EncodeCounts, Examples
from burnish.data.mixture import epoch_counts, epoch_order, shares
from burnish.data.packing import Batch, Row, batch_arrays, plan_rows
from burnish.errors import InputError

LENGTHS = 8  # different row lengths without packing: as many programs are compiled at most


@dataclass(frozen=True)
class Shard:
    """Which of several processes this is; each makes its own rows of every batch."""

    index: int = 0
    count: int = 1

    def rows(self, batch_size: int) -> slice:
        """This process's rows of a batch."""
        each = batch_size // self.count
        return slice(self.index * each, (self.index + 1) * each)

    def check(self, batch_size: int) -> None:
        """InputError where there is no batch, or it cannot be shared evenly."""
        if batch_size < 1:
            raise InputError(f"batch_size={batch_size}: must be at least 1")
        if batch_size % self.count:
            raise InputError(
                f"train.batch_size: {batch_size} rows cannot be shared by {self.count} processes; "
                f"use a multiple of {self.count}"
            )


@dataclass(frozen=True)
class EpochPlan:
    """The rows of an epoch, `batch_size` of them a step."""

    rows: list[Row]
    batch_size: int

    @property
    def steps(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def batch_rows(self, step: int) -> list[Row]:
        rows = self.rows[step * self.batch_size : (step + 1) * self.batch_size]
        return rows + [[]] * (self.batch_size - len(rows))


class TrainBatches(grain.DatasetIterator[Batch]):
    """Endless training batches, reshuffled and repacked every epoch.

    A Grain iterator, so `grain.checkpoint.CheckpointSave(batches)` stores it. `get_state` is small and
    JSON-able; setting it on an iterator over the same data continues exactly where it was taken, on any number of
    processes.

    Args:
        examples: the encoded examples, none longer than `config.max_length` (but for `packing=concat`).
        batch_size: rows of an optimizer step, over all processes.
        config: `max_length`, the packing, the mixture and `seed` are read.
        weights: of the sources, by number; see `SourceConfig.weight`.
        shard: which process this is.

    Raises:
        InputError: there are no examples; or the state set was taken over other data or options.
    """

    def __init__(
        self,
        examples: Examples,
        batch_size: int,
        config: DataConfig,
        *,
        weights: Sequence[float | None] = (None,),
        shard: Shard = Shard(),
    ) -> None:
        super().__init__()
        if not len(examples):
            raise InputError("no examples to make batches of")
        shard.check(batch_size)
        self._examples, self._batch_size, self._config = examples, batch_size, config
        self._shard = shard
        self._sizes = np.bincount(examples.sources, minlength=len(weights)).tolist()
        share = shares(self._sizes, weights, config.temperature)
        self._counts = None if share is None else epoch_counts(self._sizes, share, config.repeat)
        self._lengths = examples.lengths
        self._epoch, self._step = 0, 0
        self._planned: tuple[int, EpochPlan] | None = None  # the last one asked for

    def plan(self, epoch: int) -> EpochPlan:
        """The rows of an epoch."""
        if self._planned is not None and self._planned[0] == epoch:
            return self._planned[1]
        order = epoch_order(self._sizes, self._counts, self._config.seed, epoch)
        plan = EpochPlan(plan_rows(order.tolist(), self._lengths, self._config), self._batch_size)
        self._planned = epoch, plan
        return plan

    def steps_per_epoch(self, epoch: int = 0) -> int:
        """Batches of an epoch; packing makes it vary a little from one to the next."""
        return self.plan(epoch).steps

    @property
    def efficiency(self) -> float:
        """Real tokens over slots, 0 to 1, of the first epoch."""
        return efficiency(self.plan(0), self._config)

    @property
    def longest(self) -> int:
        """Slots of the longest rows of the first epoch."""
        plan = self.plan(0)
        return max(row_length(plan.batch_rows(step), self._config) for step in range(plan.steps))

    @property
    def counts(self) -> EncodeCounts:
        """What became of the rows."""
        return self._examples.counts

    @property
    def source_counts(self) -> tuple[EncodeCounts, ...]:
        """What became of each source's rows, where there are several."""
        return self._examples.source_counts

    def __next__(self) -> Batch:
        plan = self.plan(self._epoch)
        rows = plan.batch_rows(self._step)
        batch = batch_arrays(self._examples, rows[self._shard.rows(self._batch_size)], row_length(rows, self._config))
        self._step += 1
        if self._step == plan.steps:
            self._epoch, self._step = self._epoch + 1, 0
        return batch

    def get_state(self) -> dict[str, Any]:
        """Epoch and step of the next batch, and what must be the same for them to mean the same."""
        return {"epoch": self._epoch, "step": self._step, "made_from": self._made_from}

    def set_state(self, state: dict[str, Any]) -> None:
        check_made_from(state, self._made_from)
        self._epoch, self._step = state["epoch"], state["step"]

    @cached_property
    def _made_from(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for array in (self._examples.ids, self._examples.sources, self._examples.starts):
            digest.update(np.ascontiguousarray(array).data)
        digest.update(np.ascontiguousarray(self._examples.tokens).data)
        digest.update(np.ascontiguousarray(self._examples.weights).data)
        return {
            "batch_size": self._batch_size,
            **order_options(self._config),
            "mixture": self._counts,
            "data": digest.hexdigest()[:16],
        }


def order_options(config: DataConfig) -> dict[str, Any]:
    """The options that say which examples share a batch."""
    names = ("max_length", "packing", "max_segments", "lookahead", "seed")
    return {name: getattr(config, name) for name in names}


def check_made_from(state: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """InputError for the first thing that was otherwise when an iterator's state was taken."""
    before = state.get("made_from", {})
    for name, value in now.items():
        if before.get(name) != value:
            raise InputError(
                f"cannot continue the data: {name} was {before.get(name)} at the checkpoint and is {value} now; "
                "restore it, or start a new run"
            )


def efficiency(plan: EpochPlan, config: DataConfig) -> float:
    """Real tokens over slots, 0 to 1; rows that fill up the last batch count."""
    used = slots = 0
    for step in range(plan.steps):
        rows = plan.batch_rows(step)
        used += sum(piece.end - piece.start for row in rows for piece in row)
        slots += len(rows) * row_length(rows, config)
    return used / max(slots, 1)


def row_length(rows: Sequence[Row], config: DataConfig) -> int:
    """Slots of a batch's rows: `max_length`; without packing the longest row's, rounded up to one of a few lengths."""
    if config.packing != "none":
        return config.max_length
    longest = max((piece.end - piece.start for row in rows for piece in row), default=1)
    step = -(-config.max_length // LENGTHS)
    return min(-(-longest // step) * step, config.max_length)


def evaluation_batches(examples: Examples, batch_size: int, config: DataConfig) -> Iterator[Batch]:
    """Every example once, in a fixed order; the last batch is filled up with rows of padding."""
    plan = EpochPlan(plan_rows(range(len(examples)), examples.lengths, config), batch_size)
    for step in range(plan.steps):
        rows = plan.batch_rows(step)
        yield batch_arrays(examples, rows, row_length(rows, config))
