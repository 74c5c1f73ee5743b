"""Writes safetensors files one tensor at a time, so that a model is never held twice.

Format: github.com/huggingface/safetensors. Eight bytes of header length (little endian), a JSON header that gives each
tensor's dtype, shape and byte range, padded with spaces to a multiple of eight, then the tensors' bytes in order.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from burnish.errors import InputError

_NAMES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class TensorOut(NamedTuple):
    """A tensor to be written: `read` makes its array [shape] when its turn has come."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


def float_dtype(value: Any) -> np.dtype:
    """A floating-point dtype that safetensors and the readers of models know; InputError otherwise."""
    try:
        dtype = np.dtype(jnp.dtype(value))
    except TypeError:
        raise InputError(f"dtype {value!r} is not known; known are {', '.join(_NAMES)}") from None
    if dtype.name not in _NAMES:
        raise InputError(f"dtype {dtype.name!r} cannot be written; known are {', '.join(_NAMES)}")
    return dtype


def write_safetensors(path: Path, tensors: Sequence[TensorOut]) -> None:
    """Writes one file. Raises InputError when a finite number does not fit into a tensor's dtype."""
    # Wider numbers first: readers that map the file want every tensor aligned to its own width.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes
        kind = _NAMES[tensor.dtype.name]
        header[tensor.name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(_bytes(tensor).data)


def write_shards(folder: Path, tensors: Sequence[TensorOut], shard_bytes: int) -> None:
    """Writes `model.safetensors`, or shards of at most `shard_bytes` (a larger tensor has its own) and their index."""
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
    total = sum(tensor.nbytes for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Sequence[TensorOut], shard_bytes: int) -> list[list[TensorOut]]:
    if shard_bytes < 1:
        raise InputError(f"shard_bytes is {shard_bytes}; it must be 1 or more")
    shards: list[list[TensorOut]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _bytes(tensor: TensorOut) -> np.ndarray:
    array = tensor.read()
    if array.shape != tensor.shape:
        raise ValueError(f"{tensor.name}: {array.shape} was read where {tensor.shape} was promised")
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(array, dtype=tensor.dtype)
    narrow = tensor.dtype.name == "float16" and array.dtype != tensor.dtype
    if narrow and np.isinf(cast).any() and not np.isinf(array).any():
        raise InputError(f"dtype float16: {tensor.name} holds numbers beyond 65504; use bfloat16 or float32")
    return cast.reshape(-1).view(np.uint8)
