"""The loop itself: fetch, step, report one step late, evaluate, save.

Metrics of a step are read while the next one runs, so that reading them never stalls the device.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from burnish.errors import InputError
from burnish.train.callbacks import Callback
from burnish.train.config import TrainConfig
from burnish.train.step import StepState

Step = Callable[[StepState, Mapping[str, np.ndarray]], tuple[StepState, dict[str, jax.Array]]]


class _Made(NamedTuple):
    """A step whose metrics have not been read: its number, they, and what is known of its batch."""

    step: int
    metrics: dict[str, jax.Array]
    batch: dict[str, float]


@jax.jit
def _all_finite(params: Mapping[str, jax.Array]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(array)) for array in params.values()]))


@dataclass
class Loop:
    """Makes steps from `done` to `total`. `state` is always that of the last step made.

    step: takes the state (and may reuse its memory) and a batch [rows, length]. batches: may end before `total`; then
    the run does. sources: what the batches' sources are called. evaluate: metrics of the held-out examples. save:
    begins a checkpoint of (step, state). stopping: asked before each step.
    """

    config: TrainConfig
    state: StepState
    done: int
    total: int
    step: Step
    batches: Iterator[Mapping[str, np.ndarray]]
    evaluate: Callable[[StepState], dict[str, float]] | None
    save: Callable[[int, StepState], None] | None
    stopping: Callable[[], bool]
    sources: tuple[str, ...] = ()
    callbacks: Sequence[Callback] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    data_ended: bool = False
    _clock: float = 0.0

    def run(self) -> None:
        """Makes the remaining steps, evaluates, and saves. Raises InputError when a loss or gradient is not finite."""
        if self.done >= self.total:
            return
        began_at = self.done
        waiting: _Made | None = None
        self._clock = time.perf_counter()
        while self.done < self.total and not self.stopping():
            began = time.perf_counter()
            batch = next(self.batches, None)
            if batch is None:
                self.data_ended, self.total = True, self.done
                break
            known = {"data_seconds": round(time.perf_counter() - began, 4), **self._known(batch)}
            self.state, metrics = self.step(self.state, batch)
            self.done += 1
            if waiting:
                self._report(waiting)
            waiting = _Made(self.done, metrics, known)
            if self._due(self.config.eval_every) or self._due(self.config.save_every):
                self._report(waiting)  # before anything is saved: a step that went wrong must not be
                waiting = None
                self._pause()
                self._clock = time.perf_counter()
        if waiting:
            self._report(waiting)
        if not self.data_ended or self.done > began_at:  # a finished run that is resumed has nothing to add
            self._finish()

    def _known(self, batch: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Real tokens of a batch, and trained ones of each source where there are several."""
        known: dict[str, float] = {"tokens": int(np.count_nonzero(batch["segment_ids"]))}
        if len(self.sources) > 1:
            trained = np.bincount(batch["source_ids"][batch["weights"] != 0], minlength=len(self.sources))
            known |= {f"trained_tokens/{name}": int(n) for name, n in zip(self.sources, trained, strict=True)}
        return known

    def _due(self, every: int | None) -> bool:
        return every is not None and self.done % every == 0 and self.done < self.total

    def _pause(self) -> None:
        self._check_parameters()
        if self._due(self.config.eval_every):
            self._evaluate()
        if self._due(self.config.save_every):
            self._save()

    def _finish(self) -> None:
        self._check_parameters()
        if self.done == self.total:
            self._evaluate()
        self._save()

    def _report(self, made: _Made) -> None:
        values = {name: float(value) for name, value in made.metrics.items()}
        for name in ("loss", "grad_norm"):
            if not math.isfinite(values[name]):
                raise InputError(
                    f"step {made.step}: {name} is {values[name]}; lower optimizer.lr (now {values['lr']:g}), "
                    "look at the data with `burnish inspect`, or train in float32"
                )
        # Steps overlap with their reports, so a step's time is that from one report to the next.
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        values["trained_tokens"] = int(values["trained_tokens"])
        for name in self.sources:
            if made.batch.get(f"trained_tokens/{name}") == 0:  # it has no loss at this step
                del values[f"loss/{name}"]
        self.metrics = {"step": made.step, **values, **made.batch, "seconds": round(seconds, 4)}
        self.metrics["tokens_per_second"] = round(made.batch["tokens"] / seconds, 1)
        if made.step % self.config.log_every == 0 or made.step in (1, self.total):
            for callback in self.callbacks:
                callback.on_step(self.metrics)

    def _check_parameters(self) -> None:
        """A step's loss is that of the parameters before it: what is saved must be looked at itself."""
        if not _all_finite(self.state.params):
            raise InputError(f"step {self.done}: its update is not finite; lower optimizer.lr or look at optimizer.*")

    def _evaluate(self) -> None:
        if self.evaluate is None:
            return
        self.evaluation = {"step": self.done, **self.evaluate(self.state)}
        if not math.isfinite(self.evaluation["eval_loss"]):
            found = self.evaluation["eval_loss"]
            raise InputError(f"step {self.done}: the held-out loss is {found}; lower optimizer.lr")
        for callback in self.callbacks:
            callback.on_evaluation(self.evaluation)

    def _save(self) -> None:
        if self.save is None:
            return
        self.save(self.done, self.state)
        for callback in self.callbacks:
            callback.on_save(self.done)
