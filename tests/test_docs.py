"""The documentation says what the program does."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_recipe_reference_is_that_of_the_schema() -> None:
    spec = importlib.util.spec_from_file_location("make", ROOT / "docs" / "make_recipe_reference.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert module.reference() == written, "run: python docs/make_recipe_reference.py"
