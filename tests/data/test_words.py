"""Words of a text looked up: always the very ids and places that the library finds."""

import json
import re
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from burnish.data.tokenizer import Tokenizer
from burnish.data.words import _LETTERS, _OTHER, Words

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES_ONLY = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "The island's answers aren't 1234 or 12, they're 7.  We'll see!\n\n  if (x == 10):\n\treturn [x]\r\n",
    "user assistant <b> 'S 'D don't DON'T $3.50 a+b\n \n2001-10-07 CamelCase snake_case ... --- ??",
] * 30


def split(*patterns: str, after=BYTES_ONLY):
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(each), "isolated") for each in patterns), after])


def digits(individual: bool):
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=individual), BYTE_LEVEL])


def trained(rule, added=(), normalizer=None) -> Backend:
    """Many merges, so that every cut in another place shows in the ids."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = BYTES_ONLY if rule is None else rule
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    # The model learns merges over any cut: it is trained on whole lines, not on this rule's words.
    backend.pre_tokenizer = BYTES_ONLY
    backend.train_from_iterator([line for text in CORPUS for line in text.splitlines(True)], trainer)
    backend.pre_tokenizer = rule
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|im_"])
    backend.add_tokens(list(added))
    return backend


UNDERSTOOD = {
    "gpt2": BYTE_LEVEL,
    "gpt2 alone in a sequence": pre_tokenizers.Sequence([BYTE_LEVEL]),
    "digits, each": digits(True),
    "digits, all": digits(False),
    "llama3": split(LLAMA3),
    "qwen2": split(QWEN2),
    "gpt4o": split(GPT4O),
    "digits then gpt2, by hand": split(r"\p{N}|[^\p{N}]+", after=BYTE_LEVEL),
    "two expressions": split(r"\p{N}{1,2}|[^\p{N}]+", LLAMA3),
    "three stages": split(r"[\r\n]+|[^\r\n]+", r"[0-9]{2}|[0-9]|[^0-9]+", after=BYTE_LEVEL),
    # Words that would be cut again if they stood alone.
    "looking ahead": split(r"[a-z]+(?=['.])|[a-z]|\p{N}+(?= )|\p{N}|\s+(?=\n)|\s|\S"),
    "possessive": split(r"[a-z]++|[^\r\n\p{L}\p{N}]?+\p{L}++| ?[^\s]|\s+"),
}
BACKENDS = {name: trained(rule) for name, rule in UNDERSTOOD.items()}

PIECES = [
    *("'s", "'S", "'ll", "'", "''", "s", "S", "re", "don't", "island", "The", "A", "z", "CamelCase"),
    *("0", "1", "12", "123", "1234567", " 1", "a1", "1a", " '1s"),
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n ", "\f", "\x0b"),
    *(".", "...", " .", "!", "-", "_", "$", "(", "[x]", "+", "/", "/\n", "<", ">", "<|", "|>"),
    *("\x00", "\x01", "\x1c", "\x1d", "\x1e", "\x1f", " \x1c", "\x1c ", "\x7f"),
    *("<|im_start|>", "<|im_end|>", "<|im_", "<|im_en", "im_end|>"),
]
ASCII = st.lists(st.sampled_from(PIECES), max_size=14).map("".join) | st.text(
    st.characters(max_codepoint=127), max_size=30
)


MORE = [
    "é",
    "É",
    "ß",
    "ŉ",
    "İ",
    "Ǆ",
    "œ",
    "ª",
    "µ",
    "’",
    "’s",
    "“",
    "”",
    "€",
    "£",
    "—",
    " –",
    "…",
    "×",
    "°",
    "→",
    "«",
    "¿",
    "\u2044",
]
LATIN = st.lists(st.sampled_from([*PIECES, *MORE, *MORE]), min_size=1, max_size=14).map("".join)


def agree(backend: Backend, text: str) -> None:
    words = Words.of(backend)
    assert words is not None
    again(words, backend, text)


def again(words: Words, backend: Backend, text: str) -> None:
    found = words.encode(text)
    assert found is not None, text
    theirs = backend.encode(text, add_special_tokens=False)
    assert found[0].tolist() == theirs.ids, text
    assert found[1].tolist() == [start for start, _ in theirs.offsets], text


WORDS = {name: Words.of(backend) for name, backend in BACKENDS.items()}


@pytest.mark.parametrize("name", UNDERSTOOD)
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(ASCII, min_size=3, max_size=3))
@example(texts=["a  1", " '1s1's  2 \n3\t", "\x0b1 \x0b\x1c 1\x1f\x85"[:-1]])
def test_the_librarys_ids_and_places(name, texts):
    for text in texts:
        again(WORDS[name], BACKENDS[name], text)


@pytest.mark.parametrize("name", [name for name in UNDERSTOOD if name != "gpt4o"])
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(LATIN, min_size=3, max_size=3))
def test_the_librarys_ids_and_places_of_latin_text(name, texts):
    for text in texts:
        again(WORDS[name], BACKENDS[name], text)


def test_letters_and_signs_are_what_they_are_taken_for():
    every = [chr(point) for point in range(0x80, 0x3000) if not _OTHER.search(chr(point))]
    letters = [char for char in every if re.fullmatch(f"[{_LETTERS}]", char)]
    assert len(letters) == 400 and len(every) > 600
    assert {unicodedata.category(char)[0] for char in letters} == {"L"}
    assert {unicodedata.category(char)[0] for char in set(every) - set(letters)} == {"P", "S"}
    assert all(unicodedata.normalize("NFC", char) == char for char in every)
    assert "ſ" not in every


def test_an_added_token_beyond_ascii_has_its_place():
    backend = trained(BYTE_LEVEL, ["«é»"])
    agree(backend, "a é«é» b’s «é»")


def test_one_text_that_has_all_kinds():
    for name, backend in BACKENDS.items():
        ids, _ = WORDS[name].encode("".join(CORPUS[:2])) or (None, None)
        assert ids is not None and ids.tolist() == backend.encode("".join(CORPUS[:2])).ids, name


def test_words_that_would_be_cut_again_by_themselves():
    backend = BACKENDS["looking ahead"]
    assert len(backend.encode("is").ids) == 2 and len(backend.encode("is'").ids) == 2, "or nothing is tested"
    agree(backend, "is' is is.")


def test_capitals_are_told_from_small_letters():
    vocab = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE({**vocab, "aB": 256, "Ba": 257}, [("a", "B"), ("B", "a")]))
    backend.pre_tokenizer = UNDERSTOOD["gpt4o"]
    assert backend.encode("aBaB").tokens == ["a", "Ba", "B"]
    agree(backend, "aBaB")
    assert WORDS["gpt4o"].encode("É") is None  # beyond ASCII they are not told apart here


def test_an_expression_that_does_not_cover_a_text_is_left_to_the_library():
    words = Words.of(trained(split(r"[a-z]+|\p{N}")))
    assert words.encode("a1 b") is None and words.encode("a1b") is not None


def test_what_is_remembered_changes_nothing():
    """The same texts twice, with one memory, and with one that is full at every call."""
    texts = ["a 1 's  b", "a 1", "\n\n12 's", "", "<|im_end|>a<|im_end|>"]
    words = Words.of(BACKENDS["digits, each"])
    for text in [*texts, *texts]:
        again(words, BACKENDS["digits, each"], text)


@pytest.mark.parametrize("text", ["x²", "a\x85b", "island 😀", "a\u00a0b", "a\u2028", "½", "日本", "e\u0301", "ſ"])
def test_text_that_is_not_latin_is_left_to_the_library(text):
    tokenizer = Tokenizer(trained(BYTE_LEVEL))
    assert WORDS["gpt2"].encode(text) is None
    theirs = tokenizer.backend.encode(text, add_special_tokens=False)
    ids, starts = tokenizer.encode_with_starts(text)
    assert ids.tolist() == theirs.ids and starts.tolist() == [start for start, _ in theirs.offsets]


# Each would be read otherwise by Python, or the cut depends on what is around the word.
@pytest.mark.parametrize(
    "pattern",
    [
        r"(?<=a)b|[a-z]|[^a-z]",
        r"(?<!a)b|[a-z]|[^a-z]",
        r"[0-9]{1,2}+|[^0-9]+",
        r"[0-9]{2}?|[^0-9]|[0-9]",
        r"[a-z]+$|[^a-z]+|[a-z]",
        r"^[a-z]+|.|\n",
        r"[a-z]+\b|[^a-z]|[a-z]",
        r"[a-z]+\Z|[^a-z]|[a-z]",
        r"[[:alpha:]]+|[^a-z]",
        r"[a[bc]]+|[^a]|a",
        r"[a-z&&[^b]]+|[^a]|a",
        r"(?m:a.)|[^a]|a",
        r"([a-z])+|[^a-z]",
        r"(?<name>a)|[^a]",
        r"\h+|[^0-9a-f]+",
        r"\w+|\W+",
        r"[\p{M}]|[a]+|[^a]",
        r"\p{M}|[^a]|a",
        r"\p{Han}+|[^a]|a",
        r"\P{L}+|\p{L}+",
        r"\p{^L}+|\p{L}+",
        r"\\p{L}|[^a]|a",
        r"]|[^a]|a",
    ],
)
def test_an_expression_that_may_be_read_otherwise_is_left_alone(pattern):
    assert Words.of(trained(split(pattern))) is None


@pytest.mark.parametrize(
    "rule",
    [
        None,
        BYTES_ONLY,
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Whitespace(),
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), BYTE_LEVEL]),
        pre_tokenizers.Sequence([BYTE_LEVEL, pre_tokenizers.Digits()]),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s+"), "removed"), BYTES_ONLY]),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s+"), "merged_with_next"), BYTES_ONLY]),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s+"), "isolated", invert=True), BYTES_ONLY]),
        pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "isolated"), BYTES_ONLY]),
    ],
)
def test_other_rules_are_left_to_the_library(rule):
    assert Words.of(trained(rule)) is None


def test_other_models_and_normalizers_are_left_to_the_library():
    assert Words.of(trained(BYTE_LEVEL, normalizer=normalizers.NFC())) is not None  # Latin text stays as it is
    for other in (normalizers.Lowercase(), normalizers.NFKC(), normalizers.Prepend("x"), normalizers.Strip()):
        assert Words.of(trained(BYTE_LEVEL, normalizer=other)) is None
    chance = trained(BYTE_LEVEL)
    chance.model.dropout = 0.5
    assert Words.of(chance) is None
    unigram = Backend(models.Unigram([("a", -1.0), ("b", -2.0)], 0, False))
    unigram.pre_tokenizer = BYTE_LEVEL
    assert Words.of(unigram) is None


def test_a_model_that_does_not_know_every_byte_is_left_to_the_library():
    for unknown in (None, "?"):
        backend = Backend(models.BPE({"a": 0, "b": 1, "?": 2}, [], unk_token=unknown))
        backend.pre_tokenizer = BYTE_LEVEL
        words = Words.of(backend)
        assert words.encode("abba")[0].tolist() == [0, 1, 1, 0]
        found = words.encode("axb")
        theirs = backend.encode("axb")
        assert found is None or (found[0].tolist(), found[1].tolist()) == (theirs.ids, [a for a, _ in theirs.offsets])


def test_ids_with_holes_between_them():
    vocab = {char: 3 * number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE({**vocab, "ab": 9000}, [("a", "b")]))
    backend.pre_tokenizer = BYTE_LEVEL
    agree(backend, "abba cab")


# ---- added tokens


def test_the_longest_added_token_wins_and_those_taken_as_they_are_come_first():
    plain = trained(BYTE_LEVEL)
    for text in ("<|im_end|>", "<|im_<|im_end|>", "<|im_en", "x<|im_start|>y\n"):
        agree(plain, text)
    mixed = trained(BYTE_LEVEL, [AddedToken("x<|im", normalized=True), AddedToken("ab", normalized=True)])
    for text in ("x<|im_end|>", "x<|im", "x<|im<|im_end|>ab", "cab"):
        agree(mixed, text)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.text("ab<", min_size=1, max_size=3), st.booleans(), max_size=4),
    st.text("ab< ", max_size=12),
)
def test_any_added_tokens(added, text):
    vocab = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE({**vocab, "ab": 256, "<a": 257}, [("a", "b"), ("<", "a")]))
    backend.pre_tokenizer = BYTE_LEVEL
    backend.add_tokens([AddedToken(content, normalized=normalized) for content, normalized in added.items()])
    agree(backend, text)


@pytest.mark.parametrize("option", ["lstrip", "rstrip", "single_word"])
def test_added_tokens_that_take_white_space_with_them_are_left_to_the_library(option):
    assert Words.of(trained(BYTE_LEVEL, [AddedToken("<x>", **{option: True})])) is None


def test_a_tokenizer_with_more_tokens_has_words_of_its_own():
    """The one before keeps its ids; neither remembers for the other."""
    few = Tokenizer(trained(BYTE_LEVEL), name="few")
    assert few.encode_with_starts("island<new>")[0].tolist() == few.encode("island<new>")
    description = json.loads(few.backend.to_str())
    more = Tokenizer(Backend.from_str(json.dumps(description)), {"pad_token": "<new>"})
    ids, starts = more.encode_with_starts("island<new>x")
    assert ids.tolist() == more.encode("island<new>x") and few.vocab_size in ids.tolist()
    assert starts[ids.tolist().index(few.vocab_size)] == len("island")
    assert few.vocab_size not in few.encode_with_starts("island<new>")[0].tolist()
    assert more.with_chat_template("x").encode_with_starts("a<new>")[0].tolist() == more.encode("a<new>")
