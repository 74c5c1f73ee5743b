"""The decoder: embedding, runs of stacked blocks, final norm, head.

Blocks that repeat are stored once, stacked: a `Run` holds one period of blocks whose parameters have a leading
`layers` axis, and scans over it. Llama's thirty layers are one run of period one; an alternating-window model is a run
of period two. What the user sees, and what files hold, is `layers.N...`, whatever the runs (see
`burnish.models.paths`).
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from burnish.errors import InputError
from burnish.models.block import Block
from burnish.models.config import ModelConfig
from burnish.models.layers import (
    Context,
    DropoutKeys,
    Embedding,
    LayerCache,
    Linear,
    ParamMaker,
    RMSNorm,
)
from burnish.models.neftune import neftune_noise
from burnish.models.remat import RematPolicy, rematerialized
from burnish.models.rope import rope_angles
from burnish.ops.attention import Backend
from burnish.ops.visibility import TokenIds


class KVCache(NamedTuple):
    """Keys and values of all layers, and which slots hold what.

    layers: a list a run of a list a period block of LayerCache, stacked [repeats, batch, kv_heads, capacity, head_dim];
    slots: positions and segment ids [batch, capacity] (segment 0: empty); next_slot: the next to write, one for all
    rows.
    """

    layers: list[list[LayerCache]]
    slots: tuple[jax.Array, jax.Array]
    next_slot: jax.Array


def find_runs(keys: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Splits a sequence into runs of a repeating period: a list of (period, repeats) that covers it in order.

    At each place the period that covers most is taken, the shortest first among equals.

    >>> find_runs("aaaa")
    [(1, 4)]
    >>> find_runs("lllllglllllgll")
    [(6, 2), (1, 2)]
    """
    runs, at = [], 0
    while at < len(keys):
        best = (1, 1)
        for period in range(1, (len(keys) - at) // 2 + 1):
            repeats = 1
            unit = keys[at : at + period]
            while keys[at + repeats * period : at + (repeats + 1) * period] == unit:
                repeats += 1
            if repeats > 1 and period * repeats > best[0] * best[1]:
                best = (period, repeats)
        runs.append(best)
        at += best[0] * best[1]
    return runs


class Run(nnx.Module):
    """`repeats` times a period of blocks, parameters stacked [repeats, ...], applied by one scan."""

    def __init__(self, blocks: list[Block], start: int, repeats: int) -> None:
        self.blocks = nnx.List(blocks)
        self.start = start
        self.repeats = repeats

    @property
    def period(self) -> int:
        """How many different blocks repeat."""
        return len(self.blocks)

    def layers(self, offset: int) -> range:
        """The layer numbers held by block `offset` of the period, in the order they are stacked."""
        return range(self.start + offset, self.start + self.period * self.repeats, self.period)

    def __call__(
        self, x: jax.Array, context: Context, caches: list[LayerCache] | None, policy: RematPolicy
    ) -> tuple[jax.Array, list[LayerCache] | None]:
        graphdef, params = nnx.split(self.blocks)

        def one_period(x: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
            params, caches, repeat = inputs
            blocks, written = nnx.merge(graphdef, params), []
            for offset, block in enumerate(blocks):
                layer = self.start + repeat * self.period + offset
                x, cache = block(x, _for_layer(context, layer), caches[offset] if caches else None)
                written.append(cache)
            return x, written if caches else None

        return jax.lax.scan(rematerialized(one_period, policy), x, (params, caches, jnp.arange(self.repeats)))


def _for_layer(context: Context, layer: jax.Array) -> Context:
    if context.dropout is None:
        return context
    return context._replace(dropout=context.dropout._replace(layer=layer))


class Decoder(nnx.Module):
    """A decoder-only language model (`ModelConfig` says which).

    >>> from burnish.models.layers import random_params
    >>> config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2,
    ...                      num_kv_heads=1, head_dim=8, max_length=64)
    >>> Decoder(config, random_params(seed=0))(jnp.zeros((1, 5), jnp.int32)).shape
    (1, 5, 32)
    """

    def __init__(self, config: ModelConfig, make: ParamMaker, *, dtype: Any = jnp.float32) -> None:
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.backend: Backend = "auto"
        self.embed = Embedding(config.vocab_size, config.hidden_size, make)
        blocks = [Block(config, layer, make) for layer in range(config.num_layers)]
        self.runs = nnx.List(stack_blocks(blocks))
        self.norm = RMSNorm(config.hidden_size, config, make)
        self.head = nnx.data(None)
        if not config.tie_embeddings:
            self.head = Linear(config.hidden_size, config.vocab_size, ("embed", "vocab"), make)

    def hidden(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        parent_ids: jax.Array | None = None,
        dropout: DropoutKeys | None = None,
        neftune_alpha: float = 0.0,
        remat: RematPolicy = "selective",
        groups: int = 1,
    ) -> jax.Array:
        """Final hidden states [batch, length, hidden] of tokens [batch, length], after the last norm.

        positions default to 0, 1, …; segment_ids (0 is padding) default to one document a row. Only with `dropout`,
        what adapters' dropout and NEFTune's noise are drawn from, is either done. remat: what is kept for the backward
        pass (`burnish.models.remat`). groups: how many devices the rows are sharded over.
        """
        queries = visibility(tokens, positions, segment_ids, parent_ids)
        context = self.context(queries)._replace(dropout=dropout, groups=groups)
        x = self.embedded(tokens)
        if neftune_alpha and dropout is not None:
            x = x + neftune_noise(neftune_alpha, x.shape[-1], dropout, queries.segments).astype(x.dtype)
        for run in self.runs:
            x, _ = run(x, context, None, remat)
        return self.finished(x)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        parent_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Logits [batch, length, vocab] in float32."""
        return self.logits(self.hidden(tokens, positions, segment_ids, parent_ids))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., vocab] in float32 of hidden states [..., hidden]."""
        matrix, layout = self.unembedding()
        spec = "...d,vd->...v" if layout == "vocab_dim" else "...d,dv->...v"
        raw = jnp.einsum(spec, hidden, matrix.astype(hidden.dtype), preferred_element_type=jnp.float32)
        cap = self.config.final_softcap
        return raw if cap is None else cap * jnp.tanh(raw / cap)

    def unembedding(self) -> tuple[jax.Array, str]:
        """The matrix that turns hidden states into logits, and its layout: "vocab_dim" (tied) or "dim_vocab"."""
        if self.head is None:
            return self.embed.weight[...], "vocab_dim"
        return self.head.effective_kernel(), "dim_vocab"

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache for `capacity` tokens a row, nothing in it."""
        config = self.config

        def zeros(run: Run) -> jax.Array:
            shape = (run.repeats, batch, config.num_kv_heads, capacity, config.head_dim)
            return jnp.zeros(shape, self.dtype)

        layers = [[LayerCache(zeros(run), zeros(run)) for _ in range(run.period)] for run in self.runs]
        empty = jnp.zeros((batch, capacity), jnp.int32)
        return KVCache(layers, (empty, empty), jnp.zeros((), jnp.int32))

    def extend(
        self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Hidden states of new tokens that see the cache and each other, and the cache with them written.

        All arguments [batch, length]; tokens of segment 0 are padding: written, and seen by nobody.
        """
        at = (0, cache.next_slot)
        slots = (
            jax.lax.dynamic_update_slice(cache.slots[0], positions, at),
            jax.lax.dynamic_update_slice(cache.slots[1], segment_ids, at),
        )
        context = self.context(TokenIds(positions, segment_ids))
        context = context._replace(keys=TokenIds(*slots), cache_index=cache.next_slot)
        x = self.embedded(tokens)
        layers: list[Any] = []
        for run, caches in zip(self.runs, cache.layers, strict=True):
            x, written = run(x, context, caches, "none")
            layers.append(written)
        return self.finished(x), KVCache(layers, slots, cache.next_slot + tokens.shape[1])

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """What the first block reads: [batch, length, hidden] of tokens [batch, length]."""
        x = self.embed(tokens, self.dtype)
        # The factor is rounded to the dtype first, as the models were trained.
        return x if self.config.embedding_scale == 1 else x * jnp.asarray(self.config.embedding_scale, x.dtype)

    def finished(self, x: jax.Array) -> jax.Array:
        """What the head reads of what the last block leaves. The factor on the logits is in here."""
        x = self.norm(x)
        return x if self.config.logit_scale == 1 else x * self.config.logit_scale

    def context(self, queries: TokenIds) -> Context:
        """What the blocks share, for tokens [batch, length]."""
        angles = {rope: rope_angles(rope, self.config.head_dim, queries) for rope in self.config.distinct_ropes}
        return Context(queries, angles, backend=self.backend)


def visibility(
    tokens: jax.Array,
    positions: jax.Array | None,
    segment_ids: jax.Array | None,
    parent_ids: jax.Array | None = None,
) -> TokenIds:
    """Fills in what a caller left out: one document a row, positions that count its real tokens from 0."""
    if parent_ids is not None and (positions is None or segment_ids is None):
        raise InputError("parent_ids: give positions and segment_ids, too; a child's positions go on from its parent's")
    if segment_ids is None:
        segment_ids = jnp.ones_like(tokens)
    if positions is None:
        positions = _positions(segment_ids)
    return TokenIds(positions, segment_ids, parent_ids)


def _positions(segment_ids: jax.Array) -> jax.Array:
    """Counts each segment's tokens from 0, wherever it starts (left padding shifts nothing); 0 on padding."""
    index = jnp.arange(segment_ids.shape[1])
    before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    starts = jax.lax.cummax(jnp.where(segment_ids != before, index, 0), axis=1)
    return jnp.where(segment_ids == 0, 0, index - starts).astype(jnp.int32)


def stack_blocks(blocks: Sequence[Block], start: int = 0, keys: Sequence[Hashable] | None = None) -> list[Run]:
    """Joins blocks of equal structure (and equal key, where keys are given) into runs.

    `start` is the number of the first layer.
    """
    structures = [_structure(block) for block in blocks]
    runs, at = [], 0
    for period, repeats in find_runs(list(zip(structures, keys or structures, strict=True))):
        taken = blocks[at : at + period * repeats]
        stacked = [_stack(taken[offset::period]) for offset in range(period)]
        runs.append(Run(stacked, start + at, repeats))
        at += period * repeats
    return runs


def unstack_run(run: Run) -> list[Block]:
    """The blocks of a run as single layers, in order."""
    return [_layer(run.blocks[i % run.period], i // run.period) for i in range(run.period * run.repeats)]


def split_run(run: Run, keys: Sequence[Hashable]) -> list[Run]:
    """Cuts a run so that layers which are to differ (one key a layer) no longer share a stack."""
    return stack_blocks(unstack_run(run), run.start, keys)


def _structure(block: Block) -> Hashable:
    graphdef, state = nnx.split(block)
    shapes = tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in jax.tree.leaves(state))
    return graphdef, shapes


def _stack(blocks: Sequence[Block]) -> Block:
    graphdef, first = nnx.split(blocks[0])
    others = [nnx.state(block) for block in blocks[1:]]

    def join(*leaves: Any) -> Any:
        if isinstance(leaves[0], jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)
        return jnp.stack(leaves)

    return _with_axes(nnx.merge(graphdef, jax.tree.map(join, first, *others)), stacked=True)


def _layer(block: Block, index: int) -> Block:
    graphdef, state = nnx.split(block)
    return _with_axes(nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[index], state)), stacked=False)


def _with_axes(block: Block, *, stacked: bool) -> Block:
    for _, variable in nnx.to_flat_state(nnx.state(block)):
        axes = variable.get_metadata("axes")
        variable.set_metadata(axes=("layers", *axes) if stacked else axes[1:])
    return block
