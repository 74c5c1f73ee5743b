"""A tokenizer from a GGUF file's metadata.

A GGUF holds the vocabulary and a few flags under `tokenizer.*` keys (specification: github.com/ggml-org/ggml,
docs/gguf.md), not the rules by which text is cut. Those follow from two names:

    tokenizer.ggml.model == "gpt2"     byte-level BPE. Text is cut into words by regular expressions, which
                                       `tokenizer.ggml.pre` names; merges are in the file.
    tokenizer.ggml.model == "llama"    SentencePiece BPE (Kudo & Richardson 2018, arXiv:1808.06226). Spaces
                                       are "▁", what the vocabulary lacks becomes bytes <0x00>..<0xFF>;
                                       merges follow from the tokens' scores.

The rules are those of the models' published tokenizer.json files. transformers' own GGUF reader cuts text
less exactly in places (it leaves out "smollm"'s single digits, Qwen's NFC and Llama 3's whole-word look-up).
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from burnish.data.tokenizer import Tokenizer
from burnish.data.tokenizer_files import wrap_texts
from burnish.errors import InputError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer as Backend

T = TypeVar("T")

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_SPACE = "▁"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Cutting(NamedTuple):
    """How byte-level BPE cuts text into words."""

    pattern: str | None = None  # None: GPT-2's, which the library has built in
    single_digits: bool = False  # each digit is a word of its own, before the pattern is asked
    compose: bool = False  # Unicode NFC first
    whole_words: bool = False  # a word that is in the vocabulary is one token, whatever the merges say
    adds_bos: bool = False  # where the file does not say


_GPT2 = _Cutting()
_CUTTINGS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _Cutting(single_digits=True),
    "llama-bpe": _Cutting(_LLAMA3, whole_words=True, adds_bos=True),
    "llama3": _Cutting(_LLAMA3, whole_words=True, adds_bos=True),
    "llama-v3": _Cutting(_LLAMA3, whole_words=True, adds_bos=True),
    "smaug-bpe": _Cutting(_LLAMA3),
    "qwen2": _Cutting(_QWEN2, compose=True),
    "deepseek-r1-qwen": _Cutting(_QWEN2, compose=True),
    "tekken": _Cutting(_TEKKEN, whole_words=True, adds_bos=True),
}
_NAMED_IDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # the specification's spelling
    "pad_token": "tokenizer.ggml.padding_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}
_STOP_IDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def tokenizer_from_gguf(source: "GGUFReader | Mapping[str, Any]", name: str | None = None) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Args:
      source: an open `gguf.GGUFReader`, or its metadata as plain values by key.
      name: what to call it in messages; the reader's file where it is not given.

    Raises:
      InputError: metadata that is missing, cut, contradictory, or of a kind not known here.
    """
    metadata = _Metadata(source, name)
    kind = metadata.get("tokenizer.ggml.model", str)
    if kind == "gpt2":
        vocabulary = _Vocabulary(metadata)
        backend, adds_bos = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        vocabulary = _Vocabulary(metadata)
        backend, adds_bos = _sentencepiece(metadata, vocabulary), True
    else:
        raise metadata.error("tokenizer.ggml.model", f"{kind!r} is not known; known are 'gpt2' and 'llama'")

    _add_tokens(backend, vocabulary)
    named = {
        token_name: vocabulary.tokens[id]
        for token_name, key in _NAMED_IDS.items()
        if (id := vocabulary.id(metadata, key)) is not None
    }
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", bool, adds_bos)
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", bool, False)
    wrap_texts(backend, named.get("bos_token") if adds_bos else None, named.get("eos_token") if adds_eos else None)
    stop_ids = (vocabulary.id(metadata, key) for key in _STOP_IDS)
    architecture = metadata.get("general.architecture", str, "")
    return Tokenizer(
        backend,
        named,
        _chat_templates(metadata),
        stop_ids=[id for id in stop_ids if id is not None],
        model_max_length=metadata.get(f"{architecture}.context_length", int, None),
        name=metadata.name,
    )


