"""`burnish import-recipe`: a recipe from the configuration of another tool, and all that was not understood."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from burnish.cli.importing.axolotl import read_axolotl
from burnish.cli.importing.keys import Draft, Keys
from burnish.cli.importing.llama_factory import read_llama_factory
from burnish.cli.importing.sources import weigh_streams
from burnish.cli.recipe import Recipe
from burnish.config import build_config
from burnish.errors import InputError
from burnish.train.run_folder import read_yaml

Kind = Literal["axolotl", "llama-factory"]
_NAMES: dict[Kind, str] = {"axolotl": "Axolotl", "llama-factory": "LLaMA-Factory"}
_TELLING: dict[Kind, tuple[str, ...]] = {
    "axolotl": ("base_model", "datasets", "pretraining_dataset"),
    "llama-factory": ("model_name_or_path", "dataset", "finetuning_type"),
}


@dataclass(frozen=True)
class Imported:
    """What was made of another tool's configuration.

    Attributes:
        kind: whose it is.
        recipe: a tree that `Recipe` accepts.
        translated: keys whose meaning the recipe has in full. A key stands for all below it.
        unknown: the other keys, each with why, and what to do: no key of the file is in neither list.
        assumed: what the file does not say, or says otherwise.
    """

    kind: Kind
    recipe: dict[str, Any]
    translated: list[str]
    unknown: list[tuple[str, str]]
    assumed: list[str]


def import_recipe(tree: Mapping[str, Any], folder: Path) -> Imported:
    """Translates a configuration. LLaMA-Factory's dataset_info.json is read where there is one.

    Args:
        tree: the configuration file's content.
        folder: where it lies; data files are looked for from here, and there.

    Raises:
        InputError: it is neither tool's, or a value is out of the range that a recipe allows.
    """
    kind, draft = _kind_of(tree), Draft()
    read = read_axolotl if kind == "axolotl" else read_llama_factory
    read(Keys(tree, draft), folder, draft)
    weigh_streams(draft)
    build_config(Recipe, draft.recipe, place="the recipe that comes of it: ")
    return Imported(kind, draft.recipe, draft.translated, draft.unknown, draft.assumed)


def run_import(path: Path, out: Path | None, as_json: bool) -> None:
    """Prints the recipe, or writes it to `out`; what was not understood goes to standard error.

    Raises:
        InputError: as `import_recipe`; the file is no YAML mapping; or `out` is there already or cannot be written.
    """
    if out is not None and out.suffix not in (".yaml", ".yml"):
        raise InputError(f"{out}: a recipe's name ends in .yaml")
    tree = _read(path)
    try:
        imported = import_recipe(tree, path.parent)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    text = yaml.safe_dump(imported.recipe, sort_keys=False, allow_unicode=True, width=120)
    if out is not None:
        _write(out, text)
    if as_json:
        unknown = [{"key": key, "reason": reason} for key, reason in imported.unknown]
        answer = {"kind": imported.kind, "recipe": imported.recipe, "unknown": unknown, "assumed": imported.assumed}
        print(json.dumps(answer, ensure_ascii=False))
        return
    if out is None:
        print(text, end="")
    for line in notes(imported):
        print(line, file=sys.stderr)
    if out is not None:
        print(f"{out} is written. See what it trains on: burnish inspect {out}")


def notes(imported: Imported) -> list[str]:
    """Lines that say what the recipe lacks, keys of one reason together, and what was assumed."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in imported.unknown:
        by_reason.setdefault(reason, []).append(key)
    lines = [f"not understood: {', '.join(keys)} ({reason})" for reason, keys in by_reason.items()]
    return [*lines, *(f"assumed: {line}" for line in imported.assumed)]


def _kind_of(tree: Mapping[str, Any]) -> Kind:
    found = {kind: [key for key in telling if key in tree] for kind, telling in _TELLING.items()}
    kinds: list[Kind] = [kind for kind, keys in found.items() if keys]
    if len(kinds) == 1:
        return kinds[0]
    told = "; ".join(f"{_NAMES[kind]}'s has {', '.join(keys)}" for kind, keys in _TELLING.items())
    if kinds:
        raise InputError(f"keys of two tools are in it ({', '.join(found[kinds[0]] + found[kinds[1]])}): {told}")
    raise InputError(f"neither Axolotl's configuration nor LLaMA-Factory's: {told}")


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.is_file() and not path.read_text(encoding="utf-8").strip():
            raise InputError(f"{path}: is empty; give the configuration of Axolotl or LLaMA-Factory")
    except UnicodeDecodeError:
        pass  # read_yaml says so
    return read_yaml(path)


def _write(out: Path, text: str) -> None:
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InputError(f"{out}: is there already; give another name, or remove it") from None
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
