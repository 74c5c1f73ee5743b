"""The sampling section of a recipe."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

Text = Annotated[str, Field(min_length=1)]


class SamplingConfig(BaseModel):
    """How text is drawn from a model.

    max_tokens: the most tokens of an answer, what ends it included; the model's context may allow fewer.
    temperature: divides the logits; 0 takes the likeliest token each time.
    top_k: keep the k likeliest tokens (Fan et al. 2018, arXiv 1805.04833); None keeps all.
    top_p: keep the fewest tokens that hold this share of what is left (Holtzman et al. 2019, arXiv 1904.09751);
        1 keeps all.
    min_p: keep tokens of at least this share of the likeliest one's probability (Nguyen et al. 2024, arXiv 2407.01082);
        0 keeps all.
    stop: texts that end an answer and are not part of it, beside the model's own stop tokens.
    seed: of the first request of a call; the others' are derived from it. None draws a fresh one at each call. Each
        answer reports the seed that gives it again.

    Temperature comes first, then top_k, top_p and min_p, each on what the one before it kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: int = Field(default=256, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=1)
    top_p: float = Field(default=1.0, ge=1e-6, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    stop: tuple[Text, ...] = ()
    seed: int | None = Field(default=None, ge=0, lt=2**63)

    @field_validator("temperature")
    @classmethod
    def _divides(cls, value: float) -> float:
        if 0 < value < 1e-30:
            raise ValueError("use 0 for the likeliest token each time, or 1e-30 and more")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value
