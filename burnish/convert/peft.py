"""PEFT adapter folders, in and out (the layout of the `peft` library's LoRA).

    adapter_config.json          which layers, rank, alpha, the base model's name
    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight  [rank, in]
                                 base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight  [out, rank]

Where tokens were added, embedding and head lie beside them (`burnish.convert.peft_embeddings`).

The layer there computes y = W x + (alpha / rank) B A x, with alpha / sqrt(rank) when `use_rslora` is set.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from burnish.adapt.lora import LoRA, attach, next_generation, of_layer, split_runs
from burnish.convert.hf import read_json
from burnish.convert.hf_out import family_named, layer_array, write_json
from burnish.convert.model_card import peft_card
from burnish.convert.peft_embeddings import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PREFIX, embedding_tensors, take_embeddings
from burnish.convert.peft_modules import Adapter, FileModule, file_modules, join_layers, split_modules
from burnish.convert.safetensors_out import TensorOut, write_safetensors
from burnish.data.tokenizer import Tokenizer
from burnish.errors import InputError
from burnish.files import whole_folder
from burnish.models.decoder import Decoder
from burnish.models.paths import linears
from burnish.wrapper import ModelWrapper

# ---- out


def save_peft(model: ModelWrapper, folder: str | os.PathLike[str]) -> Path:
    """Writes the adapters of `model` as a PEFT folder, relative to the base the model was loaded from.

    Several adapters on one layer become one: their ranks are joined, and their scales folded into B where they differ.
    Where tokens were added, the whole embedding and head go along, an adapter on the head merged into them.

    Raises InputError when there are no adapters, or when `folder` holds anything but an earlier export.
    """
    decoder = model.decoder
    family = family_named(decoder.config.family)
    whole = embedding_tensors(model, family)
    modules = file_modules(decoder, family)
    joined = {name: one for name, one in _joined_adapters(decoder).items() if not (whole and name == "head")}
    adapters = join_layers(joined, modules)
    if not adapters:
        raise InputError("this model has no adapters to export; export the whole model (format hf) instead")
    dropout = max(part.dropout for linear, _ in linears(decoder).values() for part in linear.adapters)
    base = model.origin.base
    if not base:
        raise InputError(
            "the weights under these adapters were trained, too, and no file holds them by themselves: "
            "export the whole model (format hf)"
        )
    with whole_folder(folder) as staging:
        write_safetensors(staging / ADAPTER_WEIGHTS, [*_adapter_tensors(adapters), *whole])
        config = _adapter_config(adapters, list(modules), base, dropout)
        if whole:
            saved = [tensor.name.removesuffix(".weight").rpartition(".")[2] for tensor in whole]
            config |= {"modules_to_save": saved, "ensure_weight_tying": decoder.head is None}
        write_json(staging / ADAPTER_CONFIG, config)
        if model.tokenizer is not None:
            model.tokenizer.save(staging)
        size = sum(adapter.a.size + adapter.b.size for adapter in adapters.values())
        rows = whole[0].shape[0] if whole else None
        card = peft_card(model.origin, parameters=size, base=base, rows=rows)
        (staging / "README.md").write_text(card, encoding="utf-8")
    return Path(folder)


def _joined_adapters(decoder: Decoder) -> dict[str, Adapter]:
    """Each adapted layer's adapters as one, by layer name, in the order of the layers."""
    found = {}
    for linear, names in linears(decoder).values():
        stacked = linear.kernel[...].ndim == 3
        for index, name in enumerate(names):
            if len(linear.adapters):
                found[name] = _join(list(linear.adapters), (index,) if stacked else ())
    order = [
        name for layer in range(decoder.config.num_layers) for name in found if name.startswith(f"layers.{layer}.")
    ]
    return {name: found[name] for name in dict.fromkeys([*order, *found])}


def _join(parts: list[LoRA], at: tuple[int, ...]) -> Adapter:
    scale = parts[-1].scale
    all_a = [layer_array(part.a, at).astype(np.float32) for part in parts]
    all_b = [layer_array(part.b, at).astype(np.float32) for part in parts]
    # A ratio of one leaves B's bits as they are.
    all_b = [b * np.float32(part.scale / scale) for b, part in zip(all_b, parts, strict=True)]
    return Adapter(np.concatenate(all_a, axis=1), np.concatenate(all_b, axis=0), scale)


def _adapter_tensors(adapters: Mapping[str, Adapter]) -> list[TensorOut]:
    tensors = []
    for module, adapter in adapters.items():
        for name, array in (("lora_A", adapter.a.T), ("lora_B", adapter.b.T)):
            full = f"{PREFIX}{module}.{name}.weight"
            tensors.append(TensorOut(full, array.shape, np.dtype(np.float32), partial(np.asarray, array)))
    return tensors


