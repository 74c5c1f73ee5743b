"""The files of a tokenizer in Hugging Face's layout, read and written.

    tokenizer.json                     vocabulary, merges, how text is cut: the `tokenizers` library's file
    tokenizer_config.json              named special tokens, length limit; in older folders chat templates
    special_tokens_map.json            named special tokens again (older transformers)
    chat_template.jinja                the chat template (transformers since 4.52)
    additional_chat_templates/*.jinja  further templates by name
    generation_config.json             ids at which generation stops

Where two files disagree, what transformers believes is believed.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# What transformers writes for "no limit is known".
_NO_LIMIT = int(1e30)
_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_FOLDER = "additional_chat_templates"


def read_text(path: Path) -> str:
    """A UTF-8 file as it is, line ends included."""
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); get the file again") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {error.lineno}: {error.msg}; get the file again or mend it") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a JSON {type(content).__name__}; it must hold an object")
    return content


def read_backend(folder: Path) -> "Backend":
    """tokenizer.json of a folder."""
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give one that holds tokenizer.json")
    if not path.exists():
        mend = "copy it from where the model came from"
        if (folder / "tokenizer.model").exists():
            mend = (
                "it has tokenizer.model only, from which transformers makes one: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        raise InputError(f"{folder} has no tokenizer.json; {mend}")
    text = read_text(path)
    try:
        return Backend.from_str(text)
    except Exception as error:  # the library raises bare Exception for whatever is wrong with a file
        raise InputError(f"{path} is no tokenizer ({' '.join(str(error).split())}); get the file again") from error


def read_special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens of a folder by name, as "bos_token"; `config` is its tokenizer_config.json."""
    named = _named_tokens(config)
    # transformers reads the map only beside a configuration that does not list the added tokens; there the
    # map wins.
    if "added_tokens_decoder" not in config:
        named.update(_named_tokens(read_json(folder / "special_tokens_map.json")))
    return named


def _named_tokens(content: Mapping[str, Any]) -> dict[str, str]:
    named = {key: _content(value) for key, value in content.items() if key.endswith("_token")}
    # Tokens of a model's own, as {"image_token": "<image>"}.
    extra = content.get("extra_special_tokens")
    if isinstance(extra, dict):
        named.update({key: _content(value) for key, value in extra.items()})
    return {key: token for key, token in named.items() if token is not None}


def _content(value: Any) -> str | None:
    """The token of `"<s>"` or `{"content": "<s>", ...}`; None for all else (add_bos_token is a boolean)."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def add_tokens(backend: "Backend", config: Mapping[str, Any], named: Mapping[str, str], path: Path) -> None:
    """Adds to the backend what the configuration at `path` says beyond tokenizer.json.

    These are tokens of `added_tokens_decoder` and `extra_special_tokens` that it lacks, and BOS and EOS
    around texts.

    Raises:
      InputError: an added token cannot have the id that the configuration gives it.
    """
    from tokenizers import AddedToken

    listed = config.get("added_tokens_decoder", {})
    try:
        wanted = {int(id): AddedToken(**token) for id, token in listed.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{path}: added_tokens_decoder is odd ({error}); get the file again") from error
    present = backend.get_added_tokens_decoder()
    for id, token in sorted(wanted.items()):
        if repr(present.get(id)) == repr(token):
            continue
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != id:
            raise InputError(
                f"{path}: added_tokens_decoder gives {token.content!r} the id {id}, but tokenizer.json "
                f"has it at {backend.token_to_id(token.content)}; the two files belong to different models"
            )
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    more = [_content(token) for token in extra] if isinstance(extra, list) else []
    make_special(backend, [*named.values(), *(token for token in more if token is not None)])

    # Older transformers took BOS and EOS from these two flags, whatever the post-processor did.
    bos, eos = named.get("bos_token"), named.get("eos_token")
    adds_bos, adds_eos = wrapping(backend, bos, eos)
    wants_bos = config.get("add_bos_token") is True and not adds_bos
    wants_eos = config.get("add_eos_token") is True and not adds_eos
    wrap_texts(backend, bos if wants_bos else None, eos if wants_eos else None)


def make_special(backend: "Backend", tokens: Iterable[str]) -> None:
    """Makes tokens special: they are found in text as wholes, and decoding can leave them out."""
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    new = [token for token in dict.fromkeys(tokens) if token not in known]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in new])


def wrapping(backend: "Backend", bos: str | None, eos: str | None) -> tuple[bool, bool]:
    """Whether the post-processor puts `bos` before a text, and `eos` after it: found by asking it."""
    bare, wrapped = (backend.encode("a", add_special_tokens=add).tokens for add in (False, True))
    return (
        bos is not None and wrapped[:1] == [bos] and bare[:1] != [bos],
        eos is not None and wrapped[-1:] == [eos] and bare[-1:] != [eos],
    )


def wrap_texts(backend: "Backend", bos: str | None, eos: str | None) -> None:
    """Makes the post-processor put `bos` before and `eos` after a text, beside what it does already."""
    from tokenizers.processors import Sequence as Processors
    from tokenizers.processors import TemplateProcessing

    if bos is None and eos is None:
        return
    before, after = ([] if token is None else [token] for token in (bos, eos))
    second = [*before, "$B", *after]
    wrap = TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{piece}:1" for piece in second)],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(before + after)],
    )
    present = backend.post_processor
    backend.post_processor = wrap if present is None else Processors([present, wrap])


def read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name, "default" for the usual one; files of their own win over the configuration."""
    named = {path.stem: read_text(path) for path in sorted((folder / _TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / _TEMPLATE_FILE).exists():
        named["default"] = read_text(folder / _TEMPLATE_FILE)
    value = config.get("chat_template")
    if named or value is None:
        return named
    if isinstance(value, str):
        return {"default": value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (KeyError, TypeError) as error:
        raise InputError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be text or a list of "
            '{"name": ..., "template": ...}; mend it'
        ) from error


def read_eos_lists(folder: Path) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json and config.json: an id or a list of ids."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        some = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(id, int) and not isinstance(id, bool) for id in some):
            raise InputError(f"{folder / name}: eos_token_id is {value!r}; it must be a token id or a list of them")
        ids += some
    return tuple(ids)


def write(
    folder: Path,
    backend: "Backend",
    special_tokens: Mapping[str, str],
    chat_templates: Mapping[str, str],
    config: Mapping[str, Any],
) -> None:
    """Writes what `AutoTokenizer.from_pretrained(folder)` reads; `config` goes into tokenizer_config.json.

    Each file is written whole or not at all. Chat templates that lie there already are replaced or taken
    away: they would serve in this tokenizer's name.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **config,
        "model_max_length": config.get("model_max_length") or _NO_LIMIT,
        **special_tokens,
    }
    contents = {
        "tokenizer.json": backend.to_str(pretty=True),
        "tokenizer_config.json": _json(config),
        "special_tokens_map.json": _json(dict(special_tokens)),
    }
    for name, source in chat_templates.items():
        contents[_TEMPLATE_FILE if name == "default" else f"{_TEMPLATE_FOLDER}/{name}.jinja"] = source
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(content.encode("utf-8"))
        part.replace(path)
    for path in (folder / _TEMPLATE_FILE, *(folder / _TEMPLATE_FOLDER).glob("*.jinja")):
        if path.relative_to(folder).as_posix() not in contents:
            path.unlink(missing_ok=True)


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"
