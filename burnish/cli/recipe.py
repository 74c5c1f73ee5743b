"""The recipe: one tree of options behind every command, from a YAML file and `key.path=value` words.

model: smollm2-135m
adapter: {rank: 16}
data: {path: train.jsonl, max_length: 512}
train: {steps: 200}
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from burnish.adapt.config import LoraConfig
from burnish.adapt.vocabulary import VocabularyConfig
from burnish.config import build_config
from burnish.data.config import DataConfig, SourceConfig
from burnish.data.parts import Source, absolute
from burnish.data.tasks import TaskConfig
from burnish.errors import InputError
from burnish.train.config import TrainerConfig
from burnish.train.run_folder import CONFIG, read_recipe, read_yaml


class RecipeData(DataConfig):
    """`data`: where records are, and how they become rows of tokens."""

    path: str | None = Field(
        default=None, description="What to train on: a file, folder or glob (docs/data.md), or hf:ORG/NAME."
    )
    eval_path: str | None = Field(default=None, description="What to evaluate on; null: hold rows out.")
    sources: list[SourceConfig] = Field(
        default_factory=list, description="Several to train on, instead of path: {path, weight, name, format, ...}."
    )

    @property
    def source(self) -> Source | None:
        """What to train on; None where nothing is named. Raises InputError where both path and sources are."""
        if self.path is not None and self.sources:
            raise InputError("data.path and data.sources are both given; put the path among the sources")
        return self.path if self.path is not None else self.sources or None

    def absolute(self) -> "RecipeData":
        """The same, with names that mean the same from any folder."""
        paths = {name: absolute(value) for name in ("path", "eval_path") if (value := getattr(self, name)) is not None}
        named = [each.model_copy(update={"path": absolute(each.path)}) for each in self.sources]
        return self.model_copy(update={**paths, "sources": named})


class RecipeTask(TaskConfig):
    """`task`: problems that are made as needed, trained on and scored."""

    name: str | None = Field(default=None, description="reasoning_gym:TASK")
    score: bool = Field(default=True, description="Score the held-out problems before and after training.")
    max_tokens: int = Field(default=64, ge=1, description="Longest reply that is read when scoring.")


class SftConfig(BaseModel):
    """`sft`: the objective of supervised fine-tuning (see `burnish.objectives.sft.SFT`)."""

    model_config = ConfigDict(extra="forbid")

    loss: Literal["cross_entropy", "dft"] = Field(
        default="cross_entropy", description="dft weighs each token by its own probability (arXiv 2508.05629)."
    )
    z_loss: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="Coefficient of logsumexp squared.")
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="Share of the uniform distribution.")


class Recipe(TrainerConfig):
    """Everything a command can be told."""

    model: str | None = Field(
        default=None, description="Built-in name, Hugging Face or PEFT folder, .gguf, run directory, or Hub id."
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None, description="Of the weights; null: float32 on a CPU, bfloat16 elsewhere."
    )
    compute_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None, description="Of activations and matrix products; null: that of the weights."
    )
    vocabulary: VocabularyConfig = Field(default_factory=VocabularyConfig)
    adapter: LoraConfig = Field(default_factory=LoraConfig)
    sft: SftConfig = Field(default_factory=SftConfig)
    data: RecipeData = Field(default_factory=RecipeData)
    task: RecipeTask = Field(default_factory=RecipeTask)


def read_words(words: Iterable[str], options: dict[str, Any]) -> Recipe:
    """A recipe from a command line: a YAML file among the words, then the options, then `key.path=value` words.

    options: by dotted key; None is left out. Later ones win. Raises InputError for a word that is neither, and for any
    key or value that the schema refuses.
    """
    tree: dict[str, Any] = {}
    words = list(words)
    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise InputError(f"{files[1]}: one recipe file is enough; options are written key=value")
    if files:
        if not files[0].endswith((".yaml", ".yml")):
            raise InputError(f"{files[0]}: neither a .yaml recipe nor key=value")
        tree = read_yaml(Path(files[0]))
    for key, value in options.items():
        if value is not None:
            _place(tree, key, value)
    for word in words:
        key, equals, text = word.partition("=")
        if equals:
            _place(tree, key, _value(text, key))
    return build_config(Recipe, tree)


def recipe_of_run(path: Path) -> Recipe:
    """The recipe that a run directory was made by."""
    return build_config(Recipe, read_recipe(path), place=f"{path / CONFIG}: ")


# What is of the records, not of the model that learned them.
_OF_THE_RECORDS = {"path", "eval_path", "sources", "format", "columns", "streaming", "temperature"}


def with_run(recipe: Recipe) -> Recipe:
    """The recipe, and what it does not say taken from that of the run that made the model, if one did.

    Taken are its task and how its records became tokens. Where records or another task are named, the run's task is
    left out. Raises InputError for options that do not go together.
    """
    run = Path(str(recipe.model))
    if not (run / CONFIG).exists():
        return recipe
    made_by = recipe_of_run(run)
    data = {**made_by.data.model_dump(exclude=_OF_THE_RECORDS), **recipe.data.model_dump(exclude_unset=True)}
    recipe = recipe.model_copy(update={"data": build_config(RecipeData, data, place="data")})
    if recipe.data.source is not None or recipe.task.name not in (None, made_by.task.name):
        return recipe
    task = {**made_by.task.model_dump(), **recipe.task.model_dump(exclude_unset=True)}
    return recipe.model_copy(update={"task": build_config(RecipeTask, task, place="task")})


def _place(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = tree.get(section)
        if inner is None:
            inner = tree[section] = {}
        elif isinstance(inner, str) and section in ("optimizer", "schedule"):
            inner = tree[section] = {"name": inner}
        if not isinstance(inner, dict):
            raise InputError(f"{key}: {section} is {inner!r}, not a section")
        tree = inner
    tree[last] = value


def _value(text: str, key: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):
        raise InputError(f"{key}: {text!r} is not a value; quote it as in YAML") from None