def _adapter_config(
    adapters: Mapping[str, Adapter], everything: list[str], base: str, dropout: float
) -> dict[str, Any]:
    rank = Counter(adapter.rank for adapter in adapters.values()).most_common(1)[0][0]
    alphas = {module: _alpha(adapter) for module, adapter in adapters.items()}
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": _target_modules(list(adapters), everything),
        "rank_pattern": {module: adapter.rank for module, adapter in adapters.items() if adapter.rank != rank},
        "alpha_pattern": {module: value for module, value in alphas.items() if value != alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        # alpha is written as scale * rank, so rank-stabilised adapters need no switch.
        "use_rslora": False,
        "use_dora": False,
    }


def _alpha(adapter: Adapter) -> float | int:
    alpha = adapter.scale * adapter.rank
    return int(alpha) if alpha == int(alpha) else alpha


def _target_modules(adapted: list[str], everything: list[str]) -> list[str]:
    """Names of projections where each is adapted in every layer; whole module paths otherwise, which are exact."""
    endings = {module.rpartition(".")[2] for module in adapted}
    covered = [module for module in everything if module.rpartition(".")[2] in endings]
    return sorted(endings) if len(covered) == len(adapted) else list(adapted)


# ---- in


def load_peft(path: Path, load: Callable[..., ModelWrapper], dtype: Any) -> ModelWrapper:
    """Reads a PEFT folder: loads its base with `load(name, dtype=dtype)` and puts the adapters on.

    Raises InputError for anything but a plain LoRA, for tensors that are missing, unknown or of another shape, and when
    the base cannot be loaded.
    """
    config = read_json(path / ADAPTER_CONFIG)
    place = path / ADAPTER_CONFIG
    _check_options(config, place)
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InputError(f"{place}: base_model_name_or_path is missing; name the model it was trained on")
    try:
        model = load(base, dtype=dtype)
    except InputError as error:
        raise InputError(f"{place}: base_model_name_or_path: {error}") from None
    decoder, base_rows = model.decoder, model.decoder.config.vocab_size
    family = family_named(decoder.config.family)
    tensors, extended = take_embeddings(_read_tensors(path / ADAPTER_WEIGHTS), config, decoder, family, path)
    modules = file_modules(decoder, family)
    adapters = split_modules(_read_adapters(path, tensors, config, modules), modules)
    if "head" in adapters and extended:
        raise InputError(f"{place}: lm_head has an adapter and was trained whole, too; merge it with peft first")
    if "head" in adapters and decoder.dtype != jnp.float32:
        raise InputError(f"{place}: an adapter on lm_head needs a float32 model; load it with dtype float32")
    # Layers share a stack where their adapters agree in place, rank and scale.
    kinds = [f"{name} {adapter.rank} {adapter.scale!r}" for name, adapter in adapters.items()]
    split_runs(decoder, lambda layer: of_layer(kinds, layer))
    generation, dropout = next_generation(decoder), float(config.get("lora_dropout") or 0.0)
    for linear, names in linears(decoder).values():
        if names[0] in adapters:
            parts = [adapters[name] for name in names]
            a, b = jnp.stack([part.a for part in parts]), jnp.stack([part.b for part in parts])
            attach(linear, names, a, b, scale=parts[0].scale, dropout=dropout, generation=generation)
    tokenizer = Tokenizer.from_folder(path) if (path / "tokenizer.json").exists() else model.tokenizer
    rows = decoder.config.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > rows:
        raise InputError(f"{path}: its tokenizer has {tokenizer.vocab_size} ids, for {rows} embeddings; copy it again")
    # The base stays what it was: saved again, the adapters are relative to it.
    origin = replace(model.origin, source=str(path.resolve()), first=model.origin.base)
    if extended:
        origin = replace(origin, base_rows=origin.base_rows or base_rows)
    return ModelWrapper(decoder, tokenizer, origin)


# Options that are read, or that change nothing about a trained adapter's output.
_HARMLESS = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "inference_mode"),
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"),
    *(
        "bias",
        "modules_to_save",
        "use_rslora",
        "init_lora_weights",
        "layers_to_transform",
        "layers_pattern",
        "revision",
    ),
    *("megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    *("runtime_config", "ensure_weight_tying"),
}
# Initialisations that also change the base's weights when the folder is opened.
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")


