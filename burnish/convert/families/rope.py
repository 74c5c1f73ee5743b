"""Rotary embeddings as `config.json` says them: `rope_theta` and `rope_scaling`, or `rope_parameters` with both in it.

Either is read, and both are written, so that older and newer readers load the file.
"""

import math
from collections.abc import Mapping
from typing import Any

from burnish.convert.families.fields import Fields
from burnish.models.config import ModelConfig, RopeConfig

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_NUMBERS = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
_ALWAYS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow")}


def read_rope(fields: Fields, max_length: int, *, theta: float = 10000.0, partial: bool = False) -> RopeConfig:
    """The one rotary embedding of all layers; where a file has both spellings `rope_scaling` wins, as in transformers.

    theta: where the file says none. partial: whether the family may rotate a part of each head.
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    section = fields.section(name)
    if any(isinstance(value, Mapping) for value in section.values()):
        raise fields.error(f"{name} is {section!r}; one set of numbers for all layers is needed")
    outer = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    beside = {key: fields.values[key] for key in outer if fields.get(key) is not None}
    return read_section({**beside, **section}, fields, name, max_length, theta=theta, partial=partial)


def read_section(
    values: Mapping[str, Any], fields: Fields, name: str, max_length: int, *, theta: float, partial: bool = False
) -> RopeConfig:
    """A rotary embedding from one set of numbers, `name` in the file."""
    section = Fields(values, f"{fields.place}: {name}")
    theta = Fields(values, fields.place).number("rope_theta", theta)
    share = section.number("partial_rotary_factor", 1.0)
    if share > 1 or (share != 1 and not partial):
        raise fields.error(f"partial_rotary_factor is {share}; models of this family rotate whole heads")
    kind: Any = section.get("rope_type", section.get("type", "default"))
    if kind not in KINDS:
        raise section.error(f"rope type {kind!r} is not known; known are {', '.join(KINDS)}")
    if kind == "default":
        return RopeConfig(theta, partial_rotary_factor=share)
    original = max_length
    if kind != "dynamic":
        original = section.count("original_max_position_embeddings", max_length)
    # Longrope and YaRN say how far they stretch, or leave it to the lengths.
    if kind not in ("longrope", "yarn") and section.get("factor") is None:
        raise section.error(f"a rope of type {kind!r} needs a factor")
    factor = section.number("factor", max_length / original)
    if kind == "linear":
        return RopeConfig(theta, kind, factor, partial_rotary_factor=share)
    given: dict[str, Any] = {key: section.number(key, 1.0) for key in _NUMBERS if section.get(key) is not None}
    if kind == "longrope":
        factors = {key: _factors(section, key) for key in ("short_factor", "long_factor")}
        given |= {f"{key}s": value for key, value in factors.items()}
    if kind == "yarn" and "attention_factor" not in given and section.get("mscale") and section.get("mscale_all_dim"):
        above, below = (section.number(key, 1.0) for key in ("mscale", "mscale_all_dim"))
        given["attention_factor"] = _temperature(factor, above) / _temperature(factor, below)
    truncate = section.get("truncate") is not False
    return RopeConfig(theta, kind, factor, original, truncate=truncate, partial_rotary_factor=share, **given)


def _factors(section: Fields, key: str) -> tuple[float, ...]:
    value = section.get(key)
    if not isinstance(value, list) or not all(isinstance(item, int | float) and item > 0 for item in value):
        raise section.error(f"{key} is {value!r}; a list of numbers above 0 is needed")
    return tuple(map(float, value))


def _temperature(factor: float, weight: float) -> float:
    """YaRN's attention temperature with DeepSeek's weight on the logarithm: 0.1 weight ln(factor) + 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_section(rope: RopeConfig) -> dict[str, Any]:
    """What goes under `rope_parameters`."""
    section: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.kind}
    if rope.partial_rotary_factor != 1:
        section["partial_rotary_factor"] = rope.partial_rotary_factor
    if rope.kind != "default":
        section["factor"] = rope.factor
    if rope.kind in ("llama3", "yarn", "longrope"):
        section["original_max_position_embeddings"] = rope.original_max_length
    if rope.kind == "longrope":
        section |= {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
    section |= {key: getattr(rope, key) for key in _ALWAYS.get(rope.kind, ())}
    if rope.attention_factor is not None:
        section["attention_factor"] = rope.attention_factor
    if rope.kind == "yarn" and not rope.truncate:
        section["truncate"] = False
    return section


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Both spellings: the newer one takes rope_parameters, the older ones the keys after it."""
    assert config.rope is not None  # every family has one, for some of its layers at least
    section = rope_section(config.rope)
    return {"rope_parameters": section, "rope_theta": config.rope.theta, "rope_scaling": _old_scaling(section)}


def _old_scaling(section: Mapping[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` as files had it before `rope_parameters`."""
    kind = section["rope_type"]
    if kind == "default":
        return None
    if kind in ("linear", "dynamic"):  # the oldest readers want exactly these two keys
        return {"type": kind, "factor": section["factor"]}
    return {key: value for key, value in section.items() if key not in ("rope_theta", "partial_rotary_factor")}
