"""Families as data: from a published configuration to a `ModelConfig` and back, and the table of weight names.

Facts come from the Hugging Face configuration files of each family; both spellings in the wild are read
(`rope_theta` and `rope_scaling`, or `rope_parameters`; `torch_dtype`, or `dtype`), the newer one is written.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from burnish.errors import InputError
from burnish.models.config import ModelConfig, RopeConfig


@dataclass(frozen=True)
class Family:
    """How one family is written down: its `model_type`, architecture name, and the names of its weights.

    `outer` and `inner` map our names to the file's: whole-model parameters, and parameters within a layer.
    """

    model_type: str
    architecture: str
    from_hf: Callable[[Mapping[str, Any], str], ModelConfig]
    to_hf: Callable[[ModelConfig], dict[str, Any]]
    outer: Mapping[str, str]
    inner: Mapping[str, str]
    layer_prefix: str = "model.layers"

    def weight_name(self, name: str) -> str:
        """The file's name of a parameter: `layers.3.mlp.up_proj.kernel` -> `model.layers.3.mlp.up_proj.weight`."""
        if name.startswith("layers."):
            _, layer, rest = name.split(".", 2)
            module, _, leaf = rest.rpartition(".")
            return f"{self.layer_prefix}.{layer}.{self.inner[module]}.{_FILE_LEAF[leaf]}"
        module, _, leaf = name.rpartition(".")
        return f"{self.outer[module]}.{_FILE_LEAF[leaf]}"


_FILE_LEAF = {"kernel": "weight", "scale": "weight", "weight": "weight", "bias": "bias"}


