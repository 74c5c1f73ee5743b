"""Checkpoints: trained parameters, optimizer and data order of a step, written by Orbax.

Files use one name a layer, whatever the stacking in memory: a stacked leaf is cut into its layers on the way out and
joined on the way in, its optimizer moments too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from burnish.errors import InputError
from burnish.models.paths import Leaf
from burnish.train.optimizer import OptimizerState
from burnish.train.run_folder import CHECKPOINTS
from burnish.train.step import StepState


class Restored(NamedTuple):
    """What a checkpoint held: the step's state, and the data iterator's."""

    state: StepState
    data: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run. Saving is asynchronous: `close` before relying on the files."""

    def __init__(self, run: Path, keep: int | None) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager((run / CHECKPOINTS).absolute(), options=options)

    def latest_step(self) -> int | None:
        """The newest whole checkpoint's step; None when there is none."""
        return self._manager.latest_step()

    def save(
        self,
        step: int,
        state: StepState,
        leaves: Mapping[str, Leaf],
        data: Mapping[str, Any],
        recipe: Mapping[str, Any],
    ) -> None:
        """Writes the state after `step` steps. It appears under its name only when whole."""
        optimizer = {"step": state.optimizer.step, "moments": _by_layer(state.optimizer.moments, leaves)}
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(_by_layer(state.params, leaves)),
                optimizer=ocp.args.StandardSave(optimizer),
                data=ocp.args.JsonSave(dict(data)),
                recipe=ocp.args.JsonSave(dict(recipe)),
            ),
        )

    def restore(self, step: int, like: StepState, leaves: Mapping[str, Leaf]) -> Restored:
        """The checkpoint of `step`, laid out and sharded as `like` is; asserts that it is that step's."""
        optimizer = {"step": like.optimizer.step, "moments": _by_layer_abstract(like.optimizer.moments, leaves)}
        found = self._restore(
            step,
            ocp.args.Composite(
                params=ocp.args.StandardRestore(_by_layer_abstract(like.params, leaves)),
                optimizer=ocp.args.StandardRestore(jax.tree.map(_abstract, optimizer)),
                data=ocp.args.JsonRestore(),
            ),
        )
        moments = stack_layers(found["optimizer"]["moments"], like.optimizer.moments, leaves)
        state = StepState(
            stack_layers(found["params"], like.params, leaves), OptimizerState(found["optimizer"]["step"], moments)
        )
        if int(state.optimizer.step) != step:
            raise InputError(f"checkpoint {step}: its optimizer is at step {int(state.optimizer.step)}; it is damaged")
        return Restored(state, found["data"])

    def recipe(self, step: int) -> dict[str, Any]:
        """The recipe that the run was following when it wrote the checkpoint."""
        return self._restore(step, ocp.args.Composite(recipe=ocp.args.JsonRestore()))["recipe"]

    def restore_params(self, step: int, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Trained parameters alone, by the name of each layer's parameter."""
        return self._restore(step, ocp.args.Composite(params=ocp.args.StandardRestore(dict(shapes))))["params"]

    def _restore(self, step: int, wanted: Any) -> Any:
        try:
            return self._manager.restore(step, args=wanted)
        except (ValueError, KeyError, OSError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0][:200]
            where = self._manager.directory / str(step)
            raise InputError(
                f"{where}: damaged, or not of this model and recipe ({reason}); take the folder away to go on "
                "from an earlier checkpoint"
            ) from None

    def close(self) -> None:
        """Waits and releases the folder."""
        self._manager.close()


def _by_layer(stored: Mapping[str, Any], leaves: Mapping[str, Leaf]) -> dict[str, Any]:
    """By stored key -> by the name of each layer's parameter."""
    found: dict[str, Any] = {}
    for key, leaf in leaves.items():
        for index, name in enumerate(leaf.names):
            found[name] = jax.tree.map(lambda array, i=index: array[i], stored[key]) if leaf.stacked else stored[key]
    return found


def _by_layer_abstract(stored: Mapping[str, Any], leaves: Mapping[str, Leaf]) -> dict[str, Any]:
    """Shapes, dtypes and shardings of what `_by_layer` would give."""
    found: dict[str, Any] = {}
    for key, leaf in leaves.items():
        one = jax.tree.map(_abstract_layer if leaf.stacked else _abstract, stored[key])
        found |= dict.fromkeys(leaf.names, one)
    return found


def _abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _abstract_layer(array: jax.Array) -> jax.ShapeDtypeStruct:
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, P(*sharding.spec[1:]))
    return jax.ShapeDtypeStruct(array.shape[1:], array.dtype, sharding=sharding)


def stack_layers(found: Mapping[str, Any], like: Mapping[str, Any], leaves: Mapping[str, Leaf]) -> dict[str, Any]:
    """By the name of each layer's parameter -> by stored key, laid out and sharded as `like` is."""
    stored = {}
    for key, leaf in leaves.items():
        layers = [found[name] for name in leaf.names]
        joined = jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers) if leaf.stacked else layers[0]
        stored[key] = jax.tree.map(lambda array, model: jax.device_put(array, model.sharding), joined, like[key])
    return stored
