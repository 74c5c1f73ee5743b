"""What a family is: how its configuration is read and written, and what its files call the parameters."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from burnish.convert.families.fields import Fields
from burnish.errors import InputError
from burnish.models.config import ModelConfig

_OUTER = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


class Place(NamedTuple):
    """Where a parameter is in a family's files.

    tensors: their names; more than one where the files hold each expert by itself. rows: which rows of the one tensor,
    of how many (`height`), where the files hold several modules as one; None for all.
    """

    tensors: tuple[str, ...]
    rows: slice | None = None
    height: int | None = None


@dataclass(frozen=True)
class Family:
    """How one family is written down: its `model_type`, architecture name, and the names of its weights.

    inner: our names of the modules of a layer to the file's; `{}` stands for the number of an expert. fused: modules of
    a layer that the file holds as one, by the file's name, their outputs one after the other.
    """

    model_type: str
    architecture: str
    read: Callable[[Fields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    inner: Mapping[str, str]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def from_hf(self, hf: Mapping[str, Any], place: str) -> ModelConfig:
        """The configuration of a parsed `config.json`; InputError for what it says wrongly or what we cannot do."""
        fields = Fields(hf, place)
        fields.neutral("quantization_config", None, "the weights are quantized; give the unquantized model")
        return self.read(fields)

    def to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """The `config.json` of a configuration, without the names of dtypes and special tokens."""
        return {"architectures": [self.architecture], "model_type": self.model_type, **self.write(config)}

    def place(self, name: str, config: ModelConfig) -> Place:
        """Where the files hold a parameter: `layers.3.mlp.up_proj.kernel` -> `model.layers.3.mlp.up_proj.weight`.

        Raises KeyError where the family's files have no place for it.
        """
        module, _, leaf = name.rpartition(".")
        file_leaf = _FILE_LEAF[leaf]
        if not name.startswith("layers."):
            return Place((f"{_OUTER[module]}.{file_leaf}",))
        _, layer, module = module.split(".", 2)
        prefix = f"model.layers.{layer}"
        for file_module, parts in self.fused.items():
            if module in parts:
                ends = list(itertools.accumulate(_width(part, config) for part in parts))
                stop = ends[parts.index(module)]
                rows = slice(stop - _width(module, config), stop)
                return Place((f"{prefix}.{file_module}.{file_leaf}",), rows, ends[-1])
        pattern = f"{prefix}.{self.inner[module]}.{file_leaf}"
        experts = range(config.experts.count) if config.experts is not None and "{}" in pattern else (0,)
        return Place(tuple(pattern.format(expert) for expert in experts))


def _width(module: str, config: ModelConfig) -> int:
    """How many numbers a module puts out for a token."""
    if module.startswith("mlp"):
        return config.intermediate_size
    return config.head_dim * (config.num_heads if module == "attn.q_proj" else config.num_kv_heads)


_FILE_LEAF = {"kernel": "weight", "scale": "weight", "weight": "weight", "bias": "bias"}

ATTENTION = {f"attn.{name}": f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
QK_NORMS = {f"attn.{name}": f"self_attn.{name}" for name in ("q_norm", "k_norm")}
MLP = {f"mlp.{name}": f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
PRE_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}

# Hugging Face's names of activations, and the one of ours that computes each.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_FILE_ACTIVATION = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}

_SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_length",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}


def read_common(
    fields: Fields,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    max_length: int = 2048,
    eps: float = 1e-6,
    tied: bool = False,
) -> dict[str, Any]:
    """What nearly all families say in the same words, as values of a `ModelConfig`; the defaults are a family's own."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    return {
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.count("intermediate_size"),
        "num_layers": fields.count("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": fields.count("num_key_value_heads", kv_heads or heads),
        "head_dim": fields.count("head_dim", head_dim or max(hidden // heads, 1)),
        "max_length": fields.count("max_position_embeddings", max_length),
        "norm_eps": fields.number("rms_norm_eps", eps),
        "activation": fields.choice("hidden_act", ACTIVATIONS, "silu"),
        "tie_embeddings": fields.flag("tie_word_embeddings", tied),
    }


def write_common(config: ModelConfig) -> dict[str, Any]:
    """The same words for a configuration."""
    values = {key: getattr(config, ours) for key, ours in _SAME.items()}
    return values | {"hidden_act": _FILE_ACTIVATION[config.activation]}


def attention_biases(fields: Fields) -> dict[str, bool]:
    """`attention_bias` stands for all four maps of the attention."""
    bias = fields.flag("attention_bias")
    return {"qkv_bias": bias, "output_bias": bias}


def write_attention_bias(config: ModelConfig) -> dict[str, bool]:
    """The same; InputError where only some of the four have one."""
    if config.qkv_bias != config.output_bias:
        raise InputError(f"files of family {config.family!r} have biases in all maps of the attention, or in none")
    return {"attention_bias": config.qkv_bias}


def every_layer(window: int | None, layers: int) -> tuple[int | None, ...]:
    """The windows of layers that all have the same."""
    return () if window is None else (window,) * layers


def maybe_window(fields: Fields) -> int | None:
    """`sliding_window`, None where it is missing."""
    return None if fields.get("sliding_window") is None else fields.count("sliding_window")


def read_windows(fields: Fields, layers: int, sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer: `sliding_window` tokens where `layer_types` says so, or, where the file has none of
    those, `sliding`."""
    types = fields.one_a_layer("layer_types", layers, str)
    if types is None:
        types = ["sliding_attention" if sliding(layer) else "full_attention" for layer in range(layers)]
    for kind in types:
        if kind not in ("sliding_attention", "full_attention"):
            raise fields.error(f"layer_types: {kind!r} is not known; known are full_attention and sliding_attention")
    if "sliding_attention" not in types:
        return ()
    window = fields.count("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def write_windows(config: ModelConfig) -> dict[str, Any]:
    """`layer_types` and `sliding_window`, which all sliding layers share."""
    windows = config.windows or (None,) * config.num_layers
    types = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"layer_types": types, "sliding_window": next((window for window in windows if window is not None), None)}
