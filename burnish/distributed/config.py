"""The mesh section of a recipe."""

from pydantic import BaseModel, ConfigDict, Field


class MeshConfig(BaseModel):
    """How devices are laid out: `data` copies of the model, each cut in `fsdp` shards (None: all devices that
    remain)."""

    model_config = ConfigDict(extra="forbid")

    data: int = Field(default=1, ge=1)
    fsdp: int | None = Field(default=None, ge=1)
