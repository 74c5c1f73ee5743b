"""Batches in an order that is known before the first one is made.

The order of an epoch is a pure function of (seed, epoch, lengths of the examples): a permutation, then a
packing plan, then rows taken `batch_size` at a time. So the number of steps of an epoch is known, every
example is seen exactly once in it, and the iterator's whole state is an epoch and a step.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import grain
import numpy as np

from burnish.data.config import DataConfig
from burnish.data.encode import Encoded
from burnish.data.packing import Batch, batch_arrays, pack
from burnish.errors import InputError


@dataclass(frozen=True)
class EpochPlan:
    """The rows of an epoch (indices of examples, one list a row), `batch_size` of them a step."""

    rows: list[list[int]]
    batch_size: int

    @property
    def steps(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    @property
    def filler_rows(self) -> int:
        """Rows without examples that fill up the last batch."""
        return self.steps * self.batch_size - len(self.rows)

    def batch_rows(self, step: int) -> list[list[int]]:
        rows = self.rows[step * self.batch_size : (step + 1) * self.batch_size]
        return rows + [[]] * (self.batch_size - len(rows))


class TrainBatches(grain.DatasetIterator[Batch]):
    """Endless training batches, reshuffled and repacked every epoch; `epochs` bounds them.

    A Grain iterator, so `grain.checkpoint.CheckpointSave(batches)` stores it. `get_state` is small and
    JSON-able; setting it on an iterator over the same data continues exactly where it was taken.

    Args:
        examples: the encoded examples, none longer than `config.max_length`.
        batch_size: rows of an optimizer step.
        config: `max_length`, `packing` and `seed` are read.
        epochs: stop after so many; None never stops.

    Raises:
        InputError: there are no examples; or the state set was taken over other data or options.
    """

    def __init__(
        self, examples: Sequence[Encoded], batch_size: int, config: DataConfig, epochs: int | None = None
    ) -> None:
        super().__init__()
        if not examples:
            raise InputError("no examples to make batches of")
        if batch_size < 1:
            raise InputError(f"batch_size={batch_size}: must be at least 1")
        self._examples, self._batch_size, self._config, self._epochs = examples, batch_size, config, epochs
        self._lengths = np.array([len(example.tokens) for example in examples])
        self._epoch, self._step = 0, 0
        self._planned: tuple[int, EpochPlan] | None = None  # the last one asked for

    def plan(self, epoch: int) -> EpochPlan:
        """The rows of an epoch."""
        if self._planned is not None and self._planned[0] == epoch:
            return self._planned[1]
        order = np.random.default_rng((self._config.seed, epoch)).permutation(len(self._examples))
        plan = EpochPlan(_rows(order, self._lengths, self._config), self._batch_size)
        self._planned = epoch, plan
        return plan

    def steps_per_epoch(self, epoch: int = 0) -> int:
        """Batches of an epoch; packing makes it vary a little from one to the next."""
        return self.plan(epoch).steps

    def __next__(self) -> Batch:
        if self._epochs is not None and self._epoch >= self._epochs:
            raise StopIteration
        plan = self.plan(self._epoch)
        batch = batch_arrays(self._examples, plan.batch_rows(self._step), self._config.max_length)
        self._step += 1
        if self._step == plan.steps:
            self._epoch, self._step = self._epoch + 1, 0
        return batch

    def get_state(self) -> dict[str, Any]:
        """Epoch and step of the next batch, and what must be the same for them to mean the same."""
        return {"epoch": self._epoch, "step": self._step, "made_from": self._made_from}

    def set_state(self, state: dict[str, Any]) -> None:
        for name, value in self._made_from.items():
            if state["made_from"][name] != value:
                raise InputError(
                    f"cannot continue the data: {name} was {state['made_from'][name]} at the checkpoint and "
                    f"is {value} now; restore it, or start a new run"
                )
        self._epoch, self._step = state["epoch"], state["step"]

    @cached_property
    def _made_from(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for example in self._examples:
            digest.update(np.array([example.example_id, len(example.tokens)]).tobytes())
            digest.update(example.tokens.tobytes())
            digest.update(example.loss_mask.tobytes())
        return {
            "batch_size": self._batch_size,
            "max_length": self._config.max_length,
            "packing": self._config.packing,
            "seed": self._config.seed,
            "data": digest.hexdigest()[:16],
        }


def evaluation_batches(examples: Sequence[Encoded], batch_size: int, config: DataConfig) -> Iterator[Batch]:
    """Every example once, in a fixed order; the last batch is filled up with rows of padding."""
    lengths = np.array([len(example.tokens) for example in examples])
    plan = EpochPlan(_rows(np.arange(len(examples)), lengths, config), batch_size)
    for step in range(plan.steps):
        yield batch_arrays(examples, plan.batch_rows(step), config.max_length)


def _rows(order: np.ndarray, lengths: np.ndarray, config: DataConfig) -> list[list[int]]:
    """Examples in `order` laid in rows: packed, or one a row."""
    if not config.packing:
        return [[index] for index in order.tolist()]
    return [order[row].tolist() for row in pack(lengths[order], config.max_length)]
