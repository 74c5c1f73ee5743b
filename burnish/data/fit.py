"""Fits the data section to what a model can take."""

import datetime
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from burnish.data.config import DataConfig
from burnish.data.named_templates import template_text, use_template
from burnish.errors import InputError

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer

Config = TypeVar("Config", bound=DataConfig)


def fit_data(config: Config, *, context: int | None, packing: bool) -> Config:
    """The config for a model with a context of so many tokens (None: no bound known) that takes packed rows or not.

    `max_length` that nobody set is cut to the context; a template's file is replaced by its text, so that the config
    says all; a stream has nothing held out where nobody asked for it. Raises InputError when a `max_length` that was
    set is longer than the context, or there is no such file.
    """
    changes: dict[str, object] = {}
    if config.streaming and "holdout" not in config.model_fields_set:
        changes["holdout"] = 0.0
    if config.packing != "none" and not packing:
        changes["packing"] = "none"
    if config.chat_template is not None:
        changes["chat_template"] = template_text(config.chat_template)
    if context is not None and config.max_length > context:
        if "max_length" in config.model_fields_set:
            raise InputError(
                f"data.max_length: {config.max_length} is longer than the model's context; use {context} or less"
            )
        if config.overlap > context - 2:
            raise InputError(f"data.overlap: {config.overlap} is too much for the model's context of {context}")
        changes["max_length"] = context
    return config.model_copy(update=changes)


def fit_tokenizer(tokenizer: "Tokenizer", config: DataConfig) -> "Tokenizer":
    """The tokenizer with the chat template that the config names, if it names one, and the values of its variables."""
    if config.chat_template is not None:
        tokenizer = use_template(tokenizer, config.chat_template)
    tokenizer = tokenizer.with_template_variables(config.template_variables)
    return tokenizer if config.date is None else tokenizer.with_date(config.date)


def with_day(config: Config, tokenizer: "Tokenizer") -> Config:
    """The config, with today's date where the tokenizer's template writes one and the config has none."""
    if config.date is not None or not tokenizer.writes_date:
        return config
    return config.model_copy(update={"date": datetime.date.today()})


def with_recipe_template(tokenizer: "Tokenizer", recipe: Mapping[str, Any]) -> "Tokenizer":
    """The same for the recipe of a run as it was written, which other versions may have done."""
    data = recipe.get("data") or {}
    known = {name: data[name] for name in ("chat_template", "template_variables") if data.get(name)}
    return fit_tokenizer(tokenizer, DataConfig(**known))
