"""The adapter section of a recipe."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class LoraConfig(BaseModel):
    """Low-rank adapters: which linear layers, how large, how strong."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["lora", "none"] = Field(default="lora", description="none: no adapters, everything is trained.")
    rank: int | None = Field(
        default=None, ge=1, description="Null: by model size: 8 under 300M parameters, 16 up to 8B, 32 above."
    )
    alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False, description="Null: twice the rank.")
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0, description="Of the adapters' input.")
    rslora: bool = Field(default=False, description="Scale by alpha / sqrt(rank) instead of alpha / rank.")
    targets: list[str] = Field(
        default_factory=list, description="Selectors of linear layers; empty: all of every block."
    )


def default_rank(parameters: int) -> int:
    """The rank for a model of so many parameters."""
    return 8 if parameters < 300e6 else 16 if parameters <= 8e9 else 32
