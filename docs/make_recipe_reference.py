"""Writes docs/recipe.md from the recipe's schema: python docs/make_recipe_reference.py (a test keeps them equal)."""

import inspect
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from burnish.cli.recipe import Recipe

HEAD = """# The recipe

Every command reads one tree of options: a YAML file, overridden by `key.path=value` words on the command line. What is
not there has the default below; a key that is not below is an error. A run's `config.yaml` holds the tree as resolved.

    burnish sft recipe.yaml --out runs/a adapter.rank=16 optimizer.lr=1e-4

`null` is YAML's word for "not set". Selectors name parameters: `q_proj` at any depth, `layers.*.mlp`, `layers.0.attn`.
"""


def reference() -> str:
    parts = [HEAD]
    for name, field in Recipe.model_fields.items():
        section = nested(field.annotation)
        if section is None:
            parts.append(f"## `{name}`\n\n{table([(name, field)])}")
        else:
            parts.append(f"## `{name}`\n\n{describe(section)}\n\n{table(rows(section))}")
    return "\n".join(parts)


def rows(section: type[BaseModel], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, field in section.model_fields.items():
        inner = nested(field.annotation)
        found += rows(inner, f"{prefix}{name}.") if inner else [(prefix + name, field)]
    return found


def table(entries: list[tuple[str, Any]]) -> str:
    lines = ["| key | default | |", "|---|---|---|"]
    for name, field in entries:
        default = field.get_default(call_default_factory=True)
        shown = "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
        lines.append(f"| `{name}` | `{shown}` | {field.description or ''} |")
    return "\n".join(lines) + "\n"


def describe(section: type[BaseModel]) -> str:
    return inspect.cleandoc(section.__doc__ or "")


def nested(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    models = [option for option in get_args(annotation) if isinstance(option, type) and issubclass(option, BaseModel)]
    return models[0] if models and not str(annotation).startswith("list") else None


if __name__ == "__main__":
    Path(__file__).with_name("recipe.md").write_text(reference(), encoding="utf-8")
