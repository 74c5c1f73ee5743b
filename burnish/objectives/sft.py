"""Supervised fine-tuning: losses over the target tokens of a demonstration.

Each function takes per-token arrays as `burnish.ops.head.head_map` returns them, with their loss weights, all
of one shape `[...]`, and returns a pair of scalars `(sum, weight)`: see `burnish.objectives.pairs`. Weights
of the whole global batch are known from its masks before any model runs, so with

    objective = SFT()
    scale = 1 / objective.denominators(weights of the global batch)["loss"]

the loss of the batch is the sum over its micro-batches of `scale * objective(found, weights)["loss"][0]`.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from burnish.errors import InputError
from burnish.objectives.pairs import Pair, counted, weighted_sum
from burnish.ops.head import HeadOutputs, OutputName

__all__ = ["SFT", "cross_entropy", "dft", "entropy", "label_smoothed_cross_entropy", "z_loss"]

LossName = Literal["cross_entropy", "dft"]


def cross_entropy(log_probs: jax.Array, weights: jax.Array) -> Pair:
    """Negative log-likelihood of the targets: `sum(-w log p)`.

    Args:
      log_probs: `[...]` log-probability of each target.
      weights: `[...]` loss weights.
    """
    return weighted_sum(-log_probs, weights)


def label_smoothed_cross_entropy(
    log_probs: jax.Array, logsumexp: jax.Array, mean_logit: jax.Array, weights: jax.Array, smoothing: float
) -> Pair:
    """Cross-entropy against the target mixed with the uniform distribution over the vocabulary.

    `sum(w [(1 - e) (-log p) + e mean_v(-log p_v)])` with `mean_v(-log p_v) = logsumexp - mean_logit`.
    Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7 (arXiv 1512.00567).

    Args:
      log_probs: `[...]` log-probability of each target.
      logsumexp: `[...]` log of the sum over the vocabulary of exp(logit).
      mean_logit: `[...]` mean over the vocabulary of the logits.
      weights: `[...]` loss weights.
      smoothing: e, in [0, 1).
    """
    uniform = logsumexp - mean_logit
    return weighted_sum((1 - smoothing) * -log_probs + smoothing * uniform, weights)


def z_loss(logsumexp: jax.Array, weights: jax.Array) -> Pair:
    """Penalty that keeps the softmax's normaliser near 1: `sum(w logsumexp^2)`.

    It is added with a small coefficient. Chowdhery et al. 2022, PaLM, section 5 (arXiv
    2204.02311), takes 1e-4.

    Args:
      logsumexp: `[...]` log of the sum over the vocabulary of exp(logit).
      weights: `[...]` loss weights.
    """
    return weighted_sum(jnp.square(counted(logsumexp, weights)), weights)


def dft(log_probs: jax.Array, weights: jax.Array) -> Pair:
    """Dynamic fine-tuning: each token's loss is scaled by its own probability, `sum(-w sg(p) log p)`.

    `sg` stops the gradient. Seen as a policy gradient, plain cross-entropy weighs a token by 1/p; this takes
    that weight away. Wu et al. 2025, "On the Generalization of SFT" (arXiv 2508.05629).

    Args:
      log_probs: `[...]` log-probability of each target.
      weights: `[...]` loss weights.
    """
    log_probs = counted(log_probs, weights)
    return weighted_sum(-jax.lax.stop_gradient(jnp.exp(log_probs)) * log_probs, weights)


def entropy(entropies: jax.Array, weights: jax.Array) -> Pair:
    """Entropy of the predicted distributions: `sum(w H)`, in nats.

    Args:
      entropies: `[...]` `H = -sum_v p_v log p_v` at each token.
      weights: `[...]` loss weights.
    """
    return weighted_sum(entropies, weights)


@dataclass(frozen=True)
class SFT:
    """The objective of supervised fine-tuning, as a trainer uses it.

    Attributes:
      loss: "cross_entropy" or "dft".
      z_loss: coefficient of the z-loss, 0 or more; 0 leaves it out.
      label_smoothing: share of the uniform distribution in the target, in [0, 1); cross-entropy only.

    Raises:
      InputError: a value is out of its range.
    """

    loss: LossName = "cross_entropy"
    z_loss: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.loss not in get_args(LossName):
            raise InputError(f"loss: {self.loss!r} is not one of {', '.join(get_args(LossName))}")
        if not _is_number(self.z_loss) or self.z_loss < 0:
            raise InputError(f"z_loss: {self.z_loss!r} must be a finite number, 0 or more")
        if not _is_number(self.label_smoothing) or not 0 <= self.label_smoothing < 1:
            raise InputError(f"label_smoothing: {self.label_smoothing!r} must be a number from 0 up to but not 1")
        if self.label_smoothing and self.loss != "cross_entropy":
            raise InputError(f"label_smoothing: goes with cross_entropy, not with {self.loss}; set it to 0")

    @property
    def per_token(self) -> bool:
        """True: every term is a sum over tokens (`burnish.objectives.objective.Objective`)."""
        return True

    @property
    def head_outputs(self) -> tuple[OutputName, ...]:
        """Names of the quantities to ask `head_map` for: no more than the loss needs."""
        names: list[OutputName] = ["log_probs"]
        if self.z_loss or self.label_smoothing:
            names.append("logsumexp")
        if self.label_smoothing:
            names.append("mean_logit")
        return tuple(names)

    def __call__(self, found: HeadOutputs, weights: jax.Array) -> dict[str, Pair]:
        """`(sum, weight)` pairs of one micro-batch.

        Args:
          found: what `head_map` returned for `head_outputs`, each `[...]`.
          weights: `[...]` loss weights.

        Returns:
          "loss", which is minimised; "nll", the plain negative log-likelihood; and, where it is on, "z_loss"
          without its coefficient.
        """
        nll = cross_entropy(_need(found, "log_probs"), weights)
        pairs = {"loss": self._token_loss(found, weights), "nll": nll}
        if self.z_loss:
            pairs["z_loss"] = z_loss(_need(found, "logsumexp"), weights)
            total, weight = pairs["loss"]
            pairs["loss"] = total + self.z_loss * pairs["z_loss"][0], weight
        return pairs

    def denominators(self, weights: jax.Array) -> dict[str, jax.Array]:
        """What to divide each sum of `__call__` by, from the weights `[...]` of the whole global batch.

        Equals the sum over micro-batches of the pairs' weights, and is known before the model runs. It is 0
        when no token counts; `burnish.objectives.pairs.mean` then gives 0.
        """
        names = ("loss", "nll", "z_loss") if self.z_loss else ("loss", "nll")
        return dict.fromkeys(names, jnp.sum(weights))

    def _token_loss(self, found: HeadOutputs, weights: jax.Array) -> Pair:
        log_probs = _need(found, "log_probs")
        if self.loss == "dft":
            return dft(log_probs, weights)
        if self.label_smoothing:
            logsumexp, mean_logit = _need(found, "logsumexp"), _need(found, "mean_logit")
            return label_smoothed_cross_entropy(log_probs, logsumexp, mean_logit, weights, self.label_smoothing)
        return cross_entropy(log_probs, weights)


def _need(found: HeadOutputs, name: OutputName) -> jax.Array:
    array = getattr(found, name)
    if array is None:
        raise InputError(f"outputs: this loss needs {name}; ask head_map for SFT.head_outputs")
    return array


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
