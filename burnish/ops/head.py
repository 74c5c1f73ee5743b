"""Per-token quantities of the softmax over the vocabulary, without ever holding the logits.

With hidden state `h`, unembedding rows `E_v` and vocabulary size `V`, a token's logits are

    raw_v = h . E_v
    z_v   = cap * tanh(raw_v / cap) / temperature       (without a cap: raw_v / temperature)

and `head_map` returns what was asked for of

    log_probs           z_target - logsumexp
    logsumexp           log sum_v exp(z_v)
    entropy             -sum_v p_v log p_v,  p = softmax(z)
    mean_logit          sum_v z_v / V        (so mean_v(-log p_v) = logsumexp - mean_logit)
    token_id_log_probs  z_k - logsumexp for each k of a given list

Tokens go through the vocabulary a chunk at a time. With `g_v = dz_v/draw_v`, the gradients for `h` are

    logsumexp   sum_v p_v g_v E_v                  (the expected embedding)
    log_probs   g_target E_target - expected
    entropy     -sum_v p_v (z_v - sum_u p_u z_u) g_v E_v
    mean_logit  sum_v g_v E_v / V

When the unembedding is frozen these sums are taken in the forward pass, while the chunk's probabilities are
at hand, and the backward pass never visits the vocabulary. When it is trained, the backward pass computes
each chunk's logits again and takes both gradients. When nothing is differentiated, neither is done. Which
case holds is read off the differentiation itself (`symbolic_zeros`), so a head is frozen simply by not being
differentiated. Where `jax.checkpoint` wraps the head, the forward half is computed twice: leave it outside.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from burnish.errors import InputError
from burnish.ops.compaction import chunk_of, compact, picker, put, spread
from burnish.ops.head_chunk import (
    KEPT_FROZEN,
    KEPT_TRAINED,
    HeadSpec,
    HeadTokens,
    UnembedLayout,
    chunk_outputs,
    embed,
    gradient_from_kept,
    logit_gradient,
    raw_logits,
    unembed_gradient,
)

__all__ = ["HeadOutputs", "OutputName", "UnembedLayout", "head_map", "token_logprobs"]

OutputName = Literal["log_probs", "logsumexp", "entropy", "mean_logit"]

_CHUNK_BYTES = 32 * 2**20
_FEWEST_ROWS = 32  # with fewer, a matrix product waits for the unembedding to come from memory


class HeadOutputs(NamedTuple):
    """What `head_map` was asked for, each `[...]` like the tokens; the rest is None."""

    log_probs: jax.Array | None = None
    logsumexp: jax.Array | None = None
    entropy: jax.Array | None = None
    mean_logit: jax.Array | None = None
    token_id_log_probs: jax.Array | None = None  # [..., k]


def head_map(
    hidden: jax.Array,
    unembed: jax.Array,
    targets: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    outputs: Sequence[OutputName] = ("log_probs",),
    token_ids: jax.Array | None = None,
    unembed_layout: UnembedLayout = "vocab_dim",
    temperature: float = 1.0,
    softcap: float | None = None,
    groups: int = 1,
    chunk_rows: int | None = None,
) -> HeadOutputs:
    """Per-token quantities of the softmax, differentiable in `hidden` and `unembed`.

    Matrix products run in the dtype of `hidden` and accumulate in float32; everything else is float32, and so
    is what is returned (float64 for float64 inputs).

    Args:
      hidden: `[..., dim]`, the decoder's normalised output.
      unembed: `[vocab, dim]` (a tied embedding) or, with `unembed_layout="dim_vocab"`, `[dim, vocab]`.
      targets: `[...]` integers; needed for `log_probs`. A target outside the vocabulary gives NaN where the
        mask is on; where it is off, any value will do.
      mask: `[...]` booleans, or loss weights, of which only "is it 0" is read. Tokens that are off are not
        computed: each output is 0 there, no gradient comes from there, and a NaN there reaches nothing.
        None: all are on.
      outputs: names of the quantities wanted.
      token_ids: `[..., k]` integers; when given, `token_id_log_probs` `[..., k]` is returned too. An id
        outside the vocabulary gives NaN.
      unembed_layout: order of the axes of `unembed`; neither is transposed in memory.
      temperature: divides the logits, after the soft cap; above 0.
      softcap: bound of the logits, as in Gemma 2 (arXiv 2408.00118); None is no bound.
      groups: number of pieces into which the flattened tokens are cut. Each piece is compacted and chunked by
        itself, so with as many groups as the batch has shards every device works on its own tokens.
      chunk_rows: tokens of one group in a chunk; None takes the largest power of two that keeps a group's
        logits within 32 MiB and within an eighth of what all its tokens would take (but 32 or more).

    Raises:
      InputError: an argument is out of its range, or shapes do not fit each other.
    """
    check_arguments(hidden, unembed, targets, mask, outputs, token_ids, unembed_layout, temperature, softcap, groups)
    lead, dim = hidden.shape[:-1], hidden.shape[-1]
    flat = (groups, math.prod(lead) // groups)
    spec = head_spec(hidden, unembed, flat[1], outputs, unembed_layout, temperature, softcap, chunk_rows)
    if token_ids is not None:
        spec = spec._replace(outputs=(*spec.outputs, "token_id_log_probs"))
    tokens = HeadTokens(
        targets=targets.reshape(flat) if targets is not None and "log_probs" in outputs else None,
        token_ids=None if token_ids is None else token_ids.reshape(*flat, -1),
    )
    on = jnp.ones(flat, bool) if mask is None else (mask != 0).reshape(flat)
    found = _head(spec, hidden.reshape(*flat, dim), unembed, tokens, on)
    return HeadOutputs(**{name: array.reshape(lead + array.shape[2:]) for name, array in found.items()})


def token_logprobs(
    hidden: jax.Array,
    unembed: jax.Array,
    targets: jax.Array,
    mask: jax.Array | None = None,
    *,
    unembed_layout: UnembedLayout = "vocab_dim",
    temperature: float = 1.0,
    softcap: float | None = None,
    groups: int = 1,
) -> jax.Array:
    """Log-probability of each target, `[...]` float32; 0 where `mask` is off. Arguments as in `head_map`."""
    found = head_map(
        hidden,
        unembed,
        targets,
        mask,
        unembed_layout=unembed_layout,
        temperature=temperature,
        softcap=softcap,
        groups=groups,
    )
    assert found.log_probs is not None
    return found.log_probs


def head_spec(
    hidden: jax.Array,
    unembed: jax.Array,
    per_group: int,
    outputs: Sequence[OutputName],
    layout: UnembedLayout,
    temperature: float,
    softcap: float | None,
    chunk_rows: int | None,
    chunk_bytes: int = _CHUNK_BYTES,
) -> HeadSpec:
    """The static half of a call, whose arguments were checked; `chunk_rows` as `head_map` has it."""
    vocab = unembed.shape[0 if layout == "vocab_dim" else 1]
    if chunk_rows is None:
        affordable = max(_FEWEST_ROWS, min(chunk_bytes // (4 * vocab), per_group // 8))
        chunk_rows = 2 ** (affordable.bit_length() - 1)
    elif chunk_rows < 1:
        raise InputError(f"chunk_rows: {chunk_rows} must be 1 or more")
    return HeadSpec(
        outputs=tuple(outputs),
        layout=layout,
        temperature=float(temperature),
        softcap=None if softcap is None else float(softcap),
        rows=min(chunk_rows, per_group),
        dtype=hidden.dtype,
    )


def check_arguments(
    hidden: jax.Array,
    unembed: jax.Array,
    targets: jax.Array | None,
    mask: jax.Array | None,
    outputs: Sequence[str],
    token_ids: jax.Array | None,
    layout: str,
    temperature: float,
    softcap: float | None,
    groups: int,
) -> None:
    """Refuse what cannot be mapped, naming the argument."""
    if layout not in get_args(UnembedLayout):
        raise InputError(f"unembed_layout: {layout!r} is not one of {', '.join(get_args(UnembedLayout))}")
    unknown = [name for name in outputs if name not in get_args(OutputName)]
    if unknown:
        raise InputError(f"outputs: {unknown[0]!r} is not one of {', '.join(get_args(OutputName))}")
    if len(set(outputs)) < len(outputs) or not (outputs or token_ids is not None):
        raise InputError(f"outputs: {tuple(outputs)} must name at least one quantity, each once")
    dim_axis = 1 if layout == "vocab_dim" else 0
    if unembed.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != unembed.shape[dim_axis]:
        raise InputError(f"hidden {hidden.shape} does not fit unembed {unembed.shape} laid out {layout}")
    lead = hidden.shape[:-1]
    if "log_probs" in outputs and targets is None:
        raise InputError("targets: log_probs needs them")
    for name, array in (("targets", targets), ("mask", mask)):
        if array is not None and array.shape != lead:
            raise InputError(f"{name}: shape {array.shape} must be that of the tokens, {lead}")
    if token_ids is not None and token_ids.shape[:-1] != lead:
        raise InputError(f"token_ids: shape {token_ids.shape} must be {lead} and one axis more")
    if not (math.isfinite(temperature) and temperature > 0):
        raise InputError(f"temperature: {temperature} must be finite and above 0")
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise InputError(f"softcap: {softcap} must be finite and above 0, or None for no cap")
    count = math.prod(lead)
    if count == 0 or groups < 1 or count % groups:
        raise InputError(f"groups: {count} tokens cannot be cut into {groups} equal groups of one or more")


def _forward(
    spec: HeadSpec,
    hidden: jax.Array,
    unembed: jax.Array,
    tokens: HeadTokens,
    mask: jax.Array,
    slopes: bool,
    kept: tuple[str, ...],
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Outputs by name, `[groups, tokens, ...]`, and what is `kept`, compacted `[groups, padded, ...]`."""
    places = compact(mask, spec.rows)

    def one_chunk(start: jax.Array) -> dict[str, jax.Array]:
        rows, tokens_here = jax.tree.map(picker(places, start, spec.rows), (hidden, tokens))
        found = chunk_outputs(spec, raw_logits(spec, rows, unembed), unembed, tokens_here, slopes)
        return {name: array for name, array in found.items() if name in spec.outputs or name in kept}

    def body(i: jax.Array, buffers: dict[str, jax.Array]) -> dict[str, jax.Array]:
        start = i * spec.rows
        return {name: put(buffers[name], start, array) for name, array in one_chunk(start).items()}

    shapes = jax.eval_shape(one_chunk, jnp.zeros((), jnp.int32))
    padded = places.order.shape[1]
    buffers = {name: jnp.zeros((s.shape[0], padded, *s.shape[2:]), s.dtype) for name, s in shapes.items()}
    buffers = jax.lax.fori_loop(0, places.chunks, body, buffers)
    outputs = {name: spread(places, buffers[name]) for name in spec.outputs}
    return outputs, {name: array for name, array in buffers.items() if name in kept}


