"""The product of a linear layer and its gradients against NumPy in float64, and how many products they take."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.ops.matmul import matmul, transposed_product

IN, OUT = 6, 9
RNG = np.random.default_rng(0)
W = RNG.normal(size=(IN, OUT))


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def value_and_gradients(x: Any, w: Any, g: Any) -> tuple[jax.Array, ...]:
    """y, dx and dW where g is the gradient for y."""
    y, pull_back = jax.vjp(matmul, x, w)
    return y, *pull_back(jnp.asarray(g, y.dtype))


def by_definition(x: Any, w: Any, g: Any) -> tuple[np.ndarray, ...]:
    """The same, a row of x at a time, in float64."""
    x, w, g = wide(x), wide(w), wide(g)
    rows = list(np.ndindex(x.shape[:-1]))
    y, dx, dw = np.zeros(g.shape), np.zeros(x.shape), np.zeros(w.shape)
    for row in rows:
        y[row], dx[row] = x[row] @ w, w @ g[row]
        dw += np.outer(x[row], g[row])
    return y, dx, dw


def assert_close(got: Any, want: np.ndarray, rtol: float) -> None:
    """Relative to the largest number."""
    np.testing.assert_allclose(wide(got), want, rtol=0, atol=rtol * np.abs(want).max())


@pytest.mark.parametrize("lead", [(7,), (2, 3), (2, 1, 5), (), (1,)], ids=str)
def test_equals_the_definition_over_any_leading_axes(lead: tuple[int, ...]) -> None:
    x, g = normal(*lead, IN), normal(*lead, OUT)
    got = jax.jit(value_and_gradients)(jnp.float32(x), jnp.float32(W), jnp.float32(g))
    assert [array.shape for array in got] == [(*lead, OUT), (*lead, IN), (IN, OUT)]
    for array, want in zip(got, by_definition(x, W, g), strict=True):
        assert array.dtype == jnp.float32
        assert_close(array, want, 1e-6)


def test_float64_stays_float64() -> None:
    x, g = normal(4, IN), normal(4, OUT)
    with jax.enable_x64(True):
        got = jax.jit(value_and_gradients)(jnp.asarray(x), jnp.asarray(W), g)
        for array, want in zip(got, by_definition(x, W, g), strict=True):
            assert array.dtype == jnp.float64
            assert_close(array, want, 1e-14)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_narrow_x_over_a_wide_kernel(jit: bool) -> None:
    """What is narrow rounds once, at the end; the kernel's gradient is wide, and never was narrow."""
    rows = 1000
    x, w, g = jnp.asarray(normal(rows, IN), jnp.bfloat16), jnp.float32(W), jnp.asarray(normal(rows, OUT), jnp.bfloat16)
    run = jax.jit(value_and_gradients) if jit else value_and_gradients
    y, dx, dw = run(x, w, g)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    want = by_definition(x, w.astype(jnp.bfloat16), g)  # the products take W in the dtype of x
    assert_close(y, want[0], 2**-8)
    assert_close(dx, want[1], 2**-8)
    assert_close(dw, want[2], 1e-6)
    rounded = wide(jnp.asarray(want[2], jnp.bfloat16))
    assert np.abs(rounded - want[2]).max() > 1e-3 * np.abs(want[2]).max()  # what the last bound would not let pass


def test_narrow_products_are_summed_in_float32() -> None:
    """Of 300 ones: a bfloat16 sum of ones stops at 256."""
    x, w, g = jnp.ones((300, 300), jnp.bfloat16), jnp.ones((300, 300)), jnp.ones((300, 300), jnp.bfloat16)
    y, dx, dw = jax.jit(value_and_gradients)(x, w, g)
    for array in (y, dx, dw, transposed_product(x, g)):
        np.testing.assert_array_equal(wide(array), 300)


def test_a_narrow_product_takes_a_narrow_kernel() -> None:
    """1 + 1/512 is 1 in bfloat16; a product in float32 would leave 1/512 over."""
    x = g = jnp.ones(2, jnp.bfloat16)
    y, dx, _ = jax.jit(value_and_gradients)(x, jnp.array([[1 + 2**-9, -1], [-1, 1]], jnp.float32), g)
    np.testing.assert_array_equal(wide(y), 0)
    np.testing.assert_array_equal(wide(dx), 0)


