"""`burnish inspect`: a model's tree, and the rows of a data set as they are trained."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from burnish.cli.recipe import Recipe, read_words
from burnish.cli.report import count, data_line, make_console, marked
from burnish.data.batches import TrainBatches
from burnish.data.dataset import Examples, load_examples
from burnish.errors import InputError
from burnish.loading import load
from burnish.models.paths import Leaf, leaves
from burnish.wrapper import ModelWrapper


def inspect_model(words: Sequence[str], model: str | None, data: str | None, rows: int, as_json: bool) -> None:
    """Prints the model's tree, or with data its rows and lengths."""
    recipe = read_words(words, {"model": model, "data.path": data})
    if recipe.model is None:
        raise InputError("model: not given; add --model (its tokenizer and template decide what rows become)")
    loaded = load(recipe.model, dtype=recipe.dtype)
    console = make_console()
    if recipe.data.path is None:
        _show_tree(console, loaded, as_json)
    else:
        examples = load_examples(recipe.data.path, loaded.require_tokenizer(), recipe.data)
        _show_data(console, loaded, recipe, examples, rows, as_json)


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


def _show_data(
    console: Console, model: ModelWrapper, recipe: Recipe, examples: Examples, rows: int, as_json: bool
) -> None:
    tokenizer = model.require_tokenizer()
    lengths = np.array([len(example.tokens) for example in examples.encoded])
    packed = TrainBatches(examples.encoded, recipe.train.batch_size, recipe.data).plan(0)
    slots = len(packed.rows) * recipe.data.max_length
    quantiles = {f"p{q}": int(np.percentile(lengths, q)) for q in (0, 25, 50, 75, 95, 100)}
    if as_json:
        shown = [
            {
                "example": example.example_id,
                "tokens": example.tokens.tolist(),
                "trained": example.loss_mask.astype(int).tolist(),
                "text": tokenizer.decode(example.tokens.tolist(), skip_special=False),
            }
            for example in examples.encoded[:rows]
        ]
        summary = {
            "data": recipe.data.path,
            **vars(examples.counts),
            "lengths": quantiles,
            "rows_packed": len(packed.rows),
        }
        print(json.dumps({**summary, "efficiency": examples.counts.tokens / slots, "examples": shown}))
        return
    for example in examples.encoded[:rows]:
        console.print(f"row {example.example_id}, {len(example.tokens)} tokens", style="bold")
        console.print(marked(example, tokenizer, plain=not console.is_terminal))
    console.print("trained tokens are " + ("green" if console.is_terminal else "in ⟦ ⟧"), style="bold")
    console.print(data_line(str(recipe.data.path), examples.counts))
    console.print("tokens in a row: " + ", ".join(f"{name} {value}" for name, value in quantiles.items()))
    console.print(
        f"rows of {recipe.data.max_length} tokens: {len(packed.rows)}, {examples.counts.tokens / slots:.1%} full"
    )
