"""Rotary position embeddings: angles from positions, and the rotation of queries and keys.

Two kinds depend on how long a document is (`RopeConfig.by_length`); each document of a packed row has its own length,
so that packing changes nothing. Keys that were cached keep the rotation they were cached with.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from burnish.models.config import RopeConfig
from burnish.ops.visibility import TokenIds


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [rotary_dim / 2] in radians a token, and the factor that scales cos and sin.

    The factor is 1 except for `yarn` and `longrope`, whose attention temperature is folded into both sides of the
    product. Kinds that depend on the length are given as for a document of `original_max_length`.
    """
    dim = rope.rotary_dim(head_dim)
    inverse = rope.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    match rope.kind:
        case "linear":
            return inverse / rope.factor, 1.0
        case "llama3":
            return _llama3(inverse, rope), 1.0
        case "yarn":
            return _yarn(inverse, rope, dim), _or(rope.attention_factor, 0.1 * math.log(max(rope.factor, 1)) + 1)
        case "longrope":
            longer = math.log(max(rope.factor, 1)) / math.log(rope.original_max_length)
            return inverse / np.asarray(rope.short_factors), _or(rope.attention_factor, math.sqrt(1 + longer))
        case "default" | "dynamic":
            return inverse, 1.0


def _or(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given


def _llama3(inverse: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Llama 3.1: waves longer than the trained context are slowed, shorter ones kept, with a ramp between."""
    turns = rope.original_max_length * inverse / (2 * math.pi)  # full turns within the trained context
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(ramp, 0.0, 1.0)
    return keep * inverse + (1 - keep) * inverse / rope.factor


def _yarn(inverse: np.ndarray, rope: RopeConfig, dim: int) -> np.ndarray:
    """YaRN: as llama3, but the ramp runs over the dimension index."""

    def dimension(turns: float) -> float:
        return dim * math.log(rope.original_max_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = max(high - low, 1e-3)
    slow = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    return inverse * (1 - slow) + inverse / rope.factor * slow


def rope_angles(rope: RopeConfig, head_dim: int, tokens: TokenIds) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each [batch, 1, length, rotary_dim / 2] float32, for tokens [batch, length]."""
    inverse, scale = rope_frequencies(rope, head_dim)
    frequencies = jnp.asarray(inverse, jnp.float32)
    if rope.by_length:
        frequencies = _stretched(rope, frequencies, document_lengths(tokens)[:, None, :, None])
    angles = tokens.positions[:, None, :, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def document_lengths(tokens: TokenIds) -> jax.Array:
    """How long the document of each token is, as far as its tokens are here: [batch, length] int32. A document's tokens
    stand side by side; its id may be any number."""

    def row(positions: jax.Array, segments: jax.Array) -> jax.Array:
        documents = jnp.cumsum(jnp.diff(segments, prepend=segments[:1]) != 0)
        return jax.ops.segment_max(positions + 1, documents, len(segments))[documents]

    return jax.vmap(row)(tokens.positions, tokens.segments)


def _stretched(rope: RopeConfig, inverse: jax.Array, lengths: jax.Array) -> jax.Array:
    """Inverse frequencies of documents of these lengths, from those of a document of `original_max_length`."""
    if rope.kind == "longrope":
        ratio = np.asarray(rope.short_factors) / np.asarray(rope.long_factors)
        return jnp.where(lengths > rope.original_max_length, inverse * jnp.asarray(ratio, jnp.float32), inverse)
    # Dynamic: theta times growth ** (dim / (dim - 2)), where growth is 1 up to the trained length.
    dim = 2 * inverse.shape[-1]
    longer = jnp.maximum(lengths / rope.original_max_length, 1.0)
    growth = rope.factor * longer - (rope.factor - 1)
    return inverse * growth ** (-jnp.arange(0, dim, 2) / max(dim - 2, 1))


def apply_rope(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the first features of x [batch, heads, length, head_dim], as many as there are angles.

    Of n rotated features i pairs with i + n / 2, as in Hugging Face files.
    """
    cos, sin = angles
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second, still = jnp.split(wide, [half, 2 * half], axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*turned, still] if still.shape[-1] else turned, axis=-1).astype(x.dtype)