class _Metadata:
    """Typed look-ups in a GGUF's metadata; what is wrong becomes an `InputError` that names the key."""

    def __init__(self, source: "GGUFReader | Mapping[str, Any]", name: str | None) -> None:
        self._fields: Mapping[str, Any] = source if isinstance(source, Mapping) else source.fields
        file = None if isinstance(source, Mapping) else getattr(source.data, "filename", None)
        self.name = name or str(file or "the GGUF file")

    def error(self, key: str, fault: str) -> InputError:
        return InputError(f"{self.name}: {key}: {fault}")

    def get(self, key: str, kind: type[T], *default: Any) -> Any:
        """The value of a key, checked to be of a type; the default where the file does not have it."""
        if key not in self._fields:
            if default:
                return default[0]
            raise self.error(key, "is missing; take a GGUF file that holds its tokenizer")
        value = self._value(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(key, f"is {type(value).__name__} where {kind.__name__} is needed; convert the model again")
        return value

    def array(self, key: str, kind: type[T], length: int | None = None) -> list[T]:
        """An array, checked to hold values of one type and, where given, to be of a length."""
        values = self.get(key, list)
        wrong = next((i for i, v in enumerate(values) if not isinstance(v, kind)), None)
        if wrong is not None:
            fault = f"value {wrong} is {type(values[wrong]).__name__} where {kind.__name__} is needed"
            raise self.error(key, f"{fault}; convert the model again")
        if length is not None and len(values) != length:
            raise self.error(key, f"has {len(values)} values for {length} tokens; convert the model again")
        return values

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def _value(self, key: str) -> Any:
        field = self._fields[key]
        if not hasattr(field, "contents"):
            return field
        try:
            return field.contents()
        except (UnicodeDecodeError, ValueError, IndexError, TypeError) as error:
            raise self.error(key, f"cannot be read ({error}); the file is cut or damaged, get it again") from error


class _Vocabulary:
    """The tokens of a GGUF in the order of their ids, and the type of each."""

    def __init__(self, metadata: _Metadata) -> None:
        key = "tokenizer.ggml.tokens"
        self.tokens = metadata.array(key, str)
        if not self.tokens:
            raise metadata.error(key, "is empty; take a GGUF file that holds its tokenizer")
        self.ids: dict[str, int] = {}
        for id, token in enumerate(self.tokens):
            if self.ids.setdefault(token, id) != id:
                raise metadata.error(key, f"{token!r} is there twice, as {self.ids[token]} and {id}; convert it again")
        self.types = [1] * len(self.tokens)
        if "tokenizer.ggml.token_type" in metadata:
            self.types = metadata.array("tokenizer.ggml.token_type", int, len(self.tokens))

    def id(self, metadata: _Metadata, key: str) -> int | None:
        """The token id that a key names; None where the file does not have the key."""
        id = metadata.get(key, int, None)
        if id is not None and not 0 <= id < len(self.tokens):
            raise metadata.error(key, f"is {id}, outside the vocabulary of {len(self.tokens)} tokens; set it right")
        return id

    def of_type(self, *types: int) -> list[str]:
        return [token for token, type in zip(self.tokens, self.types, strict=True) if type in types]


def _byte_level(metadata: _Metadata, vocabulary: _Vocabulary) -> tuple["Backend", bool]:
    """Byte-level BPE, and whether such a model starts with BOS where the file does not say."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    pre = metadata.get("tokenizer.ggml.pre", str, "default")
    if pre not in _CUTTINGS:
        raise metadata.error("tokenizer.ggml.pre", f"{pre!r} is not known; known are {', '.join(sorted(_CUTTINGS))}")
    cutting = _CUTTINGS[pre]
    merges = _merges(metadata, vocabulary)
    backend = Backend(models.BPE(vocabulary.ids, merges, ignore_merges=cutting.whole_words))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cutting.pattern is None)
    if cutting.single_digits:
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif cutting.pattern is not None:
        split = pre_tokenizers.Split(Regex(cutting.pattern), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        backend.pre_tokenizer = byte_level
    if cutting.compose:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, cutting.adds_bos


def _merges(metadata: _Metadata, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """The merges of the file, best first, as pairs. All three tokens of each are in the vocabulary."""
    key = "tokenizer.ggml.merges"
    pairs = []
    for row, merge in enumerate(metadata.array(key, str)):
        left, _, right = merge.partition(" ")
        if not (left and right) or " " in right:
            raise metadata.error(key, f"row {row}, {merge!r}, is not two tokens; convert the model again")
        for token in (left, right, left + right):
            if token not in vocabulary.ids:
                raise metadata.error(key, f"row {row}, {merge!r}: {token!r} is not in the vocabulary; convert it again")
        pairs.append((left, right))
    return pairs


def _sentencepiece(metadata: _Metadata, vocabulary: _Vocabulary) -> "Backend":
    """SentencePiece BPE, as the library's BPE over text in which spaces are "▁"."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    # Runs of spaces that SentencePiece was told to keep whole are in the file as real spaces.
    ids = {_SPACE * len(token) if set(token) == {" "} else token: id
           for token, id in vocabulary.ids.items()}  # fmt: skip
    if len(ids) != len(vocabulary.ids):
        raise metadata.error(
            "tokenizer.ggml.tokens", f"a run of spaces is there twice, with {_SPACE!r} too; convert it again"
        )
    if "tokenizer.ggml.merges" in metadata:
        merges = _merges(metadata, vocabulary)
    else:
        merges = _merges_of_scores(ids, vocabulary.types, _priorities(metadata, vocabulary))
    unknown = vocabulary.id(metadata, "tokenizer.ggml.unknown_token_id")
    backend = Backend(
        models.BPE(
            ids,
            merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", bool, True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _priorities(metadata: _Metadata, vocabulary: _Vocabulary) -> Sequence[float]:
    """For each token, how early it is to be made of two: the higher, the earlier."""
    if metadata.get("general.architecture", str, "").startswith("gemma"):
        # Gemma's scores do not follow the order in which its merges were learned; its ids do.
        return [-id for id in range(len(vocabulary.tokens))]
    key = "tokenizer.ggml.scores"
    scores = metadata.array(key, float, len(vocabulary.tokens))
    wrong = next((id for id, score in enumerate(scores) if math.isnan(score)), None)
    if wrong is not None:
        raise metadata.error(key, f"value {wrong} is not a number; convert the model again")
    return scores


def _merges_of_scores(
    ids: Mapping[str, int], types: Sequence[int], priorities: Sequence[float]
) -> list[tuple[str, str]]:
    """Merges that make a BPE act as SentencePiece's.

    SentencePiece joins the two neighbours whose joint token has the highest score, whichever two they are;
    so each way to cut a token into two tokens is a merge, ranked by the score of the whole. Of equals
    the longer left part comes first, as transformers has it.
    """
    merges = []
    for token, id in ids.items():
        # Never made by joining: bytes, and tokens that only the program itself may write.
        if types[id] in (_UNKNOWN, _CONTROL, _UNUSED, _BYTE):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((-priorities[id], -len(left), -len(right), left, right))
    merges.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in merges]


def _add_tokens(backend: "Backend", vocabulary: _Vocabulary) -> None:
    """Tokens found in text as wholes: control tokens, which decoding leaves out, and the user's own."""
    from tokenizers import AddedToken

    control, own = vocabulary.of_type(_CONTROL), vocabulary.of_type(_USER_DEFINED)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    # A run of spaces is in the vocabulary as a run of "▁", and is made by merges.
    own = [token for token in own if backend.token_to_id(token) is not None]
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in own])


def _chat_templates(metadata: _Metadata) -> dict[str, str]:
    templates = {}
    if "tokenizer.chat_template" in metadata:
        templates["default"] = metadata.get("tokenizer.chat_template", str)
    if "tokenizer.chat_templates" in metadata:
        for name in metadata.array("tokenizer.chat_templates", str):
            templates[name] = metadata.get(f"tokenizer.chat_template.{name}", str)
    return templates
