"""What a loss is to whoever trains or evaluates with it."""

from typing import Protocol

import jax

from burnish.objectives.pairs import Pair
from burnish.ops.head import HeadOutputs, OutputName

Sums = dict[str, Pair]
"""By name of a term: `(sum, weight)`. The term "loss" is the one that is minimised."""


class Objective(Protocol):
    """Sums over tokens, whose weights are known before the model runs (`burnish.objectives.sft.SFT` is one)."""

    @property
    def head_outputs(self) -> tuple[OutputName, ...]:
        """What it needs of each token."""
        ...

    @property
    def per_token(self) -> bool:
        """Whether each sum is one over tokens of a function of that token's quantities and weight alone.

        Such a loss is differentiated a chunk of tokens at a time, in one visit to the vocabulary. A loss that looks at
        several tokens at once (at sequences, at pairs) says False.
        """
        ...

    def denominators(self, weights: jax.Array) -> dict[str, jax.Array]:
        """By term, what its sum over the global batch is divided by, from the loss weights of that batch."""
        ...

    def __call__(self, found: HeadOutputs, weights: jax.Array) -> Sums:
        """The terms of one micro-batch."""
        ...
