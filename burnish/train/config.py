"""The sections of a recipe that say how to train, and the short form of them that Python callers write."""

import secrets
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from burnish.data.config import DataConfig
from burnish.distributed.config import MeshConfig
from burnish.models.remat import RematPolicy
from burnish.train.optimizer_config import OptimizerConfig


class TrainConfig(BaseModel):
    """Length, batch and bookkeeping of a run."""

    model_config = ConfigDict(extra="forbid")

    steps: int | None = Field(default=None, ge=1, le=10**9, description="Optimizer steps; they win over epochs.")
    epochs: float | None = Field(
        default=None, gt=0, le=10_000, description="Passes over the data; 1 where steps are not given either."
    )
    batch_size: int = Field(default=8, ge=1, le=2**20, description="Rows of an optimizer step, over all devices.")
    accumulation: int | None = Field(
        default=None, ge=1, description="Micro-batches a step is cut in; null: the most up to 4 that divide it."
    )
    trainable: list[str] = Field(
        default_factory=list,
        description="Selectors of what is trained; empty: the adapters where there are any, else everything.",
    )
    remat: Literal["auto", RematPolicy] = Field(
        default="auto",
        description="What blocks keep for the backward pass: `none` (all of it), `selective`, `offload` (as selective, "
        "in the host's memory), `block` (nothing: least memory, most time); auto: the fastest that fits.",
    )
    neftune_alpha: float = Field(
        default=0.0, ge=0, le=1000, description="Size of the noise on embedded tokens (arXiv 2310.05914); 0: none."
    )
    seed: int | None = Field(
        default=0, ge=0, lt=2**31, description="Fixes fresh adapters and dropout; null draws one and records it."
    )
    log_every: int = Field(default=1, ge=1, description="Steps between lines of `metrics.jsonl`.")
    eval_every: int | None = Field(default=None, ge=1, description="Steps between evaluations; null: at the end alone.")
    save_every: int = Field(default=1000, ge=1, description="Steps between checkpoints; the last step is always saved.")
    keep: int = Field(default=2, ge=1, description="Checkpoints kept.")
    tensorboard: bool = Field(default=True, description="Write TensorBoard scalars, too.")

    @field_validator("remat", mode="before")
    @classmethod
    def _remat_by_name(cls, value: Any) -> Any:
        """Runs recorded by earlier versions have true or false."""
        return {True: "block", False: "none"}[value] if isinstance(value, bool) else value

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
