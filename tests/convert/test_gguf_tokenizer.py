"""GGUF tokenizers against transformers and sentencepiece; tests/fixtures/make_tokenizers.py made the ids."""

import json
import os
import re
from pathlib import Path

import gguf
import pytest

from burnish.convert.gguf_tokenizer import tokenizer_from_gguf
from burnish.data.tokenizer import StreamDecoder
from burnish.errors import InputError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "tokenizers"
TEXTS = json.loads((FIXTURES / "texts.json").read_text())
BPE = json.loads((FIXTURES / "bpe.json").read_text())
SPM = json.loads((FIXTURES / "spm.json").read_text())
CHAT = json.loads((FIXTURES / "chat.json").read_text())


def metadata_of(name: str) -> dict[str, object]:
    reader = gguf.GGUFReader(FIXTURES / name)
    return {key: field.contents() for key, field in reader.fields.items()}


@pytest.fixture(scope="module")
def bpe() -> dict[str, object]:
    return metadata_of("bpe.gguf")


@pytest.fixture(scope="module")
def spm() -> dict[str, object]:
    return metadata_of("spm.gguf")


def real_smollm2() -> Path:
    cache = Path(os.environ.get("BURNISH_CACHE", "~/.cache/burnish")).expanduser()
    path = Path(os.environ.get("BURNISH_SMOLLM2_GGUF", cache / "smollm2-135m" / "model.gguf"))
    if not path.is_file():
        pytest.skip(f"{path} is not there (burnish fetch smollm2-135m, or set BURNISH_SMOLLM2_GGUF)")
    return path


@pytest.mark.parametrize("pre", sorted(BPE["ids"]))
def test_byte_level_ids_equal_transformers(bpe, pre):
    tokenizer = tokenizer_from_gguf(bpe | {"tokenizer.ggml.pre": pre})
    for text, expected in zip(TEXTS, BPE["ids"][pre], strict=True):
        assert tokenizer.encode(text) == expected, text


@pytest.mark.parametrize(
    "alias, pre",
    [("default", "gpt-2"), ("llama3", "llama-bpe"), ("llama-v3", "llama-bpe"), ("deepseek-r1-qwen", "qwen2")],
)
def test_other_names_of_a_pre_tokenizer(bpe, alias, pre):
    tokenizer = tokenizer_from_gguf(bpe | {"tokenizer.ggml.pre": alias})
    assert [tokenizer.encode(text) for text in TEXTS] == BPE["ids"][pre]


def test_a_file_that_names_no_pre_tokenizer_is_cut_as_gpt2(bpe):
    tokenizer = tokenizer_from_gguf({key: value for key, value in bpe.items() if key != "tokenizer.ggml.pre"})
    assert [tokenizer.encode(text) for text in TEXTS] == BPE["ids"]["gpt-2"]


def test_byte_level_decoding_equals_transformers(bpe):
    tokenizer = tokenizer_from_gguf(bpe)
    rows = BPE["ids"]["smollm"]
    assert [tokenizer.decode(ids, skip_special=False) for ids in rows] == BPE["decoded"]["kept"] == TEXTS
    assert [tokenizer.decode(ids) for ids in rows] == BPE["decoded"]["skipped"]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_equal_transformers(spm, prefix):
    tokenizer = tokenizer_from_gguf(spm | {"tokenizer.ggml.add_space_prefix": prefix})
    expected = SPM["ids"]["prefix" if prefix else "no prefix"]
    for text, ids in zip(TEXTS, expected, strict=True):
        assert tokenizer.encode(text) == ids, text


def test_sentencepiece_ids_equal_sentencepiece(spm):
    tokenizer = tokenizer_from_gguf(spm)
    compared = 0
    for row, expected in SPM["sentencepiece"].items():
        text = TEXTS[int(row)]
        # sentencepiece puts its space also before a text that starts with one; transformers does not.
        if not text.startswith(" "):
            assert tokenizer.encode(text) == expected, text
            compared += 1
    assert compared > 20


def test_sentencepiece_decoding_equals_transformers(spm):
    tokenizer = tokenizer_from_gguf(spm)
    rows = SPM["ids"]["prefix"]
    assert [tokenizer.decode(ids, skip_special=False) for ids in rows] == SPM["decoded"]["kept"]
    assert [tokenizer.decode(ids) for ids in rows] == SPM["decoded"]["skipped"]


