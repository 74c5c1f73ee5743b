"""Rotary position embeddings: angles from positions, and the rotation of queries and keys."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from burnish.models.config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [head_dim / 2] in radians a token, and the factor that scales cos and sin.

    The factor is 1 except for `yarn`, whose attention temperature is folded into both sides of the product.
    """
    inverse = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "default":
        return inverse, 1.0
    if rope.kind == "linear":
        return inverse / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(inverse, rope), 1.0
    return _yarn(inverse, rope, head_dim)


def _llama3(inverse: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Llama 3.1: waves longer than the trained context are slowed, shorter ones kept, with a ramp between."""
    turns = rope.original_max_length * inverse / (2 * math.pi)  # full turns within the trained context
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(ramp, 0.0, 1.0)
    return keep * inverse + (1 - keep) * inverse / rope.factor


def _yarn(inverse: np.ndarray, rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """YaRN: as llama3, but the ramp runs over the dimension index; the temperature is 0.1 ln(factor) + 1."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = max(high - low, 1e-3)
    slow = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    scale = rope.attention_factor
    if scale is None:
        scale = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return inverse * (1 - slow) + inverse / rope.factor * slow, scale


def rope_angles(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each [batch, 1, length, head_dim / 2] float32, for positions [batch, length]."""
    inverse, scale = rope_frequencies(rope, head_dim)
    angles = positions[:, None, :, None].astype(jnp.float32) * jnp.asarray(inverse, jnp.float32)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [batch, heads, length, head_dim]; feature i pairs with i + head_dim / 2, as in Hugging Face files."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
