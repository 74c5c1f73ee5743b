"""An objective's terms over a data set: sums over every token, divided once, whatever the batches and devices."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from burnish.data.batches import evaluation_batches
from burnish.data.config import DataConfig
from burnish.data.examples import Examples
from burnish.distributed.sharding import batch_sharding, batch_shards
from burnish.models.language_model import Batch, token_outputs
from burnish.models.parts import Arrays, Parts
from burnish.objectives.objective import Objective, Sums
from burnish.objectives.sources import source_losses


@dataclass
class Evaluator:
    """Evaluates trained arrays of a module on the same examples, as often as asked.

    rows: rows of a batch, a multiple of the mesh's batch shards. sources: names of the examples' sources; where there
    are several, each one's loss is told apart, as `eval_loss/NAME`.
    """

    parts: Parts
    frozen: list[Any]
    objective: Objective
    examples: Examples
    data: DataConfig
    rows: int
    mesh: Mesh
    sources: tuple[str, ...] = ()

    def __call__(self, trained: Mapping[str, jax.Array]) -> dict[str, float]:
        """Each term's sum / weight, prefixed `eval_`, and `eval_tokens`, the number of tokens it was taken over."""
        sharding = batch_sharding(self.mesh, micro_batches=False)
        totals: dict[str, np.ndarray] = {}
        tokens = 0
        for batch in evaluation_batches(self.examples, self.rows, self.data):
            sums = self._step(dict(trained), self.frozen, jax.device_put(batch, sharding))
            for name, pair in sums.items():  # added in float64: a long data set has more tokens than float32 digits
                totals[name] = totals.get(name, np.zeros(2)) + np.array(pair, np.float64)
            tokens += int(np.count_nonzero(batch["weights"]))
        terms = {f"eval_{name}": float(total / weight) for name, (total, weight) in totals.items() if weight}
        return {**terms, "eval_tokens": tokens}

    @cached_property
    def _step(self) -> Any:
        def step(trained: Arrays, frozen: list[Any], batch: Batch) -> Sums:
            module = self.parts.merge(trained, frozen)
            found = token_outputs(module, batch, self.objective.head_outputs, groups=batch_shards(self.mesh))
            sums = self.objective(found, batch["weights"])
            return sums | source_losses(self.objective, found, batch, self.sources)

        return jax.jit(step)
