"""Chat templates by the tools' names of them."""

from collections.abc import Mapping, Sequence

from burnish.cli.importing.keys import Draft, Keys

_MODELS_OWN = "the model's own"
_NONE = (
    "no template of Burnish's writes quite that, so the model's own is taken; data.chat_template takes a .jinja file"
)
_INLINE = "save it as template.jinja, and set data.chat_template: template.jinja; for now the model's own is taken"

# Only names whose templates write the same text, so that nothing is trained in another form than before.
AXOLOTL = {
    "tokenizer_default": _MODELS_OWN,
    "chatml": "chatml",
    "llama3": "llama3",
    "gemma": "gemma",
    "gemma3": "gemma",
    "mistral_v2v3": "mistral",
    "qwen3": "qwen3",
    "phi_3": "phi",
    "phi_35": "phi",
}
LLAMA_FACTORY = {
    "chatml": "chatml",
    "llama3": "llama3",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3": "gemma",
    "mistral": "mistral",
    "qwen": "chatml",  # with a system message of its own
    "qwen3": "qwen3",
    "phi": "phi",
}


def put_template(keys: Keys, draft: Draft, key: str, names: Mapping[str, str]) -> None:
    """Translates a template's name into `data.chat_template`."""
    name = keys.text(key)
    if name and name.startswith("tokenizer_default_fallback_"):
        keys.refuse(key, "the model's own is taken; for a base model without one set data.chat_template")
    elif name and name not in names:
        keys.refuse(key, _NONE)
    elif name and names[name] != _MODELS_OWN:
        draft.put("data.chat_template", names[name])


def put_shared_template(holders: Sequence[Keys], draft: Draft) -> None:
    """The one template of Axolotl's file (first) and its data sets: theirs where they agree, else the file's."""
    top, *own = (_named(keys) for keys in holders)
    effective = {name or top for name in own}
    chosen = effective.pop() if len(effective) == 1 else top
    for keys, name in zip(holders, (top, *own), strict=True):
        if name and name != chosen:
            for key in _KEYS:
                if keys.has(key):
                    keys.refuse(key, "one template makes all rows, and another is taken: data.chat_template")
        elif name and name.endswith(".jinja"):
            draft.put("data.chat_template", name)
        elif name and keys.has("chat_template_jinja") and name == keys.get("chat_template_jinja"):
            keys.refuse("chat_template_jinja", _INLINE)
        elif name:
            put_template(keys, draft, "chat_template" if keys.has("chat_template") else "conversation", AXOLOTL)


_KEYS = ("chat_template", "chat_template_jinja", "conversation")


def _named(keys: Keys) -> str | None:
    """The template that a mapping names: by name, as a file, or as its whole text."""
    name, own, old = (keys.text(key) for key in _KEYS)
    if own and name not in (None, "jinja"):
        keys.refuse("chat_template_jinja", f"chat_template names {name}")
    return own if own and name in (None, "jinja") else name or old
