"""One optimizer step, and one evaluation step, as pure functions of flat dicts of arrays.

A step reads the whole global batch: the weights of every term are summed first, from the masks alone, so that each
micro-batch's loss is scaled once and for all, and loss and gradient do not depend on how the batch was cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from burnish.errors import InputError
from burnish.models.language_model import Batch, token_outputs
from burnish.models.paths import Leaf, leaves, matches, select
from burnish.ops.head import HeadOutputs, OutputName
from burnish.train.optimizer import Optimizer, OptimizerState

Arrays = dict[str, jax.Array]
Sums = dict[str, tuple[jax.Array, jax.Array]]
"""By name of a term: the sum of its values and the sum of their weights."""


class Objective(Protocol):
    """What a loss is to the trainer: which head outputs it needs, its weights, and its sums (see `burnish.objectives`).

    The term "loss" is minimised: its sum over the global batch, divided by its weight over the global batch.
    """

    @property
    def head_outputs(self) -> tuple[OutputName, ...]: ...

    def weight(self, weights: jax.Array) -> jax.Array: ...

    def __call__(self, outputs: HeadOutputs, weights: jax.Array) -> Sums: ...


@dataclass(frozen=True)
class Parts:
    """A module taken apart: its structure, the leaves that are trained, and the rest.

    `merge` puts a module together again, from trained arrays by stored key and frozen leaves in order.
    """

    treedef: Any
    graphdef: Any
    trained: dict[str, Leaf]
    places: dict[str, int]

    def merge(self, trained: Mapping[str, Any], frozen: list[Any]) -> Any:
        """The module, for one forward pass."""
        rest = iter(frozen)
        by_place = {self.places[key]: array for key, array in trained.items()}
        flat = [by_place[i] if i in by_place else next(rest) for i in range(self.treedef.num_leaves)]
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, flat))


def take_apart(module: nnx.Module, selectors: list[str]) -> tuple[Parts, Arrays, list[Any]]:
    """(parts, trained arrays by stored key as float32 masters, frozen leaves).

    Trained is what the selectors cover; without any, the newest adapters where there are adapters, else every parameter.
    """
    found = leaves(module)
    trained = _choose(found, selectors)
    graphdef, state = nnx.split(module)
    variables = nnx.to_flat_state(state)
    flat, treedef = jax.tree.flatten(state)
    places = {}
    for index, (path, _) in enumerate(variables):
        key = ".".join(str(part) for part in path)
        if key in trained:
            places[key] = index
    if len(variables) != len(flat):
        raise InputError(
            "train: a parameter of this model is not one array; only plain array parameters are trained"
        )
    chosen = {key: flat[index].astype(jnp.float32) for key, index in places.items()}
    frozen = [leaf for index, leaf in enumerate(flat) if index not in places.values()]
    return Parts(treedef, graphdef, {key: trained[key] for key in places}, places), chosen, frozen


def _choose(found: Mapping[str, tuple[Leaf, nnx.Variable]], selectors: list[str]) -> dict[str, Leaf]:
    if selectors:
        select(
            (name for leaf, _ in found.values() for name in leaf.names), selectors, option="train.trainable"
        )
        chosen = {}
        for key, (leaf, _) in found.items():
            hit = [any(matches(name, selector) for selector in selectors) for name in leaf.names]
            if any(hit) and not all(hit):
                raise InputError(
                    f"train.trainable: {selectors} covers some layers of the stacked {leaf.names[0]} and not others; "
                    "select all layers, or use optimizer.groups with lr_scale=0 for those to be left alone"
                )
            if all(hit):
                chosen[key] = leaf
        return chosen
    adapters = {key: leaf for key, (leaf, variable) in found.items() if isinstance(variable, nnx.LoRAParam)}
    newest = {key: leaf for key, leaf in adapters.items() if _next_adapter(key) not in adapters}
    return newest or {key: leaf for key, (leaf, _) in found.items()}


def _next_adapter(key: str) -> str:
    """The key of the adapter put on after this one: `...adapters.0.a` -> `...adapters.1.a`."""
    stem, index, name = key.rsplit(".", 2)
    return f"{stem}.{int(index) + 1}.{name}"


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
) -> tuple[StepState, dict[str, jax.Array]]:
    """One update from a global batch of arrays [micro_batches, rows, length].

    Returns the next state and scalar metrics: each term of the objective divided by its weight, the gradient norm before
    clipping, the learning rate, the number of trained tokens. `key` is the run's dropout key.
    """
    weight = objective.weight(batch["weights"])
    scale = jnp.where(weight > 0, 1.0 / jnp.maximum(weight, 1e-30), 0.0)
    dropout_key = jax.random.fold_in(key, state.optimizer.step)

    def micro_loss(params: Arrays, micro: Batch) -> tuple[jax.Array, Sums]:
        module = parts.merge(params, frozen)
        outputs = token_outputs(module, micro, objective.head_outputs, dropout_key=dropout_key, groups=groups)
        sums = objective(outputs, micro["weights"])
        return sums["loss"][0] * scale, sums

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
    for name, (value, weight) in sums.items():
        metrics[name] = jnp.where(weight > 0, value / jnp.maximum(weight, 1e-30), 0.0)
    metrics["trained_tokens"] = jnp.sum(batch["weights"] != 0)
    return StepState(params, optimizer_state), metrics


def eval_step(
    parts: Parts, objective: Objective, groups: int, params: Arrays, frozen: list[Any], batch: Batch
) -> Sums:
    """The objective's sums and weights over one batch of arrays [rows, length], without dropout."""
    outputs = token_outputs(parts.merge(params, frozen), batch, objective.head_outputs, groups=groups)
    return objective(outputs, batch["weights"])
