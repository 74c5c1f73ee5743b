"""A faster way to the same tokens: words that were tokenised before are looked up.

Byte-level BPE tokenizers (GPT-2's, Llama 3's, Qwen's, SmolLM's) first cut a text into words by regular expressions and
then tokenise each word by itself. The `tokenizers` library spends most of its time in that cutting. On ASCII text
Python's own `re` cuts the same words, and a word's tokens are asked of the library once. Text that is not ASCII, and
tokenizers that work otherwise, are left to the library.
"""

import json
import re
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGITS = "[0-9]|[^0-9]+"
# The last after the first, in one expression: a digit is a word, and for what stands before it the text ends there.
_DIGITS_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|[0-9]| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
# The library's expressions are Oniguruma's, where `$`, `{1,3}+`, `[a[b]]` and more are read otherwise than by Python.
# What both read alike: escapes, classes without one in them, groups without a number, looking ahead, and repetition.
_ESCAPE = r"\\(?:[sSdrnt]|p\{\w+\}|[^\w\s])"
_CLASS = rf"\[\^?(?:{_ESCAPE}|&(?!&)|[^\\\[\]^&])+\]"
_UNDERSTOOD = re.compile(rf"(?:{_ESCAPE}|{_CLASS}|\(\?(?:i:|[:!=])|\)|\{{\d+(?:,\d*)?\}}(?![+?*])|[^\\\[\](){{}}^$.])*")
_PART = re.compile(rf"{_CLASS}|{_ESCAPE}|.", re.DOTALL)
_PROPERTY = re.compile(r"\\p\{(\w+)\}")
# What is left of Unicode's classes in ASCII.
_CLASSES = {"L": "A-Za-z", "N": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}
# The characters that byte-level tokens write for bytes which are not seen, of those in ASCII.
_BYTES = {byte: 256 + byte for byte in range(33)} | {127: 289}
_MOST_WORDS = 1_000_000  # remembered; then all are forgotten


class Words:
    """Tokenises ASCII text as `backend` does.

    Args:
        backend: a tokenizer that `Words.of` found fit.
        stages: expressions that cut a text, and what it was cut into, one after the other.
        added: the added tokens as tokenizer.json lists them; they are cut out first.
    """

    def __init__(self, backend: "Backend", stages: list[re.Pattern[str]], added: list[dict[str, Any]]) -> None:
        self._stages = stages
        self._added: dict[str, int] = {token["content"]: token["id"] for token in added}
        # The library looks for those it takes as they are before those it normalises as it does the text.
        kinds = ([token["content"] for token in added if token["normalized"] is wanted] for wanted in (False, True))
        self._cuts = [_any_of(contents) for contents in kinds if contents]
        self._ids = _Memo(backend)
        # Characters of each token: byte-level tokens have one for every byte.
        vocabulary = backend.get_vocab()
        self._lengths = np.zeros(max(vocabulary.values(), default=0) + 1, np.int64)
        for token, id in vocabulary.items():
            self._lengths[id] = len(token)

    @classmethod
    def of(cls, backend: "Backend") -> "Words | None":
        """None where the tokenizer is not byte-level BPE, or cuts words by rules that are not understood."""
        description = json.loads(backend.to_str())
        model, added = description["model"], description["added_tokens"]
        plain = not any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
        if model["type"] != "BPE" or model.get("dropout") or not plain:
            return None
        if (description["normalizer"] or {"type": "NFC"})["type"] != "NFC":  # changes nothing in ASCII
            return None
        stages = _stages(description["pre_tokenizer"])
        return None if stages is None else cls(backend, stages, added)

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Ids (int32), and the character each starts at (int64); None where the library has to do it."""
        if not text.isascii():
            return None
        if len(self._ids) > _MOST_WORDS:
            self._ids.clear()
        ids = self._without_added(text, self._cuts)
        found = np.array(ids, np.int32)
        lengths = self._lengths[found]
        ends = lengths.cumsum()
        if text and (not ids or ends[-1] != len(text)):  # an expression that does not cover the text
            return None
        return found, ends - lengths

    def _without_added(self, text: str, cuts: list[re.Pattern[str]]) -> list[int]:
        if not cuts:
            return self._plain(text)
        ids = []
        for number, piece in enumerate(cuts[0].split(text)):
            if number % 2:
                ids.append(self._added[piece])
            elif piece:
                ids += self._without_added(piece, cuts[1:])
        return ids

    def _plain(self, text: str) -> list[int]:
        words = [text]
        for stage in self._stages:
            words = list(chain.from_iterable(map(stage.findall, words)))
        return list(chain.from_iterable(map(self._ids.__getitem__, words)))


class _Memo(dict[str, tuple[int, ...]]):
    """A word's ids, found when first asked for: of the model itself, for the word is not to be cut again."""

    def __init__(self, backend: "Backend") -> None:
        super().__init__()
        self._model = backend.model

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = self[word] = tuple(token.id for token in self._model.tokenize(word.translate(_BYTES)))
        return ids


def _any_of(contents: list[str]) -> re.Pattern[str]:
    return re.compile("(" + "|".join(map(re.escape, sorted(contents, key=len, reverse=True))) + ")")


def _stages(rule: dict[str, Any] | None) -> list[re.Pattern[str]] | None:
    """The expressions of a pre-tokenizer that ends in ByteLevel; None where there is another rule among them."""
    if rule is None:
        return None
    rules: list[dict[str, Any]] = rule["pretokenizers"] if rule["type"] == "Sequence" else [rule]
    if not rules or rules[-1]["type"] != "ByteLevel" or rules[-1]["add_prefix_space"]:
        return None
    patterns = [_pattern(each) for each in rules[:-1]]
    if rules[-1]["use_regex"]:
        patterns[-1:] = [_DIGITS_GPT2] if patterns[-1:] == [_DIGITS] else [*patterns[-1:], _GPT2]
    stages = [None if pattern is None else _in_ascii(pattern) for pattern in patterns]
    return None if not stages or None in stages else stages  # type: ignore[return-value]


def _pattern(rule: dict[str, Any]) -> str | None:
    if rule["type"] == "Digits":
        return _DIGITS if rule["individual_digits"] else "[0-9]+|[^0-9]+"
    if rule["type"] == "Split" and "Regex" in rule["pattern"] and rule["behavior"] == "Isolated" and not rule["invert"]:
        return rule["pattern"]["Regex"]
    return None


def _in_ascii(pattern: str) -> re.Pattern[str] | None:
    r"""The expression for ASCII text, with \p{...} written out; None where it may mean something else to `re`."""
    if not _UNDERSTOOD.fullmatch(pattern):
        return None
    written = ""
    for part in _PART.findall(pattern):
        in_class = part.startswith("[")
        names = _PROPERTY.findall(part)
        if any(name not in _CLASSES for name in names):
            return None
        part = _PROPERTY.sub(lambda match: _CLASSES[match[1]], part)
        if names and not in_class:
            part = f"[{part}]"
        if part in ("[]", "[^]"):  # nothing of it is ASCII
            return None
        written += part
    try:
        return re.compile(written, re.ASCII)
    except re.error:
        return None
