"""Families as data: from a published configuration to a `ModelConfig` and back, and the table of weight names.

Facts come from the Hugging Face configuration files of each family; both spellings in the wild are read
(`rope_theta` and `rope_scaling`, or `rope_parameters`; `torch_dtype`, or `dtype`), the newer one is written.
"""

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
    if model_type not in FAMILIES:
        raise InputError(f"{place}: model_type {model_type!r} is not known; known are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def _llama_from_hf(hf: Mapping[str, Any], place: str) -> ModelConfig:
    def need(key: str) -> int:
        if hf.get(key) is None:
            raise InputError(f"{place}: {key} is missing; the file is incomplete")
        return hf[key]

    hidden, heads = need("hidden_size"), need("num_attention_heads")
    max_length = hf.get("max_position_embeddings") or 2048
    theta, rope = _rope_section(hf)
    activation = hf.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise InputError(f"{place}: hidden_act {activation!r} is not known; known are {', '.join(_ACTIVATIONS)}")
    if not isinstance(heads, int) or heads < 1:
        raise InputError(f"{place}: num_attention_heads is {heads!r}; it must be a whole number of 1 or more")
    return ModelConfig(
        family="llama",
        vocab_size=need("vocab_size"),
        hidden_size=hidden,
        intermediate_size=need("intermediate_size"),
        num_layers=need("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hidden // heads,
        max_length=max_length,
        norm_eps=1e-6 if hf.get("rms_norm_eps") is None else float(hf["rms_norm_eps"]),
        activation=_ACTIVATIONS[activation],
        rope=_rope_from_hf(theta, rope, max_length, place),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        attention_bias=bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
    )


# Hugging Face's names of activations, and the one of ours that computes each.
_ACTIVATIONS: dict[str, Any] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def _rope_section(hf: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """(theta, scaling) from either spelling."""
    section = hf.get("rope_parameters")
    scaling = dict(section or hf.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or hf.get("rope_theta") or 10000.0
    return float(theta), scaling


def _rope_from_hf(theta: float, scaling: dict[str, Any], max_length: int, place: str) -> RopeConfig:
    kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise InputError(f"{place}: rope type {kind!r} is not known; known are default, linear, llama3, yarn")
    if kind == "default":
        return RopeConfig(theta=theta)
    if "factor" not in scaling:
        raise InputError(f"{place}: rope type {kind!r} needs a factor")
    original = scaling.get("original_max_position_embeddings") or max_length
    names = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    given = {name: float(scaling[name]) for name in names if scaling.get(name) is not None}
    return RopeConfig(theta, kind, float(scaling["factor"]), int(original), **given)


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
        "rope_scaling": None if rope.kind == "default" else {k: v for k, v in parameters.items() if k != "rope_theta"},
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }


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
