"""`burnish inspect`: a model's tree, or with data its rows as they are trained (`burnish.cli.data_report`)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from burnish.adapt.vocabulary import learn_tokens
from burnish.cli.data_html import check_absent, write_html
from burnish.cli.data_report import Report, as_json_object, make_report, show
from burnish.cli.recipe import Recipe, read_words, with_run
from burnish.cli.report import count, make_console
from burnish.data.fit import fit_data, fit_tokenizer
from burnish.data.parts import sources_of
from burnish.errors import InputError
from burnish.loading import load, load_tokenizer
from burnish.models.paths import Leaf, leaves
from burnish.wrapper import ModelWrapper


def inspect_model(
    words: Sequence[str],
    options: dict[str, Any],
    rows: int,
    ids: bool,
    worst: int,
    as_json: bool,
    html: Path | None,
) -> None:
    """Prints the model's tree, or with data a report on it; `html` is a new file to write the report to."""
    asked = read_words(words, options)
    recipe = with_run(asked)
    if recipe.model is None:
        raise InputError("model: not given; add --model (its tokenizer and template decide what rows become)")
    if recipe.data.source is None:
        if asked.task.name is not None:
            raise InputError("task.name: a task's problems are made, not read; give records to inspect (--data FILE)")
        if ids or html is not None:
            raise InputError(f"{'--ids' if ids else '--html'} is of a data set's rows; give one (--data FILE)")
        _show_tree(make_console(), load(recipe.model, dtype=recipe.dtype, compute_dtype=recipe.compute_dtype), as_json)
        return
    if html is not None:
        check_absent(html)
    report = _report(recipe, rows, worst)
    if html is not None:
        write_html(report, html)
    if as_json:
        print(json.dumps(as_json_object(report)))
        return
    console = make_console()
    show(report, console, ids)
    if html is not None:
        console.print(f"written to {html}")


def _report(recipe: Recipe, rows: int, worst: int) -> Report:
    """The report on a recipe's data; what a row becomes is decided as before training."""
    assert recipe.model is not None and recipe.data.source is not None
    parts = sources_of(recipe.data.source, recipe.data)
    tokenizer, context = load_tokenizer(recipe.model)
    tokenizer, _ = learn_tokens(tokenizer, recipe.vocabulary.add_tokens)
    config = fit_data(recipe.data, context=context, packing=True)
    tokenizer = fit_tokenizer(tokenizer, config)
    notes = []
    if config.max_length < recipe.data.max_length:
        notes.append(f"data.max_length is {config.max_length}, the model's context")
    return make_report(recipe.model, parts, tokenizer, config, recipe.train.batch_size, rows, worst, notes)


def _show_tree(console: Console, model: ModelWrapper, as_json: bool) -> None:
    found = leaves(model.module)
    if as_json:
        shapes = {name: list(_layer_shape(leaf, variable)) for leaf, variable in found.values() for name in leaf.names}
        print(json.dumps({"model": model.origin.source, "parameters": model.parameters, "shapes": shapes}))
        return
    tree = Tree(Text(f"{model.origin.source}  {count(model.parameters)} parameters", style="bold"))
    branches: dict[str, Tree] = {}
    for leaf, variable in found.values():
        branch, (*groups, name) = tree, _collapsed(leaf).split("/")
        for depth, group in enumerate(groups):
            key = "/".join(groups[: depth + 1])
            branches[key] = branches[key] if key in branches else branch.add(Text(group))
            branch = branches[key]
        shape = "×".join(map(str, _layer_shape(leaf, variable)))
        branch.add(Text(f"{name}  {shape} {variable[...].dtype}  {count(variable[...].size)}"))
    console.print(tree)


def _collapsed(leaf: Leaf) -> str:
    """`layers.0-29/attn/q_proj/kernel`: one entry for all the layers of a stack."""
    if not leaf.stacked:
        return leaf.names[0].replace(".", "/")
    numbers = [int(name.split(".")[1]) for name in leaf.names]
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
    _, _, rest = leaf.names[0].split(".", 2)
    return f"layers.{span}{f' by {step}' if step > 1 else ''}/" + rest.replace(".", "/")


def _layer_shape(leaf: Leaf, variable: Any) -> tuple[int, ...]:
    return variable.shape[1:] if leaf.stacked else variable.shape
