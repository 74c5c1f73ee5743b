"""Writes a Hugging Face model folder that transformers, and whatever reads its layout, loads.

config.json, generation_config.json                   the originals, with what is true of this model now
model.safetensors, or shards and their index          per-layer names, adapters merged, tied weights once
tokenizer.json, tokenizer_config.json, chat_template.jinja, ...
README.md                                             model card
"""

import functools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from burnish.adapt.lora import LoRA
from burnish.convert.families import FAMILIES, Family, Place
from burnish.convert.hf import CONFIG
from burnish.convert.model_card import hf_card
from burnish.convert.safetensors_out import TensorOut, float_dtype, write_shards
from burnish.data.tokenizer import Tokenizer
from burnish.errors import InputError
from burnish.files import whole_folder
from burnish.models.config import ModelConfig
from burnish.models.decoder import Decoder
from burnish.models.paths import leaves, linears
from burnish.wrapper import ModelWrapper, Origin

GENERATION_CONFIG = "generation_config.json"
_SHARD_BYTES = 5_000_000_000


def save_hf(
    model: ModelWrapper,
    folder: str | os.PathLike[str],
    *,
    dtype: Any = None,
    shard_bytes: int = _SHARD_BYTES,
) -> Path:
    """Writes `model` into `folder` and returns the folder; the model in memory stays as it is.

    Adapters are merged in float32 into what is written. dtype: of the written weights, those of the parameters
    where it is None. Memory: one tensor of one layer beside the model. Raises InputError, leaving `folder` as it
    was, when it holds anything but an earlier export, or when the model has parts its family's files cannot hold.
    """
    decoder = model.decoder
    family = family_named(decoder.config.family)
    tensors = list(file_tensors(decoder, family, None if dtype is None else float_dtype(dtype)))
    with whole_folder(folder) as staging:
        write_shards(staging, tensors, shard_bytes)
        written = tensors[0].dtype.name
        write_json(staging / CONFIG, _config(decoder, family, model.origin, model.tokenizer, written))
        generation = _generation_config(model.origin, model.tokenizer)
        if generation:
            write_json(staging / GENERATION_CONFIG, generation)
        if model.tokenizer is not None:
            model.tokenizer.save(staging)
        card = hf_card(
            model.origin,
            parameters=sum(int(np.prod(tensor.shape)) for tensor in tensors),
            dtype=written,
            merged_adapters=model.adapted,
            chat=model.tokenizer is not None and model.tokenizer.chat_template is not None,
        )
        (staging / "README.md").write_text(card, encoding="utf-8")
    return Path(folder)


def family_named(name: str) -> Family:
    """The family a decoder belongs to; InputError when no Hugging Face layout is known for it."""
    if name not in FAMILIES:
        raise InputError(
            f"no Hugging Face layout is known for family {name!r}; known are {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[name]


def file_place(family: Family, name: str, config: ModelConfig) -> Place:
    """Where a parameter goes; InputError when the family's files have no place for it."""
    try:
        return family.place(name, config)
    except KeyError:
        raise InputError(f"{name}: files of family {family.model_type!r} have no place for this parameter") from None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A JSON object, indented, non-ASCII characters as they are."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def file_tensors(decoder: Decoder, family: Family, dtype: np.dtype | None) -> Iterator[TensorOut]:
    """Every tensor that a file holds, adapters merged, in the layout of files (a kernel is [out, in] there).

    dtype: of the tensors; None: as they are.
    """
    parts: dict[str, list[_Part]] = {}
    adapters = {f"{key}.kernel": list(linear.adapters) for key, (linear, _) in linears(decoder).items()}
    for key, (leaf, variable) in leaves(decoder).items():
        if isinstance(variable, nnx.LoRAParam):
            continue
        for layer, name in enumerate(leaf.names):
            place = file_place(family, name, decoder.config)
            for expert, tensor in enumerate(place.tensors):
                at = ((layer,) if leaf.stacked else ()) + ((expert,) if len(place.tensors) > 1 else ())
                start = 0 if place.rows is None else place.rows.start
                turned = name.endswith(".kernel")
                parts.setdefault(tensor, []).append(_Part(start, variable, at, adapters.get(key, []), turned))
    for tensor, pieces in parts.items():
        pieces.sort(key=lambda part: part.start)
        shapes = [part.shape for part in pieces]
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        kind = dtype or float_dtype(pieces[0].variable.dtype)
        yield TensorOut(tensor, shape, kind, functools.partial(_joined, pieces))


class _Part(NamedTuple):
    """A parameter of one layer, or of one expert, that is the rows of a file's tensor from `start` on."""

    start: int
    variable: nnx.Variable
    at: tuple[int, ...]
    adapters: list[LoRA]
    turned: bool

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.variable.shape[len(self.at) :])
        return shape[::-1] if self.turned else shape

    def read(self) -> np.ndarray:
        array = layer_array(self.variable, self.at)
        if self.adapters:
            # On the host: an accelerator's matmul may round its inputs.
            array = array.astype(np.float32)
            for adapter in self.adapters:
                a, b = layer_array(adapter.a, self.at), layer_array(adapter.b, self.at)
                array += np.float32(adapter.scale) * (a.astype(np.float32) @ b.astype(np.float32))
        return array.T if self.turned else array


def _joined(parts: list[_Part]) -> np.ndarray:
    return parts[0].read() if len(parts) == 1 else np.concatenate([part.read() for part in parts])


def layer_array(variable: nnx.Variable, at: tuple[int, ...]) -> np.ndarray:
    """A parameter on the host; of a stacked one, only what is at these indices."""
    array = variable[...]
    return np.asarray(array[at] if at else array)


def _config(
    decoder: Decoder, family: Family, origin: Origin, tokenizer: Tokenizer | None, dtype: str
) -> dict[str, Any]:
    # Code beside the original is not copied, so it must not be asked for.
    original = {key: value for key, value in origin.hf_config.items() if key not in ("auto_map", "_name_or_path")}
    ids = {} if tokenizer is None else _token_ids(tokenizer)
    # `dtype` is what transformers reads since 4.56, `torch_dtype` what it read before.
    return {**ids, **original, **family.to_hf(decoder.config), "dtype": dtype, "torch_dtype": dtype}


def _generation_config(origin: Origin, tokenizer: Tokenizer | None) -> dict[str, Any]:
    original = dict(origin.generation_config)
    if tokenizer is None:
        return original
    given = original.get("eos_token_id")
    stops = [*(given if isinstance(given, list) else [] if given is None else [given]), *tokenizer.stop_ids]
    stops = list(dict.fromkeys(stops))
    eos = {} if not stops else {"eos_token_id": stops if len(stops) > 1 else stops[0]}
    return {**_token_ids(tokenizer), **original, **eos}


def _token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    named = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    return {key: value for key, value in named.items() if value is not None}
