"""The mesh section of a recipe."""

from pydantic import BaseModel, ConfigDict, Field


class MeshConfig(BaseModel):
    """How devices are laid out; data times fsdp is their number."""

    model_config = ConfigDict(extra="forbid")

    data: int = Field(default=1, ge=1, description="Copies of the model, each of which sees other rows.")
    fsdp: int | None = Field(
        default=None, ge=1, description="Shards each copy is cut in; null: all devices that remain."
    )
