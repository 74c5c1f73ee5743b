"""A decoder laid out for decoding: one set of arrays a layer, adapters merged.

A decode step streams every weight once. Scanned over stacked layers it would copy each layer's slice of the weights
and of the cache first, which at least doubles its traffic on a CPU; so here the layers stand apart, and the compiled
step names them one by one. Prompts are read by the decoder as it is, scanned: that compiles sooner, and beside the
work of a prompt the copies are nothing.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from burnish.adapt.lora import merge_lora
from burnish.generate.shapes import capacity_bucket, length_bucket, pad_prompts, prompt_lengths
from burnish.generate.snapshot import snapshot
from burnish.models.decoder import Decoder, unstack_run, visibility
from burnish.models.layers import LayerCache
from burnish.ops.visibility import TokenIds


class CacheMemory(NamedTuple):
    """What a decoder remembers of each row, after reading its tokens.

    layers: a LayerCache `[rows, kv_heads, capacity, head_dim]` a layer; keys: positions and segment ids
    `[rows, capacity]` of the cached tokens (segment 0: none); next_slot: where the next token goes, one for all rows;
    hidden: `[rows, hidden]` of the last token; positions: `[rows]` of the next one.
    """

    layers: list[LayerCache]
    keys: TokenIds
    next_slot: jax.Array
    hidden: jax.Array
    positions: jax.Array


class Unrolled(nnx.Module):
    """A copy of a decoder's weights, layer by layer. The decoder itself is left as it is.

    In float32 adapters are added into the kernels; in bfloat16 that would round small ones away, and they stay beside.
    """

    def __init__(self, decoder: Decoder) -> None:
        ends = nnx.merge(*snapshot(decoder))
        if decoder.dtype == jnp.float32:
            merge_lora(ends)
        self.blocks = nnx.List([block for run in ends.runs for block in unstack_run(run)])
        ends.runs = nnx.List([])
        self.ends = ends

    def logits(self, memory: CacheMemory) -> jax.Array:
        """Logits `[rows, vocab]` of each row's next token, in float32."""
        return self.ends.logits(memory.hidden)

    def push(self, memory: CacheMemory, tokens: jax.Array) -> CacheMemory:
        """Reads one more token a row, `[rows]`."""
        column = (0, memory.next_slot)
        queries = TokenIds(memory.positions[:, None], jnp.ones_like(memory.positions)[:, None])
        keys = TokenIds(
            jax.lax.dynamic_update_slice(memory.keys.positions, queries.positions, column),
            jax.lax.dynamic_update_slice(memory.keys.segments, queries.segments, column),
        )
        context = self.ends.context(queries)._replace(keys=keys, cache_index=memory.next_slot)
        x = self.ends.embedded(tokens[:, None])
        layers: list[LayerCache] = []
        for block, layer in zip(self.blocks, memory.layers, strict=True):
            x, written = block(x, context, layer)
            assert written is not None
            layers.append(written)
        hidden = self.ends.finished(x)[:, -1]
        return CacheMemory(layers, keys, memory.next_slot + 1, hidden, memory.positions + 1)


class CachedModel:
    """A decoder as the decode loop wants it: `parts` of a module with `logits` and `push`, and memories for it."""

    def __init__(self, decoder: Decoder) -> None:
        self.parts = nnx.split(Unrolled(decoder))
        self.vocab_size = decoder.config.vocab_size
        self.max_length: int | None = decoder.config.max_length
        self._reader = snapshot(decoder)

    def read(self, prompts: Sequence[Sequence[int]], rows: int, room: int) -> CacheMemory:
        """Memory of `rows` rows that have read their prompts (rows beyond the prompts: nothing), with room for more."""
        length = length_bucket(max(map(len, prompts)))
        tokens, lengths = pad_prompts(prompts, rows, length, left=True), prompt_lengths(prompts, rows)
        return _prefill(*self._reader, tokens, lengths, capacity=capacity_bucket(rows, length + room))

    def room(self, memory: CacheMemory) -> int:
        """How many more tokens a row may get before the memory has to grow."""
        return memory.keys.positions.shape[1] - int(memory.next_slot)

    def grow(self, memory: CacheMemory) -> CacheMemory:
        """The same memory with more room."""
        rows, capacity = memory.keys.positions.shape
        return _grow(memory, capacity=capacity_bucket(rows, capacity + 1))


@functools.partial(jax.jit, static_argnames=("graphdef", "capacity"))
def _prefill(graphdef: Any, params: Any, tokens: Any, lengths: Any, *, capacity: int) -> CacheMemory:
    decoder = nnx.merge(graphdef, params)
    rows, length = tokens.shape
    segments = (jnp.arange(length) >= length - lengths[:, None]).astype(jnp.int32)
    positions = visibility(tokens, None, segments).positions
    hidden, cache = decoder.extend(tokens, positions, segments, decoder.empty_cache(rows, length))
    layers = []
    for run in cache.layers:
        repeats = run[0].k.shape[0]
        layers += [LayerCache(block.k[i], block.v[i]) for i in range(repeats) for block in run]
    # Prompts end where the padded row ends, so that the last hidden state is each one's own.
    memory = CacheMemory(layers, TokenIds(*cache.slots), cache.next_slot, hidden[:, -1], lengths)
    return _grow(memory, capacity=capacity)


@functools.partial(jax.jit, static_argnames=("capacity",))
def _grow(memory: CacheMemory, *, capacity: int) -> CacheMemory:
    more = capacity - memory.keys.positions.shape[1]
    layers = [
        LayerCache(*(jnp.pad(array, ((0, 0), (0, 0), (0, more), (0, 0))) for array in layer)) for layer in memory.layers
    ]
    keys = TokenIds(*(jnp.pad(array, ((0, 0), (0, more))) for array in memory.keys[:2]))
    return memory._replace(layers=layers, keys=keys)
