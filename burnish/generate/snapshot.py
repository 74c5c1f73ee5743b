"""A module as it is now, apart from what becomes of it later."""

from typing import Any

import jax
from flax import nnx


def snapshot(module: nnx.Module) -> tuple[Any, Any]:
    """`nnx.split`, with Variables of its own: those of `nnx.split` are the module's, and change with it.

    The arrays are shared. Nothing can change an array; but one that was donated to a jitted step is gone.
    """
    graphdef, state = nnx.split(module)
    return graphdef, jax.tree.map(lambda leaf: leaf, state)
