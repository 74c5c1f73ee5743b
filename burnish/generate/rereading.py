"""Models without a cache: each new token reads the whole text again.

They need to be causal only. Rows are padded on the right, where no earlier token sees the padding.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from burnish.errors import InputError
from burnish.generate.shapes import CHUNK, pad_prompts, prompt_lengths, text_bucket
from burnish.generate.snapshot import snapshot
from burnish.models.language_model import features_of


class TextMemory(NamedTuple):
    """The text of each row: tokens `[rows, capacity]`, lengths `[rows]`; used: the longest row's
    length, rows that are done included."""

    tokens: jax.Array
    lengths: jax.Array
    used: jax.Array


class Rereader(nnx.Module):
    """A module that maps tokens to logits or hidden states, as the decode loop wants it."""

    def __init__(self, module: nnx.Module) -> None:
        self.module = module

    def logits(self, memory: TextMemory) -> jax.Array:
        """Logits `[rows, vocab]` of each row's next token, in float32."""
        last = jnp.maximum(memory.lengths - 1, 0)
        if not features_of(self.module).hidden:
            return _at(self.module(memory.tokens), last).astype(jnp.float32)
        hidden = _at(self.module.hidden(memory.tokens), last)  # type: ignore[attr-defined]
        matrix, layout = self.module.unembedding()  # type: ignore[attr-defined]
        spec = "bd,vd->bv" if layout == "vocab_dim" else "bd,dv->bv"
        raw = jnp.einsum(spec, hidden, matrix.astype(hidden.dtype), preferred_element_type=jnp.float32)
        cap = getattr(getattr(self.module, "config", None), "final_softcap", None)
        return raw if cap is None else cap * jnp.tanh(raw / cap)

    def push(self, memory: TextMemory, tokens: jax.Array) -> TextMemory:
        """Writes one more token a row, `[rows]`."""
        rows = jnp.arange(tokens.shape[0])
        written = memory.tokens.at[rows, memory.lengths].set(tokens)
        return TextMemory(written, memory.lengths + 1, memory.used + 1)


def _at(array: jax.Array, last: jax.Array) -> jax.Array:
    if array.ndim != 3:
        raise InputError(f"the model gave an array {array.shape} for tokens [batch, length]; one axis more is needed")
    return jnp.take_along_axis(array, last[:, None, None], axis=1)[:, 0]


class UncachedModel:
    """A module as the decode loop wants it; see `burnish.generate.unrolled.CachedModel`."""

    def __init__(self, module: nnx.Module, max_length: int | None) -> None:
        self.parts = snapshot(Rereader(module))
        self.vocab_size: int | None = None
        self.max_length = max_length

    def read(self, prompts: Sequence[Sequence[int]], rows: int, room: int) -> TextMemory:
        """Memory of `rows` rows with their prompts (rows beyond the prompts: nothing)."""
        longest = max(map(len, prompts))
        tokens = pad_prompts(prompts, rows, self._bounded(text_bucket(longest + room)), left=False)
        lengths = prompt_lengths(prompts, rows)
        return TextMemory(jnp.asarray(tokens), jnp.asarray(lengths), jnp.int32(longest))

    def room(self, memory: TextMemory) -> int:
        """How many more tokens a row may get before the memory has to grow."""
        capacity = memory.tokens.shape[1]
        # At the model's longest text no row that goes on can outgrow its own (rows that are done may: no matter).
        return CHUNK if capacity == self.max_length else capacity - int(memory.used)

    def grow(self, memory: TextMemory) -> TextMemory:
        """The same memory with more room."""
        capacity = memory.tokens.shape[1]
        return _grow(memory, capacity=self._bounded(text_bucket(capacity + 1)))

    def _bounded(self, capacity: int) -> int:
        # A module with learned positions has none beyond its longest text.
        return capacity if self.max_length is None else min(capacity, self.max_length)


@functools.partial(jax.jit, static_argnames=("capacity",))
def _grow(memory: TextMemory, *, capacity: int) -> TextMemory:
    more = capacity - memory.tokens.shape[1]
    return memory._replace(tokens=jnp.pad(memory.tokens, ((0, 0), (0, more))))
