"""Attention a block at a time: memory linear in the length, and no work on blocks that nothing can see.

The softmax of a row of scores `s` is built up as its blocks go by: a running maximum `m`, a running sum
`l = sum exp(s - m)` and a running output `sum exp(s - m) v`, the last two rescaled whenever `m` grows
(Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Dao et al. 2022, "FlashAttention").
The forward pass keeps the output `o` and the log-sum-exp `L = m + log l`, nothing of size `[length, length]`.
The backward pass computes the scores again (Dao 2023, "FlashAttention-2"):

    p = exp(s - L)   dv = p' do   ds = p * (do v' - rowsum(do * o))   dq = scale ds k   dk = scale ds' q

where a soft-cap, `s = cap tanh(x / cap)`, puts a factor `1 - (s / cap)^2` on `ds`.

Which pairs of blocks are worth a visit is read from the ids at run time (`visibility.visible_blocks`), for
the rows that go together: few on a CPU, where their scores then stay in its cache; all of them elsewhere. As many
come from each of the batch's groups, so that rows sharded over devices stay where they are. Each block of queries
then loops over a list of its own: what is not on it costs nothing. The list decides only what is skipped, since
every block visited is masked exactly. Under `vmap` the result is right, but the saving is lost.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from burnish.ops.platform import on_cpu
from burnish.ops.visibility import TokenIds, visible, visible_blocks

# Below any score, yet finite: a row that has seen nothing yet must not compute inf - inf.
_FLOOR = -1e30
# Block lengths are multiples of this.
_GRAIN = 16
# Bytes of scores that a visit may hold on a CPU: about the second-level cache of two cores.
_CACHE = 3 * 2**20


def blockwise_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_ids: TokenIds,
    kv_ids: TokenIds,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    q_block: int | None = None,
    kv_block: int | None = None,
    rows: int | None = None,
    groups: int = 1,
) -> jax.Array:
    """`attention.attention`, which checks the arguments, a block at a time. Reverse-mode derivatives only.

    q `[batch, heads, q_length, head_dim]`, k and v `[batch, kv_heads, kv_length, head_dim]`, ids
    `[batch, length]`; returns q's shape and dtype. A block holds at most `q_block` queries (of every head
    that shares a key head) or `kv_block` keys, multiples of 16 both, of `rows` rows of each of the `groups` the
    batch is cut in; rows of any length are padded to whole blocks. Unless given, blocks follow from the lengths, and
    rows from the size of a CPU's cache; elsewhere all rows go together.
    """
    q_block = q_block or _default_block(q.shape[2])
    kv_block = kv_block or _default_block(k.shape[2])
    rows = rows or _default_rows(q.shape[0] // groups, q.shape[1] * q_block * kv_block)
    return _blockwise(q, k, v, q_ids, kv_ids, _Config(scale, window, softcap, q_block, kv_block, rows, groups))


def _default_block(length: int) -> int:
    """Small blocks skip more of the causal triangle and of other documents, large ones multiply faster. Measured on
    2 CPU cores in whole steps: by 128 they are the fastest at 8 x 256 and 4 x 512, and level with 64 at 1 x 2048
    tokens packed with documents of 100 to 400; for one text of 2048 tokens 256 take 0.8 of the time of 128."""
    return 128 if length <= 4096 else 256


def _default_rows(group: int, scores: int) -> int:
    """As many rows of a group, a divisor of them, as have their block of `scores` each in a CPU's cache; else all."""
    most = max(1, _CACHE // (4 * scores)) if on_cpu() else group
    return max(rows for rows in range(1, min(group, most) + 1) if group % rows == 0)


class _Config(NamedTuple):
    scale: float
    window: int | None
    softcap: float | None
    q_block: int
    kv_block: int
    rows: int  # that go together, of each group
    groups: int


class _Blocks(NamedTuple):
    """The operands, cut. `kv_order[i, :kv_count[i]]` are the key blocks that query block `i` has to visit."""

    q: jax.Array  # [q_blocks, rows, kv_heads, group * q_block, head_dim]: those of the first rows first
    k: jax.Array  # [kv_blocks, rows, kv_heads, kv_block, head_dim]
    v: jax.Array  # as k
    q_ids: TokenIds  # [q_blocks, rows, q_block]
    kv_ids: TokenIds  # [kv_blocks, rows, kv_block]
    kv_order: jax.Array  # [q_blocks, kv_blocks of the same rows]
    kv_count: jax.Array  # [q_blocks]

    def keys(self, j: jax.Array) -> tuple[jax.Array, jax.Array, TokenIds]:
        return self.k[j], self.v[j], jax.tree.map(lambda ids: ids[j], self.kv_ids)


# In the einsums below: b batch, k key head, r a query of one of the heads that share it, s key, d head_dim.


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _blockwise(
    q: jax.Array, k: jax.Array, v: jax.Array, q_ids: TokenIds, kv_ids: TokenIds, config: _Config
) -> jax.Array:
    return _forward(q, k, v, q_ids, kv_ids, config)[0]


def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, q_ids: TokenIds, kv_ids: TokenIds, config: _Config
) -> tuple[jax.Array, tuple[Any, ...]]:
    found = _walk_forward(config, q, k, v, q_ids, kv_ids)
    # By this name a recomputed block keeps them, and walks the blocks of keys no second time.
    out, log_sum_exp = (checkpoint_name(x, "attention") for x in found)
    return out, (q, k, v, q_ids, kv_ids, out, log_sum_exp)


