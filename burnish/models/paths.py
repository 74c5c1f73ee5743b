"""Names: how stored parameters and the names a user sees relate, and selectors over those names.

A stored leaf of a stacked run holds one array for many layers; its `Leaf` lists the layers' own names in stack
order. Everything that reads names (files, decay masks, learning-rate groups, adapters) goes through here.
"""

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from burnish.errors import InputError
from burnish.models.decoder import Decoder
from burnish.models.layers import Linear


@dataclass(frozen=True)
class Leaf:
    """A stored parameter.

    key: where it is stored ("runs.0.blocks.0.attn.q_proj.kernel"); names: what the user calls it, one a layer in
    stack order, or a single one; axes: logical axis names, "layers" first when stacked.
    """

    key: str
    names: tuple[str, ...]
    axes: tuple[str | None, ...]
    stacked: bool


def leaves(module: nnx.Module) -> dict[str, tuple[Leaf, nnx.Variable]]:
    """Every parameter (`nnx.Param`) of a module by stored key, in a fixed order."""
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        leaf = describe(module, path, variable)
        found[leaf.key] = (leaf, variable)
    return found


def describe(module: nnx.Module, path: Sequence[Any], variable: nnx.Variable) -> Leaf:
    """The `Leaf` of one variable at an nnx path."""
    key = ".".join(str(part) for part in path)
    axes = variable.get_metadata("axes", None) or (None,) * len(variable.shape)
    if isinstance(module, Decoder) and path[0] == "runs":
        run, offset, rest = module.runs[path[1]], path[3], ".".join(str(part) for part in path[4:])
        names = tuple(f"layers.{layer}.{rest}" for layer in run.layers(offset))
        return Leaf(key, names, axes, stacked=True)
    return Leaf(key, (key,), axes, stacked=False)


def linears(module: Decoder) -> dict[str, tuple[Linear, tuple[str, ...]]]:
    """Every linear layer by stored path, with the names the user calls it by (one a layer when stacked).

    An untied head is among them, as "head"; a tied one is the embedding, which is no linear layer.
    """
    found = {}
    for path, part in nnx.iter_graph(module):
        if isinstance(part, Linear):
            leaf = describe(module, path, part.kernel)
            found[leaf.key] = (part, leaf.names)
    return dict(sorted(found.items()))


def read(module: nnx.Module) -> dict[str, jax.Array]:
    """The parameters' arrays by stored key."""
    return {key: variable[...] for key, (_, variable) in leaves(module).items()}


def write(module: nnx.Module, arrays: Mapping[str, Any]) -> None:
    """Replaces parameters' arrays by stored key."""
    found = leaves(module)
    for key, array in arrays.items():
        found[key][1].set_value(array)


def matches(name: str, selector: str) -> bool:
    """Whether a selector covers a name, or something the name lies under.

    Components are separated by dots and may hold `*`; a selector of one component matches at any depth.

    >>> matches("layers.7.attn.q_proj.kernel", "layers.*.attn")
    True
    >>> matches("layers.7.attn.q_proj.kernel", "q_proj")
    True
    >>> matches("layers.7.attn.q_proj.kernel", "layers.1*")
    False
    """
    parts, wanted = name.split("."), selector.split(".")
    if len(wanted) == 1:
        return any(fnmatch.fnmatchcase(part, selector) for part in parts)
    return len(wanted) <= len(parts) and all(map(fnmatch.fnmatchcase, parts, wanted))


def select(names: Iterable[str], selectors: Sequence[str], *, option: str) -> set[str]:
    """The names that any selector covers.

    Raises InputError when a selector covers none, naming the option it came from and the nearest names.
    """
    names = list(names)
    chosen: set[str] = set()
    for selector in selectors:
        hit = {name for name in names if matches(name, selector)}
        if not hit:
            near = difflib.get_close_matches(selector, names, n=2, cutoff=0.3) or names[:2]
            raise InputError(f"{option}: {selector!r} matches nothing in this model; names look like {', '.join(near)}")
        chosen |= hit
    return chosen
