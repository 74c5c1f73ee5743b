"""The `optimizer` section of a recipe, and the `schedule` inside it."""

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

# What each optimizer takes beside `lr`, `weight_decay` and the like, with the values of its paper or of
# common use.
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"b1": 0.9, "b2": 0.999, "eps": 1e-8},
    "lion": {"b1": 0.9, "b2": 0.99},
    "adafactor": {"decay_rate": 0.8, "eps": 1e-30, "parameter_scale": False},
    "muon": {"momentum": 0.95, "nesterov": True, "muon_scale": "rms", "b1": 0.9, "b2": 0.95, "eps": 1e-8},
    "sgd": {"momentum": 0.0, "nesterov": False},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "linear": {"end_lr": None},
    "cosine": {"end_lr": None},
    "wsd": {"end_lr": None, "decay_ratio": 0.1},
}
NO_DECAY = ("*norm*", "scale", "bias")

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Momentum = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


def _known_name(value: Any, known: Iterable[str], what: str) -> Any:
    """The name, if it is known; else an error that offers the nearest one."""
    known = list(known)
    if value in known:
        return value
    near = difflib.get_close_matches(str(value).lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise PydanticCustomError(
        "name",
        "{value} is no {what}; {hint}known: {known}",
        {"value": repr(value), "what": what, "hint": hint, "known": ", ".join(known)},
    )


def _taken_option(value: Any, info: ValidationInfo, options: dict[str, dict[str, Any]]) -> Any:
    """The option's value, or its default under the section's `name`, which must have such an option."""
    name = info.data.get("name")
    if name is None:  # it was wrong, and is reported already
        return value
    if value is None:
        return options[name].get(info.field_name or "")
    if info.field_name not in options[name]:
        raise PydanticCustomError(
            "option",
            "{name} does not take it; leave it out ({name} takes: {taken})",
            {"name": name, "taken": ", ".join(options[name]) or "nothing more"},
        )
    return value


class _Named(BaseModel):
    """A section whose `name` decides what else it takes; a bare word stands for the name alone."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, data: Any) -> Any:
        return {"name": data} if isinstance(data, str) else data


class ScheduleConfig(_Named):
    """How the learning rate moves over a run.

    `end_lr` is the rate of the last step (null: a tenth of the peak); `decay_ratio` is the share of the run
    in which wsd falls. An option that the named schedule does not take is an error.
    """

    name: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine", description="Shape after the warmup."
    )
    warmup_ratio: float = Field(
        default=0.03, ge=0, le=1, allow_inf_nan=False, description="Share of the run in which the rate rises."
    )
    warmup_steps: int | None = Field(
        default=None,
        ge=0,
        description="Steps in which the rate rises; null: by warmup_ratio, else instead of it.",
    )
    end_lr: NonNegative | None = Field(default=None, description="Rate of the last step; null: a tenth of the peak.")
    decay_ratio: Share | None = Field(
        default=None,
        description="wsd: share of the run in which the rate falls.",
    )

    @field_validator("name", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        return _known_name(value, SCHEDULES, "schedule")

    @field_validator("end_lr", "decay_ratio", mode="before")
    @classmethod
    def _taken(cls, value: Any, info: ValidationInfo) -> Any:
        return _taken_option(value, info, SCHEDULES)


class GroupConfig(BaseModel):
    """Parameters that learn at their own rate. A parameter belongs to one group at most."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    selectors: list[str] = Field(
        min_length=1, description="Selectors over parameter names: `layers.0`, `q_proj`, `layers.*.mlp`."
    )
    lr_scale: NonNegative = Field(default=1.0, description="Factor on the learning rate, and so on the weight decay.")
    weight_decay: NonNegative | None = Field(
        default=None, description="Replaces the optimizer's weight_decay; what no_decay covers stays without."
    )


class OptimizerConfig(_Named):
    """Which optimizer, how strong, and on what.

    Options that are null take the named optimizer's own default; one that it does not take is an error:

        adamw      b1, b2, eps
        lion       b1, b2
        adafactor  decay_rate, eps (added to squared gradients), parameter_scale
        muon       momentum, nesterov, muon_scale for matrices; b1, b2, eps for AdamW on all else
        sgd        momentum, nesterov

    Weight decay is decoupled for every optimizer: a step takes lr * lr_scale * weight_decay * parameter off.
    Norms, scales and biases go without. Embeddings and the matrices of adapters are decayed like any other
    matrix: for an adapter this pulls the model back towards its base.
    """

    name: Literal["adamw", "lion", "adafactor", "muon", "sgd"] = "adamw"
    lr: Rate | None = Field(default=None, description="Peak learning rate; null: by what is trained.")
    weight_decay: NonNegative = 0.01
    clip_norm: Rate | None = Field(default=1.0, description="Largest norm of the whole gradient; null: no clipping.")
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    no_decay: list[str] = Field(
        default_factory=lambda: list(NO_DECAY), description="Selectors of what goes without weight decay."
    )
    groups: list[GroupConfig] = Field(default_factory=list, description="Learning rates by selector.")

    b1: Momentum | None = Field(default=None, description="Decay of the first moment.")
    b2: Momentum | None = Field(default=None, description="Decay of the second moment (lion: of the first).")
    eps: Rate | None = Field(default=None, description="Keeps denominators from zero.")
    momentum: Momentum | None = Field(default=None, description="Decay of the sum of past gradients.")
    nesterov: bool | None = Field(default=None, description="Look one step of momentum ahead.")
    decay_rate: Share | None = Field(
        default=None,
        description="adafactor: the second moment's decay at step t is 1 - t^-decay_rate.",
    )
    parameter_scale: bool | None = Field(
        default=None,
        description="adafactor: multiply steps by the parameter's root mean square.",
    )
    muon_scale: Literal["rms", "shape"] | None = Field(
        default=None,
        description="muon: 'rms' makes steps as large as AdamW's, so lr means the same for every parameter; "
        "'shape' is the original sqrt(max(1, out / in)).",
    )

    @field_validator("name", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        return _known_name(value, OPTIONS, "optimizer")

    @field_validator(*sorted({option for taken in OPTIONS.values() for option in taken}), mode="before")
    @classmethod
    def _taken(cls, value: Any, info: ValidationInfo) -> Any:
        return _taken_option(value, info, OPTIONS)

    @field_validator("nesterov")
    @classmethod
    def _has_momentum(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        if value and info.data.get("momentum") == 0:
            raise PydanticCustomError("momentum", "needs momentum above 0; set momentum, or nesterov=false")
        return value