def _check_options(config: Mapping[str, Any], place: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise InputError(f"{place}: peft_type is {config.get('peft_type')!r}; only 'LORA' is read")
    for key, value in config.items():
        if key not in _HARMLESS and value:
            raise InputError(f"{place}: {key} is set ({value!r}); only plain LoRA is read: merge it with peft first")
    if config.get("bias", "none") != "none":
        raise InputError(f"{place}: bias is {config['bias']!r}; only 'none' is read: merge it with peft first")
    started = str(config.get("init_lora_weights", True)).lower()
    if started.startswith(_BASE_CHANGING):
        raise InputError(f"{place}: init_lora_weights {started!r} changes the base; convert it to a plain LoRA first")
    if config.get("revision") not in (None, "main"):
        raise InputError(f"{place}: revision is {config['revision']!r}; only a base's main revision is loaded")


def _read_adapters(
    path: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any], known: Mapping[str, FileModule]
) -> dict[str, Adapter]:
    """Adapters by module path, checked against the configuration and the decoder."""
    modules = _modules(tensors, known, path / ADAPTER_WEIGHTS)
    _check_targets(modules, list(known), config, path)
    found = {}
    for module in modules:
        n_in, n_out = known[module].n_in, sum(known[module].widths)
        rank = _pattern(config, "rank_pattern", module, config.get("r", 8), path / ADAPTER_CONFIG)
        alpha = _pattern(config, "alpha_pattern", module, config.get("lora_alpha", 8), path / ADAPTER_CONFIG)
        pair = []
        for part, wanted in (("lora_A", (rank, n_in)), ("lora_B", (n_out, rank))):
            key = f"{PREFIX}{module}.{part}.weight"
            if key not in tensors:
                raise InputError(f"{path / ADAPTER_WEIGHTS}: tensor {key} is missing")
            if tensors[key].shape != wanted:
                shape = list(tensors[key].shape)
                raise InputError(f"{path / ADAPTER_WEIGHTS}: tensor {key} is {shape}; {list(wanted)} is needed")
            pair.append(np.ascontiguousarray(tensors[key].astype(np.float32).T))
        found[module] = Adapter(pair[0], pair[1], alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
    return found


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        raise InputError(f"{path}: no such file; copy it (a .bin adapter is not read: save it with safetensors)")
    try:
        with safe_open(path, "np") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: not a whole safetensors file ({error}); copy it again") from None


def _modules(tensors: Mapping[str, Any], known: Mapping[str, Any], path: Path) -> list[str]:
    """Module paths that the tensors are for; InputError for a tensor that is no layer's lora_A or lora_B."""
    modules: dict[str, None] = {}
    for key in tensors:
        match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_[AB]\.weight", key)
        if match is None or match[1] not in known:
            raise InputError(f"{path}: tensor {key} belongs to no linear layer of the base model")
        modules[match[1]] = None
    return list(modules)


def _check_targets(modules: list[str], known: list[str], config: Mapping[str, Any], path: Path) -> None:
    """What target_modules selects must be what the file holds: the rest of either would be silently ignored."""
    narrowed = any(config.get(key) for key in ("exclude_modules", "layers_to_transform", "layers_pattern"))
    targeted = {module for module in known if _targets(config.get("target_modules"), module, path)}
    for module in modules:
        if module not in targeted:
            raise InputError(f"{path / ADAPTER_WEIGHTS}: {module} has an adapter, but target_modules does not name it")
    missing = [module for module in known if module in targeted and module not in modules]
    if missing and not narrowed:
        raise InputError(f"{path / ADAPTER_WEIGHTS}: {missing[0]} is named by target_modules, but has no adapter")


def _targets(target: Any, module: str, path: Path) -> bool:
    """Whether target_modules selects a module: a regular expression over whole paths, or a list of path endings."""
    if target == "all-linear":
        return module != "lm_head"
    if isinstance(target, str):
        try:
            return re.fullmatch(target, module) is not None
        except re.error as error:
            raise InputError(f"{path / ADAPTER_CONFIG}: target_modules is no regular expression ({error})") from None
    if not isinstance(target, list):
        raise InputError(f"{path / ADAPTER_CONFIG}: target_modules is {target!r}; it must be text or a list")
    return any(module == name or module.endswith(f".{name}") for name in target)


def _pattern(config: Mapping[str, Any], key: str, module: str, default: Any, place: Path) -> Any:
    """A layer's rank or alpha: the first pattern that matches the end of its path, or the default."""
    patterns = config.get(key) or {}
    try:
        value = next((patterns[each] for each in patterns if re.match(rf"(.*\.)?({each})$", module)), default)
    except (re.error, TypeError) as error:
        raise InputError(f"{place}: {key} must map patterns to numbers ({error})") from None
    whole = key == "rank_pattern"
    kind = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kind) or (whole and value < 1):
        needed = "a rank of 1 or more" if whole else "a number"
        raise InputError(f"{place}: {key} of {module} is {value!r}; {needed} is needed")
    return value
