"""Chat templates by name, for base models, which come without one.

    tokenizer = use_template(tokenizer, "chatml")
    tokenizer = use_template(tokenizer, "my/own.jinja")

Each renders what the template of the models it is named after renders, character for character:

    chatml    <|im_start|>user ... <|im_end|>, and no system message of its own (OpenHermes and many others)
    llama3    Llama 3 Instruct, whose system message has no dates
    gemma     Gemma 3 and 2; the system message opens the first user turn
    mistral   Mistral 7B Instruct v0.3, without tools
    qwen3     Qwen 3, with reasoning and tools
    phi       Phi 3 and 3.5
    plain     ours: lines of "User: " and "Assistant: ", for a tokenizer that is to stay as it is

There are these differences. What a template has no place for (a role, a tool, reasoning) is refused, where the
original may leave it out. `gemma` keeps a system message, which Gemma 2 refuses. `mistral` puts it into the first user
turn: the original puts it into the last, and so moves it whenever a turn is added and drops it where an assistant turn
comes last; for one user turn both are the same. A tokenizer without BOS gets none.

What the model is to learn, an assistant turn with its terminator, stands in {% generation %} marks.
"""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from burnish.errors import InputError

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer

_FOLDER = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class NamedTemplate:
    """A chat template that comes with Burnish.

    Attributes:
      name: what a recipe calls it.
      source: the template's text, complete in itself.
      tokens: the special tokens it writes out; each has to be one token.
      end: the terminator of a turn; None where that is the tokenizer's own EOS.
    """

    name: str
    source: str
    tokens: tuple[str, ...]
    end: str | None


def _named(name: str, parts: tuple[str, ...], tokens: tuple[str, ...], end: str | None) -> NamedTemplate:
    source = "".join((_FOLDER / f"{part}.jinja").read_text(encoding="utf-8") for part in (*parts, name))
    return NamedTemplate(name, source, tokens, end)


_ALTERNATING = ("text_only", "alternating")
NAMED: dict[str, NamedTemplate] = {
    template.name: template
    for template in (
        _named("chatml", ("text_only",), ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
        _named("llama3", ("text_only",), ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
        _named("gemma", _ALTERNATING, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
        _named("mistral", _ALTERNATING, ("[INST]", "[/INST]"), None),
        # <think>, <tool_call> and the like are no special tokens in Qwen's own vocabulary either.
        _named("qwen3", (), ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
        _named("phi", ("text_only",), ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
        _named("plain", ("text_only",), (), None),
    )
}


def use_template(tokenizer: "Tokenizer", spec: str) -> "Tokenizer":
    """The same tokenizer with a chat template chosen by the user.

    Args:
      spec: a name in `NAMED`, the path of a file that ends in .jinja, or the text of a template.

    Raises:
      InputError: no such name or file, a file without a valid template, or a named template with a token that the
        tokenizer does not have as one token, or that needs an EOS where there is none.
    """
    spec = template_text(spec)
    if "{" in spec:
        return tokenizer.with_chat_template(spec, "data.chat_template")
    if spec not in NAMED:
        near = difflib.get_close_matches(spec.lower(), NAMED, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(
            f"{spec!r} is no chat template; {hint}known: {', '.join(NAMED)}, or the path of a file that ends in .jinja"
        )
    template = NAMED[spec]
    _check_tokens(tokenizer, template)
    return tokenizer.with_chat_template(template.source, template.name)


def template_text(spec: str) -> str:
    """The text of a .jinja file, which a recipe can carry with it; a name, and a text, as they are."""
    return _read(spec) if spec.endswith(".jinja") else spec


def _read(path: str) -> str:
    """The text of a template file, compiled once so that an error in it names the file."""
    from burnish.data.chat import ChatTemplate

    try:
        source = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"chat template {path}: not UTF-8 text; save the file as UTF-8") from error
    except (OSError, ValueError) as error:  # a path with a NUL in it is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"chat template {path}: cannot be read ({reason}); give a .jinja file, or one of {', '.join(NAMED)}"
        ) from error
    if "{{" not in source and "{%" not in source:
        raise InputError(f"chat template {path}: there is no Jinja template in it; write one that reads `messages`")
    return ChatTemplate(source, path).source


def _check_tokens(tokenizer: "Tokenizer", template: NamedTemplate) -> None:
    missing = [token for token in template.tokens if not tokenizer.has_token(token)]
    if missing:
        them = "it" if len(missing) == 1 else "them"
        raise InputError(
            f"chat template {template.name} writes {', '.join(missing)}, which {tokenizer.name} does not have as "
            f"{'a single token' if len(missing) == 1 else 'single tokens'}; "
            f"add {them}: vocabulary.add_tokens={json.dumps(missing)} (in Python: model.add_tokens)"
        )
    if template.end is None and tokenizer.eos_id is None:
        raise InputError(
            f"chat template {template.name} ends a turn with the tokenizer's EOS, and {tokenizer.name} has none; "
            "set eos_token in its tokenizer_config.json, or take another template"
        )
