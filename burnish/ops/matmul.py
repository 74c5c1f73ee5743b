"""The matrix product of a linear layer, whose gradients stay matrix products.

    y = x W        dx = g W'        dW = x' g

Left to itself, XLA:CPU computes whatever elementwise pass made x or g (an activation's slope, a norm) once more in
the transposed order that x' asks for: sixty milliseconds a layer where the plain pass takes four. A barrier keeps the
two apart; other platforms fuse as they like.
"""

import jax
import jax.numpy as jnp
from jax import lax

from burnish.ops.platform import on_cpu

__all__ = ["as_computed", "matmul", "transposed_product"]


@jax.custom_vjp
def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """x W in the dtype of x: x `[..., in]`, W `[in, out]` in any float dtype, in which its gradient comes.

    Products of narrow inputs are summed in float32. Reverse-mode derivatives only.
    """
    return x @ w.astype(x.dtype)


def _forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return matmul(x, w), (x, w)


def _backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = as_computed(saved[0]), saved[1]
    g = as_computed(g)
    return g @ w.astype(g.dtype).T, transposed_product(x, g).astype(w.dtype)


matmul.defvjp(_forward, _backward)


def transposed_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x' y over all leading axes: x `[..., n]`, y `[..., m]` to `[n, m]`, float32 or wider."""
    rows, y_rows = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    dtype = jnp.promote_types(jnp.result_type(x, y), jnp.float32)
    return lax.dot_general(rows, y_rows, (((0,), (0,)), ((), ())), preferred_element_type=dtype)


def as_computed(x: jax.Array) -> jax.Array:
    """x, on a CPU written to memory as it stands before anything reads it."""
    return lax.optimization_barrier(x) if on_cpu() else x
