"""Fills a decoder with weights from a file, one stored leaf at a time, so that two copies never exist."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from burnish.models.config import ModelConfig
from burnish.models.decoder import Decoder
from burnish.models.layers import abstract_params
from burnish.models.paths import leaves

ReadTensor = Callable[[str, tuple[int, ...]], np.ndarray]
"""Reads one parameter by our name and checks that it has the shape we need (kernels are [in, out])."""


def build_decoder(
    config: ModelConfig, read_tensor: ReadTensor, dtype: Any, *, check: Callable[[list[str]], None] | None = None
) -> Decoder:
    """A decoder whose parameters are read by name and stored in `dtype`.

    check: is given the names of all parameters, one a layer, before any is read. Peak memory is the model plus its
    largest stored leaf (one projection of all layers).
    """
    decoder = Decoder(config, abstract_params(dtype), dtype=dtype)
    if check is not None:
        check([name for leaf, _ in leaves(decoder).values() for name in leaf.names])
    for leaf, variable in leaves(decoder).values():
        shape = tuple(variable.shape)
        buffer = np.empty(shape, jnp.dtype(dtype))
        if leaf.stacked:
            for index, name in enumerate(leaf.names):
                buffer[index] = read_tensor(name, shape[1:])
        else:
            buffer[...] = read_tensor(leaf.names[0], shape)
        # One copy (`jnp.asarray` makes two), awaited, so that this buffer is gone before the next one is made.
        variable.set_value(jax.block_until_ready(jax.device_put(buffer, may_alias=False)))
        del buffer
    return decoder
