"""Gemma 1, 2 and 3 (arXiv 2403.08295, 2408.00118, 2503.19786), text only."""

from collections.abc import Mapping
from typing import Any

from burnish.convert.families.family import (
    ACTIVATIONS,
    ATTENTION,
    MLP,
    PRE_NORMS,
    QK_NORMS,
    Family,
    attention_biases,
    read_common,
    read_windows,
    write_attention_bias,
    write_common,
    write_windows,
)
from burnish.convert.families.fields import Fields
from burnish.convert.families.rope import read_rope, read_section, rope_section, write_rope
from burnish.models.config import ModelConfig, RopeConfig

_BOTH_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def _read_any(fields: Fields, *, max_length: int, activation: str, activations: Mapping[str, str]) -> dict[str, Any]:
    """What the three have in common."""
    fields.neutral("use_bidirectional_attention", False, "only causal attention is supported")
    common = read_common(fields, head_dim=256, max_length=max_length, tied=True)
    own = {
        "activation": fields.choice(activation, activations, "gelu_pytorch_tanh"),
        "norm_offset": 1.0,
        "embedding_scale": common["hidden_size"] ** 0.5,
    }
    return common | own | attention_biases(fields)


def _write_any(config: ModelConfig) -> dict[str, Any]:
    return write_common(config) | write_attention_bias(config)


def _read_gemma(fields: Fields) -> ModelConfig:
    # Files of the first release say "gelu" and mean its tanh form.
    activations = ACTIVATIONS | {"gelu": "gelu_tanh"}
    common = _read_any(fields, max_length=8192, activation="hidden_act", activations=activations)
    return fields.config(family="gemma", rope=read_rope(fields, common["max_length"]), **common)


def _write_gemma(config: ModelConfig) -> dict[str, Any]:
    return _write_any(config) | write_rope(config)


def _read_scores(fields: Fields) -> dict[str, Any]:
    """Gemma 2 and 3 scale their scores by a number of their own, not by the head's size."""
    return {"attention_scale": fields.number("query_pre_attn_scalar", 256.0) ** -0.5}


def _write_scores(config: ModelConfig) -> dict[str, Any]:
    assert config.attention_scale is not None
    scalar = round(config.attention_scale**-2, 6)
    words = _write_any(config)
    return words | {
        "hidden_activation": words["hidden_act"],
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "final_logit_softcapping": config.final_softcap,
        **write_windows(config),
    }


def _softcap(fields: Fields, key: str, default: float) -> float | None:
    """A missing cap is the default one, null is none."""
    return fields.number(key, default) if fields.values.get(key, default) is not None else None


def _read_gemma2(fields: Fields) -> ModelConfig:
    common = _read_any(fields, max_length=8192, activation="hidden_activation", activations=ACTIVATIONS)
    windowed = Fields({"sliding_window": 4096, **fields.values}, fields.place)
    return fields.config(
        family="gemma2",
        norms="both",
        rope=read_rope(fields, common["max_length"]),
        windows=read_windows(windowed, common["num_layers"], lambda layer: layer % 2 == 0),
        attention_softcap=_softcap(fields, "attn_logit_softcapping", 50.0),
        final_softcap=_softcap(fields, "final_logit_softcapping", 30.0),
        **common,
        **_read_scores(fields),
    )


def _write_gemma2(config: ModelConfig) -> dict[str, Any]:
    return _write_scores(config) | write_rope(config) | {"attn_logit_softcapping": config.attention_softcap}


def _read_gemma3(fields: Fields) -> ModelConfig:
    common = _read_any(fields, max_length=131072, activation="hidden_activation", activations=ACTIVATIONS)
    fields.neutral("attn_logit_softcapping", None, "Gemma 3 has no cap on its scores")
    windowed = Fields({"sliding_window": 4096, **fields.values}, fields.place)
    pattern = fields.count("sliding_window_pattern", 6)
    windows = read_windows(windowed, common["num_layers"], lambda layer: (layer + 1) % pattern != 0)
    full, local = _gemma3_ropes(fields, common["max_length"])
    ropes = tuple(full if window is None else local for window in windows)
    cap = fields.maybe_number("final_logit_softcapping")
    same = {"norms": "both", "qk_norm": "head", "final_softcap": cap, "windows": windows, "ropes": ropes}
    return fields.config(family="gemma3_text", rope=full, **same, **common, **_read_scores(fields))


def _gemma3_ropes(fields: Fields, max_length: int) -> tuple[RopeConfig, RopeConfig]:
    """Of layers with full attention, and of those with a window; scaling is for the former."""
    name = "rope_parameters"
    section = fields.section(name)
    if section and not all(isinstance(part, Mapping | None) for part in section.values()):
        raise fields.error(f"{name}: one set of numbers for each of full_attention and sliding_attention is needed")
    full, local = (section.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
    scaling = fields.section("rope_scaling")
    full = {"rope_theta": fields.get("rope_theta"), **full, **scaling}
    local = {"rope_theta": fields.get("rope_local_base_freq"), **local}
    return (
        read_section(full, fields, f"{name}.full_attention", max_length, theta=1e6),
        read_section(local, fields, f"{name}.sliding_attention", max_length, theta=1e4),
    )


def _write_gemma3(config: ModelConfig) -> dict[str, Any]:
    assert config.rope is not None
    local = next((rope for rope in config.ropes if rope not in (None, config.rope)), RopeConfig())
    old = write_rope(config)
    sections = {"full_attention": rope_section(config.rope), "sliding_attention": rope_section(local)}
    return _write_scores(config) | old | {"rope_parameters": sections, "rope_local_base_freq": local.theta}


GEMMA = Family("gemma", "GemmaForCausalLM", _read_gemma, _write_gemma, PRE_NORMS | ATTENTION | MLP)
GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", _read_gemma2, _write_gemma2, _BOTH_NORMS | ATTENTION | MLP)
GEMMA3 = Family(
    "gemma3_text", "Gemma3ForCausalLM", _read_gemma3, _write_gemma3, _BOTH_NORMS | ATTENTION | QK_NORMS | MLP
)
