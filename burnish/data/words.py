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
# What is left of Unicode's classes in ASCII.
_CLASSES = {"L": "A-Za-z", "N": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}
_MOST_WORDS = 1_000_000  # remembered; then all are forgotten


class Words:
    """Tokenises ASCII text as `backend` does.

    Args:
        backend: a tokenizer that `Words.of` found fit.
        stages: expressions that cut a text, and what it was cut into, one after the other.
        added: content -> id of the added tokens, which are cut out first.
    """

    def __init__(self, backend: "Backend", stages: list[re.Pattern[str]], added: dict[str, int]) -> None:
        self._stages = stages
        self._added = added
        longest_first = sorted(added, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if added else None
        self._ids = _Memo(backend)
        # Characters of each token: byte-level tokens have one for every byte.
        self._lengths = np.zeros(backend.get_vocab_size(), np.int64)
        for token, id in backend.get_vocab().items():
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
        if stages is None:
            return None
        return cls(backend, stages, {token["content"]: token["id"] for token in added})

    def encode(self, text: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Ids (int32), and the character each starts at (int64); None where the library has to do it."""
        if not text.isascii():
            return None
        if len(self._ids) > _MOST_WORDS:
            self._ids.clear()
        if self._cut is None:
            ids = self._plain(text)
        else:
            ids = []
            for number, piece in enumerate(self._cut.split(text)):
                if number % 2:
                    ids.append(self._added[piece])
                elif piece:
                    ids += self._plain(piece)
        found = np.array(ids, np.int32)
        lengths = self._lengths[found]
        ends = lengths.cumsum()
        if text and (not ids or ends[-1] != len(text)):  # an expression that does not cover the text
            return None
        return found, ends - lengths

    def _plain(self, text: str) -> list[int]:
        words = [text]
        for stage in self._stages:
            words = list(chain.from_iterable(map(stage.findall, words)))
        return list(chain.from_iterable(map(self._ids.__getitem__, words)))


class _Memo(dict[str, tuple[int, ...]]):
    """A word's ids, found when first asked for."""

    def __init__(self, backend: "Backend") -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = self[word] = tuple(self._backend.encode(word, add_special_tokens=False).ids)
        return ids


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
    r"""The expression for ASCII text, with \p{...} written out; None where Python's `re` cannot say it."""
    written, in_class = "", False
    for part in re.findall(r"\\p\{\w+\}|\\.|.", pattern, re.DOTALL):
        if part.startswith(r"\p{"):
            inside = _CLASSES.get(part[3:-1])
            if inside is None or not (inside or in_class):
                return None
            written += inside if in_class else f"[{inside}]"
            continue
        in_class = part == "[" or (in_class and part != "]")
        written += part
    try:
        found = re.compile(written, re.ASCII)
    except re.error:
        return None
    return None if found.groups else found
