"""The matrix product of a linear layer, whose gradients stay plain matrix products.

    y = x W        dx = g W'        dW = x' g

The derivative that autodiff takes of a product with several leading axes contracts over each of them, which XLA:CPU
runs as something slower than a product of matrices: rows are laid in one axis first (docs/performance.md has what that
is worth).
"""

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["matmul", "transposed_product"]


@jax.custom_vjp
def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """x W in the dtype of x: x `[..., in]`, W `[in, out]` in any float dtype, in which its gradient comes.

    Products of narrow inputs are summed in float32. Reverse-mode derivatives only.
    """
    return x @ w.astype(x.dtype)


def _forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return matmul(x, w), (x, w)


def _backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    return g @ w.astype(g.dtype).T, transposed_product(x, g).astype(w.dtype)


matmul.defvjp(_forward, _backward)


def transposed_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x' y over all leading axes: x `[..., n]`, y `[..., m]` to `[n, m]`, float32 or wider."""
    rows, y_rows = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    dtype = jnp.promote_types(jnp.result_type(x, y), jnp.float32)
    return lax.dot_general(rows, y_rows, (((0,), (0,)), ((), ())), preferred_element_type=dtype)