def _backward_frozen(
    spec: HeadSpec,
    unembed: jax.Array,
    tokens: HeadTokens,
    mask: jax.Array,
    kept: dict[str, jax.Array],
    given: dict[str, jax.Array],
) -> jax.Array:
    """Gradient for `hidden`, without a visit to the vocabulary."""
    places = compact(mask, spec.rows)
    if "mean_logit" in given and spec.softcap is None:
        mean = jnp.mean(unembed, axis=spec.vocab_axis, dtype=spec.accumulator) / spec.temperature
    else:
        mean = None

    def body(i: jax.Array, gradient: jax.Array) -> jax.Array:
        start = i * spec.rows
        tokens_here, due = jax.tree.map(picker(places, start, spec.rows), (tokens, given))
        kept_here = {name: chunk_of(array, start, spec.rows) for name, array in kept.items()}
        if mean is not None:
            kept_here["kept_mean_logit"] = mean
        return put(gradient, start, gradient_from_kept(spec, unembed, tokens_here, kept_here, due))

    shape = (*places.order.shape, unembed.shape[1 - spec.vocab_axis])
    return spread(places, jax.lax.fori_loop(0, places.chunks, body, jnp.zeros(shape, spec.dtype)))


def _backward_trained(
    spec: HeadSpec,
    hidden: jax.Array,
    unembed: jax.Array,
    tokens: HeadTokens,
    mask: jax.Array,
    kept: dict[str, jax.Array],
    given: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Gradients for `hidden` and `unembed`, from logits computed again.

    Each group sums its own gradient for `unembed`, and the groups are added once at the end: added chunk by
    chunk, they would cost a sharded batch a reduction over devices in every chunk.
    """
    places = compact(mask, spec.rows)

    def body(i: jax.Array, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start = i * spec.rows
        rows, tokens_here, due = jax.tree.map(picker(places, start, spec.rows), (hidden, tokens, given))
        kept_here = {name: chunk_of(array, start, spec.rows) for name, array in kept.items()}
        d_logits = logit_gradient(spec, raw_logits(spec, rows, unembed), tokens_here, kept_here, due)
        d_hidden, d_unembed = gradients
        d_hidden = put(d_hidden, start, embed(spec, d_logits, unembed))
        return d_hidden, d_unembed + unembed_gradient(spec, d_logits, rows)

    groups, padded = places.order.shape
    empty = (
        jnp.zeros((groups, padded, hidden.shape[-1]), spec.dtype),
        jnp.zeros((groups, *unembed.shape), spec.accumulator),
    )
    d_hidden, d_unembed = jax.lax.fori_loop(0, places.chunks, body, empty)
    return spread(places, d_hidden), jnp.sum(d_unembed, axis=0).astype(unembed.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _head(
    spec: HeadSpec, hidden: jax.Array, unembed: jax.Array, tokens: HeadTokens, mask: jax.Array
) -> dict[str, jax.Array]:
    """Outputs by name, `[groups, tokens, ...]`; `hidden` is `[groups, tokens, dim]`."""
    return _forward(spec, hidden, unembed, tokens, mask, slopes=False, kept=())[0]


def _head_forward(spec: HeadSpec, *primals: Any) -> tuple[dict[str, jax.Array], tuple[Any, ...]]:
    """Under differentiation each array comes as a `value` and whether it is `perturbed` (differentiated)."""
    trained = primals[1].perturbed
    hidden, unembed, tokens, mask = jax.tree.map(lambda leaf: leaf.value, primals, is_leaf=is_primal)
    kept = KEPT_TRAINED if trained else KEPT_FROZEN
    outputs, kept_arrays = _forward(spec, hidden, unembed, tokens, mask, slopes=not trained, kept=kept)
    return outputs, (hidden if trained else None, unembed, tokens, mask, kept_arrays)


def is_primal(leaf: Any) -> bool:
    """Whether it is an array as a forward rule gets it under `symbolic_zeros`: `value` and `perturbed`."""
    return hasattr(leaf, "perturbed")


def _head_backward(spec: HeadSpec, residuals: tuple[Any, ...], cotangents: dict[str, Any]) -> tuple[Any, ...]:
    hidden, unembed, tokens, mask, kept = residuals
    zero = jax.custom_derivatives.SymbolicZero
    given = {name: array for name, array in cotangents.items() if not isinstance(array, zero)}
    if hidden is None:
        return _backward_frozen(spec, unembed, tokens, mask, kept, given), None, None, None
    return *_backward_trained(spec, hidden, unembed, tokens, mask, kept, given), None, None


_head.defvjp(_head_forward, _head_backward, symbolic_zeros=True)
