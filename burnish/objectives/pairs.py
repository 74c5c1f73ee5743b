"""`(sum, weight)` pairs: what every objective returns and every metric is.

A pair is not divided where it is made. Pairs of micro-batches, devices or steps are added, and the mean is
taken once at the end, so it depends on none of these. Weights may be fractions. Where a weight is 0 the token
adds 0, whatever stands there; a mean over no weight at all is 0.
"""

import jax
import jax.numpy as jnp

from burnish.errors import InputError

__all__ = ["Pair", "counted", "mean", "weighted_sum"]

Pair = tuple[jax.Array, jax.Array]


def weighted_sum(values: jax.Array, weights: jax.Array) -> Pair:
    """`(sum(w value), sum(w))` of arrays of one shape `[...]`; where a weight is 0, the value is not read."""
    if values.shape != weights.shape:
        raise InputError(f"weights: shape {weights.shape} must be that of the values, {values.shape}")
    return jnp.sum(weights * counted(values, weights)), jnp.sum(weights)


def counted(values: jax.Array, weights: jax.Array) -> jax.Array:
    """`values`, and 0 where the weight is 0.

    A loss that is not linear in its values must pass them through here before it bends them: the gradient of
    NaN squared is NaN even times a weight of 0.
    """
    return jnp.where(weights != 0, values, 0)


def mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """`total / weight`, and 0 (with zero gradient) where the weight is 0."""
    some = weight != 0
    return jnp.where(some, total, 0) / jnp.where(some, weight, 1)
