"""Fits the data section to what a model can take."""

from typing import TypeVar

from burnish.data.config import DataConfig
from burnish.errors import InputError

Config = TypeVar("Config", bound=DataConfig)


def fit_data(config: Config, *, context: int | None, packing: bool) -> Config:
    """The config for a model with a context of so many tokens (None: no bound known) that takes packed rows or not.

    `max_length` that nobody set is cut to the context. Raises InputError when one that was set is longer.
    """
    changes: dict[str, object] = {}
    if config.packing and not packing:
        changes["packing"] = False
    if context is not None and config.max_length > context:
        if "max_length" in config.model_fields_set:
            raise InputError(
                f"data.max_length: {config.max_length} is longer than the model's context; use {context} or less"
            )
        changes["max_length"] = context
    return config.model_copy(update=changes)
