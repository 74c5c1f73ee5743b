"""One optimizer step as a pure function of flat dicts of arrays.

A step reads the whole global batch: the weights of every term are summed first, from the masks alone, so that each
micro-batch's loss is scaled once and for all, and loss and gradient do not depend on how the batch was cut.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from burnish.models.language_model import Batch, token_loss, token_outputs
from burnish.models.parts import Arrays, Parts
from burnish.models.remat import RematPolicy
from burnish.objectives.objective import Objective, Sums
from burnish.objectives.pairs import mean
from burnish.objectives.sources import source_denominators, source_losses
from burnish.ops.head import HeadOutputs
from burnish.train.optimizer import Optimizer, OptimizerState


class StepState(NamedTuple):
    """What a step changes: trained arrays by stored key, and the optimizer's state."""

    params: Arrays
    optimizer: OptimizerState


def train_step(
    parts: Parts,
    objective: Objective,
    optimizer: Optimizer,
    groups: int,
    state: StepState,
    frozen: list[Any],
    batch: Batch,
    key: jax.Array,
    *,
    sources: tuple[str, ...] = (),
    neftune_alpha: float = 0.0,
    remat: RematPolicy | None = None,
) -> tuple[StepState, dict[str, jax.Array]]:
    """One update from a global batch of arrays [micro_batches, rows, length].

    Returns the next state and scalar metrics: each term of the objective divided by its weight, the gradient norm
    before clipping, the learning rate, the number of trained tokens; of several sources each one's loss, too. `key` is
    the run's dropout key.
    """
    denominators = objective.denominators(batch["weights"]) | source_denominators(objective, batch, sources)
    scale = mean(jnp.ones(()), denominators["loss"])
    dropout_key = jax.random.fold_in(key, state.optimizer.step)

    def token_sum(outputs: HeadOutputs, weights: jax.Array) -> jax.Array:
        return objective(outputs, weights)["loss"][0]

    def micro_loss(params: Arrays, micro: Batch) -> tuple[jax.Array, Sums]:
        module = parts.merge(params, frozen)
        how: dict[str, Any] = {
            "dropout_key": dropout_key,
            "neftune_alpha": neftune_alpha,
            "remat": remat,
            "groups": groups,
        }
        if getattr(objective, "per_token", False):  # one that does not say is asked for no more than its sums
            loss, outputs = token_loss(module, micro, token_sum, objective.head_outputs, **how)
            sums = objective(outputs, micro["weights"])
        else:
            outputs = token_outputs(module, micro, objective.head_outputs, **how)
            sums = objective(outputs, micro["weights"])
            loss = sums["loss"][0]
        return loss * scale, sums | source_losses(objective, outputs, micro, sources)

    def accumulate(total: tuple[Arrays, Sums], micro: Batch) -> tuple[tuple[Arrays, Sums], None]:
        (_, sums), grads = jax.value_and_grad(micro_loss, has_aux=True)(state.params, micro)
        return jax.tree.map(jnp.add, total, (grads, sums)), None

    first = jax.tree.map(lambda array: array[0], batch)
    if batch["tokens"].shape[0] == 1:
        (_, sums), grads = jax.value_and_grad(micro_loss, has_aux=True)(state.params, first)
    else:
        shapes = jax.eval_shape(lambda: jax.grad(micro_loss, has_aux=True)(state.params, first))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        (grads, sums), _ = jax.lax.scan(accumulate, zeros, batch)
    updates, optimizer_state, metrics = optimizer.update(grads, state.optimizer, state.params)
    params = {name: state.params[name] + updates[name] for name in state.params}
    metrics |= {name: mean(total, denominators[name]) for name, (total, _) in sums.items()}
    metrics["trained_tokens"] = jnp.sum(batch["weights"] != 0)
    return StepState(params, optimizer_state), metrics
