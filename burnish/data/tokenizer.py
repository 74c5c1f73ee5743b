"""Text to token ids and back, on the `tokenizers` library.

    tokenizer = Tokenizer.from_folder("SmolLM2-135M-Instruct/")
    ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True))
    text = tokenizer.decode(ids)

The ids equal those of transformers' `AutoTokenizer` on the same files. Nothing is ever added that was not
asked for: `encode` gives the text's ids alone, and one BOS where the model wants it and `add_bos=True` asks.
(`burnish.convert.gguf_tokenizer` builds the same class from a GGUF file.)
"""

import copy
import datetime
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish.data import tokenizer_files as files
from burnish.data.chat import ChatTemplate, default_variables
from burnish.data.words import Words
from burnish.errors import InputError

if TYPE_CHECKING:
    import tokenizers


class Tokenizer:
    """A vocabulary, its special tokens and its chat template.

    Args:
      backend: the `tokenizers.Tokenizer` that does the work. It belongs to this object from now on.
      special_tokens: named special tokens, as `{"bos_token": "<s>", "eos_token": "</s>"}`. Those the backend
        does not know as special yet are made so. All of them are variables of the chat template.
      chat_templates: templates by name. "default" is the usual one; "tool_use", where given, serves
        renderings with tools.
      stop_ids: further ids that end a turn, beside eos and the chat template's terminator.
      model_max_length: the longest sequence the model was made for, in tokens; None where it is not known.
      name: where this came from, for error messages.

    Attributes:
      vocab_size: number of tokens, added ones included. A model may have more rows than that, for padding.
      bos_id, eos_id, pad_id: ids of the named tokens, or None. Never tell padding by id: pad may equal eos.
      adds_bos: whether the model wants a BOS before its text.
      added_ids: ids of the added tokens: found in a text before anything else, whatever stands around them.
      special_ids: ids that `decode` leaves out.
    """

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        stop_ids: Iterable[int] = (),
        model_max_length: int | None = None,
        name: str = "this tokenizer",
    ) -> None:
        # A tokenizer.json may ask for cut or padded sequences; here lengths are the caller's affair.
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = dict(special_tokens or {})
        files.make_special(backend, self.special_tokens.values())
        self.backend = backend
        self.chat_templates = dict(chat_templates or {})
        self.model_max_length = model_max_length
        self.name = name
        self.template_name = f"of {name}"
        self.date: datetime.date | None = None  # what templates take for today; None for today
        self._more_stop_ids = tuple(stop_ids)

        self.vocab_size: int = backend.get_vocab_size()
        self.bos_id = self._id_of("bos_token")
        self.eos_id = self._id_of("eos_token")
        self.pad_id = self._id_of("pad_token")
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.adds_bos, self._adds_eos = files.wrapping(
            backend, self.special_tokens.get("bos_token"), self.special_tokens.get("eos_token")
        )

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    # ---- ids

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        """Token ids of a text. Special tokens written in the text become their ids.

        Args:
          text: any text that has a UTF-8 form.
          add_bos: begin with exactly one BOS if the model wants one (`adds_bos`), also where the text brings
            it.

        Raises:
          InputError: half a surrogate pair in the text.
        """
        _check_text(text)
        return self._with_bos(self.backend.encode(text, add_special_tokens=False).ids, add_bos)

    def _with_bos(self, ids: list[int], add_bos: bool) -> list[int]:
        if add_bos and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def encode_with_starts(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """`encode` (int32 [tokens]), and for each token the character of the text that it starts at (int64 [tokens]).

        Tokens that share a character (a rare one, cut into bytes) start at the same.
        """
        found = self._words.encode(text) if self._words else None
        if found is not None:
            return found
        _check_text(text)
        encoding = self.backend.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32), np.array([start for start, _ in encoding.offsets], np.int64)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same for tokenizers that give the same ids and render the same; in another process, too."""
        day = str(self.date or datetime.date.today()) if self.writes_date else None
        parts = [self.backend.to_str(), self.special_tokens, self.chat_templates, self.adds_bos, day]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @functools.cached_property
    def _words(self) -> Words | None:
        return Words.of(self.backend)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of token ids. Bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode([int(id) for id in ids], skip_special_tokens=skip_special)

    def has_token(self, token: str) -> bool:
        """Whether a text is one token in the midst of others; a word of the vocabulary may yet be cut up there."""
        return any(self.decode([id], skip_special=False) == token for id in self.encode(f"a{token} a"))

    # ---- conversations

    @property
    def chat_template(self) -> str | None:
        """Text of the default chat template; None where the model has none."""
        return self.chat_templates.get("default")

    def with_chat_template(self, source: str, name: str | None = None) -> "Tokenizer":
        """The same tokenizer with another chat template, which errors call `name`.

        Raises:
          InputError: the text is not a valid template.
        """
        other = self._with_templates({"default": source})
        other.template_name = name or self.template_name
        other._template(with_tools=False)
        return other

    def with_template_variables(self, variables: Mapping[str, Any]) -> "Tokenizer":
        """The same tokenizer, whose chat templates find these variables set where a caller does not set them.

        They are written into the templates, and so go wherever those go.

        Raises:
          InputError: there is no template, or a value cannot be written in one.
        """
        if not variables:
            return self
        if not self.chat_templates:
            raise InputError(f"data.template_variables are set, but {self.name} has no chat template; take them away")
        head = default_variables(variables)
        return self._with_templates(
            {name: text if text.startswith(head) else head + text for name, text in self.chat_templates.items()}
        )

    def _with_templates(self, templates: dict[str, str]) -> "Tokenizer":
        other = copy.copy(self)
        other.chat_templates = templates
        for cached in ("stop_ids", "_compiled", "fingerprint"):
            other.__dict__.pop(cached, None)
        return other

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """A conversation as the model's chat template writes it, with BOS where the template puts one.

        Args:
          messages: `{"role": ..., "content": ...}`, oldest first.
          add_generation_prompt: end with the header of the assistant's turn.
          tools: JSON schemas of functions.
          **variables: further names the template reads, as `enable_thinking=False`.

        Raises:
          InputError: no template, or one that is broken or refuses these messages.
        """
        template = self._template(with_tools=tools is not None)
        return template.render(messages, add_generation_prompt, tools, self._variables(variables))

    def render_marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """A whole conversation, and the (start, end) characters of what its template marks by `{% generation %}`.

        Raises:
          InputError: as `render`; or the template marks nothing.
        """
        template = self._template(with_tools=tools is not None)
        return template.render_marked(messages, tools, self._variables(variables))

    def _variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        dated = {} if self.date is None else {"strftime_now": self.date.strftime}
        return {**self.special_tokens, **dated, **given}

    @property
    def writes_date(self) -> bool:
        """Whether a chat template asks for the day."""
        return any("strftime_now" in text for text in self.chat_templates.values())

    def with_date(self, date: datetime.date) -> "Tokenizer":
        """The same tokenizer, for whose chat templates it is always this day."""
        other = self._with_templates(self.chat_templates)
        other.date = date
        return other

    @functools.cached_property
    def _compiled(self) -> dict[str, ChatTemplate]:
        return {}

    def _template(self, with_tools: bool) -> ChatTemplate:
        name = "tool_use" if with_tools and "tool_use" in self.chat_templates else "default"
        if name not in self.chat_templates:
            others = f" (only ones named {', '.join(sorted(self.chat_templates))})" if self.chat_templates else ""
            raise InputError(
                f"{self.name} has no chat template{others}: train it on plain text or prompt and completion, "
                "take its instruction-tuned sibling, or put a chat_template.jinja beside its tokenizer.json"
            )
        if name not in self._compiled:
            self._compiled[name] = ChatTemplate(self.chat_templates[name], self.template_name)
        return self._compiled[name]

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a turn: eos, what the chat template puts after an answer, and the model's own list."""
        ids = (self.eos_id, self._turn_end(), *self._more_stop_ids)
        return tuple(dict.fromkeys(id for id in ids if id is not None))

    def _turn_end(self) -> int | None:
        """The special token that follows an answer in a rendered probe; None where none follows."""
        if self.chat_template is None:
            return None
        probe = "burnishprobe"
        try:
            text = self.render([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": probe}])
        except InputError:
            # A template that takes no such conversation says nothing of its terminator. Rendering the user's
            # own conversation reports whatever is wrong with it.
            return None
        _, found, tail = text.rpartition(probe)
        first = self.encode(tail.lstrip())[:1] if found else []
        return first[0] if first and first[0] in self.added_ids else None

    # ---- files

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> "Tokenizer":
        """Reads a folder in Hugging Face's layout.

        Needed: tokenizer.json. Read where they are: tokenizer_config.json, special_tokens_map.json,
        chat_template.jinja, additional_chat_templates/, and the eos lists of generation_config.json and
        config.json.

        Raises:
          InputError: a file is missing or cannot be used.
        """
        folder = Path(folder)
        backend = files.read_backend(folder)
        config = files.read_json(folder / "tokenizer_config.json")
        special_tokens = files.read_special_tokens(folder, config)
        files.add_tokens(backend, config, special_tokens, folder / "tokenizer_config.json")
        limit = config.get("model_max_length")
        return cls(
            backend,
            special_tokens,
            files.read_chat_templates(folder, config),
            stop_ids=files.read_eos_lists(folder),
            model_max_length=int(limit) if isinstance(limit, int | float) and 0 < limit < 1e15 else None,
            name=str(folder),
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the files from which `from_folder` and transformers' `AutoTokenizer` read this tokenizer.

        These are tokenizer.json, tokenizer_config.json, special_tokens_map.json, and the chat templates as
        chat_template.jinja and additional_chat_templates/NAME.jinja. Other files of the folder stay as they
        are, but for chat templates that this tokenizer does not have.
        """
        config = {
            "add_bos_token": self.adds_bos,
            "add_eos_token": self._adds_eos,
            "model_max_length": self.model_max_length,
        }
        files.write(Path(folder), self.backend, self.special_tokens, self.chat_templates, config)


class StreamDecoder:
    """Decodes one token at a time, for printing an answer while it is made.

    What `push` returns, joined, and `flush` at the end, is `tokenizer.decode(ids, skip_special)`. Text is
    held back while it may still change: a character of which some bytes are missing, or a run of byte tokens.

        stream = StreamDecoder(tokenizer)
        for id in ids:
            print(stream.push(id), end="", flush=True)
        print(stream.flush())
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._byte_fallback = bool(getattr(tokenizer.backend.model, "byte_fallback", False))
        # `_shown` are the last tokens whose text is out; they stay as context, because decoders treat the
        # first token of a sequence differently (a leading space is dropped). `_held` are the tokens after
        # them.
        self._shown: list[int] = []
        self._held: list[int] = []

    def push(self, id: int) -> str:
        """The text that this token settles; often "", as inside an emoji."""
        id = int(id)
        if id in self._skipped:
            return ""
        self._held.append(id)
        if self._byte_fallback and self._is_byte(id):
            # One wrong byte turns its whole run into U+FFFD, so a run is settled by what follows it.
            return ""
        text = self._held_text()
        return "" if text.endswith("\ufffd") else self._show(text)

    def flush(self) -> str:
        """What is still held back, as it is. Call it once, after the last token."""
        return self._show(self._held_text())

    def _held_text(self) -> str:
        before = self._decode(self._shown)
        return self._decode(self._shown + self._held)[len(before) :]

    def _show(self, text: str) -> str:
        if text:
            self._shown, self._held = self._held, []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=False)

    def _is_byte(self, id: int) -> bool:
        token = self._tokenizer.backend.id_to_token(id) or ""
        return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(
            f"character {error.start} of the text is half a surrogate pair (U+{ord(text[error.start]):04X}), "
            "which has no UTF-8 form; write the whole character or take it out"
        ) from error
