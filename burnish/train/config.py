"""The sections of a recipe that say how to train, and the short form of them that Python callers write."""

import secrets
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from burnish.data.config import DataConfig
from burnish.distributed.config import MeshConfig
from burnish.train.optimizer_config import OptimizerConfig


class TrainConfig(BaseModel):
    """Length, batch and bookkeeping of a run.

    steps or epochs say how long (one epoch when neither is given; steps win). batch_size counts rows of an optimizer
    step over all devices; accumulation cuts it in so many micro-batches (None: 4, or the most that divides it).
    trainable lists selectors of what is trained; empty means the adapters where there are any, else everything.
    remat computes each block again in the backward pass: less memory, more time. seed fixes fresh adapters and dropout;
    None draws one and records it.
    """

    model_config = ConfigDict(extra="forbid")

    steps: int | None = Field(default=None, ge=1)
    epochs: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    batch_size: int = Field(default=8, ge=1)
    accumulation: int | None = Field(default=None, ge=1)
    trainable: list[str] = Field(default_factory=list)
    remat: bool = False
    seed: int | None = Field(default=0, ge=0, lt=2**31)
    log_every: int = Field(default=1, ge=1)
    eval_every: int | None = Field(default=None, ge=1)
    save_every: int = Field(default=1000, ge=1)
    keep: int = Field(default=2, ge=1)
    tensorboard: bool = True

    def with_seed(self) -> "TrainConfig":
        """The same, with a seed drawn where there was none."""
        return self if self.seed is not None else self.model_copy(update={"seed": secrets.randbits(31)})


class TrainerConfig(BaseModel):
    """All that a `Trainer` reads."""

    model_config = ConfigDict(extra="forbid")

    train: TrainConfig = Field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    mesh: MeshConfig = Field(default_factory=MeshConfig)


def with_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Puts short keys in their sections: {"optimizer": "adamw", "lr": 1e-5} -> {"optimizer": {"name": "adamw", "lr":
    1e-5}}.

    A key goes to the first section that has a field of that name; unknown keys stay, to be refused by name.
    """
    long: dict[str, Any] = {}
    sections = _sections(TrainerConfig)
    for key, value in values.items():
        if key in sections:
            given = {"name": value} if key == "optimizer" and isinstance(value, str) else value
            long[key] = {**long.get(key, {}), **given} if isinstance(given, Mapping) else given
        else:
            section = next((name for name, part in sections.items() if key in part.model_fields), None)
            target = long if section is None else long.setdefault(section, {})
            target[key] = value
    return long


def _sections(schema: type[BaseModel]) -> dict[str, type[BaseModel]]:
    found = {name: field.annotation for name, field in schema.model_fields.items()}
    return {name: part for name, part in found.items() if isinstance(part, type) and issubclass(part, BaseModel)}
