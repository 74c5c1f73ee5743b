"""Mixtures of experts: Mixtral (arXiv 2401.04088), Qwen3-MoE (arXiv 2505.09388), OLMoE (arXiv 2409.02060)."""

from typing import Any

from burnish.convert.families.family import (
    ATTENTION,
    MLP,
    PRE_NORMS,
    QK_NORMS,
    Family,
    attention_biases,
    every_layer,
    maybe_window,
    read_common,
    write_attention_bias,
    write_common,
)
from burnish.convert.families.fields import Fields
from burnish.convert.families.rope import read_rope, write_rope
from burnish.models.config import ExpertsConfig, ModelConfig

_EXPERTS = {f"mlp.experts.{name}": f"mlp.experts.{{}}.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
_ROUTED = {"mlp.router": "mlp.gate", **_EXPERTS}


def _read_mixtral(fields: Fields) -> ModelConfig:
    common = read_common(fields, kv_heads=8, max_length=4096 * 32, eps=1e-5)
    experts = ExpertsConfig(
        count=fields.count("num_local_experts", 8),
        per_token=fields.count("num_experts_per_tok", 2),
        size=common["intermediate_size"],
        load_balance=_weight(fields, 0.001),
    )
    return fields.config(
        family="mixtral",
        rope=read_rope(fields, common["max_length"], theta=1e6),
        windows=every_layer(maybe_window(fields), common["num_layers"]),
        experts=experts,
        **common,
    )


def _weight(fields: Fields, default: float) -> float:
    """`router_aux_loss_coef`, which may be 0."""
    key = "router_aux_loss_coef"
    return 0.0 if fields.get(key) == 0 else fields.number(key, default)


def _experts_of(config: ModelConfig) -> ExpertsConfig:
    assert config.experts is not None
    return config.experts


def _write_any(config: ModelConfig) -> dict[str, Any]:
    experts = _experts_of(config)
    routing = {"num_experts_per_tok": experts.per_token, "router_aux_loss_coef": experts.load_balance}
    return write_common(config) | write_rope(config) | routing


def _write_mixtral(config: ModelConfig) -> dict[str, Any]:
    count = _experts_of(config).count
    return _write_any(config) | {"num_local_experts": count, "sliding_window": config.window(0)}


def _read_qwen3_moe(fields: Fields) -> ModelConfig:
    """Experts in each `decoder_sparse_step`-th layer, except those of `mlp_only_layers`."""
    common = read_common(fields, kv_heads=4, max_length=32768)
    layers, step = common["num_layers"], fields.count("decoder_sparse_step", 1)
    dense = fields.layer_set("mlp_only_layers", layers)
    has_experts = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    window = fields.count("sliding_window", 4096) if fields.flag("use_sliding_window") else None
    experts = ExpertsConfig(
        count=fields.count("num_experts", 128),
        per_token=fields.count("num_experts_per_tok", 8),
        size=fields.count("moe_intermediate_size", 768),
        normalized=fields.flag("norm_topk_prob"),
        load_balance=_weight(fields, 0.001),
    )
    return fields.config(
        family="qwen3_moe",
        rope=read_rope(fields, common["max_length"]),
        windows=every_layer(window, layers),
        qk_norm="head",
        **attention_biases(fields),
        experts=experts,
        expert_layers=() if all(has_experts) else has_experts,
        **common,
    )


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    experts = _experts_of(config)
    return _write_any(config) | {
        "num_experts": experts.count,
        "moe_intermediate_size": experts.size,
        "norm_topk_prob": experts.normalized,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(config.num_layers) if config.layer_experts(layer) is None],
        **write_attention_bias(config),
        "use_sliding_window": bool(config.windows),
        "sliding_window": config.window(0),
    }


def _read_olmoe(fields: Fields) -> ModelConfig:
    common = read_common(fields, max_length=4096, eps=1e-5)
    experts = ExpertsConfig(
        count=fields.count("num_experts", 64),
        per_token=fields.count("num_experts_per_tok", 8),
        size=common["intermediate_size"],
        normalized=fields.flag("norm_topk_prob"),
        load_balance=_weight(fields, 0.01),
    )
    return fields.config(
        family="olmoe",
        rope=read_rope(fields, common["max_length"]),
        qk_norm="whole",
        qkv_clip=fields.maybe_number("clip_qkv"),
        **attention_biases(fields),
        experts=experts,
        **common,
    )


def _write_olmoe(config: ModelConfig) -> dict[str, Any]:
    experts = _experts_of(config)
    return _write_any(config) | {
        "num_experts": experts.count,
        "norm_topk_prob": experts.normalized,
        "clip_qkv": config.qkv_clip,
        **write_attention_bias(config),
    }


_MIXTRAL_NAMES = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.gate_proj": "block_sparse_moe.experts.{}.w1",
    "mlp.experts.up_proj": "block_sparse_moe.experts.{}.w3",
    "mlp.experts.down_proj": "block_sparse_moe.experts.{}.w2",
}
MIXTRAL = Family("mixtral", "MixtralForCausalLM", _read_mixtral, _write_mixtral, PRE_NORMS | ATTENTION | _MIXTRAL_NAMES)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _read_qwen3_moe,
    _write_qwen3_moe,
    PRE_NORMS | ATTENTION | QK_NORMS | MLP | _ROUTED,
)
OLMOE = Family("olmoe", "OlmoeForCausalLM", _read_olmoe, _write_olmoe, PRE_NORMS | ATTENTION | QK_NORMS | _ROUTED)
