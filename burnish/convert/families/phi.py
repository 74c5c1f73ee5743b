"""Phi-3, Phi-3.5 and Phi-4, which all say `phi3` (arXiv 2404.14219, 2412.08905)."""

from typing import Any

from burnish.convert.families.family import (
    ATTENTION,
    MLP,
    PRE_NORMS,
    Family,
    every_layer,
    maybe_window,
    read_common,
    write_common,
)
from burnish.convert.families.fields import Fields
from burnish.convert.families.rope import read_rope, write_rope
from burnish.models.config import ModelConfig

_ORIGINAL = "original_max_position_embeddings"


def _read_phi3(fields: Fields) -> ModelConfig:
    common = read_common(fields, max_length=4096, eps=1e-5)
    original = fields.count(_ORIGINAL, 4096, least=2)  # longrope divides by its logarithm
    scaling = dict(fields.section("rope_scaling") or fields.section("rope_parameters"))
    kind = scaling.pop("type", None)
    kind = scaling.pop("rope_type", kind) or "default"
    # The first files call longrope by other names; the trained length stands beside the scaling, and wins.
    scaling |= {"rope_type": "longrope" if kind in ("su", "yarn") else kind, _ORIGINAL: original}
    rope_fields = Fields({**fields.values, "rope_parameters": scaling, "rope_scaling": None}, fields.place)
    rope = read_rope(rope_fields, common["max_length"], partial=True)
    windows = every_layer(maybe_window(fields), common["num_layers"])
    return fields.config(family="phi3", rope=rope, windows=windows, **common)


def _write_phi3(config: ModelConfig) -> dict[str, Any]:
    assert config.rope is not None
    rope, words = config.rope, write_rope(config)
    original = rope.original_max_length if rope.kind == "longrope" else config.max_length
    if rope.attention_factor is None and rope.factor == config.max_length / original and words["rope_scaling"]:
        # The first readers want exactly these keys.
        wanted = ("short_factor", "long_factor")
        words["rope_scaling"] = {"type": "longrope", **{key: words["rope_scaling"][key] for key in wanted}}
    return {
        **write_common(config),
        **words,
        "partial_rotary_factor": config.rope.partial_rotary_factor,
        _ORIGINAL: original,
        "sliding_window": config.window(0),
    }


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    _read_phi3,
    _write_phi3,
    PRE_NORMS | ATTENTION | MLP,
    fused={
        "self_attn.qkv_proj": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
)
