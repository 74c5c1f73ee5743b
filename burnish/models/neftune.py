"""NEFTune: noise on the embedded tokens while training (Jain et al. 2023, arXiv 2310.05914).

    x' = x + u alpha / sqrt(L d),    u uniform(-1, 1) for each of the d features of each token

L is the number of tokens of the document that the token is of, d the width of the embedding. The noise of a token is
drawn from (seed, step, example, position), as dropout masks are, so packing and micro-batches do not move it.
"""

import zlib

import jax
import jax.numpy as jnp

from burnish.models.layers import DropoutKeys

_TAG = zlib.crc32(b"neftune")  # tells it from dropout's layers, which are small numbers


def neftune_noise(alpha: float, width: int, keys: DropoutKeys, segment_ids: jax.Array) -> jax.Array:
    """[batch, length, width] float32, 0 on padding (segment 0); segment_ids [batch, length]."""
    key = jax.random.fold_in(keys.key, _TAG)

    def one_token(example: jax.Array, position: jax.Array) -> jax.Array:
        token_key = jax.random.fold_in(jax.random.fold_in(key, example), position)
        return jax.random.uniform(token_key, (width,), jnp.float32, -1.0, 1.0)

    drawn = jax.vmap(jax.vmap(one_token))(keys.example_ids, keys.positions)
    scale = alpha * jax.lax.rsqrt(segment_lengths(segment_ids).astype(jnp.float32) * width)
    return jnp.where(segment_ids[..., None] == 0, 0.0, drawn * scale[..., None])


def segment_lengths(segment_ids: jax.Array) -> jax.Array:
    """For each slot of [batch, length], how many slots of its row are of the same segment."""

    def one_row(row: jax.Array) -> jax.Array:
        ordered = jnp.sort(row)
        return jnp.searchsorted(ordered, row, side="right") - jnp.searchsorted(ordered, row, side="left")

    return jax.vmap(one_row)(segment_ids)
