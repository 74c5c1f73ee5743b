"""What training and evaluation need of a language model, ours or anyone's.

A module is a language model here when calling it on tokens gives logits, or hidden states beside an unembedding. What
it lacks (packing, dropout keys, a cache, hidden states) is found from its signatures, once, and told to the user.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from burnish.errors import InputError
from burnish.models.decoder import Decoder
from burnish.models.layers import DropoutKeys
from burnish.models.remat import RematPolicy
from burnish.ops.head import HeadOutputs, OutputName, head_map
from burnish.ops.head_loss import TokenLoss, head_loss

Batch = Mapping[str, jax.Array]
"""Arrays [rows, length]: tokens, targets, weights, segment_ids, positions, example_ids (see `burnish.data.packing`)."""


@dataclass(frozen=True)
class Features:
    """What a language model can do beyond `(tokens) -> logits`."""

    packing: bool
    hidden: bool
    dropout: bool
    cache: bool
    neftune: bool = False
    remat: bool = False
    groups: bool = False
    own_dropout: bool = False
    own_statistics: bool = False

    def missing(self) -> list[str]:
        """One sentence for each thing a run will do without."""
        said = {
            "packing": "it takes no segment_ids: every example gets a row of its own",
            "hidden": "it gives logits only: [tokens, vocab] is held in memory at each step",
            "cache": "it has no key-value cache: each new token reads the whole text again",
        }
        lacking = [text for name, text in said.items() if not getattr(self, name)]
        if self.own_dropout:
            lacking.append("its own dropout is switched off: its masks would repeat at every step")
        if self.own_statistics:
            lacking.append("its running statistics (batch norm) are used as they are and never updated")
        return lacking


def features_of(module: nnx.Module) -> Features:
    """Reads a module's abilities off its methods and their parameters."""
    if isinstance(module, Decoder):
        return Features(packing=True, hidden=True, dropout=True, cache=True, neftune=True, remat=True, groups=True)
    has_hidden = callable(getattr(module, "hidden", None)) and callable(getattr(module, "unembedding", None))
    if not has_hidden and not callable(module):
        raise InputError(f"{type(module).__name__} is not a language model: it cannot be called on tokens")
    forward = module.hidden if has_hidden else module.__call__  # type: ignore[attr-defined]
    takes = inspect.signature(forward).parameters
    return Features(
        packing={"segment_ids", "positions"} <= set(takes),
        hidden=has_hidden,
        dropout="dropout" in takes,
        cache=False,
        neftune={"dropout", "neftune_alpha"} <= set(takes),
        remat="remat" in takes,
        groups="groups" in takes,
        own_dropout=bool(jax.tree.leaves(nnx.state(module, nnx.RngState))),
        own_statistics=bool(jax.tree.leaves(nnx.state(module, nnx.BatchStat))),
    )


def token_outputs(
    module: Any,
    batch: Batch,
    outputs: Sequence[OutputName],
    *,
    dropout_key: jax.Array | None = None,
    neftune_alpha: float = 0.0,
    remat: RematPolicy | None = None,
    groups: int = 1,
) -> HeadOutputs:
    """What an objective asked for, per token of a batch [rows, length]; 0 where the batch's weight is 0.

    dropout_key: typed key of (seed, step); None, as in evaluation, switches dropout and NEFTune's noise off.
    remat: what is kept for the backward pass, None for the module's default. groups: devices rows are sharded over.

    Our decoder and any module with `hidden` and `unembedding` go through the head mapper; others through their logits.
    Modules of others are put in their evaluation mode (see `Features.missing`). Raises InputError for an alpha above 0
    and a module that takes no `neftune_alpha`.
    """
    features, known = _forward_arguments(module, batch, dropout_key, neftune_alpha, remat, groups)
    mask = batch["weights"] != 0
    if not features.hidden:
        return _from_logits(module(batch["tokens"], **known), batch["targets"], mask, outputs)
    hidden, matrix, options = _hidden_and_head(module, batch, known)
    return head_map(hidden, matrix, batch["targets"], mask, outputs=outputs, groups=groups, **options)


def token_loss(
    module: Any,
    batch: Batch,
    loss: TokenLoss,
    outputs: Sequence[OutputName],
    *,
    dropout_key: jax.Array | None = None,
    neftune_alpha: float = 0.0,
    remat: RematPolicy | None = None,
    groups: int = 1,
) -> tuple[jax.Array, HeadOutputs]:
    """A loss that is a sum over tokens (`burnish.ops.head_loss`), and what it was taken of, without a gradient.

    Arguments and errors as `token_outputs`; a module without hidden states is differentiated through its logits.
    """
    features, known = _forward_arguments(module, batch, dropout_key, neftune_alpha, remat, groups)
    if not features.hidden:
        mask = batch["weights"] != 0
        found = _from_logits(module(batch["tokens"], **known), batch["targets"], mask, outputs)
        return loss(found, batch["weights"]), found
    hidden, matrix, options = _hidden_and_head(module, batch, known)
    return head_loss(
        loss, hidden, matrix, batch["targets"], batch["weights"], outputs=outputs, groups=groups, **options
    )


def _forward_arguments(
    module: Any,
    batch: Batch,
    dropout_key: jax.Array | None,
    neftune_alpha: float,
    remat: RematPolicy | None,
    groups: int,
) -> tuple[Features, dict[str, Any]]:
    """What the module can do, and what its forward pass is given beside the tokens."""
    features = features_of(module)
    if neftune_alpha and not features.neftune:
        raise InputError(f"neftune_alpha: {type(module).__name__} takes no noise on its embedded tokens; leave it at 0")
    if not isinstance(module, Decoder):
        module.eval()
    known: dict[str, Any] = {}
    if features.packing:
        known |= {"positions": batch["positions"], "segment_ids": batch["segment_ids"]}
    if features.dropout and dropout_key is not None:
        known["dropout"] = DropoutKeys(dropout_key, batch["example_ids"], batch["positions"])
        if neftune_alpha:
            known["neftune_alpha"] = neftune_alpha
    if features.remat and remat is not None:
        known["remat"] = remat
    if features.groups:
        known["groups"] = groups
    return features, known


def _hidden_and_head(
    module: Any, batch: Batch, known: Mapping[str, Any]
) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """Hidden states, the unembedding, and how the head is to be read."""
    matrix, layout = module.unembedding()
    softcap = getattr(getattr(module, "config", None), "final_softcap", None)
    return module.hidden(batch["tokens"], **known), matrix, {"unembed_layout": layout, "softcap": softcap}


def _from_logits(logits: jax.Array, targets: jax.Array, mask: jax.Array, outputs: Sequence[OutputName]) -> HeadOutputs:
    if logits.ndim != 3 or logits.shape[:2] != targets.shape:
        raise InputError(
            f"the model gave an array {logits.shape} for tokens {targets.shape}; [batch, length, vocab] is needed"
        )
    logits = jnp.where(mask[..., None], logits.astype(jnp.float32), 0.0)
    every = jax.nn.log_softmax(logits, axis=-1)
    found = {
        "log_probs": lambda: jnp.take_along_axis(every, targets[..., None], axis=-1)[..., 0],
        "logsumexp": lambda: jax.nn.logsumexp(logits, axis=-1),
        "entropy": lambda: -jnp.sum(jnp.exp(every) * every, axis=-1),
        "mean_logit": lambda: jnp.mean(logits, axis=-1),
    }
    return HeadOutputs(**{name: jnp.where(mask, found[name](), 0.0) for name in outputs})
