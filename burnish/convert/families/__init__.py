"""Families as data: from a published `config.json` to a `ModelConfig` and back, and the table of weight names.

Facts come from the Hugging Face configuration files of each family; both spellings in the wild are read (`rope_theta`
and `rope_scaling`, or `rope_parameters`), and both are written. docs/adding_a_family.md says how one is added.
"""

from collections.abc import Mapping
from typing import Any

from burnish.convert.families.family import Family, Place
from burnish.convert.families.fields import placed_config
from burnish.convert.families.gemma import GEMMA, GEMMA2, GEMMA3
from burnish.convert.families.llama import GRANITE, LLAMA, MISTRAL, SMOLLM3
from burnish.convert.families.mixtures import MIXTRAL, OLMOE, QWEN3_MOE
from burnish.convert.families.olmo import OLMO2
from burnish.convert.families.phi import PHI3
from burnish.convert.families.qwen import QWEN2, QWEN3
from burnish.errors import InputError

__all__ = ["FAMILIES", "Family", "Place", "family_of", "placed_config"]

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(LLAMA, MISTRAL, SMOLLM3, GRANITE, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI3, OLMO2),
        *(MIXTRAL, QWEN3_MOE, OLMOE),
    )
}


def family_of(config: Mapping[str, Any], place: str) -> Family:
    """The family of a parsed `config.json`; InputError when it is not one of ours, naming those that are."""
    model_type = config.get("model_type")
    if model_type is None:
        raise InputError(f"{place}: no model_type; this is not the config.json of a language model")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(f"{place}: model_type {model_type!r} is not known; known are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]
