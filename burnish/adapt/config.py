"""The adapter section of a recipe."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class LoraConfig(BaseModel):
    """Low-rank adapters: which linear layers, how large, how strong.

    rank None means by model size (8 under 300M parameters, 16 up to 8B, 32 above); alpha None means twice the rank.
    targets are selectors over layer names (`q_proj`, `layers.*.mlp`, `layers.0.attn`); empty means every linear layer
    of every block.
    """

    model_config = ConfigDict(extra="forbid")

    kind: Literal["lora", "none"] = "lora"
    rank: int | None = Field(default=None, ge=1)
    alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    rslora: bool = False
    targets: list[str] = Field(default_factory=list)


def default_rank(parameters: int) -> int:
    """The rank for a model of so many parameters."""
    return 8 if parameters < 300e6 else 16 if parameters <= 8e9 else 32
