"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) on the linear layers of a decoder.

    before                              after add_lora(rank=16)
    layers.0.attn.q_proj                layers.0.attn.q_proj
      kernel [576, 576]                   kernel [576, 576]                  frozen
                                          adapters.0.a [576, 16]             trained
                                          adapters.0.b [16, 576]             trained

The layer computes y = x W + s (x A) B with s = alpha / rank, or alpha / sqrt(rank) with rsLoRA (Kalajdzievski 2023,
arXiv 2312.03732). B starts at zero, so a fresh adapter changes nothing. On stacked blocks A and B are stacked too.

A second adapter on the same layer makes the first part of the frozen policy: both act, only the last is trained.
"""

import math
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from burnish.adapt.config import LoraConfig, default_rank
from burnish.errors import InputError
from burnish.models.decoder import Decoder, Run, split_run
from burnish.models.layers import DropoutKeys, Linear
from burnish.models.parts import generation_of
from burnish.models.paths import leaves, linears, select
from burnish.ops.matmul import matmul, transposed_product
from burnish.ops.platform import on_cpu


class LoRA(nnx.Module):
    """One adapter of one linear layer (or of a stack of them): y = x W + scale (dropout(x) A) B."""

    def __init__(self, a: nnx.Param, b: nnx.Param, *, scale: float, dropout: float, tag: int) -> None:
        self.a = a
        self.b = b
        self.scale = scale
        self.dropout = dropout
        self.tag = tag  # tells the projections of a block apart when dropout masks are drawn

    def __call__(
        self, x: jax.Array, kernel: jax.Array, earlier: Sequence["LoRA"], dropout: DropoutKeys | None
    ) -> jax.Array:
        """x [batch, length, in] through W [in, out], the earlier (frozen) adapters and this one, in the dtype of x."""
        dropping = self.dropout > 0 and dropout is not None
        if x.dtype == jnp.float32 and not dropping and on_cpu():
            for adapter in earlier:
                kernel = kernel + adapter.delta()
            return merged_matmul(x, kernel, self.a[...], self.b[...], self.scale)
        # In bfloat16, W + s A B would round a small adapter away (and accelerators multiply float32 with fewer digits,
        # by default): it runs beside W instead.
        y = matmul(x, kernel)
        for adapter in earlier:
            y = y + adapter.beside(x)
        return y + self.beside(self._dropped(x, dropout) if dropping and dropout else x)

    def beside(self, x: jax.Array) -> jax.Array:
        """scale (x A) B in the dtype of x, accumulated in float32."""
        low = jnp.matmul(x, self.a[...].astype(x.dtype), preferred_element_type=jnp.float32)
        high = jnp.matmul(low.astype(x.dtype), self.b[...].astype(x.dtype), preferred_element_type=jnp.float32)
        return (self.scale * high).astype(x.dtype)

    def delta(self) -> jax.Array:
        """scale A B, what is added to W: [in, out] float32 (stacked: [layers, in, out])."""
        a, b = self.a[...].astype(jnp.float32), self.b[...].astype(jnp.float32)
        return self.scale * jnp.matmul(a, b, precision="highest")

    def _dropped(self, x: jax.Array, keys: DropoutKeys) -> jax.Array:
        layer_key = jax.random.fold_in(jax.random.fold_in(keys.key, keys.layer), self.tag)

        def token_mask(example: jax.Array, position: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.fold_in(layer_key, example), position)
            return jax.random.bernoulli(key, 1 - self.dropout, x.shape[-1:])

        keep = jax.vmap(jax.vmap(token_mask))(keys.example_ids, keys.positions)
        return jnp.where(keep, x / (1 - self.dropout), 0).astype(x.dtype)


@jax.custom_vjp
def merged_matmul(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """x (W + s A B): one large product forward and one backward, where autodiff of x W + s (x A) B takes more.

    x [..., in], W [in, out], A [in, rank], B [rank, out]. With g the gradient of the output:
    dx = g (W + s A B)ᵀ, dA = s xᵀ (g Bᵀ), dB = s (x A)ᵀ g, dW = xᵀ g (dropped by the compiler when W is frozen).
    """
    return x @ (w + scale * (a @ b))


_Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array, float]


def _merged_forward(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> tuple[jax.Array, _Saved]:
    return merged_matmul(x, w, a, b, scale), (x, w, a, b, scale)


def _merged_backward(saved: _Saved, g: jax.Array) -> tuple[jax.Array | None, ...]:
    x, w, a, b, scale = saved
    dx = g @ (w + scale * (a @ b)).T
    da = scale * transposed_product(x, g @ b.T)
    db = scale * transposed_product(x @ a, g)
    return dx, transposed_product(x, g).astype(w.dtype), da, db, None


merged_matmul.defvjp(_merged_forward, _merged_backward)


def add_lora(
    decoder: Decoder, config: LoraConfig, *, seed: int = 0, with_embeddings: bool = False
) -> tuple[LoraConfig, list[str]]:
    """Puts a fresh adapter on every selected linear layer, in place.

    with_embeddings: embedding and head are to be trained beside the adapters, whole.

    Returns the config with rank and alpha filled in, and the names of those layers.

    A is uniform(±1 / sqrt(in)), drawn from (seed, layer name); B is zero. Raises InputError when a selector matches no
    linear layer or the rank exceeds a layer's smallest side.
    """
    names = [name for _, group in linears(decoder).values() for name in group]
    blocks = [name for name in names if name.startswith("layers.")]
    chosen = select(names, config.targets, option="adapter.targets") if config.targets else set(blocks)
    if "head" in chosen and (config.dropout > 0 or decoder.dtype != jnp.float32):
        raise InputError("adapter.targets: an adapter on the head needs a float32 model and adapter.dropout=0")
    rank = config.rank or default_rank(sum(variable[...].size for _, variable in leaves(decoder).values()))
    alpha = config.alpha or 2.0 * rank
    config = config.model_copy(update={"rank": rank, "alpha": alpha})
    _check_rank(decoder, chosen, rank)
    split_runs(decoder, lambda layer: of_layer(chosen, layer))
    scale = alpha / (math.sqrt(rank) if config.rslora else rank)
    generation = next_generation(decoder)
    for linear, group in linears(decoder).values():
        for older in linear.adapters:
            older.dropout = 0.0  # it is frozen from here on
        if group[0] in chosen:
            attach(
                linear,
                group,
                *_fresh(linear, group, rank, seed),
                scale=scale,
                dropout=config.dropout,
                generation=generation,
            )
    if with_embeddings:
        for variable in [decoder.embed.weight, *([] if decoder.head is None else [decoder.head.kernel])]:
            variable.set_metadata(generation=generation)
    return config, sorted(chosen)


def _check_rank(decoder: Decoder, chosen: set[str], rank: int) -> None:
    """InputError when a chosen layer is too small, before anything is changed."""
    for linear, group in linears(decoder).values():
        n_in, n_out = linear.kernel.shape[-2:]
        name = next((name for name in group if name in chosen), None)
        if name is not None and rank > min(n_in, n_out):
            raise InputError(
                f"adapter.rank: {rank} is above the smallest side of {name} [{n_in}, {n_out}]; "
                f"use {min(n_in, n_out)} or less, or leave the layer out of adapter.targets"
            )


def _fresh(linear: Linear, names: tuple[str, ...], rank: int, seed: int) -> tuple[jax.Array, jax.Array]:
    """A and B of new adapters, one for each name: [layers, in, rank], [layers, rank, out]."""
    n_in, n_out = linear.kernel.shape[-2:]
    keys = [jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode())) for name in names]
    bound = 1 / math.sqrt(n_in)
    a = jnp.stack([jax.random.uniform(key, (n_in, rank), jnp.float32, -bound, bound) for key in keys])
    return a, jnp.zeros((len(names), rank, n_out), jnp.float32)


def next_generation(decoder: Decoder) -> int:
    """The number of the adapters that are put on next."""
    numbers = [generation_of(variable) for _, variable in leaves(decoder).values()]
    return 1 + max((number for number in numbers if number is not None), default=-1)


def attach(
    linear: Linear,
    names: tuple[str, ...],
    a: jax.Array,
    b: jax.Array,
    *,
    scale: float,
    dropout: float = 0.0,
    generation: int = 0,
) -> None:
    """Puts an adapter on a linear layer, or on a stack of them that the names are those of.

    a [layers, in, rank], b [layers, rank, out]; one layer for a layer that is not stacked. Adapters put on together are
    of one generation; the newest generation is the one that is trained (`burnish.models.parts`).
    """
    stacked = linear.kernel.ndim == 3
    lead = ("layers",) if stacked else ()
    in_axis, out_axis = linear.kernel.get_metadata("axes")[-2:]
    within_block = names[0].partition(".")[2].partition(".")[2]
    linear.adapters.append(
        LoRA(
            nnx.LoRAParam(a if stacked else a[0], axes=(*lead, in_axis, "rank"), generation=generation),
            nnx.LoRAParam(b if stacked else b[0], axes=(*lead, "rank", out_axis), generation=generation),
            scale=scale,
            dropout=dropout,
            tag=zlib.crc32(within_block.encode()),
        )
    )


def split_runs(decoder: Decoder, key: Callable[[int], Hashable]) -> None:
    """Cuts runs where layers that share a stack are to differ: layers of unlike keys stand apart, others together."""
    runs: list[Run] = []
    for run in decoder.runs:
        keys = [key(run.start + i) for i in range(run.period * run.repeats)]
        uniform = all(keys[i] == keys[i % run.period] for i in range(len(keys)))
        runs += [run] if uniform else split_run(run, keys)
    decoder.runs = nnx.List(runs)


def of_layer(names: Iterable[str], layer: int) -> frozenset[str]:
    """The names that lie in a layer, without its number: {"attn.q_proj", ...}."""
    prefix = f"layers.{layer}."
    return frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))


class Merged(NamedTuple):
    """What `merge_lora` replaced: by layer, the kernel before and the adapters it had.

    generations: by stored key, which adapters' generation an embedding or head was trained with.
    """

    layers: dict[str, tuple[jax.Array, list[LoRA]]]
    generations: dict[str, int]


def merge_lora(decoder: Decoder, dtype: Any = None) -> Merged:
    """Adds every adapter to its kernel and takes the adapters off, in place.

    dtype: of the merged kernels, their own where it is None; bfloat16 swallows small adapters.

    What comes back undoes it exactly (`unmerge_lora`); drop it to free the memory of the kernels it holds.
    """
    replaced = {}
    for key, (linear, _) in linears(decoder).items():
        if len(linear.adapters):
            replaced[key] = (linear.kernel[...], list(linear.adapters))
            linear.kernel.set_value(linear.effective_kernel(dtype))
            linear.adapters = nnx.List([])
    generations = {}
    for key, (_, variable) in leaves(decoder).items():
        if (generation := generation_of(variable)) is not None:
            generations[key] = generation
            variable.set_metadata(generation=None)
    return Merged(replaced, generations)


def unmerge_lora(decoder: Decoder, merged: Merged) -> None:
    """Puts back the kernels and adapters that `merge_lora` replaced, bit for bit."""
    found = linears(decoder)
    for key, (kernel, adapters) in merged.layers.items():
        found[key][0].kernel.set_value(kernel)
        found[key][0].adapters = nnx.List(adapters)
    for key, generation in merged.generations.items():
        leaves(decoder)[key][1].set_metadata(generation=generation)
