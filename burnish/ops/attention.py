"""Attention over packed rows: one signature, one rule of who sees whom, two back ends.

`visibility` states the rule. `dense_attention` computes it as written; `blockwise` computes the same a block
at a time, in memory linear in the length, skipping what nothing can see. Both take the softmax in float32
(wider where the input is wider), and give zeros and zero gradient for a query that sees nothing.

A key that a query does not see weighs exactly 0, so what one document holds moves no bit of another's output.
(Values must be finite for that: 0 times infinity is not 0.)
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from burnish.errors import InputError
from burnish.ops.blockwise import blockwise_attention
from burnish.ops.visibility import TokenIds, visible

Backend = Literal["auto", "dense", "blockwise"]

# Pairs of tokens in one row from which blockwise is the faster, forward and backward. Measured on 2 CPU cores
# in float32, 8 rows, 9 heads of 64 over 3 key heads: even at 64 x 64 and 128 x 128, 1.4 times as fast at
# 192 x 192, about 2 at 256 x 256, about 3 at 1024 x 1024. Below it the weights that dense holds are small.
_BLOCKWISE_FROM = 128 * 128


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    q_positions: jax.Array,
    q_segment_ids: jax.Array,
    q_parent_ids: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    backend: Backend = "auto",
    groups: int = 1,
) -> jax.Array:
    """Softmax attention, `softmax(scale q k') v`, over the keys each query sees (`burnish.ops.visibility`).

    Args:
        q: `[batch, heads, q_length, head_dim]`.
        k, v: `[batch, kv_heads, kv_length, head_dim]`. `kv_heads` divides `heads`, and each key head serves
            `heads / kv_heads` query heads in a row (Ainslie et al. 2023, "GQA"); k and v are never repeated.
        q_positions, q_segment_ids: int32 `[batch, q_length]`. Positions are 0 or more; segment 0 is padding.
        q_parent_ids: int32 `[batch, q_length]`, a segment that the query sees beside its own, or 0.
        kv_positions, kv_segment_ids: int32 `[batch, kv_length]`, or neither where the keys are of the same
            tokens as the queries.
        window: how many positions back a query sees, its own included; None for all.
        softcap: bends scores to `softcap * tanh(score / softcap)` before the mask (Gemma 2).
        scale: `head_dim ** -0.5` unless given.
        backend: "dense", "blockwise" (reverse-mode derivatives only), or "auto", the faster on a CPU.
        groups: equal pieces the batch is cut in, as many as the devices it is sharded over: then none is moved.

    Returns:
        `[batch, heads, q_length, head_dim]` in q's dtype.

    Raises:
        InputError: shapes that do not fit together, a window below 1, a softcap of 0 or less, only one of
            `kv_positions` and `kv_segment_ids`, an unknown back end, groups that do not divide the batch.
    """
    if (kv_positions is None) != (kv_segment_ids is None):
        raise InputError("attention: give kv_positions and kv_segment_ids together, or neither")
    q_ids = TokenIds(q_positions, q_segment_ids, q_parent_ids)
    kv_ids = TokenIds(
        q_positions if kv_positions is None else kv_positions,
        q_segment_ids if kv_segment_ids is None else kv_segment_ids,
    )
    _check(q, k, v, q_ids, kv_ids, window, softcap)
    if groups < 1 or q.shape[0] % groups:
        raise InputError(f"attention: {q.shape[0]} rows cannot be cut into {groups} equal groups of one or more")
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if backend == "auto":
        backend = choose_backend(q.shape[2], k.shape[2])
    if backend == "blockwise":
        return blockwise_attention(q, k, v, q_ids, kv_ids, scale=scale, window=window, softcap=softcap, groups=groups)
    if backend == "dense":
        core = functools.partial(dense_attention, scale=scale, window=window, softcap=softcap)
        # Computed again in the backward pass: less memory, and on a CPU no slower than reading it back.
        return checkpoint_name(jax.checkpoint(core)(q, k, v, q_ids, kv_ids), "attention")
    raise InputError(f"attention: unknown backend {backend!r}; use 'auto', 'dense' or 'blockwise'")


def choose_backend(q_length: int, kv_length: int) -> Literal["dense", "blockwise"]:
    """What "auto" takes. A decode step, one query a row, is dense whatever the length of the cache."""
    return "blockwise" if q_length > 1 and q_length * kv_length >= _BLOCKWISE_FROM else "dense"


def dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_ids: TokenIds,
    kv_ids: TokenIds,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """`attention`, which checks the arguments, as its definition reads. Ids are `[batch, length]`. Holds an
    array of weights `[batch, heads, q_length, kv_length]`."""
    batch, heads, q_length, head_dim = q.shape
    kv_heads = k.shape[1]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    # b batch, k key head, g query head of its group, t query, s key, d head_dim
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, q_length, head_dim)
    scores = scale * jnp.einsum("bkgtd,bksd->bkgts", grouped, k, preferred_element_type=dtype)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    mask = visible(q_ids, kv_ids, window)[:, None, None]
    scores = jnp.where(mask, scores, jnp.finfo(dtype).min)
    highest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    # Masked once more: for a query that sees nothing, every score equals the highest.
    weights = jnp.where(mask, jnp.exp(scores - highest), 0)
    total = weights.sum(-1, keepdims=True)
    out = jnp.einsum("bkgts,bksd->bkgtd", weights.astype(v.dtype), v, preferred_element_type=dtype)
    return (out / jnp.where(total > 0, total, 1)).reshape(q.shape).astype(q.dtype)


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_ids: TokenIds,
    kv_ids: TokenIds,
    window: int | None,
    softcap: float | None,
) -> None:
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise InputError(f"attention: q, k, v are [batch, heads, length, head_dim], v like k; got {shapes}")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise InputError(f"attention: q and k must agree in batch and head_dim; got {shapes}")
    if q.shape[1] % k.shape[1]:
        raise InputError(f"attention: the heads of k must divide those of q; got {shapes}")
    for name, ids, x in (("q", q_ids, q), ("kv", kv_ids, k)):
        want = (x.shape[0], x.shape[2])
        for field, array in ids._asdict().items():
            if array is not None and array.shape != want:
                raise InputError(f"attention: {name} {field} must be of shape {want}; got {array.shape}")
    if window is not None and window < 1:
        raise InputError(f"attention: window must be 1 or more (a query sees itself); got {window}")
    if softcap is not None and softcap <= 0:
        raise InputError(f"attention: softcap must be above 0, or None for no cap; got {softcap}")
