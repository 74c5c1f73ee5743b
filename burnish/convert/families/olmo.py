"""OLMo 2 (arXiv 2501.00656): norms over what a part adds, and over whole queries and keys."""

from typing import Any

from burnish.convert.families.family import (
    ATTENTION,
    MLP,
    QK_NORMS,
    Family,
    attention_biases,
    read_common,
    write_attention_bias,
    write_common,
)
from burnish.convert.families.fields import Fields
from burnish.convert.families.rope import read_rope, write_rope
from burnish.models.config import ModelConfig

_POST_NORMS = {"attn_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}


def _read_olmo2(fields: Fields) -> ModelConfig:
    common = read_common(fields, eps=1e-5)
    return fields.config(
        family="olmo2",
        rope=read_rope(fields, common["max_length"]),
        norms="post",
        qk_norm="whole",
        **attention_biases(fields),
        **common,
    )


def _write_olmo2(config: ModelConfig) -> dict[str, Any]:
    return write_common(config) | write_rope(config) | write_attention_bias(config)


OLMO2 = Family("olmo2", "Olmo2ForCausalLM", _read_olmo2, _write_olmo2, _POST_NORMS | ATTENTION | QK_NORMS | MLP)
