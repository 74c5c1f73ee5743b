"""A module taken apart into what is trained and what is frozen, so that a step is a pure function of flat arrays."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from burnish.errors import InputError
from burnish.models.paths import Leaf, leaves, matches, select

Arrays = dict[str, jax.Array]


@dataclass(frozen=True)
class Parts:
    """The structure of a module whose arrays are elsewhere.

    trained: what is trained, by stored key; places: where each of those stands among the module's leaves.
    """

    treedef: Any
    graphdef: Any
    trained: dict[str, Leaf]
    places: dict[str, int]

    def merge(self, trained: Mapping[str, Any], frozen: list[Any]) -> Any:
        """The module, for one forward pass."""
        rest = iter(frozen)
        by_place = {self.places[key]: array for key, array in trained.items()}
        flat = [by_place[i] if i in by_place else next(rest) for i in range(self.treedef.num_leaves)]
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, flat))


def take_apart(module: nnx.Module, trained: Mapping[str, Leaf]) -> tuple[Parts, Arrays, list[Any]]:
    """(parts, arrays of `trained` by stored key as float32 masters, all other leaves in order)."""
    graphdef, state = nnx.split(module)
    keys = [".".join(str(part) for part in path) for path, _ in nnx.to_flat_state(state)]
    flat, treedef = jax.tree.flatten(state)
    if len(keys) != len(flat):
        raise InputError(f"{type(module).__name__}: a parameter is not one array; only arrays can be trained")
    places = {key: index for index, key in enumerate(keys) if key in trained}
    masters = {key: flat[index].astype(jnp.float32) for key, index in places.items()}
    frozen = [leaf for key, leaf in zip(keys, flat, strict=True) if key not in places]
    return Parts(treedef, graphdef, {key: trained[key] for key in places}, places), masters, frozen


def choose_trained(module: nnx.Module, selectors: list[str]) -> dict[str, Leaf]:
    """What is trained: what the selectors cover; without any, the newest adapters if there are any, else everything.

    With adapters that were put on after tokens were added go embedding and head, which are of their generation.

    Raises InputError for a selector that covers nothing, or some layers of a stacked parameter and not others.
    """
    found = leaves(module)
    if not selectors:
        generations = {key: generation_of(variable) for key, (_, variable) in found.items()}
        newest = max((number for number in generations.values() if number is not None), default=None)
        return {key: leaf for key, (leaf, _) in found.items() if generations[key] == newest}
    select((name for leaf, _ in found.values() for name in leaf.names), selectors, option="train.trainable")
    chosen = {}
    for key, (leaf, _) in found.items():
        hit = [any(matches(name, selector) for selector in selectors) for name in leaf.names]
        if any(hit) and not all(hit):
            raise InputError(
                f"train.trainable: {selectors} covers some layers of the stacked {leaf.names[0]} and not others; "
                "select all its layers, and give those to be left alone an optimizer group with lr_scale=0"
            )
        if all(hit):
            chosen[key] = leaf
    return chosen


def only_adapters(trained: Iterable[str], *, extended: bool = False) -> bool:
    """Whether nothing but adapters is trained, from the stored keys of what is.

    With an extended vocabulary, embedding and head count as part of the adapters that are trained with them.
    """
    keys = list(trained)
    others = [key for key in keys if ".adapters." not in key]
    beside = extended and len(others) < len(keys) and {"embed.weight", "head.kernel"}.issuperset(others)
    return not others or beside


def generation_of(variable: nnx.Variable) -> int | None:
    """Which of the model's successive adapters a parameter belongs to; None when to none of ours."""
    return variable.get_metadata("generation", None)
