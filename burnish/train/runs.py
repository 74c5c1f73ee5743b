"""A run directory as a model: the model it started from, with what the run trained put in."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import jax

from burnish.adapt.config import LoraConfig
from burnish.adapt.vocabulary import VocabularyConfig
from burnish.config import build_config
from burnish.data.fit import with_recipe_template
from burnish.errors import InputError
from burnish.models.parts import choose_trained, only_adapters, take_apart
from burnish.models.paths import write
from burnish.train.checkpoint import Checkpoints, stack_layers
from burnish.train.config import TrainConfig
from burnish.train.run_folder import CONFIG, read_recipe
from burnish.wrapper import ModelWrapper


def load_run(path: Path, load: Callable[..., ModelWrapper], dtype: Any) -> ModelWrapper:
    """The model of a run directory, as of its last checkpoint.

    Its adapter is frozen from here on: training goes on with a new one (`add_lora`), or with everything after
    `merge_lora`.
    """
    recipe = read_recipe(path)
    if recipe.get("model") == str(path.resolve()):
        raise InputError(f"{path / CONFIG}: model is this run itself; name what the run started from")
    if not isinstance(recipe.get("model"), str):
        raise InputError(f"{path / CONFIG}: model is missing; it names what the run started from")
    model = load(recipe["model"], dtype=dtype)
    vocabulary = build_config(VocabularyConfig, recipe.get("vocabulary") or {}, place=f"{path / CONFIG}: vocabulary")
    model.add_tokens(vocabulary.add_tokens, pad_to_multiple_of=vocabulary.pad_to_multiple_of)
    model.tokenizer = with_recipe_template(model.require_tokenizer(), recipe)
    adapter = build_config(LoraConfig, recipe.get("adapter") or {"kind": "none"}, place=f"{path / CONFIG}: adapter")
    model.prepare(adapter)
    selectors = build_config(TrainConfig, recipe.get("train") or {}, place=f"{path / CONFIG}: train").trainable
    parts, params, _ = take_apart(model.module, choose_trained(model.module, selectors))
    with closing(Checkpoints(path, keep=None)) as checkpoints:
        step = checkpoints.latest_step()
        if step is None:
            raise InputError(f"{path}: no checkpoint yet; wait for the run to save one, or run it again")
        shapes = {
            name: jax.ShapeDtypeStruct(array.shape[1:] if leaf.stacked else array.shape, array.dtype)
            for (key, array), leaf in zip(params.items(), parts.trained.values(), strict=True)
            for name in leaf.names
        }
        found = checkpoints.restore_params(step, shapes)
    arrays = stack_layers(found, params, parts.trained)
    # Adapters stay in float32, whatever the model is in; the others were masters.
    write(model.module, {key: array if only_adapters([key]) else array.astype(dtype) for key, array in arrays.items()})
    model.note_run(str(path.resolve()), parts.trained)
    return model
