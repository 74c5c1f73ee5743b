"""The compiled step, one program for each length of rows that comes."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from burnish.train.memory import StepMemory
from burnish.train.step import StepState


class Programs:
    """Makes steps, compiling for a new shape of batch when it first comes.

    step: (state, frozen, batch, key) -> (state, metrics). It reuses the state's memory; the next state lives where
    that did. put: lays a batch [rows, length] on the devices as the step takes it.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        state: StepState,
        frozen: list[Any],
        key: jax.Array,
        put: Callable[[Mapping[str, np.ndarray]], Mapping[str, jax.Array]],
    ) -> None:
        places = (jax.tree.map(lambda array: array.sharding, state), None)
        self._jitted = jax.jit(step, donate_argnums=0, out_shardings=places)
        self._frozen, self._key, self._put = frozen, key, put
        self._compiled: dict[int, Any] = {}
        self.compile_seconds = 0.0
        self.memory = StepMemory()

    def compile(self, state: StepState, batch: Mapping[str, np.ndarray]) -> None:
        """Compiles for such a batch; notes the time it took and the memory of its step."""
        began = time.perf_counter()
        program = self._jitted.lower(state, self._frozen, self._put(batch), self._key).compile()
        self._compiled[batch["tokens"].shape[1]] = program
        self.compile_seconds += time.perf_counter() - began
        self.memory = self.memory.or_more(StepMemory.of(program))

    def __call__(self, state: StepState, batch: Mapping[str, np.ndarray]) -> tuple[StepState, dict[str, jax.Array]]:
        length = batch["tokens"].shape[1]
        if length not in self._compiled:
            self.compile(state, batch)
        return self._compiled[length](state, self._frozen, self._put(batch), self._key)