def test_wide_x_over_a_narrow_kernel() -> None:
    """The product runs in the dtype of x; the kernel's gradient comes in that of the kernel, rounded once."""
    x, w, g = jnp.float32(normal(1000, IN)), jnp.asarray(W, jnp.bfloat16), jnp.float32(normal(1000, OUT))
    y, dx, dw = jax.jit(value_and_gradients)(x, w, g)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)
    want = by_definition(x, w, g)
    assert_close(y, want[0], 1e-6)
    assert_close(dx, want[1], 1e-6)
    assert_close(dw, want[2], 2**-8)


def test_transposed_product() -> None:
    x, y = normal(3, 5, IN), normal(3, 5, OUT)
    want = sum(np.outer(x[row], y[row]) for row in np.ndindex(3, 5))
    got = jax.jit(transposed_product)(jnp.float32(x), jnp.float32(y))
    assert got.dtype == jnp.float32
    assert_close(got, want, 1e-6)
    narrow = [jnp.asarray(array, jnp.bfloat16) for array in (x, y)]
    got = jax.jit(transposed_product)(*narrow)
    assert got.dtype == jnp.float32
    assert_close(got, np.einsum("abn,abm->nm", *map(wide, narrow)), 1e-6)
    with jax.enable_x64(True):
        got = transposed_product(jnp.asarray(x), jnp.asarray(y))
        assert got.dtype == jnp.float64
        assert_close(got, want, 1e-14)


# A layer within a model: what comes before and after it, and a loop over layers.


def chain(x: jax.Array, w: jax.Array, product: Callable[..., jax.Array] = matmul) -> jax.Array:
    return (jnp.tanh(product(jnp.sin(x), w)) ** 2).sum()


def dots(function: Callable[..., Any], *args: jax.Array) -> int:
    text = jax.jit(function).lower(*args).compile().as_text()
    return len(re.findall(r" = \S+ (?:dot|custom-call)\(", text))


def test_a_frozen_kernel_costs_no_product() -> None:
    args = jnp.ones((64, 32)), jnp.ones((32, 48))
    assert dots(chain, *args) == 1
    assert dots(jax.grad(chain), *args) == 2
    assert dots(jax.grad(lambda x, w: chain(x, jax.lax.stop_gradient(w))), *args) == 2
    assert dots(jax.grad(chain, 1), *args) == 2
    assert dots(jax.grad(chain, (0, 1)), *args) == 3


@pytest.mark.parametrize("wrapping", [lambda f: f, jax.checkpoint], ids=["kept", "checkpoint"])
def test_gradients_in_a_scan_over_layers(wrapping: Callable[..., Any]) -> None:
    """Equal to those that JAX derives of the plain product."""
    x, kernels = jnp.float32(normal(5, IN)), jnp.float32(normal(3, IN, IN))

    def through(product: Callable[..., jax.Array], x: jax.Array, kernels: jax.Array) -> jax.Array:
        layer = wrapping(lambda x, w: (x + jnp.tanh(product(x, w)), None))
        return (jax.lax.scan(layer, x, kernels)[0] ** 2).sum()

    got, want = (
        jax.jit(jax.value_and_grad(lambda x, w, product=product: through(product, x, w), (0, 1)))(x, kernels)
        for product in (matmul, jnp.matmul)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, wide(b), 1e-5)


def test_mapped_over_kernels_and_over_rows() -> None:
    x, kernels = jnp.float32(normal(3, 5, IN)), jnp.float32(normal(3, IN, OUT))
    for axes, w in ((0, kernels), ((0, None), kernels[0])):
        mapped = jax.jit(jax.vmap(jax.grad(chain, (0, 1)), axes))(x, w)
        for i in range(3):
            alone = jax.grad(lambda x, w: chain(x, w, jnp.matmul), (0, 1))(x[i], w[i] if w.ndim == 3 else w)
            for a, b in zip(mapped, alone, strict=True):
                assert_close(a[i], wide(b), 1e-5)
