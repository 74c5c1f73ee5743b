"""`burnish eval`."""

import json
from collections.abc import Sequence
from typing import Any

from burnish.cli.recipe import Recipe, read_words, with_run
from burnish.cli.report import count, data_line, make_console, progress_line
from burnish.data.tasks import Task
from burnish.errors import InputError
from burnish.evaluate.accuracy import task_accuracy
from burnish.evaluate.perplexity import perplexity
from burnish.loading import load
from burnish.wrapper import ModelWrapper


def evaluate_model(words: Sequence[str], options: dict[str, Any], as_json: bool) -> None:
    """Perplexity on records or accuracy on a task's held-out problems, said in words or as one JSON object."""
    recipe = read_words(words, options)
    if recipe.model is None:
        raise InputError("model: not given; add --model")
    recipe = with_run(recipe)
    if (recipe.data.source is None) == (recipe.task.name is None):
        raise InputError("give either records (--data FILE) or a task (--task reasoning_gym:TASK) to evaluate on")
    answer = _accuracy(recipe, as_json) if recipe.task.name else _perplexity(recipe, as_json)
    if as_json:
        print(json.dumps({"model": recipe.model, **answer}))


def _load(recipe: Recipe) -> ModelWrapper:
    model = load(str(recipe.model), dtype=recipe.dtype, compute_dtype=recipe.compute_dtype)
    model.add_tokens(recipe.vocabulary.add_tokens, pad_to_multiple_of=recipe.vocabulary.pad_to_multiple_of)
    return model


def _perplexity(recipe: Recipe, as_json: bool) -> dict[str, Any]:
    model = _load(recipe)
    assert recipe.data.source is not None
    found = perplexity(model, recipe.data.source, recipe.data)
    if not as_json:
        console = make_console()
        console.print(data_line("data", found.counts))
        console.print(
            f"perplexity {found.perplexity:.4f} (mean -log p {found.nll:.6f} over {count(found.tokens)} tokens)"
        )
    found_json = {"perplexity": found.perplexity, "nll": found.nll, "tokens": found.tokens}
    named = recipe.data.path or [source.path for source in recipe.data.sources]
    return {"data": named, **found_json, "rows": vars(found.counts)}


def _accuracy(recipe: Recipe, as_json: bool) -> dict[str, Any]:
    task = Task(str(recipe.task.name), recipe.task)
    _, problems = task.train_and_heldout()
    model = _load(recipe)
    console = make_console(stderr=as_json)
    with progress_line(console, "scoring held-out problems", len(problems)) as advance:
        found = task_accuracy(
            model,
            task,
            problems,
            system=recipe.data.system,
            max_tokens=recipe.task.max_tokens,
            on_progress=advance,
        )
    if not as_json:
        console.print(f"final answer right {found.final}")
        console.print(f"whole reply right {found.strict}")
        if found.score is not None:
            console.print(f"mean score of the task's own scorer {found.score:.4f}")
    return {"task": recipe.task.name, **found.as_json()}
