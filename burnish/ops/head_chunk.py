"""One chunk of tokens against the vocabulary: its logits, what they say, and the way back.

`burnish.ops.head` explains the quantities and walks the chunks; only here has an array a vocabulary axis.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

__all__ = [
    "KEPT_FROZEN",
    "KEPT_TRAINED",
    "HeadSpec",
    "HeadTokens",
    "UnembedLayout",
    "chunk_outputs",
    "embed",
    "gradient_from_kept",
    "logit_gradient",
    "raw_logits",
    "unembed_gradient",
]

UnembedLayout = Literal["vocab_dim", "dim_vocab"]

# What the forward pass keeps of a chunk for the backward pass, besides the outputs.
KEPT_FROZEN = (
    "kept_rest",  # 1 - p_target
    "kept_target_slope",  # g_target
    "kept_id_slopes",  # g of the listed ids
    "kept_expected",
    "kept_entropy",
    "kept_mean_logit",
)
KEPT_TRAINED = ("logsumexp", "kept_rest", "kept_peak", "kept_mean_shifted")


class HeadSpec(NamedTuple):
    """The static half of a call."""

    outputs: tuple[str, ...]
    layout: UnembedLayout
    temperature: float
    softcap: float | None
    rows: int  # tokens of one group in a chunk
    dtype: Any  # of the matrix products: that of the hidden states

    @property
    def vocab_axis(self) -> int:
        return 0 if self.layout == "vocab_dim" else 1

    @property
    def accumulator(self) -> Any:
        return jnp.promote_types(self.dtype, jnp.float32)

    @property
    def weight_axes(self) -> str:
        return "vd" if self.layout == "vocab_dim" else "dv"


class HeadTokens(NamedTuple):
    """What is known of the tokens; None where no output needs it."""

    targets: jax.Array | None  # [groups, tokens]
    token_ids: jax.Array | None  # [groups, tokens, k]


def raw_logits(spec: HeadSpec, rows: jax.Array, unembed: jax.Array) -> jax.Array:
    """`[groups, rows, dim]` to `[groups, rows, vocab]`."""
    axes = f"grd,{spec.weight_axes}->grv"
    return jnp.einsum(axes, rows, unembed.astype(spec.dtype), preferred_element_type=spec.accumulator)


def embed(spec: HeadSpec, weights: jax.Array, unembed: jax.Array) -> jax.Array:
    """Sum of embeddings weighted over the vocabulary: `[groups, rows, vocab]` to `[groups, rows, dim]`."""
    axes = f"grv,{spec.weight_axes}->grd"
    factors = weights.astype(spec.dtype), unembed.astype(spec.dtype)
    return jnp.einsum(axes, *factors, preferred_element_type=spec.accumulator)


def _bend(spec: HeadSpec, raw: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    """Soft cap, then temperature: `(z, dz/draw)`."""
    if spec.softcap is None:
        return raw / spec.temperature, 1.0 / spec.temperature
    share = jnp.tanh(raw / spec.softcap)
    return share * (spec.softcap / spec.temperature), (1.0 - share * share) / spec.temperature


def _look_up(spec: HeadSpec, unembed: jax.Array, ids: jax.Array) -> jax.Array:
    """Embeddings of `ids` `[...]` as `[..., dim]`."""
    rows = jnp.take(unembed, ids, axis=spec.vocab_axis, mode="clip")
    return (rows if spec.vocab_axis == 0 else jnp.moveaxis(rows, 0, -1)).astype(spec.accumulator)


def _gather_logits(raw: jax.Array, ids: jax.Array) -> jax.Array:
    """Logits of `ids` `[groups, rows, k]`; NaN for an id outside the vocabulary, lest it go unseen."""
    vocab = raw.shape[-1]
    found = jnp.take_along_axis(raw, jnp.clip(ids, 0, vocab - 1), axis=-1)
    return jnp.where((ids >= 0) & (ids < vocab), found, jnp.nan)


def _is_target(raw: jax.Array, targets: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(targets.dtype, raw.shape, raw.ndim - 1) == targets[..., None]


def chunk_outputs(
    spec: HeadSpec, raw: jax.Array, unembed: jax.Array, tokens: HeadTokens, slopes: bool
) -> dict[str, jax.Array]:
    """Everything asked for of one chunk of raw logits, and with `slopes` what a frozen head's backward pass needs.

    `kept_expected` leaves the target out of the expected embedding: for a confident token
    `E_target - expected` would lose in rounding what `(1 - p_target) E_target - (the others)` keeps.
    """
    targets, ids = tokens.targets, tokens.token_ids
    z, slope = _bend(spec, raw)
    vocab = raw.shape[-1]
    peak = jnp.max(z, axis=-1)
    shifted = z - peak[..., None]
    others = mass = jnp.exp(shifted)
    found: dict[str, jax.Array] = {}
    if targets is None:
        total = jnp.sum(mass, axis=-1)
    else:
        target_z, target_slope = _bend(spec, _gather_logits(raw, targets[..., None])[..., 0])
        others = jnp.where(_is_target(raw, targets), 0, mass)
        rest = jnp.sum(others, axis=-1)
        total = rest + jnp.exp(target_z - peak)
        found["kept_rest"] = rest / total
        if slopes:
            found["kept_target_slope"] = jnp.broadcast_to(target_slope, total.shape)
        found["log_probs"] = target_z - peak - jnp.log(total)
    found["logsumexp"] = peak + jnp.log(total)
    if ids is not None:
        id_z, id_slope = _bend(spec, _gather_logits(raw, ids))
        found["token_id_log_probs"] = id_z - found["logsumexp"][..., None]
        if slopes:
            found["kept_id_slopes"] = jnp.broadcast_to(id_slope, ids.shape)
    if slopes and set(spec.outputs) & {"log_probs", "logsumexp", "token_id_log_probs"}:
        found["kept_expected"] = embed(spec, others * slope, unembed) / total[..., None]
    if "entropy" in spec.outputs:
        mean_shifted = jnp.sum(mass * shifted, axis=-1) / total
        found["entropy"] = jnp.log(total) - mean_shifted
        found["kept_peak"], found["kept_mean_shifted"] = peak, mean_shifted
        if slopes:
            weights = mass * (mean_shifted[..., None] - shifted) * slope
            found["kept_entropy"] = embed(spec, weights, unembed) / total[..., None]
    if "mean_logit" in spec.outputs:
        found["mean_logit"] = jnp.sum(z, axis=-1) / vocab
        if slopes and spec.softcap is not None:
            found["kept_mean_logit"] = embed(spec, jnp.asarray(slope), unembed) / vocab
    return found


def gradient_from_kept(
    spec: HeadSpec,
    unembed: jax.Array,
    tokens: HeadTokens,
    kept: dict[str, jax.Array],
    due: dict[str, jax.Array],
) -> jax.Array:
    """Gradient for a frozen head's rows, `[groups, rows, dim]`, from `due`, the gradients of its outputs.

    `kept` is what `chunk_outputs` left; only the embeddings of targets and listed ids are looked up again.
    """
    nothing = jnp.zeros((), spec.accumulator)
    due_log_prob, due_expected = due.get("log_probs", nothing), due.get("logsumexp", nothing)
    gradient = nothing
    if tokens.token_ids is not None and "token_id_log_probs" in due:
        due_ids = due["token_id_log_probs"]
        embedded = _look_up(spec, unembed, tokens.token_ids)
        gradient += jnp.einsum("grk,grkd->grd", due_ids * kept["kept_id_slopes"], embedded)
        due_expected -= jnp.sum(due_ids, axis=-1)
    if tokens.targets is not None:
        rest = kept["kept_rest"]
        share = (due_log_prob * rest + due_expected * (1 - rest)) * kept["kept_target_slope"]
        gradient += share[..., None] * _look_up(spec, unembed, tokens.targets)
    if "kept_expected" in kept:
        gradient += (due_expected - due_log_prob)[..., None] * kept["kept_expected"]
    if "entropy" in due:
        gradient += due["entropy"][..., None] * kept["kept_entropy"]
    if "mean_logit" in due:
        gradient += due["mean_logit"][..., None] * kept["kept_mean_logit"]
    return gradient


def logit_gradient(
    spec: HeadSpec, raw: jax.Array, tokens: HeadTokens, kept: dict[str, jax.Array], due: dict[str, jax.Array]
) -> jax.Array:
    """Gradient for the raw logits of one chunk, `[groups, rows, vocab]`; `due` as above."""
    z, slope = _bend(spec, raw)
    probabilities = jnp.exp(z - kept["logsumexp"][..., None])
    scale = due.get("logsumexp", jnp.zeros_like(kept["logsumexp"]))
    if "token_id_log_probs" in due:
        scale -= jnp.sum(due["token_id_log_probs"], axis=-1)
    scale = scale[..., None]
    if "entropy" in due:
        shifted = z - kept["kept_peak"][..., None]  # so that for a confident token little is taken from little
        scale = scale + due["entropy"][..., None] * (kept["kept_mean_shifted"][..., None] - shifted)
    gradient = probabilities * scale
    if tokens.targets is not None and "log_probs" in due:
        # At the target 1 - p, as the sum of the others: 1 - p itself would round for a confident token.
        pull = jnp.where(_is_target(raw, tokens.targets), kept["kept_rest"][..., None], -probabilities)
        gradient += due["log_probs"][..., None] * pull
    if "mean_logit" in due:
        gradient += due["mean_logit"][..., None] / raw.shape[-1]
    if tokens.token_ids is not None and "token_id_log_probs" in due:
        gradient = _add_at(gradient, tokens.token_ids, due["token_id_log_probs"])
    return gradient * slope


def _add_at(gradient: jax.Array, ids: jax.Array, due: jax.Array) -> jax.Array:
    """`gradient[g, r, ids[g, r, k]] += due[g, r, k]`, mapped over tokens so that sharded groups stay put."""
    add = jax.vmap(jax.vmap(lambda row, columns, values: row.at[columns].add(values, mode="drop")))
    return add(gradient, ids, due)


def unembed_gradient(spec: HeadSpec, d_logits: jax.Array, rows: jax.Array) -> jax.Array:
    """One chunk's gradient for the unembedding, in its layout, a group at a time: `[groups, vocab, dim]`."""
    axes = f"grv,grd->g{spec.weight_axes}"
    return jnp.einsum(axes, d_logits.astype(spec.dtype), rows, preferred_element_type=spec.accumulator)
