"""Qwen 2, 2.5 (which say `qwen2`) and 3 (arXiv 2407.10671, 2505.09388)."""

from typing import Any

from burnish.convert.families.family import (
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
from burnish.convert.families.rope import read_rope, write_rope
from burnish.models.config import ModelConfig


def read_sliding(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Only where `use_sliding_window` says so: from layer `max_window_layers` on, unless `layer_types` is there."""
    if not fields.flag("use_sliding_window"):
        return ()
    full = fields.count("max_window_layers", 28, least=0)
    return read_windows(fields, layers, lambda layer: layer >= full)


def write_sliding(config: ModelConfig) -> dict[str, Any]:
    """`layer_types` for newer readers, `max_window_layers` for older ones."""
    full = config.windows.count(None) if config.windows else config.num_layers
    return write_windows(config) | {"use_sliding_window": bool(config.windows), "max_window_layers": full}


def _read_qwen2(fields: Fields) -> ModelConfig:
    common = read_common(fields, kv_heads=32, max_length=32768)
    rope = read_rope(fields, common["max_length"])
    windows = read_sliding(fields, common["num_layers"])
    return fields.config(family="qwen2", rope=rope, windows=windows, qkv_bias=True, **common)


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    return write_common(config) | write_rope(config) | write_sliding(config)


def _read_qwen3(fields: Fields) -> ModelConfig:
    common = read_common(fields, kv_heads=32, head_dim=128, max_length=32768)
    return fields.config(
        family="qwen3",
        rope=read_rope(fields, common["max_length"]),
        windows=read_sliding(fields, common["num_layers"]),
        qk_norm="head",
        **attention_biases(fields),
        **common,
    )


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return _write_qwen2(config) | write_attention_bias(config)


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _read_qwen2, _write_qwen2, PRE_NORMS | ATTENTION | MLP)
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _read_qwen3, _write_qwen3, PRE_NORMS | ATTENTION | QK_NORMS | MLP)
