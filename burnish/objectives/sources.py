"""An objective's loss on each source of a mixture, beside the loss that is trained on."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from burnish.objectives.objective import Objective, Sums
from burnish.ops.head import HeadOutputs


def source_losses(
    objective: Objective, found: HeadOutputs, batch: Mapping[str, jax.Array], names: Sequence[str]
) -> Sums:
    """`loss/NAME` of each source: the pair that the objective's loss is over that source's tokens.

    Nothing where there is one source alone. batch: `weights` and `source_ids` [...], as `found` is.
    """
    if len(names) < 2:
        return {}
    return {
        f"loss/{name}": objective(found, source_weights(batch, number))["loss"] for number, name in enumerate(names)
    }


def source_denominators(
    objective: Objective, batch: Mapping[str, jax.Array], names: Sequence[str]
) -> dict[str, jax.Array]:
    """What to divide the sums of `source_losses` by, from the masks of the whole global batch."""
    if len(names) < 2:
        return {}
    return {
        f"loss/{name}": objective.denominators(source_weights(batch, number))["loss"]
        for number, name in enumerate(names)
    }


def source_weights(batch: Mapping[str, jax.Array], number: int) -> jax.Array:
    """The loss weights of one source's tokens; 0 elsewhere."""
    return jnp.where(batch["source_ids"] == number, batch["weights"], 0)
