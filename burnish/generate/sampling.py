"""From logits to a token and its log-probability.

With logits `l` of one row and temperature `T`, `z = (l - max l) / T`, and

    top_k    keeps z_v among the k largest
    top_p    keeps the fewest largest z_v whose probabilities, among those kept so far, sum to top_p or more
    min_p    keeps z_v with p_v >= min_p max_u p_u

in this order. Tokens that tie with the last one kept are kept too. A token is drawn from `q = softmax(z)` over the
kept set, and its log-probability is `log q`: that of the distribution it was drawn from. At temperature 0 the token
is the likeliest one and its log-probability the model's own, at temperature 1, so that it means something.

A row's random numbers are those of (its seed, its step): neither its place in a batch nor its neighbours matter.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from burnish.generate.config import SamplingConfig

_LANES = 128


class Rules(NamedTuple):
    """A `SamplingConfig` for the device. What is None is off, and costs nothing; temperature None is greedy."""

    temperature: jax.Array | None = None
    top_k: jax.Array | None = None
    top_p: jax.Array | None = None
    min_p: jax.Array | None = None


def rules_of(config: SamplingConfig) -> Rules:
    """The rules that a config asks for. Greedy needs no filters: they never drop the likeliest token."""
    if config.temperature == 0:
        return Rules()
    return Rules(
        temperature=jnp.float32(config.temperature),
        top_k=None if config.top_k is None else jnp.float32(config.top_k),
        top_p=None if config.top_p == 1 else jnp.float32(config.top_p),
        min_p=None if config.min_p == 0 else jnp.float32(config.min_p),
    )


def seeds_of(seed: int, count: int) -> list[int]:
    """Seeds of the requests of one call: the first has the call's own, so that any answer can be drawn again alone."""
    others = [int(np.random.SeedSequence([seed, i]).generate_state(1, np.uint64)[0]) >> 1 for i in range(1, count)]
    return [seed, *others][:count]


def key_data(seeds: Sequence[int]) -> np.ndarray:
    """Seeds as `[requests, 2]` uint32."""
    return np.array([(seed >> 32, seed & 0xFFFFFFFF) for seed in seeds], np.uint32).reshape(-1, 2)


def draw(logits: jax.Array, keys: jax.Array, step: jax.Array, rules: Rules) -> tuple[jax.Array, jax.Array]:
    """One token a row.

    Args:
      logits: `[rows, vocab]` float32.
      keys: `[rows, 2]` uint32, of each row's seed (`key_data`).
      step: scalar int32, how many tokens came before this one.
      rules: what to draw from.

    Returns:
      tokens `[rows]` int32, and their log-probabilities `[rows]` float32 under the distribution drawn from.
    """
    if rules.temperature is None:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return tokens, _log_probs(logits, tokens)
    # The highest becomes 0 before the division, so that no temperature is too low for float32.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / rules.temperature
    scaled = jnp.where(kept(scaled, rules), scaled, -jnp.inf)
    tokens = _inverse_cdf(jnp.exp(scaled), _uniform(keys, step))
    return tokens, _log_probs(scaled, tokens)


def kept(scaled: jax.Array, rules: Rules) -> jax.Array:
    """Which tokens may be drawn, `[rows, vocab]` booleans; `scaled` `[rows, vocab]` has its highest at 0."""
    weights = jnp.exp(scaled)
    keep = jnp.ones(scaled.shape, bool)
    if rules.top_k is not None:
        count = jnp.minimum(rules.top_k, scaled.shape[-1])
        keep = _largest(scaled, jnp.ones_like(scaled), count)
    if rules.top_p is not None:
        left = jnp.where(keep, weights, 0)
        keep &= _largest(scaled, left, rules.top_p * left.sum(axis=-1))
    if rules.min_p is not None:
        keep &= weights >= rules.min_p  # the highest weighs 1
    return keep


def _largest(values: jax.Array, weights: jax.Array, enough: jax.Array) -> jax.Array:
    """The fewest largest values of each row whose weights sum to `enough` or more, ties included, as a mask.

    Found by bisection over the values as ordered integers: 32 passes over the row, where a sort takes many more.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    order = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def narrow(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        above = jnp.where(order >= middle[:, None], weights, 0).sum(axis=-1)
        return jnp.where(above >= enough, middle, low), jnp.where(above >= enough, high, middle)

    rows = values.shape[0]
    ends = jnp.iinfo(jnp.int32)
    bounds = jnp.full(rows, ends.min, jnp.int32), jnp.full(rows, ends.max, jnp.int32)
    low, _ = jax.lax.fori_loop(0, 32, narrow, bounds)
    return order >= low[:, None]


def _uniform(keys: jax.Array, step: jax.Array) -> jax.Array:
    """Two numbers in [0, 1) a row, `[rows, 2]`."""

    def one(data: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(data, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, step), (2,))

    return jax.vmap(one)(keys)


def _inverse_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Draws a place of each row `[rows, vocab]` in proportion to its weight: first a block of places, then one in it.

    Two draws are finer than one: a uniform number in float32 has 2**23 values, too few for a flat row of 10**5.
    """
    rows, vocab = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -vocab % _LANES))).reshape(rows, -1, _LANES)
    block = _pick(blocks.sum(axis=-1), uniform[:, 0])
    inside = _pick(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], uniform[:, 1])
    return (block * _LANES + inside).astype(jnp.int32)


def _pick(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The first place of each row whose running sum exceeds `uniform` of the whole; never one that weighs 0.

    Parallel sums may sink by a rounding from one place to the next, so places of weight 0 are left out by name.
    """
    sums = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), -1)
    return jnp.argmax(sums > (uniform * sums.max(axis=-1))[:, None], axis=-1)


def _log_probs(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
