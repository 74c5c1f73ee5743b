"""The parts of a block (`burnish.models.block`): linear maps, norms, the gated MLP, grouped-query attention.

Parameters carry the logical names of their axes (`axes=`); `burnish.distributed` maps those to mesh axes. Kernels
are stored [in, out]. A part computes in the dtype of its input: parameters may be kept in a wider one.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from burnish.models.config import ModelConfig, RopeConfig
from burnish.models.remat import kept
from burnish.models.rope import apply_rope
from burnish.ops.attention import Backend, attention
from burnish.ops.matmul import matmul
from burnish.ops.visibility import TokenIds

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class ParamMaker(Protocol):
    """Makes a parameter: `make(shape, axes, kind)`, where kind is "normal", "ones" or "zeros"."""

    def __call__(self, shape: tuple[int, ...], axes: tuple[str | None, ...], kind: str) -> nnx.Param: ...


def abstract_params(dtype: Any) -> ParamMaker:
    """Parameters with a shape and no storage, to be filled by a loader."""

    def make(shape: tuple[int, ...], axes: tuple[str | None, ...], kind: str) -> nnx.Param:
        del kind
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes)

    return make


def random_params(seed: int, dtype: Any = jnp.float32, stddev: float = 0.02) -> ParamMaker:
    """Fresh parameters: kernels normal(0, stddev), scales 1, biases 0."""
    rngs = nnx.Rngs(seed)

    def make(shape: tuple[int, ...], axes: tuple[str | None, ...], kind: str) -> nnx.Param:
        if kind == "normal":
            return nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * stddev, axes=axes)
        return nnx.Param((jnp.ones if kind == "ones" else jnp.zeros)(shape, dtype), axes=axes)

    return make


class DropoutKeys(NamedTuple):
    """What a dropout mask is drawn from, so that it does not depend on batching: (seed, step, example, position,
    layer).

    key: typed key of (seed, step); example_ids, positions: [batch, length] int32; layer: scalar int32.
    """

    key: jax.Array
    example_ids: jax.Array
    positions: jax.Array
    layer: jax.Array | int = 0


class LayerCache(NamedTuple):
    """Keys and values of one layer: [batch, kv_heads, capacity, head_dim]."""

    k: jax.Array
    v: jax.Array


class Context(NamedTuple):
    """What every block of one forward pass shares.

    `angles`: cos and sin of the positions, by the rotary embedding they are for (`burnish.models.rope`). `keys`
    describes the keys when they come from a cache, whose slots from `cache_index` on are being written. `groups` is how
    many devices the rows are sharded over.
    """

    queries: TokenIds
    angles: Mapping[RopeConfig, tuple[jax.Array, jax.Array]]
    dropout: DropoutKeys | None = None
    keys: TokenIds | None = None
    cache_index: jax.Array | int = 0
    backend: Backend = "auto"
    groups: int = 1


class Linear(nnx.Module):
    """y = x W + b, with the adapters that were put beside W (see `burnish.adapt.lora`)."""

    def __init__(self, n_in: int, n_out: int, axes: tuple[str, str], make: ParamMaker, *, bias: bool = False) -> None:
        self.kernel = make((n_in, n_out), axes, "normal")
        self.bias = make((n_out,), (axes[1],), "zeros") if bias else nnx.data(None)
        self.adapters: Any = nnx.List([])

    def __call__(self, x: jax.Array, dropout: DropoutKeys | None = None) -> jax.Array:
        """x [batch, length, in] -> [batch, length, out] in the dtype of x."""
        if len(self.adapters):
            *earlier, last = self.adapters
            y = last(x, self.kernel[...], earlier, dropout)
        else:
            y = matmul(x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)

    def effective_kernel(self, dtype: Any = None) -> jax.Array:
        """W with its adapters added, [in, out] in W's dtype or the one given (a head's matrix is read so)."""
        kernel = self.kernel[...]
        if not len(self.adapters):
            return kernel
        return (kernel.astype(jnp.float32) + sum(adapter.delta() for adapter in self.adapters)).astype(
            dtype or kernel.dtype
        )


class RMSNorm(nnx.Module):
    """x / rms(x) * (offset + scale), in float32 (Zhang and Sennrich 2019, arXiv 1910.07467); offset is 0 or 1."""

    def __init__(self, size: int, config: ModelConfig, make: ParamMaker) -> None:
        self.offset, self.eps = config.norm_offset, config.norm_eps
        self.scale = make((size,), ("norm",), "zeros" if self.offset else "ones")

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (normed * (self.offset + self.scale[...].astype(jnp.float32))).astype(x.dtype)


class Embedding(nnx.Module):
    """A table [vocab, hidden]: rows for tokens, and the unembedding of a model with a tied head."""

    def __init__(self, vocab: int, hidden: int, make: ParamMaker) -> None:
        self.weight = make((vocab, hidden), ("vocab", "embed"), "normal")

    def __call__(self, tokens: jax.Array, dtype: Any) -> jax.Array:
        """tokens [batch, length] -> [batch, length, hidden]."""
        return jnp.take(self.weight[...], tokens, axis=0).astype(dtype)


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, make: ParamMaker) -> None:
        n, m, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(n, m, ("embed", "mlp"), make, bias=bias)
        self.up_proj = Linear(n, m, ("embed", "mlp"), make, bias=bias)
        self.down_proj = Linear(m, n, ("mlp", "embed"), make, bias=bias)
        self.activation = config.activation

    def __call__(self, x: jax.Array, dropout: DropoutKeys | None = None) -> jax.Array:
        gate, up = kept(self.gate_proj(x, dropout), "gate"), kept(self.up_proj(x, dropout), "up")
        return self.down_proj(ACTIVATIONS[self.activation](gate) * up, dropout)


class Attention(nnx.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) of layer `layer`: rotary positions or none,
    queries and keys normalised or not."""

    def __init__(self, config: ModelConfig, layer: int, make: ParamMaker) -> None:
        n, d, bias = config.hidden_size, config.head_dim, config.qkv_bias
        queries, keys = config.num_heads * d, config.num_kv_heads * d
        self.q_proj = Linear(n, queries, ("embed", "heads"), make, bias=bias)
        self.k_proj = Linear(n, keys, ("embed", "kv_heads"), make, bias=bias)
        self.v_proj = Linear(n, keys, ("embed", "kv_heads"), make, bias=bias)
        self.o_proj = Linear(queries, n, ("heads", "embed"), make, bias=config.output_bias)
        self.q_norm = self.k_norm = nnx.data(None)
        if config.qk_norm is not None:
            whole = config.qk_norm == "whole"
            self.q_norm = RMSNorm(queries if whole else d, config, make)
            self.k_norm = RMSNorm(keys if whole else d, config, make)
        self.norm_whole = config.qk_norm == "whole"
        self.head_dim = d
        self.rope = config.layer_rope(layer)
        self.window = config.window(layer)
        self.scale = config.attention_scale
        self.softcap = config.attention_softcap
        self.clip = config.qkv_clip

    def __call__(
        self, x: jax.Array, context: Context, cache: LayerCache | None = None
    ) -> tuple[jax.Array, LayerCache | None]:
        """x [batch, length, hidden] -> (the same, the cache with this call's keys and values written)."""
        dropout = context.dropout
        angles = None if self.rope is None else context.angles[self.rope]
        q = kept(self._placed(self.q_proj(x, dropout), self.q_norm, angles), "query")
        k = kept(self._placed(self.k_proj(x, dropout), self.k_norm, angles), "key")
        v = kept(self._split_heads(self._clipped(self.v_proj(x, dropout))), "value")
        if cache is not None:
            at = (0, 0, context.cache_index, 0)
            cache = LayerCache(
                jax.lax.dynamic_update_slice(cache.k, k.astype(cache.k.dtype), at),
                jax.lax.dynamic_update_slice(cache.v, v.astype(cache.v.dtype), at),
            )
            k, v = cache.k.astype(x.dtype), cache.v.astype(x.dtype)
        queries, keys = context.queries, context.keys
        mixed = attention(
            q,
            k,
            v,
            q_positions=queries.positions,
            q_segment_ids=queries.segments,
            q_parent_ids=queries.parents,
            kv_positions=None if keys is None else keys.positions,
            kv_segment_ids=None if keys is None else keys.segments,
            window=self.window,
            softcap=self.softcap,
            scale=self.scale,
            backend=context.backend,
            groups=context.groups,
        )
        batch, heads, length, dim = mixed.shape
        joined = mixed.transpose(0, 2, 1, 3).reshape(batch, length, heads * dim)
        return self.o_proj(joined, dropout), cache

    def _placed(self, x: jax.Array, norm: RMSNorm | None, angles: tuple[jax.Array, jax.Array] | None) -> jax.Array:
        """Queries or keys as they are compared: normalised, [batch, heads, length, head_dim], rotated."""
        if norm is not None and self.norm_whole:
            x = norm(x)
        x = self._split_heads(self._clipped(x))
        if norm is not None and not self.norm_whole:
            x = norm(x)
        return x if angles is None else apply_rope(x, angles)

    def _clipped(self, x: jax.Array) -> jax.Array:
        return x if self.clip is None else jnp.clip(x, -self.clip, self.clip)

    def _split_heads(self, x: jax.Array) -> jax.Array:
        """[batch, length, heads * head_dim] -> [batch, heads, length, head_dim]."""
        batch, length, _ = x.shape
        return x.reshape(batch, length, -1, self.head_dim).transpose(0, 2, 1, 3)