def test_unknown_characters_become_bytes_and_come_back(spm):
    tokenizer = tokenizer_from_gguf(spm)
    ids = tokenizer.encode("𠜎")
    assert [spm["tokenizer.ggml.tokens"][id] for id in ids] == ["▁", "<0xF0>", "<0xA0>", "<0x9C>", "<0x8E>"]
    assert tokenizer.decode(ids) == "𠜎"


def test_merges_are_made_in_the_order_of_scores():
    # "abc": by score "bc" is joined before "ab", and then "a" + "bc"; ids would say otherwise.
    tokens = ["<unk>", "ab", "bc", "abc", "a", "b", "c"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.scores": [0.0, -3.0, -1.0, -2.0, -4.0, -5.0, -6.0],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }
    assert tokenizer_from_gguf(metadata).encode("abcab") == [3, 1]
    assert tokenizer_from_gguf(metadata).encode("aba") == [1, 4]
    # Without bytes in the vocabulary, what is unknown is one token however long it is.
    assert tokenizer_from_gguf(metadata).encode("a??b") == [4, 0, 5]
    low = metadata | {"tokenizer.ggml.scores": [0.0, -1.0, -3.0, -9.0, -4.0, -5.0, -6.0]}
    assert tokenizer_from_gguf(low).encode("abc") == [3]
    without_abc = low | {"tokenizer.ggml.token_type": [2, 1, 1, 3, 1, 1, 1]}
    assert tokenizer_from_gguf(without_abc).encode("ab bc") == [1, 0, 2]
    # Gemma's merges follow its ids: "ab" before "bc".
    gemma = metadata | {"general.architecture": "gemma3", "tokenizer.ggml.token_type": [2, 1, 1, 5, 1, 1, 1]}
    assert tokenizer_from_gguf(gemma).encode("abc") == [1, 6]


def test_runs_of_spaces_kept_whole():
    tokens = ["<unk>", "   ", "▁▁", "▁", "a"]
    metadata = {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 4, 4, 1, 1],
        "tokenizer.ggml.scores": [0.0] * 5,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.encode("a   a  a a") == [4, 1, 4, 2, 4, 3, 4]
    assert tokenizer.decode([4, 1, 4, 2, 4]) == "a   a  a"
    assert tokenizer.vocab_size == 5


def test_named_ids_flags_and_limits(bpe, spm):
    tokenizer = tokenizer_from_gguf(bpe)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
    assert (tokenizer.vocab_size, tokenizer.model_max_length) == (len(bpe["tokenizer.ggml.tokens"]), 512)
    assert not tokenizer.adds_bos
    assert tokenizer.encode("a", add_bos=True) == tokenizer.encode("a")
    # Control tokens are special; the user's own are found whole, and stay in decoded text.
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.encode("<tool>") == [3] and tokenizer.decode([1, 3]) == "<tool>"

    tokenizer = tokenizer_from_gguf(spm)
    assert tokenizer.adds_bos and tokenizer.pad_id is None
    assert tokenizer.encode("a", add_bos=True) == [tokenizer.bos_id, *tokenizer.encode("a")]


def test_bos_where_the_file_does_not_say(bpe, spm):
    def adds_bos(metadata, **changed):
        silent = {k: v for k, v in metadata.items() if k != "tokenizer.ggml.add_bos_token"}
        return tokenizer_from_gguf(silent | {f"tokenizer.ggml.{k}": v for k, v in changed.items()}).adds_bos

    assert adds_bos(spm) and adds_bos(bpe, pre="llama-bpe")
    assert not adds_bos(bpe, pre="qwen2") and not adds_bos(bpe)
    assert adds_bos(bpe, add_bos_token=True)


def test_eos_flag_is_written_for_transformers_and_not_acted_on(bpe, tmp_path):
    tokenizer = tokenizer_from_gguf(bpe | {"tokenizer.ggml.add_eos_token": True})
    assert tokenizer.encode("a") == tokenizer.encode("a", add_bos=True) == tokenizer_from_gguf(bpe).encode("a")
    tokenizer.save(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["add_eos_token"] is True


def test_chat_templates_and_stop_ids(bpe):
    assert tokenizer_from_gguf(bpe).chat_template == CHAT["templates"]["headers"]
    # The terminator of the template, beside eos; and the ids that the file itself calls ends.
    other = {
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 1,
        "tokenizer.ggml.eom_token_id": 3,
    }
    assert tokenizer_from_gguf(bpe | other).stop_ids == (0, 2, 1, 3)
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "tools!"}
    tokenizer = tokenizer_from_gguf(bpe | named)
    message = [{"role": "user", "content": "Hi"}]
    assert tokenizer.render(message, tools=[]) == "tools!" != tokenizer.render(message)


BAD = [
    ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model: is missing"),
    (
        {"tokenizer.ggml.model": "rwkv"},
        "tokenizer.ggml.model: 'rwkv' is not known; known are 'gpt2' and 'llama'",
    ),
    ({"tokenizer.ggml.model": 3}, "tokenizer.ggml.model: is int where str is needed"),
    (
        {"tokenizer.ggml.pre": "viking"},
        "tokenizer.ggml.pre: 'viking' is not known; known are .*llama-bpe.*smollm",
    ),
    ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens: is missing"),
    ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens: is empty"),
    ({"tokenizer.ggml.tokens": "abc"}, "tokenizer.ggml.tokens: is str where list is needed"),
    ({"tokenizer.ggml.tokens": ["a", 1]}, "tokenizer.ggml.tokens: value 1 is int where str is needed"),
    ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "tokenizer.ggml.tokens: 'a' is there twice, as 0 and 2"),
    ({"tokenizer.ggml.token_type": [1, 1]}, r"tokenizer.ggml.token_type: has 2 values for \d+ tokens"),
    ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges: is missing"),
    ({"tokenizer.ggml.merges": ["Ġ t", "Ġ"]}, "tokenizer.ggml.merges: row 1, 'Ġ', is not two tokens"),
    ({"tokenizer.ggml.merges": ["a b c"]}, "tokenizer.ggml.merges: row 0, 'a b c', is not two tokens"),
    (
        {"tokenizer.ggml.merges": ["z q"]},
        "tokenizer.ggml.merges: row 0, 'z q': 'zq' is not in the vocabulary",
    ),
    ({"tokenizer.ggml.eos_token_id": 99999}, "tokenizer.ggml.eos_token_id: is 99999, outside the vocabulary"),
    ({"tokenizer.ggml.bos_token_id": True}, "tokenizer.ggml.bos_token_id: is bool where int is needed"),
    ({"tokenizer.ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token: is int where bool is needed"),
    ({"tokenizer.chat_template": 7}, "tokenizer.chat_template: is int where str is needed"),
    ({"tokenizer.chat_templates": ["x"]}, "tokenizer.chat_template.x: is missing"),
]
BAD_SCORES = [
    ({"tokenizer.ggml.scores": None}, "tokenizer.ggml.scores: is missing"),
    ({"tokenizer.ggml.scores": [0.5]}, r"tokenizer.ggml.scores: has 1 values for \d+ tokens"),
]


@pytest.mark.parametrize("file, change, message", [("bpe", *b) for b in BAD] + [("spm", *b) for b in BAD_SCORES])
def test_bad_metadata_is_named(request, file, change, message):
    metadata = request.getfixturevalue(file) | change
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(InputError, match=f"^here.gguf: {message}") as caught:
        tokenizer_from_gguf(metadata, name="here.gguf")
    assert "\n" not in str(caught.value)


def test_scores_that_are_no_numbers(spm):
    scores = list(spm["tokenizer.ggml.scores"])
    scores[5] = float("nan")
    with pytest.raises(InputError, match=r"tokenizer.ggml.scores: value 5 is not a number"):
        tokenizer_from_gguf(spm | {"tokenizer.ggml.scores": scores})


def test_a_reader_names_its_file_and_damaged_text(tmp_path):
    raw = (FIXTURES / "bpe.gguf").read_bytes()
    damaged = tmp_path / "damaged.gguf"
    assert raw.count(b"<|im_start|>") == 1
    damaged.write_bytes(raw.replace(b"<|im_start|>", b"<|im_st\xff\xfe\xfd|>"))
    assert tokenizer_from_gguf(gguf.GGUFReader(FIXTURES / "bpe.gguf")).name.endswith("bpe.gguf")
    with pytest.raises(InputError, match=re.escape(f"{damaged}: tokenizer.ggml.tokens: cannot be read")):
        tokenizer_from_gguf(gguf.GGUFReader(damaged))


def auto_tokenizer(folder: Path, **arguments):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(folder, **arguments)


# A model's config.json lies beside the tokenizer, and transformers lets it choose a class.
SAVED = [
    ("bpe.gguf", {}, (None, "llama", "mistral")),
    ("bpe.gguf", {"tokenizer.ggml.pre": "qwen2"}, ("qwen2", "qwen3")),
    ("bpe.gguf", {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": True}, ("llama",)),
    ("bpe.gguf", {"tokenizer.ggml.pre": "tekken", "tokenizer.ggml.add_eos_token": True}, ("mistral",)),
    ("spm.gguf", {}, (None, "llama", "mistral")),
    ("spm.gguf", {"tokenizer.ggml.add_space_prefix": False}, ("gemma2", "gemma3_text")),
]


@pytest.mark.parity
@pytest.mark.parametrize("name, changed, model_types", SAVED)
def test_transformers_reads_the_saved_folder_alike(name, changed, model_types, tmp_path):
    ours = tokenizer_from_gguf(metadata_of(name) | changed)
    ours.save(tmp_path)
    for model_type in model_types:
        if model_type is not None:
            (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        theirs = auto_tokenizer(tmp_path)
        for text in TEXTS:
            ids = ours.encode(text)
            assert theirs.encode(text, add_special_tokens=False) == ids, (model_type, text)
            assert theirs.decode(ids) == ours.decode(ids, skip_special=False)
            assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
        end = [ours.eos_id] if changed.get("tokenizer.ggml.add_eos_token") else []
        assert theirs.encode("a") == ours.encode("a", add_bos=True) + end
        named = (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
        assert named == (ours.bos_id, ours.eos_id, ours.pad_id)
        assert (theirs.chat_template, len(theirs)) == (ours.chat_template, ours.vocab_size)
        assert theirs.model_max_length == 512


@pytest.mark.parity
def test_transformers_reads_the_spm_file_alike():
    theirs = auto_tokenizer(FIXTURES, gguf_file="spm.gguf")
    ours = tokenizer_from_gguf(gguf.GGUFReader(FIXTURES / "spm.gguf"))
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(t, add_special_tokens=False) for t in TEXTS]
    assert ours.encode("a", add_bos=True) == theirs.encode("a")


@pytest.mark.slow
def test_real_smollm2(tmp_path):
    tokenizer = tokenizer_from_gguf(gguf.GGUFReader(real_smollm2()))
    expected = json.loads((FIXTURES / "smollm2.json").read_text())["ids"]
    for text, ids in zip(TEXTS, expected, strict=True):
        assert tokenizer.encode(text) == ids, text
    assert tokenizer.encode("1234567") == [33, 34, 35, 36, 37, 38, 39]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (1, 2, 2, 49152)
    assert tokenizer.stop_ids == (2,) and not tokenizer.adds_bos
    assert tokenizer.chat_template == CHAT["templates"]["smollm2"]
    stream = StreamDecoder(tokenizer)
    ids = tokenizer.encode(TEXTS[23])
    assert "".join([*map(stream.push, ids), stream.flush()]) == tokenizer.decode(ids)


@pytest.mark.slow
@pytest.mark.parity
def test_real_smollm2_equals_transformers(tmp_path):
    path = real_smollm2()
    theirs = auto_tokenizer(path.parent, gguf_file=path.name)
    ours = tokenizer_from_gguf(gguf.GGUFReader(path))
    # transformers' reader does not set digits apart. That shows after a run of spaces, and in digits that
    # are not ASCII.
    same = [text for text in TEXTS if not re.search(r"\s\s\d|½", text)]
    assert len(same) == len(TEXTS) - 2
    assert [ours.encode(text) for text in same] == [theirs.encode(text) for text in same]
    ours.save(tmp_path)
    saved = auto_tokenizer(tmp_path)
    assert [ours.encode(text) for text in TEXTS] == [saved.encode(text) for text in TEXTS]
    for case in CHAT["cases"]:
        if case["template"] == "smollm2":
            messages = CHAT["conversations"][case["conversation"]]
            assert ours.render(messages, **case["options"]) == case["text"]
            assert theirs.apply_chat_template(messages, tokenize=False, **case["options"]) == case["text"]
