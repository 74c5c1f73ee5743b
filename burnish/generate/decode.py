"""The decode loop, which runs on the device, and a batch of rows that goes through it."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from burnish.generate.rereading import UncachedModel
from burnish.generate.sampling import Rules, draw, key_data
from burnish.generate.shapes import CHUNK, row_bucket
from burnish.generate.unrolled import CachedModel


class Progress(NamedTuple):
    """Where the rows of a batch stand.

    memory: what the model remembers; done: `[rows]` booleans; limits: `[rows]`, the most tokens each row may get;
    keys: `[rows, 2]` uint32, of its seed; step: how many tokens each row that is not done has got.
    """

    memory: Any
    done: jax.Array
    limits: jax.Array
    keys: jax.Array
    step: jax.Array


@functools.partial(jax.jit, static_argnames=("graphdef",), donate_argnames=("progress",))
def _decode(
    graphdef: Any, params: Any, progress: Progress, rules: Rules, stop_ids: jax.Array, steps: jax.Array
) -> tuple[Progress, jax.Array, jax.Array]:
    """Up to `steps` tokens a row, fewer once all are done: tokens and log-probs `[rows, CHUNK]`, tokens -1 for none."""
    model = nnx.merge(graphdef, params)
    rows = progress.done.shape[0]

    def unfinished(carry: Any) -> jax.Array:
        i, progress, _, _ = carry
        return (i < steps) & ~progress.done.all()

    def one_step(carry: Any) -> Any:
        i, (memory, done, limits, keys, step), tokens, log_probs = carry
        token, log_prob = draw(model.logits(memory), keys, step, rules)
        tokens = tokens.at[:, i].set(jnp.where(done, -1, token))
        log_probs = log_probs.at[:, i].set(log_prob)
        done = done | (token[:, None] == stop_ids).any(axis=-1) | (step + 1 >= limits)
        progress = Progress(model.push(memory, token), done, limits, keys, step + 1)
        return i + 1, progress, tokens, log_probs

    empty = jnp.full((rows, CHUNK), -1, jnp.int32), jnp.zeros((rows, CHUNK), jnp.float32)
    _, progress, tokens, log_probs = jax.lax.while_loop(unfinished, one_step, (0, progress, *empty))
    return progress, tokens, log_probs


class DecodeBatch:
    """Rows that are decoded together: one prompt a row, each with its own limit and seed."""

    def __init__(
        self,
        model: CachedModel | UncachedModel,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        seeds: Sequence[int],
        rules: Rules,
        stop_ids: Sequence[int],
    ) -> None:
        self._model = model
        self._rules = rules
        self._stop_ids = jnp.asarray(stop_ids, jnp.int32)
        self._count = len(prompts)
        rows = row_bucket(len(prompts))
        spare = rows - len(prompts)
        self._progress = Progress(
            memory=model.read(prompts, rows, CHUNK),
            done=jnp.asarray([False] * len(prompts) + [True] * spare),
            limits=jnp.asarray([*limits, *[0] * spare], jnp.int32),
            keys=jnp.asarray(np.pad(key_data(seeds), ((0, spare), (0, 0)))),
            step=jnp.int32(0),
        )

    def advance(self, most: int = CHUNK) -> tuple[np.ndarray, np.ndarray]:
        """The next tokens and their log-probs, `[prompts, n]` with n from 1 to `most`; token -1: the row was done."""
        if self._model.room(self._progress.memory) == 0:
            self._progress = self._progress._replace(memory=self._model.grow(self._progress.memory))
        before = int(self._progress.step)
        steps = jnp.int32(min(most, CHUNK, self._model.room(self._progress.memory)))
        self._progress, tokens, log_probs = _decode(
            *self._model.parts, self._progress, self._rules, self._stop_ids, steps
        )
        taken = int(self._progress.step) - before
        return np.asarray(tokens)[: self._count, :taken], np.asarray(log_probs)[: self._count, :taken]

    def stop(self, finished: Sequence[bool]) -> None:
        """Ends rows (one flag a prompt) for a reason that only the host can see."""
        spare = [True] * (self._progress.done.shape[0] - self._count)
        self._progress = self._progress._replace(done=self._progress.done | jnp.asarray([*finished, *spare]))