def family_of(config: Mapping[str, Any], place: str) -> Family:
    """The family of a parsed `config.json`; InputError when it is not one of ours, naming those that are."""
    model_type = config.get("model_type")
    if model_type is None:
        raise InputError(f"{place}: no model_type; this is not the config.json of a language model")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(f"{place}: model_type {model_type!r} is not known; known are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def _llama_from_hf(hf: Mapping[str, Any], place: str) -> ModelConfig:
    hidden = _count(hf, "hidden_size", place)
    heads = _count(hf, "num_attention_heads", place)
    max_length = _count(hf, "max_position_embeddings", place, 2048)
    activation = hf.get("hidden_act") or "silu"
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise InputError(f"{place}: hidden_act {activation!r} is not known; known are {', '.join(_ACTIVATIONS)}")
    if hf.get("quantization_config"):
        raise InputError(f"{place}: the weights are quantized (quantization_config); give the unquantized model")
    return placed_config(
        place,
        family="llama",
        vocab_size=_count(hf, "vocab_size", place),
        hidden_size=hidden,
        intermediate_size=_count(hf, "intermediate_size", place),
        num_layers=_count(hf, "num_hidden_layers", place),
        num_heads=heads,
        num_kv_heads=_count(hf, "num_key_value_heads", place, heads),
        head_dim=_count(hf, "head_dim", place, max(hidden // heads, 1)),
        max_length=max_length,
        norm_eps=_number(hf, "rms_norm_eps", place, 1e-6),
        activation=_ACTIVATIONS[activation],
        rope=_rope_from_hf(hf, max_length, place),
        tie_embeddings=_flag(hf, "tie_word_embeddings", place),
        attention_bias=_flag(hf, "attention_bias", place),
        mlp_bias=_flag(hf, "mlp_bias", place),
    )


def placed_config(place: str, **values: Any) -> ModelConfig:
    """A `ModelConfig` whose errors name the file that its values come from."""
    try:
        return ModelConfig(**values)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def _count(section: Mapping[str, Any], key: str, place: str, default: int | None = None) -> int:
    """A whole number of 1 or more; where the key is missing or null, the default or an InputError."""
    value = section.get(key)
    value = default if value is None else value
    if value is None:
        raise InputError(f"{place}: {key} is missing; the file is incomplete")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{place}: {key} is {value!r}; it must be a whole number of 1 or more")
    return value


def _number(section: Mapping[str, Any], key: str, place: str, default: float) -> float:
    """A positive number; the default where the key is missing or null."""
    value = section.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InputError(f"{place}: {key} is {value!r}; it must be a number above 0")
    return float(value)


def _flag(hf: Mapping[str, Any], key: str, place: str) -> bool:
    value = hf.get(key, False)
    if not isinstance(value, bool | None):
        raise InputError(f"{place}: {key} is {value!r}; it must be true or false")
    return bool(value)


# Hugging Face's names of activations, and the one of ours that computes each.
_ACTIVATIONS: dict[str, Any] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def _rope_from_hf(hf: Mapping[str, Any], max_length: int, place: str) -> RopeConfig:
    """Rope from either spelling; where a file has both, `rope_scaling` wins, as in transformers."""
    name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    scaling = hf.get(name) or {}
    if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
        raise InputError(f"{place}: {name} is {scaling!r}; one set of numbers for all layers is needed")
    theta = _number({**hf, **scaling}, "rope_theta", place, 10000.0)
    if _number({**hf, **scaling}, "partial_rotary_factor", place, 1.0) != 1.0:
        raise InputError(f"{place}: partial_rotary_factor is not known; only rope over the whole head is")
    kind: Any = scaling.get("rope_type", scaling.get("type", "default")) or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise InputError(f"{place}: {name}: rope type {kind!r} is not known; known are default, linear, llama3, yarn")
    if kind == "default":
        return RopeConfig(theta=theta)
    if "factor" not in scaling:
        raise InputError(f"{place}: {name} of type {kind!r} needs a factor")
    if kind == "linear":
        return RopeConfig(theta, kind, _number(scaling, "factor", place, 1.0))
    original = _count(scaling, "original_max_position_embeddings", place, max_length)
    names = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    given = {key: _number(scaling, key, place, 1.0) for key in names if scaling.get(key) is not None}
    factor = _number(scaling, "factor", place, max_length / original)
    if kind == "yarn" and "attention_factor" not in given and scaling.get("mscale") and scaling.get("mscale_all_dim"):
        above, below = (_number(scaling, key, place, 1.0) for key in ("mscale", "mscale_all_dim"))
        given["attention_factor"] = _temperature(factor, above) / _temperature(factor, below)
    truncate = scaling.get("truncate") is not False
    return RopeConfig(theta, kind, factor, original, truncate=truncate, **given)


def _temperature(factor: float, weight: float) -> float:
    """YaRN's attention temperature with DeepSeek's weight on the logarithm: 0.1 weight ln(factor) + 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama_to_hf(config: ModelConfig) -> dict[str, Any]:
    rope = config.rope
    parameters: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    if rope.kind != "default":
        parameters["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn"):
        parameters["original_max_position_embeddings"] = rope.original_max_length
    if rope.kind == "llama3":
        parameters |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        parameters |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        if rope.attention_factor is not None:
            parameters["attention_factor"] = rope.attention_factor
        if not rope.truncate:
            parameters["truncate"] = False
    hf_name = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": hf_name[config.activation],
        # Read by every version: the newer one takes rope_parameters, the older ones the two keys after it.
        "rope_parameters": parameters,
        "rope_theta": rope.theta,
        "rope_scaling": _old_scaling(parameters),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }


def _old_scaling(parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` as files had it before `rope_parameters`."""
    kind = parameters["rope_type"]
    if kind == "default":
        return None
    if kind == "linear":  # the oldest readers want exactly these two keys
        return {"type": kind, "factor": parameters["factor"]}
    return {key: value for key, value in parameters.items() if key != "rope_theta"}


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    from_hf=_llama_from_hf,
    to_hf=_llama_to_hf,
    outer={"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    inner={
        "attn_norm": "input_layernorm",
        "attn.q_proj": "self_attn.q_proj",
        "attn.k_proj": "self_attn.k_proj",
        "attn.v_proj": "self_attn.v_proj",
        "attn.o_proj": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate_proj": "mlp.gate_proj",
        "mlp.up_proj": "mlp.up_proj",
        "mlp.down_proj": "mlp.down_proj",
    },
)

FAMILIES: dict[str, Family] = {LLAMA.model_type: LLAMA}
