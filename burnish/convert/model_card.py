"""README.md of what is written: front matter the Hub reads, and a few lines a person reads."""

from pathlib import Path
from typing import Any

import yaml

from burnish.convert.builtin import BUILT_IN
from burnish.wrapper import Origin


def hf_card(origin: Origin, *, parameters: int, dtype: str, merged_adapters: bool, chat: bool) -> str:
    """The card of a whole model."""
    title = _base_title(origin) or "A language model"
    text = [
        f"# {title}",
        "",
        f"{parameters:,} parameters in {dtype}, written by Burnish from `{_base_title(origin) or origin.family}`"
        + (", its low-rank adapters merged into the weights." if merged_adapters else "."),
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")',
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")',
        "```",
        "",
        *_chat_note(chat),
        *_source_note(origin),
        "What it was trained on, what it is good at and what it must not be used for is not known to the program that",
        "wrote this card: add it here before you share the model.",
    ]
    return _front_matter(origin, library="transformers", tags=["burnish", origin.family or "decoder"]) + _join(text)


def peft_card(origin: Origin, *, parameters: int, base: str, rows: int | None = None) -> str:
    """The card of an adapter; rows: of the embedding that lies beside it, where tokens were added."""
    text = [
        f"# A LoRA adapter for {_base_title(origin) or 'a language model'}",
        "",
        f"{parameters:,} adapter parameters, written by Burnish for the base model `{_shown(base)}`.",
        "",
        *_peft_use(base, origin, rows),
        "",
        "What it was trained on and what it is good at is not known to the program that wrote this card: add it here",
        "before you share the adapter.",
    ]
    return _front_matter(origin, library="peft", tags=["burnish", "lora"]) + _join(text)


def license_of(origin: Origin) -> str | None:
    """The base's licence, from the built-in table or the front matter of the README.md beside it; None if unknown."""
    if origin.base in BUILT_IN:
        return BUILT_IN[origin.base].license.lower()
    readme = origin.path / "README.md" if origin.path is not None else None
    if readme is None or not readme.is_file():
        return None
    _, fence, rest = readme.read_text(encoding="utf-8", errors="replace").partition("---\n")
    matter, closed, _ = rest.partition("\n---")
    try:
        found = yaml.safe_load(matter) if fence and closed else None
    except yaml.YAMLError:
        return None  # somebody's card is broken; that says nothing about the licence
    value = found.get("license") if isinstance(found, dict) else None
    return value if isinstance(value, str) else None


def _front_matter(origin: Origin, *, library: str, tags: list[str]) -> str:
    base = _hub_id(origin)
    matter: dict[str, Any] = {
        **({"license": found} if (found := license_of(origin)) else {}),
        **({"base_model": base} if base else {}),
        "library_name": library,
        "pipeline_tag": "text-generation",
        "tags": tags,
    }
    return "---\n" + yaml.safe_dump(matter, sort_keys=False) + "---\n\n"


def _hub_id(origin: Origin) -> str | None:
    """The base's id on the Hub, the only form its cards may name; None for a file or folder."""
    if origin.base in BUILT_IN:
        return BUILT_IN[origin.base].upstream
    named = origin.base.count("/") == 1 and not origin.base.startswith(("/", ".", "~"))
    return origin.base if named and origin.path is not None and not Path(origin.base).exists() else None


def _base_title(origin: Origin) -> str:
    if origin.base in BUILT_IN:
        return BUILT_IN[origin.base].title
    return _hub_id(origin) or (origin.path.name if origin.path is not None else "")


def _shown(base: str) -> str:
    """The base as a reader elsewhere may see it: no paths of the machine it was written on."""
    return Path(base).name if Path(base).is_absolute() else base


def _peft_use(base: str, origin: Origin, rows: int | None) -> list[str]:
    converted = origin.path is not None and origin.path.suffix == ".gguf"
    given = "base/" if converted else _shown(base)
    text = []
    if converted:
        text = [
            f"The base is a quantized GGUF file (`{_shown(base)}`), of which the adapter saw the dequantized weights.",
            "Burnish loads this folder as it is. For peft, write the base in a form that transformers reads:",
            "",
            "```bash",
            f"burnish export {_shown(base)} --format hf --out base/",
            "```",
            "",
        ]
    return [
        *text,
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f'base = AutoModelForCausalLM.from_pretrained("{given}")',
        *([] if rows is None else [f"base.resize_token_embeddings({rows})  # tokens were added"]),
        'model = PeftModel.from_pretrained(base, "path/to/this/folder")',
        "```",
    ]


def _chat_note(chat: bool) -> list[str]:
    return ["It has a chat template: build prompts with `tokenizer.apply_chat_template`.", ""] if chat else []


def _source_note(origin: Origin) -> list[str]:
    if origin.path is None or origin.path.suffix != ".gguf":
        return []
    return ["The base was a quantized GGUF file, so these weights are dequantized ones.", ""]


def _join(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
