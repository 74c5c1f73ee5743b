"""Who sees whom: the one rule behind every attention back end, and its coarse form for whole blocks.

A token carries a position, a segment id, and perhaps the id of a parent segment. Query `i` sees key `j` iff

    segment_j != 0                                     0 marks padding
    segment_j == segment_i  or  segment_j == parent_i  a completion sees its own tokens and its prompt's
    position_j <= position_i                           causal
    position_i - position_j < window                   where there is a window

Positions count the tokens of a text, not the columns of a row: a completion's positions go on from its
prompt's, wherever in the row the two were packed, so a window is a distance in the text.

Order the tokens by their *key* `(segment, position)`, segment first. The rule then says that a query sees the
keys of two intervals,

    (segment_i, position_i - window + 1) .. (segment_i, position_i)
    (parent_i,  position_i - window + 1) .. (parent_i,  position_i)

and a block of queries can see a block of keys only if the hull of the former's intervals (taken apart for own
segments and parents) meets the range of the latter's keys. That is what `visible_blocks` computes. In rows
packed the usual way (segments and positions rising) it finds the causal triangle, the borders of documents,
and the far side of a window. It holds for any other order too, since it reads the ids themselves and never an
index into the row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_LOWEST = jnp.iinfo(jnp.int32).min
_HIGHEST = jnp.iinfo(jnp.int32).max


class TokenIds(NamedTuple):
    """Where tokens stand: int32 arrays `[..., length]`; `parents` is None where no segment has a parent."""

    positions: jax.Array
    segments: jax.Array
    parents: jax.Array | None = None


class _Key(NamedTuple):
    segment: jax.Array
    position: jax.Array

    def at_most(self, other: "_Key") -> jax.Array:
        """Lexicographic order."""
        tie = (self.segment == other.segment) & (self.position <= other.position)
        return (self.segment < other.segment) | tie

    def at_axis(self, index: tuple[slice | None, ...]) -> "_Key":
        return _Key(self.segment[index], self.position[index])


def visible(q: TokenIds, kv: TokenIds, window: int | None = None) -> jax.Array:
    """The mask itself: bool `[batch, q_length, kv_length]` from ids `[batch, length]`."""
    q_positions, kv_positions = q.positions[:, :, None], kv.positions[:, None, :]
    kv_segments = kv.segments[:, None, :]
    related = q.segments[:, :, None] == kv_segments
    if q.parents is not None:
        related |= q.parents[:, :, None] == kv_segments
    seen = related & (kv_segments != 0) & (kv_positions <= q_positions)
    if window is not None:
        seen &= kv_positions > q_positions - window
    return seen


def visible_blocks(q: TokenIds, kv: TokenIds, window: int | None = None) -> jax.Array:
    """Bool `[q_blocks, kv_blocks]`: False only where, in every row, no query of one sees a key of the other.

    Ids are `[blocks, batch, block_length]`. Costs a pass over the ids and one comparison a pair of blocks.
    """
    real = kv.segments != 0
    columns = (None, slice(None))
    kv_least = _least(kv.segments, kv.positions, real).at_axis(columns)
    kv_greatest = _greatest(kv.segments, kv.positions, real).at_axis(columns)
    floor = jnp.full_like(q.positions, _LOWEST) if window is None else q.positions - window + 1
    seen = jnp.zeros((), bool)
    for segments in (q.segments, q.parents):
        if segments is None:
            continue
        rows = (slice(None), None)
        q_least = _least(segments, floor, segments != 0).at_axis(rows)
        q_greatest = _greatest(segments, q.positions, segments != 0).at_axis(rows)
        seen |= q_least.at_most(kv_greatest) & kv_least.at_most(q_greatest)
    return jnp.any(seen, axis=-1)


def _least(segments: jax.Array, positions: jax.Array, keep: jax.Array) -> _Key:
    """The least key over the last axis among those kept; the greatest there is where none is."""
    segment = jnp.min(jnp.where(keep, segments, _HIGHEST), axis=-1)
    first = keep & (segments == segment[..., None])
    return _Key(segment, jnp.min(jnp.where(first, positions, _HIGHEST), axis=-1))


def _greatest(segments: jax.Array, positions: jax.Array, keep: jax.Array) -> _Key:
    """The greatest key over the last axis among those kept; the least there is where none is."""
    segment = jnp.max(jnp.where(keep, segments, _LOWEST), axis=-1)
    last = keep & (segments == segment[..., None])
    return _Key(segment, jnp.max(jnp.where(last, positions, _LOWEST), axis=-1))
