"""The `data` section of a recipe."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class DataConfig(BaseModel):
    """How records become rows of tokens. Where the records come from is given beside it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_length: int = Field(1024, ge=2, description="Tokens in a row of a batch; longer examples are cut.")
    packing: bool = Field(True, description="Put several examples in a row; false: one example a row.")
    truncate: Literal["keep_end", "keep_start", "drop"] = Field(
        "keep_end", description="What to do with an example longer than max_length."
    )
    holdout: float = Field(0.1, ge=0, lt=1, description="Fraction of rows held out where no evaluation set is given.")
    seed: int = Field(0, ge=0, description="Fixes the held-out rows and the order of every epoch.")
    system: str | None = Field(
        None, min_length=1, description="System message of conversations that have none of their own."
    )
