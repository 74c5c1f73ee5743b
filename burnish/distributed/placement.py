"""Puts a module's parameters where the sharding rules say."""

import jax
from flax import nnx
from jax.sharding import Mesh

from burnish.distributed.sharding import parameter_sharding
from burnish.models.paths import leaves


def place_module(module: nnx.Module, mesh: Mesh) -> None:
    """Moves every parameter to its place on the mesh."""
    for leaf, variable in leaves(module).values():
        array = variable[...]
        variable.set_value(jax.device_put(array, parameter_sharding(mesh, leaf.axes, array.shape)))
