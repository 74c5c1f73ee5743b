"""A loss over the vocabulary and its gradient in one visit to it.

`burnish.ops.head.head_map` returns per-token quantities and waits for the gradients of them, so a trained unembedding
costs its logits twice. Where the loss is a sum over tokens of a function of that token's quantities alone, nothing is
worth waiting for: each chunk's loss is differentiated while its logits are at hand, and what the backward pass has
to do is to scale.

    loss      S = sum_t l(q_t, w_t)           q_t: the quantities of token t, w_t: its weight
    logits    dS/draw_t = dl/dq_t dq_t/draw_t
    hidden    dS/dh_t = dS/draw_t E           unembedding  dS/dE = sum_t dS/draw_t' h_t

What is frozen gets no gradient and costs none; without differentiation only the loss is computed.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from burnish.ops.compaction import compact, picker, put, spread
from burnish.ops.head import HeadOutputs, OutputName, check_arguments, head_spec, is_primal
from burnish.ops.head_chunk import (
    HeadSpec,
    HeadTokens,
    UnembedLayout,
    chunk_outputs,
    embed,
    logit_gradient,
    raw_logits,
    unembed_gradient,
)

__all__ = ["TokenLoss", "head_loss"]

TokenLoss = Callable[[HeadOutputs, jax.Array], jax.Array]
"""(quantities `[...]`, weights `[...]`) to a scalar: a sum over tokens, whatever their number and order."""

# Wider chunks than `head_map` takes: the unembedding's gradient is read and written once a chunk. On 2 CPU cores its
# product runs at 110 GFLOP/s by 128 rows of 49,152 logits and at 200 by 512.
_CHUNK_BYTES = 96 * 2**20


def head_loss(
    loss: TokenLoss,
    hidden: jax.Array,
    unembed: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    outputs: Sequence[OutputName] = ("log_probs",),
    unembed_layout: UnembedLayout = "vocab_dim",
    temperature: float = 1.0,
    softcap: float | None = None,
    groups: int = 1,
    chunk_rows: int | None = None,
) -> tuple[jax.Array, HeadOutputs]:
    """The loss, differentiable in `hidden` and `unembed`, and the quantities it was taken of, which are not.

    Args:
      loss: called on one chunk of tokens at a time. Tokens of weight 0 are not visited, and empty places of a chunk
        have weight 0: they must add nothing. It may not close over traced arrays.
      hidden, unembed, targets, outputs, unembed_layout, temperature, softcap, groups: as `head_map` has them.
      weights: `[...]` loss weights of the tokens; where one is 0 every quantity is 0.
      chunk_rows: tokens of one group in a chunk; None takes the largest power of two that keeps a group's logits
        within 96 MiB and within an eighth of what all its tokens would take (but 32 or more).

    Returns:
      A scalar and `[...]` arrays, float32 (float64 for float64 inputs).

    Raises:
      InputError: as `head_map`.
    """
    check_arguments(hidden, unembed, targets, weights, outputs, None, unembed_layout, temperature, softcap, groups)
    lead, dim = hidden.shape[:-1], hidden.shape[-1]
    flat = (groups, math.prod(lead) // groups)
    spec = head_spec(
        hidden, unembed, flat[1], outputs, unembed_layout, temperature, softcap, chunk_rows, chunk_bytes=_CHUNK_BYTES
    )
    tokens = HeadTokens(targets=targets.reshape(flat), token_ids=None)
    total, found = _loss(spec, loss, hidden.reshape(*flat, dim), unembed, tokens, weights.reshape(flat))
    found = {name: jax.lax.stop_gradient(array.reshape(lead)) for name, array in found.items()}
    return total, HeadOutputs(**found)


def _walk(
    spec: HeadSpec,
    loss: TokenLoss,
    hidden: jax.Array,
    unembed: jax.Array,
    tokens: HeadTokens,
    weights: jax.Array,
    *,
    for_hidden: bool = False,
    for_unembed: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array], jax.Array | None, jax.Array | None]:
    """The loss, the outputs `[groups, tokens]`, and the gradients asked for.

    As in `head_map`, each group sums its own gradient for `unembed`, and the groups are added once at the end.
    """
    places = compact(weights != 0, spec.rows)
    groups, padded = places.order.shape
    matrix = unembed.astype(spec.dtype)  # once, not once a chunk
    empty: dict[str, Any] = {name: jnp.zeros((groups, padded), spec.accumulator) for name in spec.outputs}
    if for_hidden:
        empty["d_hidden"] = jnp.zeros((groups, padded, hidden.shape[-1]), spec.dtype)
    if for_unembed:
        empty["d_unembed"] = jnp.zeros((groups, *unembed.shape), spec.accumulator)

    def body(i: jax.Array, state: tuple[jax.Array, dict[str, jax.Array]]) -> tuple[jax.Array, dict[str, jax.Array]]:
        total, buffers = state
        start = i * spec.rows
        rows, tokens_here, weights_here = jax.tree.map(picker(places, start, spec.rows), (hidden, tokens, weights))
        raw = raw_logits(spec, rows, matrix)
        found = chunk_outputs(spec, raw, matrix, tokens_here, slopes=False)
        asked = {name: found[name] for name in spec.outputs}
        value, pull = jax.vjp(lambda asked: loss(HeadOutputs(**asked), weights_here), asked)
        new = {name: put(buffers[name], start, array) for name, array in asked.items()}
        if for_hidden or for_unembed:
            [due] = pull(jnp.ones_like(value))
            d_logits = logit_gradient(spec, raw, tokens_here, found, due)
        if for_hidden:
            new["d_hidden"] = put(buffers["d_hidden"], start, embed(spec, d_logits, matrix))
        if for_unembed:
            new["d_unembed"] = buffers["d_unembed"] + unembed_gradient(spec, d_logits, rows)
        return total + value.astype(total.dtype), new

    total, buffers = jax.lax.fori_loop(0, places.chunks, body, (jnp.zeros((), spec.accumulator), empty))
    found = {name: spread(places, buffers[name]) for name in spec.outputs}
    d_hidden = spread(places, buffers["d_hidden"]) if for_hidden else None
    d_unembed = jnp.sum(buffers["d_unembed"], axis=0).astype(unembed.dtype) if for_unembed else None
    return total, found, d_hidden, d_unembed


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(
    spec: HeadSpec, loss: TokenLoss, hidden: jax.Array, unembed: jax.Array, tokens: HeadTokens, weights: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    return _walk(spec, loss, hidden, unembed, tokens, weights)[:2]


def _loss_forward(spec: HeadSpec, loss: TokenLoss, *primals: Any) -> tuple[Any, Any]:
    for_hidden, for_unembed = primals[0].perturbed, primals[1].perturbed
    values = jax.tree.map(lambda leaf: leaf.value, primals, is_leaf=is_primal)
    total, found, *gradients = _walk(spec, loss, *values, for_hidden=for_hidden, for_unembed=for_unembed)
    return (total, found), gradients


def _loss_backward(spec: HeadSpec, loss: TokenLoss, gradients: Any, cotangents: Any) -> tuple[Any, ...]:
    due, _ = cotangents
    if isinstance(due, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None
    d_hidden, d_unembed = jax.tree.map(lambda gradient: (due * gradient).astype(gradient.dtype), gradients)
    return d_hidden, d_unembed, None, None


_loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)
