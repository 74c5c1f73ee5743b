"""Walking only the tokens that count: move them to the front, visit them a chunk at a time, put results back.

Arrays are `[groups, tokens, ...]`. Each group is compacted by itself and a chunk takes the same rows of every
group, so an array sharded over its groups is never moved between devices. The number of chunks depends on the
data (a loop to `places.chunks` stops early), the shapes do not.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Places", "chunk_of", "compact", "picker", "put", "spread"]


class Places(NamedTuple):
    """A stable order of each group's tokens with those that count in front."""

    mask: jax.Array  # [groups, tokens]: which tokens count
    order: jax.Array  # [groups, padded]: the token at each place; padded is a whole number of chunks
    rank: jax.Array  # [groups, tokens]: the place of each token that counts
    counts: jax.Array  # [groups]: how many count
    chunks: jax.Array  # []: chunks that cover what counts in every group


def compact(mask: jax.Array, rows: int) -> Places:
    """Places for `mask` `[groups, tokens]` in chunks of `rows` tokens of each group."""
    order = jnp.argsort(~mask, axis=1, stable=True)
    counts = jnp.sum(mask, axis=1, dtype=jnp.int32)
    return Places(
        mask=mask,
        order=jnp.pad(order, ((0, 0), (0, -mask.shape[1] % rows))),
        rank=jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0),
        counts=counts,
        chunks=(jnp.max(counts) + rows - 1) // rows,
    )


def picker(places: Places, start: jax.Array, rows: int) -> Callable[[jax.Array], jax.Array]:
    """A function from `[groups, tokens, ...]` to the chunk at `start`, with 0 past the tokens that count."""
    index = jax.lax.dynamic_slice_in_dim(places.order, start, rows, axis=1)
    valid = start + jnp.arange(rows) < places.counts[:, None]
    return lambda array: _take(array, index, valid)


def spread(places: Places, compacted: jax.Array) -> jax.Array:
    """From order of place `[groups, padded, ...]` back to `[groups, tokens, ...]`; 0 where none counts."""
    return _take(compacted, places.rank, places.mask)


def chunk_of(compacted: jax.Array, start: jax.Array, rows: int) -> jax.Array:
    """The chunk at `start` of an array in order of place."""
    return jax.lax.dynamic_slice_in_dim(compacted, start, rows, axis=1)


def put(compacted: jax.Array, start: jax.Array, chunk: jax.Array) -> jax.Array:
    """`compacted` with `chunk` written at `start`."""
    return jax.lax.dynamic_update_slice_in_dim(compacted, chunk.astype(compacted.dtype), start, axis=1)


def _take(array: jax.Array, index: jax.Array, valid: jax.Array) -> jax.Array:
    """Rows `index` `[groups, n]` of `array`, 0 (never NaN times 0) where not `valid`."""
    extra = (1,) * (array.ndim - 2)
    taken = jnp.take_along_axis(array, index.reshape(*index.shape, *extra), axis=1)
    return jnp.where(valid.reshape(*valid.shape, *extra), taken, 0)
