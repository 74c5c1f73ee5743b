"""Puts the optimizer's state where its parameters are."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from burnish.distributed.sharding import parameter_sharding, replicated
from burnish.models.paths import Leaf
from burnish.train.optimizer import Optimizer, OptimizerState


def init_optimizer(
    optimizer: Optimizer, params: Mapping[str, jax.Array], leaves: Mapping[str, Leaf], mesh: Mesh
) -> OptimizerState:
    """The optimizer's first state; a moment shaped like its parameter lives where the parameter does."""
    shapes = jax.eval_shape(optimizer.init, params)

    def place(key: str, moments: Any) -> Any:
        param = params[key]
        own = parameter_sharding(mesh, leaves[key].axes, param.shape)
        return jax.tree.map(lambda moment: own if moment.shape == param.shape else replicated(mesh), moments)

    moments = {key: place(key, shapes.moments[key]) for key in shapes.moments}
    shardings: Any = OptimizerState(replicated(mesh), moments)  # type: ignore[arg-type]
    return jax.jit(optimizer.init, out_shardings=shardings)(params)