def _backward(config: _Config, residuals: tuple[Any, ...], d_out: jax.Array) -> tuple[Any, ...]:
    return (*_walk_backward(config, residuals, d_out), None, None)


_blockwise.defvjp(_forward, _backward)


def _walk_forward(
    config: _Config, q: jax.Array, k: jax.Array, v: jax.Array, q_ids: TokenIds, kv_ids: TokenIds
) -> tuple[jax.Array, jax.Array]:
    """The output, and the log-sum-exp of each query's scores `[batch, heads, q_length]`."""
    blocks = _cut_all(q, k, v, q_ids, kv_ids, config)
    dtype = _score_dtype(q)

    def attend_from(carry: None, xs: tuple[Any, ...]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        q_i, ids_i, order, count = xs

        def visit(n: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            highest, total, out = state
            k_j, v_j, ids_j = blocks.keys(order[n])
            scores, _ = _scores(q_i, k_j, ids_i, ids_j, config)
            new_highest = jnp.maximum(highest, scores.max(-1))
            weights = jnp.exp(scores - new_highest[..., None])
            decay = jnp.exp(highest - new_highest)
            part = _dot("bkrs,bksd->bkrd", weights.astype(v.dtype), v_j, dtype)
            return new_highest, total * decay + weights.sum(-1), out * decay[..., None] + part

        rows = q_i.shape[:-1]
        start = jnp.full(rows, _FLOOR, dtype), jnp.zeros(rows, dtype), jnp.zeros(q_i.shape, dtype)
        highest, total, out = lax.fori_loop(0, count, visit, start)
        total = jnp.where(total > 0, total, 1)  # a query that sees nothing: zeros
        return None, ((out / total[..., None]).astype(q.dtype), highest + jnp.log(total))

    xs = (blocks.q, blocks.q_ids, blocks.kv_order, blocks.kv_count)
    _, (out, log_sum_exp) = lax.scan(attend_from, None, xs)
    return _join(out, q.shape, config), _join(log_sum_exp[..., None], (*q.shape[:3], 1), config)[..., 0]


def _walk_backward(
    config: _Config, residuals: tuple[Any, ...], d_out: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients for q, k and v."""
    q, k, v, q_ids, kv_ids, out, log_sum_exp = residuals
    blocks = _cut_all(q, k, v, q_ids, kv_ids, config)
    dtype = _score_dtype(q)
    mean_slope = (d_out.astype(dtype) * out).sum(-1, keepdims=True)

    def attend_from(d_kv: tuple[jax.Array, jax.Array], xs: tuple[Any, ...]) -> tuple[Any, jax.Array]:
        q_i, d_out_i, mean_slope_i, log_sum_exp_i, ids_i, order, count = xs

        def visit(n: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dq_i, dk, dv = state
            k_j, v_j, ids_j = blocks.keys(order[n])
            scores, slope = _scores(q_i, k_j, ids_i, ids_j, config)
            weights = jnp.exp(scores - log_sum_exp_i)
            d_weights = _dot("bkrd,bksd->bkrs", d_out_i, v_j, dtype)
            d_scores = (weights * (d_weights - mean_slope_i) * slope).astype(q.dtype)
            dq_i += _dot("bkrs,bksd->bkrd", d_scores, k_j, dtype)
            # head_dim first: XLA:CPU runs this product about twice as fast as the one that gives [s, d].
            dk = _add_at(dk, order[n], _dot("bkrd,bkrs->bkds", q_i, d_scores, dtype))
            dv = _add_at(dv, order[n], _dot("bkrd,bkrs->bkds", d_out_i, weights.astype(q.dtype), dtype))
            return dq_i, dk, dv

        dq_i, dk, dv = lax.fori_loop(0, count, visit, (jnp.zeros(q_i.shape, dtype), *d_kv))
        return (dk, dv), dq_i

    q_block = blocks.q_ids.positions.shape[-1]
    by_query = (d_out, mean_slope, log_sum_exp[..., None])
    d_out, mean_slope, log_sum_exp = (_cut(x, k.shape[1], q_block, config) for x in by_query)
    xs = (blocks.q, d_out, mean_slope, log_sum_exp, blocks.q_ids, blocks.kv_order, blocks.kv_count)
    start = jnp.zeros(blocks.k.swapaxes(-1, -2).shape, dtype)
    (dk, dv), dq = lax.scan(attend_from, (start, start), xs)
    dk, dv = (_join(x.swapaxes(-1, -2), k.shape, config) for x in (dk, dv))
    return _join(dq, q.shape, config).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _scores(
    q_i: jax.Array, k_j: jax.Array, ids_i: TokenIds, ids_j: TokenIds, config: _Config
) -> tuple[jax.Array, jax.Array | float]:
    """Masked scores `[batch, kv_heads, group * q_block, kv_block]`, and their slope in `q . k`."""
    scores = config.scale * _dot("bkrd,bksd->bkrs", q_i, k_j, _score_dtype(q_i))
    slope: jax.Array | float = config.scale
    if config.softcap is not None:
        bent = jnp.tanh(scores / config.softcap)
        scores, slope = config.softcap * bent, config.scale * (1 - bent * bent)
    mask = visible(ids_i, ids_j, config.window)[:, None, None]
    by_head = scores.reshape(*scores.shape[:2], -1, *mask.shape[-2:])
    return jnp.where(mask, by_head, -jnp.inf).reshape(scores.shape), slope


def _cut_all(q: jax.Array, k: jax.Array, v: jax.Array, q_ids: TokenIds, kv_ids: TokenIds, config: _Config) -> _Blocks:
    kv_heads = k.shape[1]
    q_block = _block_length(q.shape[2], config.q_block)
    kv_block = _block_length(k.shape[2], config.kv_block)
    # What is added to fill the last block is segment 0: it sees nothing and nothing sees it.
    q_ids = jax.tree.map(lambda ids: _cut_ids(ids, q_block, config), q_ids)
    kv_ids = jax.tree.map(lambda ids: _cut_ids(ids, kv_block, config), kv_ids)
    worth = jax.vmap(functools.partial(visible_blocks, window=config.window))(q_ids, kv_ids)
    parts, _, kv_blocks = worth.shape
    first = kv_blocks * jnp.arange(parts)[:, None, None]
    return _Blocks(
        q=_cut(q, kv_heads, q_block, config),
        k=_cut(k, kv_heads, kv_block, config),
        v=_cut(v, kv_heads, kv_block, config),
        q_ids=jax.tree.map(_flat, q_ids),
        kv_ids=jax.tree.map(_flat, kv_ids),
        kv_order=_flat(first + jnp.argsort(~worth, axis=2, stable=True)),
        kv_count=worth.sum(2, dtype=jnp.int32).reshape(-1),
    )


def _block_length(length: int, most: int) -> int:
    """As few blocks as blocks of `most` would take, as even as grains allow: 130 is 80 + 50, not 128 + 2."""
    count = -(-length // most)
    return -(-length // (count * _GRAIN)) * _GRAIN


def _cut(x: jax.Array, kv_heads: int, block: int, config: _Config) -> jax.Array:
    """`[batch, heads, length, dim]` -> `[blocks, rows, kv_heads, group * block, dim]`: heads that share a
    key head lie one after another in one long matrix."""
    _, heads, length, dim = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -length % block), (0, 0)))
    x = x.reshape(config.groups, -1, config.rows, kv_heads, heads // kv_heads, x.shape[2] // block, block, dim)
    x = x.transpose(1, 5, 0, 2, 3, 4, 6, 7)
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2] * x.shape[3], kv_heads, -1, dim)


def _join(x: jax.Array, shape: tuple[int, ...], config: _Config) -> jax.Array:
    """Undoes `_cut`, to `shape`."""
    batch, heads, length, dim = shape
    blocks, rows, kv_heads, _, _ = x.shape
    parts = batch // rows
    x = x.reshape(
        parts, blocks // parts, config.groups, -1, kv_heads, heads // kv_heads, x.shape[3] * kv_heads // heads, dim
    )
    return x.transpose(2, 0, 3, 4, 5, 1, 6, 7).reshape(batch, heads, -1, dim)[:, :, :length]


def _cut_ids(ids: jax.Array, block: int, config: _Config) -> jax.Array:
    """`[batch, length]` -> `[parts, blocks, rows, block]`."""
    length = ids.shape[1]
    ids = jnp.pad(ids, ((0, 0), (0, -length % block)))
    ids = ids.reshape(config.groups, -1, config.rows, ids.shape[1] // block, block).transpose(1, 3, 0, 2, 4)
    return ids.reshape(*ids.shape[:2], -1, block)


def _flat(x: jax.Array) -> jax.Array:
    """Joins the two leading axes."""
    return x.reshape(-1, *x.shape[2:])


def _add_at(total: jax.Array, index: jax.Array, part: jax.Array) -> jax.Array:
    """`total[index] += part` as a slice written in place; `.at[].add` would be a scatter."""
    return lax.dynamic_update_index_in_dim(total, total[index] + part, index, 0)


def _dot(subscripts: str, a: jax.Array, b: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=dtype)


def _score_dtype(q: jax.Array) -> jnp.dtype:
    """float32, or wider where the input is."""
    return jnp.promote_types(q.dtype, jnp.float32)
