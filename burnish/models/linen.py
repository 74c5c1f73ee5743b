"""A Flax Linen language model as an NNX module, so that everything that trains NNX models trains it."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from burnish.errors import InputError


class LinenModel(nnx.Module):
    """Holds a Linen module and its parameters as `nnx.Param`s, named by their path in the `params` collection.

    Only `params` is trained; other collections are kept as they are and passed along. With `variables=None` the module
    is initialised from `seed` on a row of two tokens.
    """

    def __init__(self, module: linen.Module, variables: Mapping[str, Any] | None = None, *, seed: int = 0) -> None:
        if variables is None:
            variables = module.init(jax.random.key(seed), jnp.zeros((1, 2), jnp.int32))
        if "params" not in variables:
            raise InputError(f"{type(module).__name__}: no 'params' in its variables; pass what module.init returned")
        self.linen = module
        self.params = nnx.Dict(_as_params(variables["params"]))
        self.constants = nnx.data({name: value for name, value in variables.items() if name != "params"})

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens [batch, length] -> what the Linen module returns."""
        return self.linen.apply({"params": _as_arrays(self.params), **self.constants}, tokens)  # type: ignore[return-value]


def _as_params(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: nnx.Dict(_as_params(value)) if isinstance(value, Mapping) else nnx.Param(jnp.asarray(value))
        for name, value in tree.items()
    }


def _as_arrays(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[...] if isinstance(value, nnx.Variable) else _as_arrays(value) for name, value in tree.items()}
