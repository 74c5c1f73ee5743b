"""Embedding and head in a PEFT folder: whole matrices beside the adapters, once tokens were added.

    adapter_config.json          "modules_to_save": ["embed_tokens", "lm_head"]
    adapter_model.safetensors    base_model.model.model.embed_tokens.weight  [rows, hidden]
                                 base_model.model.lm_head.weight             [rows, hidden]

peft gives the base as many rows as the folder's tokenizer has tokens, where that is more than it has; rows beyond are
padding and not written. A tied model has both tensors, equal, and "ensure_weight_tying", which keeps them one.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from burnish.convert.families import Family
from burnish.convert.hf_out import file_place, file_tensors
from burnish.convert.safetensors_out import TensorOut
from burnish.errors import InputError
from burnish.models.decoder import Decoder
from burnish.wrapper import ModelWrapper

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


def module_names(decoder: Decoder, family: Family) -> tuple[str, str]:
    """What the family's files call embedding and head."""
    embed, head = (file_place(family, name, decoder.config).tensors[0] for name in ("embed.weight", "head.kernel"))
    return embed.removesuffix(".weight"), head.removesuffix(".weight")


def embedding_tensors(model: ModelWrapper, family: Family) -> list[TensorOut]:
    """Embedding and head as a PEFT folder holds them, the head's adapters merged; none where no tokens were added.

    Raises InputError when the tokenizer's ids have holes: peft would make an embedding too short for the last ones.
    """
    base_rows = model.origin.base_rows
    if base_rows is None:
        return []
    tokenizer = model.require_tokenizer()
    rows = max(base_rows, tokenizer.vocab_size)
    last = max(tokenizer.backend.get_vocab().values())
    if last >= rows:
        raise InputError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and ids up to {last}: peft would make too short an "
            "embedding; export the whole model (format hf)"
        )
    found = {tensor.name: tensor for tensor in file_tensors(model.decoder, family, None)}
    embed, head = (f"{module}.weight" for module in module_names(model.decoder, family))
    return [
        TensorOut(PREFIX + name, (rows, *tensor.shape[1:]), tensor.dtype, partial(_first, tensor, rows))
        for name, tensor in ((embed, found[embed]), (head, found.get(head, found[embed])))
    ]


def _first(tensor: TensorOut, rows: int) -> np.ndarray:
    return tensor.read()[:rows]


def take_embeddings(
    tensors: dict[str, np.ndarray], config: Mapping[str, Any], decoder: Decoder, family: Family, path: Path
) -> tuple[dict[str, np.ndarray], bool]:
    """Puts a folder's own embedding and head into the decoder; returns the other tensors, and whether it had any.

    They are its own where `modules_to_save` names them, or where they have more or fewer rows than the base's (peft
    writes those of a resized base). Otherwise they are copies, which peft writes beside an adapter on the head.

    Raises InputError for a copy that is not the base's, a module that is missing or is neither embedding nor head, rows
    that do not agree, and an embedding trained apart from the head that it is tied to.
    """
    place, weights = path / ADAPTER_CONFIG, path / ADAPTER_WEIGHTS
    modules = module_names(decoder, family)
    named = _named(config, modules, place)
    own, kept = {}, dict(tensors)
    for module, array in zip(modules, _base(decoder), strict=True):
        _check_copy(kept, f"{PREFIX}{module}.base_layer.weight", array, weights)
        key = f"{PREFIX}{module}.weight"
        if module in named and key not in kept:
            raise InputError(f"{place}: modules_to_save names {module}, and {ADAPTER_WEIGHTS} has no tensor {key}")
        if key in kept and (module in named or kept[key].shape != array.shape):
            own[module] = kept.pop(key)
            # Of a resized base peft writes what its wrapper holds, too: the matrix once more, and the untrained one.
            kept.pop(f"{PREFIX}{module}.original_module.weight", None)
            _check_copy(kept, f"{PREFIX}{module}.modules_to_save.weight", own[module], weights)
            if own[module].shape[1:] != array.shape[1:]:
                raise InputError(
                    f"{weights}: tensor {key} is {list(own[module].shape)}; the base's is {list(array.shape)}"
                )
        else:
            _check_copy(kept, key, array, weights)
    if own:
        _replace(decoder, [own.get(module) for module in modules], weights)
    return kept, bool(own)


def _named(config: Mapping[str, Any], modules: tuple[str, str], place: Path) -> set[str]:
    """Which of embedding and head `modules_to_save` names (as peft does, by the end of the path)."""
    asked = config.get("modules_to_save") or []
    named = set()
    for name in asked if isinstance(asked, list) else [asked]:
        hit = [module for module in modules if module == name or module.endswith(f".{name}")]
        if not hit:
            raise InputError(f"{place}: modules_to_save is {asked!r}; only embedding and head are read: merge it first")
        named |= set(hit)
    return named


def _base(decoder: Decoder) -> tuple[np.ndarray, np.ndarray]:
    """Embedding and head [vocab, hidden] as files hold them; one and the same when tied."""
    embed = np.asarray(decoder.embed.weight[...])
    return embed, embed if decoder.head is None else np.asarray(decoder.head.kernel[...]).T


def _check_copy(kept: dict[str, np.ndarray], key: str, array: np.ndarray, place: Path) -> None:
    """Drops a copy of a matrix; InputError when it was changed, so that an adapter alone could not stand for it."""
    copy = kept.pop(key, None)
    if copy is not None and not np.array_equal(copy.astype(array.dtype), array):
        raise InputError(f"{place}: tensor {key} is not the base's; merge it with peft first")


def _replace(decoder: Decoder, own: list[np.ndarray | None], place: Path) -> None:
    """Sets embedding and head [rows, hidden]; None leaves one as it is."""
    tied = decoder.head is None
    if tied and (own[0] is None or own[1] is None or not np.array_equal(own[0], own[1])):
        raise InputError(f"{place}: the base has one matrix as embedding and head; merge it with peft first")
    embed, head = (base if new is None else new for new, base in zip(own, _base(decoder), strict=True))
    if embed.shape != head.shape:
        raise InputError(f"{place}: the embedding has {embed.shape[0]} rows, the head {head.shape[0]}; save it again")
    decoder.embed.weight.set_value(jnp.asarray(embed, decoder.embed.weight[...].dtype))
    if decoder.head is not None:
        decoder.head.kernel.set_value(jnp.asarray(head.T, decoder.head.kernel[...].dtype))
    decoder.config = dataclasses.replace(decoder.config, vocab_size=embed.shape[0])
