"""Llama 2 and 3, and the families that differ from them in little: Mistral, SmolLM3, Granite.

Published at huggingface.co/meta-llama, /mistralai, /HuggingFaceTB, /ibm-granite.
"""

from typing import Any

from burnish.convert.families.family import (
    ATTENTION,
    MLP,
    PRE_NORMS,
    Family,
    attention_biases,
    every_layer,
    maybe_window,
    read_common,
    read_windows,
    write_attention_bias,
    write_common,
    write_windows,
)
from burnish.convert.families.fields import Fields
from burnish.convert.families.rope import read_rope, write_rope
from burnish.models.config import ModelConfig

_NAMES = PRE_NORMS | ATTENTION | MLP


def _biases(fields: Fields) -> dict[str, bool]:
    return attention_biases(fields) | {"mlp_bias": fields.flag("mlp_bias")}


def _write_biases(config: ModelConfig) -> dict[str, bool]:
    return write_attention_bias(config) | {"mlp_bias": config.mlp_bias}


def _read_llama(fields: Fields) -> ModelConfig:
    common = read_common(fields)
    rope = read_rope(fields, common["max_length"])
    return fields.config(family="llama", rope=rope, **common, **_biases(fields))


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return write_common(config) | write_rope(config) | _write_biases(config)


LLAMA = Family("llama", "LlamaForCausalLM", _read_llama, _write_llama, _NAMES)


def _read_mistral(fields: Fields) -> ModelConfig:
    """Every layer slides, unless `sliding_window` is null; where it is missing, over 4096 tokens."""
    common = read_common(fields, kv_heads=8, max_length=4096 * 32)
    window = maybe_window(Fields({"sliding_window": 4096, **fields.values}, fields.place))
    windows = every_layer(window, common["num_layers"])
    return fields.config(family="mistral", rope=read_rope(fields, common["max_length"]), windows=windows, **common)


def _write_mistral(config: ModelConfig) -> dict[str, Any]:
    return write_common(config) | write_rope(config) | {"sliding_window": config.window(0)}


MISTRAL = Family("mistral", "MistralForCausalLM", _read_mistral, _write_mistral, _NAMES)


def _read_smollm3(fields: Fields) -> ModelConfig:
    """`no_rope_layers` holds 1 for a layer with rope and 0 for one without; else each fourth has none."""
    common = read_common(fields, kv_heads=4, max_length=32768, tied=True)
    layers = common["num_layers"]
    rope = read_rope(fields, common["max_length"], theta=2e6)
    interval = fields.count("no_rope_layer_interval", 4)
    every = [(layer + 1) % interval != 0 for layer in range(layers)]
    has_rope = fields.one_a_layer("no_rope_layers", layers, int) or every
    windows: tuple[int | None, ...] = ()
    if fields.flag("use_sliding_window") and fields.get("sliding_window") is not None:
        windows = read_windows(fields, layers, lambda layer: not has_rope[layer])
    ropes = tuple(rope if has else None for has in has_rope)
    return fields.config(family="smollm3", rope=rope, ropes=ropes, windows=windows, **common, **_biases(fields))


def _write_smollm3(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_common(config),
        **write_rope(config),
        **_write_biases(config),
        **write_windows(config),
        "use_sliding_window": bool(config.windows),
        "no_rope_layers": [int(config.layer_rope(layer) is not None) for layer in range(config.num_layers)],
    }


SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", _read_smollm3, _write_smollm3, _NAMES)

_GRANITE = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention_scale",
}


def _read_granite(fields: Fields) -> ModelConfig:
    common = read_common(fields)
    return fields.config(
        family="granite",
        rope=read_rope(fields, common["max_length"]),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
        **{ours: fields.number(key, 1.0) for key, ours in _GRANITE.items()},
        **common,
        **_biases(fields),
    )


def _write_granite(config: ModelConfig) -> dict[str, Any]:
    multipliers = {key: getattr(config, ours) for key, ours in _GRANITE.items()}
    return _write_llama(config) | multipliers | {"logits_scaling": 1 / config.logit_scale}


GRANITE = Family("granite", "GraniteForCausalLM", _read_granite, _write_granite, _NAMES)
