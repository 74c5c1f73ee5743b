"""A faster way to the same tokens: words that were tokenised before are looked up.

Byte-level BPE tokenizers (GPT-2's, Llama 3's, Qwen's, SmolLM's) first cut a text into words by regular expressions and
then tokenise each word by itself. The `tokenizers` library spends most of its time in that cutting. On Latin text
Python's own `re` cuts the same words, and a word's tokens are asked of the library once. Text with other characters,
and tokenizers that work otherwise, are left to the library.
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
# Beyond ASCII: Latin letters (but for ſ, which some take for an s), punctuation and signs. None is a space or a digit,
# and NFC changes none.
_LETTERS = "ªµºÀ-ÖØ-öø-žƀ-ɏ"
_SIGNS = "¡-©«¬®-±´¶-¸»¿×÷‐-‧‰-⁞₠-₿←-⇿−"
_OTHER = re.compile(f"[^\\x00-\\x7f{_LETTERS}{_SIGNS}]")
# What is left of Unicode's classes in these, and in ASCII alone.
_CLASSES = {"L": f"A-Za-z{_LETTERS}", "N": "0-9", "M": ""}
_CASES = {"Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": ""}
# The character that byte-level tokens write for each byte: itself where it is seen, else one from U+0100 on.
_SEEN = {*range(33, 127), *range(161, 173), *range(174, 256)}
_UNSEEN = [byte for byte in range(256) if byte not in _SEEN]
_BYTES = [chr(byte) if byte in _SEEN else chr(256 + _UNSEEN.index(byte)) for byte in range(256)]
_MOST_WORDS = 1_000_000  # remembered; then all are forgotten


class Words:
    """Tokenises Latin text as `backend` does; where its expressions tell cases apart, ASCII text.

    Args:
        backend: a tokenizer that `Words.of` found fit.
        patterns: expressions that cut a text, and what it was cut into, one after the other.
        added: the added tokens as tokenizer.json lists them; they are cut out first.
    """

    def __init__(self, backend: "Backend", patterns: list[str], added: list[dict[str, Any]]) -> None:
        self._stages = [re.compile(_written_out(pattern), re.ASCII) for pattern in patterns]
        self._only_ascii = any(f"\\p{{{name}}}" in pattern for pattern in patterns for name in _CASES)
        self._added: dict[str, int] = {token["content"]: token["id"] for token in added}
        # The library looks for those it takes as they are before those it normalises as it does the text.
        kinds = ([token["content"] for token in added if token["normalized"] is wanted] for wanted in (False, True))
        self._cuts = [_any_of(contents) for contents in kinds if contents]
        self._ids = _Memo(backend)
        # Bytes of each token: byte-level tokens have a character for every one.
        vocabulary = backend.get_vocab()
        self._lengths = np.zeros(max(vocabulary.values(), default=0) + 1, np.int64)
        for token, id in vocabulary.items():
            self._lengths[id] = len(token.encode() if token in self._added else token)

    @classmethod
    def of(cls, backend: "Backend") -> "Words | None":
        """None where the tokenizer is not byte-level BPE, or cuts words by rules that are not understood."""
        description = json.loads(backend.to_str())
        model, added = description["model"], description["added_tokens"]
        plain = not any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in added)
        if model["type"] != "BPE" or model.get("dropout") or not plain:
            return None
        if (description["normalizer"] or {"type": "NFC"})["type"] != "NFC":
            return None
        patterns = _patterns(description["pre_tokenizer"])
        return None if patterns is None else cls(backend, patterns, added)

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Ids (int32), and the character each starts at (int64); None where the library has to do it."""
        if not text.isascii() and (self._only_ascii or _OTHER.search(text)):
            return None
        if len(self._ids) > _MOST_WORDS:
            self._ids.clear()
        ids = self._without_added(text, self._cuts)
        found = np.array(ids, np.int32)
        lengths = self._lengths[found]
        ends = lengths.cumsum()
        starts, size = ends - lengths, len(text)
        if not text.isascii():  # from bytes to characters; a byte within a character is of that one
            first = (np.frombuffer(text.encode(), np.uint8) & 0xC0) != 0x80
            size = len(first)
            starts = (first.cumsum() - 1)[np.minimum(starts, size - 1)]
        if text and (not ids or ends[-1] != size):  # an expression that does not cover the text
            return None
        return found, starts

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
        words = self._stages[0].findall(text)
        for stage in self._stages[1:]:
            words = list(chain.from_iterable(map(stage.findall, words)))
        return list(chain.from_iterable(map(self._ids.__getitem__, words)))


class _Memo(dict[str, tuple[int, ...]]):
    """A word's ids, found when first asked for: of the model itself, for the word is not to be cut again."""

    def __init__(self, backend: "Backend") -> None:
        super().__init__()
        self._model = backend.model

    def __missing__(self, word: str) -> tuple[int, ...]:
        spelt = "".join(map(_BYTES.__getitem__, word.encode()))
        ids = self[word] = tuple(token.id for token in self._model.tokenize(spelt))
        return ids


def _any_of(contents: list[str]) -> re.Pattern[str]:
    return re.compile("(" + "|".join(map(re.escape, sorted(contents, key=len, reverse=True))) + ")")


def _patterns(rule: dict[str, Any] | None) -> list[str] | None:
    """The expressions of a pre-tokenizer that ends in ByteLevel; None where there is another rule among them."""
    if rule is None:
        return None
    rules: list[dict[str, Any]] = rule["pretokenizers"] if rule["type"] == "Sequence" else [rule]
    if not rules or rules[-1]["type"] != "ByteLevel" or rules[-1]["add_prefix_space"]:
        return None
    patterns = [_pattern(each) for each in rules[:-1]]
    if rules[-1]["use_regex"]:
        patterns[-1:] = [_DIGITS_GPT2] if patterns[-1:] == [_DIGITS] else [*patterns[-1:], _GPT2]
    understood = [pattern for pattern in patterns if pattern is not None and _means_the_same(pattern)]
    return understood if patterns and len(understood) == len(patterns) else None


def _pattern(rule: dict[str, Any]) -> str | None:
    if rule["type"] == "Digits":
        return _DIGITS if rule["individual_digits"] else "[0-9]+|[^0-9]+"
    if rule["type"] == "Split" and "Regex" in rule["pattern"] and rule["behavior"] == "Isolated" and not rule["invert"]:
        return rule["pattern"]["Regex"]
    return None


def _means_the_same(pattern: str) -> bool:
    """Whether the library and `re` read an expression alike."""
    if not _UNDERSTOOD.fullmatch(pattern) or set(_PROPERTY.findall(pattern)) - {*_CLASSES, *_CASES}:
        return False
    written = _written_out(pattern)
    if "[]" in written or "[^]" in written:  # a class of which nothing is left
        return False
    try:
        re.compile(written, re.ASCII)
    except re.error:
        return False
    return True


def _written_out(pattern: str) -> str:
    r"""The expression with \p{...} as a class, or as a part of the class it stands in."""
    classes = _CLASSES | _CASES
    return "".join(
        part
        if part == (inner := _PROPERTY.sub(lambda match: classes[match[1]], part))
        else inner
        if part.startswith("[")
        else f"[{inner}]"
        for part in _PART.findall(pattern)
    )
