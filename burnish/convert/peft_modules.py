"""The linear modules that a family's files know, and the layers of ours that each is.

Most are one layer. Where the files hold several as one (Phi-3's query, key and value), an adapter on the module is one
on each layer that shares A and has its own columns of B; adapters of their own on the layers become one whose ranks
are joined, each acting on its own columns:

    A = [A_q A_k A_v]        B = [B_q 0 0; 0 B_k 0; 0 0 B_v]
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from burnish.convert.families import Family
from burnish.convert.hf_out import file_place
from burnish.models.decoder import Decoder
from burnish.models.paths import linears


class Adapter(NamedTuple):
    """One module's adapter: W + scale A B, with A [in, rank] and B [rank, out] in float32."""

    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        """Columns of A."""
        return self.a.shape[1]


class FileModule(NamedTuple):
    """The layers that a module is, in the order of its outputs, and how many outputs each has."""

    layers: tuple[str, ...]
    widths: tuple[int, ...]
    n_in: int


def file_modules(decoder: Decoder, family: Family) -> dict[str, FileModule]:
    """Every linear module of the files by its path there."""
    found: dict[str, list[tuple[int, str, int, int]]] = {}
    for linear, names in linears(decoder).values():
        n_in, n_out = linear.kernel.shape[-2:]
        for name in names:
            place = file_place(family, f"{name}.kernel", decoder.config)
            start = 0 if place.rows is None else place.rows.start
            found.setdefault(place.tensors[0].removesuffix(".weight"), []).append((start, name, n_out, n_in))
    modules = {}
    for module, parts in found.items():
        _, layers, widths, n_ins = zip(*sorted(parts), strict=True)
        modules[module] = FileModule(layers, widths, n_ins[0])
    return modules


def join_layers(adapters: Mapping[str, Adapter], modules: Mapping[str, FileModule]) -> dict[str, Adapter]:
    """Adapters of modules from those of their layers, by path and by name; in the order of the latter."""
    module_of = {layer: path for path, module in modules.items() for layer in module.layers}
    paths = dict.fromkeys(module_of[layer] for layer in adapters)
    return {path: _joined(adapters, modules[path]) for path in paths}


def _joined(adapters: Mapping[str, Adapter], module: FileModule) -> Adapter:
    parts = [adapters.get(layer) for layer in module.layers]
    there = [part for part in parts if part is not None]
    scale = there[-1].scale
    if len(there) == len(parts) and all(part.scale == scale and np.array_equal(part.a, there[0].a) for part in there):
        return Adapter(there[0].a, np.concatenate([part.b for part in there], axis=1), scale)
    rows, start = [], 0
    for part, width in zip(parts, module.widths, strict=True):
        if part is not None:
            b = np.zeros((part.rank, sum(module.widths)), np.float32)
            b[:, start : start + width] = part.b * np.float32(part.scale / scale)
            rows.append(b)
        start += width
    return Adapter(np.concatenate([part.a for part in there], axis=1), np.concatenate(rows), scale)


def split_modules(adapters: Mapping[str, Adapter], modules: Mapping[str, FileModule]) -> dict[str, Adapter]:
    """Adapters of layers from those of their modules."""
    found = {}
    for path, adapter in adapters.items():
        ends = np.cumsum(modules[path].widths)[:-1]
        for layer, b in zip(modules[path].layers, np.split(adapter.b, ends, axis=1), strict=True):
            found[layer] = Adapter(adapter.a, np.ascontiguousarray(b), adapter.scale)
    return found
