"""The tokenizer, its files, its streaming decoder, chat templates; fixtures by make_tokenizers.py."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from burnish.convert.gguf_tokenizer import tokenizer_from_gguf
from burnish.data.chat import ChatTemplate
from burnish.data.tokenizer import StreamDecoder, Tokenizer
from burnish.errors import InputError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "tokenizers"
TEXTS = json.loads((FIXTURES / "texts.json").read_text())
CHAT = json.loads((FIXTURES / "chat.json").read_text())
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = [{"role": "user", "content": "Hi"}]
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BPE = tokenizer_from_gguf(gguf.GGUFReader(FIXTURES / "bpe.gguf"))
SPM = tokenizer_from_gguf(gguf.GGUFReader(FIXTURES / "spm.gguf"))


@pytest.fixture
def folder(tmp_path) -> Path:
    """A saved byte-level tokenizer, to be spoilt."""
    BPE.save(tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, **changed: object) -> None:
    content = json.loads(path.read_text())
    content.update(changed)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


# ---- ids


@pytest.mark.parametrize("tokenizer", [BPE, SPM])
def test_folder_round_trip(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_bos=True)
        assert again.encode(text, add_bos=True) == ids
        assert again.decode(ids, skip_special=False) == tokenizer.decode(ids, skip_special=False)
    for name in (
        "vocab_size",
        "bos_id",
        "eos_id",
        "pad_id",
        "adds_bos",
        "special_ids",
        "special_tokens",
        "stop_ids",
    ):
        assert getattr(again, name) == getattr(tokenizer, name), name
    assert (again.chat_template, again.model_max_length) == (tokenizer.chat_template, 512)
    # Saving again changes no byte.
    again.save(tmp_path / "again")
    for path in (tmp_path / "again").iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()
    assert not list(tmp_path.rglob("*.part"))


def test_exactly_one_bos_and_only_when_asked():
    bos = SPM.bos_id
    assert bos not in SPM.encode("Hello")
    assert SPM.encode("Hello", add_bos=True) == [bos, *SPM.encode("Hello")]
    assert SPM.encode("<s>Hello", add_bos=True) == SPM.encode("<s>Hello") == [bos, *SPM.encode("<s>Hello")[1:]]
    assert SPM.encode("<s>Hello", add_bos=True).count(bos) == 1
    assert SPM.encode("", add_bos=True) == [bos]
    # This model has a BOS token but starts no text with it.
    assert BPE.bos_id == 1 and not BPE.adds_bos
    assert BPE.encode("Hello", add_bos=True) == BPE.encode("Hello")


def test_starts_point_into_the_text():
    for tokenizer in (BPE, SPM):
        for text in TEXTS:
            ids, starts = tokenizer.encode_with_starts(text)
            assert (ids.dtype, starts.dtype) == (np.int32, np.int64) and len(ids) == len(starts)
            assert ids.tolist() == tokenizer.encode(text)
            assert starts.tolist() == sorted(starts) and all(0 <= start < len(text) for start in starts)
            # Between two starts lies what the token reads: all of the text, in pieces.
            assert not text or starts[0] == 0
    for before, after in (("é", "😀b"), ("e", "xb")):  # once by the library, once by words
        text = f"{before}<|im_end|>{after}"
        ids, starts = BPE.encode_with_starts(text)
        at = ids.tolist().index(2)
        assert starts[at] == 1 and starts[-1] == 12 and set(starts[at + 1 : -1].tolist()) == {11}
        assert starts[:at].tolist() == [0] * at


ASCII = st.text(st.characters(max_codepoint=127), max_size=20)


@settings(max_examples=100, deadline=None)
@given(ASCII, ASCII)
def test_a_text_that_is_not_ascii_starts_as_one_that_is(before, after):
    """Words are looked up for the one and not for the other; "é" is no letter of any word here, but by itself."""
    text = f"{before}<|im_end|>é<|im_end|>{after}"
    ids, starts = BPE.encode_with_starts(text)
    split = ids.tolist().index(2, before.count("<|im_end|>"))
    plain_ids, plain_starts = BPE.encode_with_starts(before)
    assert ids[:split].tolist() == plain_ids.tolist() and starts[:split].tolist() == plain_starts.tolist()
    plain_ids, plain_starts = BPE.encode_with_starts(after)
    tail = len(ids) - len(plain_ids)
    assert ids[tail:].tolist() == plain_ids.tolist()
    assert (starts[tail:] - (len(text) - len(after))).tolist() == plain_starts.tolist()


def test_half_a_surrogate_pair_is_named():
    for call in (BPE.encode, BPE.encode_with_starts):
        with pytest.raises(InputError, match=r"character 2 of the text is half a surrogate pair \(U\+D83D\)"):
            call("ab\ud83d")


# ---- the fingerprint


def test_the_fingerprint_is_that_of_the_files(folder):
    first, second = Tokenizer.from_folder(folder), Tokenizer.from_folder(folder)
    before = first.fingerprint
    assert before == second.fingerprint
    for text in TEXTS:  # a cache that fills is no change
        second.encode_with_starts(text)
    assert second.fingerprint == before == Tokenizer.from_folder(folder).fingerprint
    code = f"from burnish.data.tokenizer import Tokenizer; print(Tokenizer.from_folder({str(folder)!r}).fingerprint)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == before


def test_the_fingerprint_tells_whatever_changes_ids_or_text(folder):
    seen = {Tokenizer.from_folder(folder).fingerprint}

    def is_new(tokenizer: Tokenizer) -> bool:
        seen.add(tokenizer.fingerprint)
        return len(seen) == count + 1

    count = len(seen)
    description = json.loads((folder / "tokenizer.json").read_text())
    changes = [
        lambda d: d["added_tokens"].append({**d["added_tokens"][-1], "id": BPE.vocab_size, "content": "<new>"}),
        lambda d: d["model"]["merges"].pop(),
        lambda d: d["added_tokens"][0].update(lstrip=True),
        lambda d: d.update(normalizer={"type": "Lowercase"}),
        lambda d: d.update(pre_tokenizer={**BYTE_LEVEL, "add_prefix_space": True}),
    ]
    for change in changes:
        other = json.loads(json.dumps(description))
        change(other)
        assert is_new(Tokenizer(Backend.from_str(json.dumps(other)), BPE.special_tokens, BPE.chat_templates)), change
        count = len(seen)
    backend = Backend.from_str(json.dumps(description))
    for special_tokens, templates in (
        ({**BPE.special_tokens, "eos_token": "<|endoftext|>"}, BPE.chat_templates),
        (BPE.special_tokens, {}),
        (BPE.special_tokens, {"default": "x"}),
        (BPE.special_tokens, {"default": "x", "tool_use": "x"}),
    ):
        assert is_new(Tokenizer(backend, special_tokens, templates)), (special_tokens, templates)
        count = len(seen)
    edit(folder / "tokenizer_config.json", add_bos_token=True)
    assert is_new(Tokenizer.from_folder(folder))


def test_another_template_is_another_fingerprint():
    first = BPE.with_chat_template(CHATML)
    before = first.fingerprint
    second = first.with_chat_template(CHATML + " ")
    assert second.fingerprint != before == first.fingerprint
    assert second.with_chat_template(CHATML).fingerprint == before


def test_lengths_are_never_cut_or_padded(folder):
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(folder / "tokenizer.json"))
    text = "the quick brown fox " * 4
    assert Tokenizer.from_folder(folder).encode(text) == BPE.encode(text)
    assert Tokenizer.from_folder(folder).encode("a") == BPE.encode("a")


# ---- streaming

tokenizers_and_ids = st.sampled_from([BPE, SPM]).flatmap(
    lambda t: st.tuples(st.just(t), st.lists(st.integers(0, t.vocab_size - 1) | st.integers(0, 300), max_size=40))
)


@settings(max_examples=300, deadline=None)
@given(tokenizers_and_ids, st.booleans())
def test_stream_of_any_ids_is_their_decoding(case, skip_special):
    tokenizer, ids = case
    stream = StreamDecoder(tokenizer, skip_special)
    assert "".join([*map(stream.push, ids), stream.flush()]) == tokenizer.decode(ids, skip_special)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([BPE, SPM]), st.text(max_size=30))
def test_stream_of_any_text(tokenizer, text):
    ids = tokenizer.encode(text)
    stream = StreamDecoder(tokenizer, skip_special=False)
    assert "".join([*map(stream.push, ids), stream.flush()]) == tokenizer.decode(ids, skip_special=False)


def test_stream_shows_text_as_soon_as_it_is_settled():
    stream = StreamDecoder(BPE)
    assert [stream.push(id) for id in BPE.encode("12")] == ["1", "2"]
    # Four bytes a character, and no token for either: nothing, nothing, nothing, the character.
    pieces = [stream.push(id) for id in BPE.encode("𐍈󠁂")]
    assert [piece for piece in pieces if piece] == ["𐍈", "󠁂"] and len(pieces) > 4
    assert stream.push(2) == "" and stream.flush() == ""  # the terminator prints nothing
    stream = StreamDecoder(BPE)
    first, *_ = BPE.encode("\U0001f469")
    assert (stream.push(first), stream.flush()) == ("", "\ufffd")


def test_stream_keeps_spaces_of_sentencepiece_after_a_special_token():
    ids = [*SPM.encode("the quick"), SPM.eos_id, *SPM.encode("brown the")]
    stream = StreamDecoder(SPM)
    assert "".join(map(stream.push, ids)) + stream.flush() == "the quick brown the" == SPM.decode(ids)


# ---- files


def test_missing_and_broken_files_are_named(tmp_path, folder):
    with pytest.raises(InputError, match=r"nowhere is not a folder; give one that holds tokenizer\.json"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"has no tokenizer\.json; copy it"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(InputError, match=r"has no tokenizer\.json; it has tokenizer\.model only.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    text = (folder / "tokenizer.json").read_bytes()
    for broken in (text[: len(text) // 2], b"{}", b"[1]", b"", b"\xff\xfe", b'{"model": {"type": "Magic"}}'):
        (folder / "tokenizer.json").write_bytes(broken)
        with pytest.raises(InputError, match=r"model/tokenizer\.json .*get the file again") as caught:
            Tokenizer.from_folder(folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"]
)
def test_broken_json_is_named(folder, name):
    (folder / name).write_text('{\n"a": ')
    with pytest.raises(InputError, match=rf"{name}, line 2: "):
        Tokenizer.from_folder(folder)
    (folder / name).write_text("[]")
    with pytest.raises(InputError, match=rf"{name} holds a JSON list; it must hold an object"):
        Tokenizer.from_folder(folder)


def test_tokenizer_json_alone_is_enough(tmp_path, folder):
    (tmp_path / "bare").mkdir()
    shutil.copy(folder / "tokenizer.json", tmp_path / "bare")
    bare = Tokenizer.from_folder(tmp_path / "bare")
    assert [bare.encode(text) for text in TEXTS] == [BPE.encode(text) for text in TEXTS]
    assert (bare.bos_id, bare.eos_id, bare.chat_template, bare.stop_ids) == (None, None, None, ())


def test_named_tokens_in_every_form(folder):
    config, special = folder / "tokenizer_config.json", folder / "special_tokens_map.json"
    edit(config, bos_token={"content": "<|endoftext|>", "lstrip": False}, pad_token=None)
    special.write_text("{}")
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 2, None)
    # Older transformers: the map is believed, unless the configuration lists its added tokens.
    special.write_text('{"pad_token": "<tool>", "bos_token": {"content": "<|im_start|>"}}')
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.pad_id) == (1, 3) and 3 in tokenizer.special_ids
    edit(config, added_tokens_decoder={"0": {"content": "<|endoftext|>", "special": True, "normalized": False}})
    assert Tokenizer.from_folder(folder).bos_id == 0


def test_tokens_that_only_the_configuration_has(folder):
    size = BPE.vocab_size
    token = {"content": "<new>", "special": True, "normalized": False}
    edit(
        folder / "tokenizer_config.json",
        added_tokens_decoder={str(size): token},
        pad_token="<pad>",
        extra_special_tokens=["<more>"],
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<new><pad><more>") == [size, size + 1, size + 2] == sorted(tokenizer.special_ids)[-3:]
    assert (tokenizer.vocab_size, tokenizer.pad_id) == (size + 3, size + 1)
    edit(folder / "tokenizer_config.json", added_tokens_decoder={str(size + 7): token})
    with pytest.raises(InputError, match=rf"tokenizer_config.json: .*'<new>' the id {size + 7}, but .* at {size};"):
        Tokenizer.from_folder(folder)
    edit(folder / "tokenizer_config.json", added_tokens_decoder={"x": token})
    with pytest.raises(InputError, match=r"tokenizer_config\.json: added_tokens_decoder is odd"):
        Tokenizer.from_folder(folder)


def test_bos_flag_of_the_configuration(folder):
    edit(folder / "tokenizer_config.json", add_bos_token=True)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.adds_bos and tokenizer.encode("a") == BPE.encode("a")
    assert tokenizer.encode("a", add_bos=True) == [1, *BPE.encode("a")]
    # The post-processor's word is enough, as in transformers.
    tokenizer.save(folder)
    edit(folder / "tokenizer_config.json", add_bos_token=False)
    assert Tokenizer.from_folder(folder).adds_bos


def test_where_chat_templates_come_from(folder):
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template="from config")
    assert Tokenizer.from_folder(folder).chat_template == "from config"
    named = [{"name": "default", "template": "usual"}, {"name": "tool_use", "template": "tools"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.render(USER), tokenizer.render(USER, tools=[])) == ("usual", "tools")
    (folder / "chat_template.jinja").write_text("from file\r\n")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.chat_template == "from file\r\n" and tokenizer.chat_templates.keys() == {"default"}
    edit(folder / "tokenizer_config.json", chat_template=[1])
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match=r"tokenizer_config.json: chat_template must be text or a list"):
        Tokenizer.from_folder(folder)


def test_saving_named_templates_and_over_an_older_folder(folder):
    both = Tokenizer(BPE.backend, BPE.special_tokens, {"default": "usual", "tool_use": "tools"})
    both.save(folder)
    assert Tokenizer.from_folder(folder).chat_templates == both.chat_templates
    (folder / "mine.txt").write_text("mine")
    Tokenizer(BPE.backend, BPE.special_tokens).save(folder)
    assert Tokenizer.from_folder(folder).chat_templates == {}
    assert (folder / "mine.txt").read_text() == "mine"


# ---- the end of a turn


def with_template(source: str) -> Tokenizer:
    return Tokenizer(BPE.backend, {"eos_token": "<|endoftext|>", "bos_token": "<|im_start|>"}, {"default": source})


def test_stop_ids_hold_eos_and_the_templates_terminator():
    assert with_template(CHATML).stop_ids == (0, 2)
    # eos is the terminator; the terminator stands behind a space; text ends a turn; nothing does.
    answers = "{% for m in messages %}[{{ m.content | trim }}]"
    assert with_template("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}").stop_ids == (0,)
    assert with_template("{% for m in messages %}{{ m.content }} <tool> {% endfor %}").stop_ids == (0, 3)
    assert with_template(answers + "{% endfor %}").stop_ids == (0,)
    assert with_template("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}").stop_ids == (0,)
    # No template; one that refuses the probe; one that leaves the answer out.
    assert Tokenizer(BPE.backend, {"eos_token": "<|im_end|>"}).stop_ids == (2,)
    assert with_template("{{ raise_exception('no') }}").stop_ids == (0,)
    assert with_template("<|im_end|>").stop_ids == (0,)


def test_stop_ids_hold_the_models_own_list(folder):
    edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    (folder / "special_tokens_map.json").unlink()
    assert Tokenizer.from_folder(folder).stop_ids == (0, 2)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 0]}')
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    assert Tokenizer.from_folder(folder).stop_ids == (0, 2, 3, 5)
    (folder / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(InputError, match=r"generation_config\.json: eos_token_id is \['</s>'\]"):
        Tokenizer.from_folder(folder)


def test_another_template_brings_another_terminator():
    first = with_template("{% for m in messages %}{{ m.content }}<tool>{% endfor %}")
    assert first.stop_ids == (0, 3) and first.render(USER) == "Hi<tool>"
    second = first.with_chat_template(CHATML)
    assert second.stop_ids == (0, 2) and second.render(USER) == "<|im_start|>user\nHi<|im_end|>\n"
    assert first.stop_ids == (0, 3) and first.render(USER) == "Hi<tool>"
    with pytest.raises(InputError, match="line 1"):
        first.with_chat_template("{% if %}")


# ---- conversations


def render_case(case: dict) -> str:
    tokenizer = Tokenizer(
        BPE.backend,
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        {"default": CHAT["templates"][case["template"]]},
    )
    return tokenizer.render(CHAT["conversations"][case["conversation"]], **case["options"])


@pytest.mark.parametrize("template", list(CHAT["templates"]))
def test_rendering_equals_transformers(template):
    cases = [case for case in CHAT["cases"] if case["template"] == template]
    assert len(cases) == 18
    for case in cases:
        if case["text"] is None:
            with pytest.raises(InputError, match="Roles must alternate"):
                render_case(case)
        else:
            assert render_case(case) == case["text"], case


@pytest.mark.parity
def test_rendering_equals_transformers_live(tmp_path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    for template, source in CHAT["templates"].items():
        tokenizer = Tokenizer(BPE.backend, BPE.special_tokens, {"default": source})
        tokenizer.save(tmp_path)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        for case in CHAT["cases"]:
            if case["template"] == template and case["text"] is not None:
                messages = CHAT["conversations"][case["conversation"]]
                expected = theirs.apply_chat_template(messages, tokenize=False, loud=True, **case["options"])
                assert tokenizer.render(messages, loud=True, **case["options"]) == expected


def test_smollm2_writes_its_own_system_message_when_there_is_none():
    tokenizer = with_template(CHAT["templates"]["smollm2"])
    text = tokenizer.render(USER, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def render(source: str, messages=USER, **arguments) -> str:
    return ChatTemplate(source, "here").render(messages, **arguments)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ '' | attr('__class__') | string + 'x' | attr('y') }}{{ (''|attr('__class__')).x }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% for i in range(1000000000) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source):
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(InputError, match="chat template here did not take the conversation"):
        render(source, messages)
    assert messages == USER


def test_faults_of_a_template_are_one_line():
    with pytest.raises(InputError, match=r"chat template here, line 2: .*; mend it"):
        ChatTemplate("\n{% for %}", "here")
    for source, words in [
        ("{{ raise_exception('Only user\n and assistant!') }}", "Only user and assistant!"),
        ("{{ 'a' + messages[0].nothing }}", "no attribute 'nothing'"),
        ("{{ 1 // 0 }}", "by zero"),
        ("{{ 'a' + 1 }}", "concatenate"),
        ("{% include 'etc' %}", "no loader"),
    ]:
        with pytest.raises(InputError, match=words) as caught:
            render(source)
        assert "\n" not in str(caught.value)


def test_conversations_that_are_none():
    for messages, words in [
        ([], "needs at least one message"),
        (["Hi"], r"messages\[0\] is str; write"),
        ([{"role": "user", "content": {1, 2}}], r"messages\[0\]\.content is set"),
        ([{"role": "user", "content": [{"a": object()}]}], r"messages\[0\]\.content\[0\]\.a is object"),
    ]:
        with pytest.raises(InputError, match=words):
            render("x", messages)


def test_what_a_template_may_use():
    assert render("{{ messages | tojson }}", [{"role": "ü<&>", "n": [1, 1.5, True, None]}]) == (
        '[{"role": "ü<&>", "n": [1, 1.5, true, null]}]'
    )
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'
    skip_and_stop = "{% if i == 1 %}{% continue %}{% endif %}{% if i > 2 %}{% break %}{% endif %}"
    assert render("{% for i in range(9) %}" + skip_and_stop + "{{ i }}{% endfor %}") == "02"
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{% set a = 1 %}{% generation %}{{ a }}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}") == "121"
    assert render("{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}") == "TrueTrueFalse"
    assert render("{{ x }}", variables={"x": 3}) == "3"


def test_reasoning_is_found_under_every_name():
    for key in ("reasoning", "thinking", "reasoning_content"):
        message = [{"role": "assistant", "content": "a", key: "hm"}]
        assert render("{{ messages[0].reasoning_content }}{{ messages[0].thinking }}", message) == "hmhm"


def test_without_a_template_the_message_says_what_to_do():
    with pytest.raises(InputError, match=r"^base has no chat template: .*chat_template\.jinja"):
        Tokenizer(BPE.backend, name="base").render(USER)
    with pytest.raises(InputError, match=r"no chat template \(only ones named rag, tool_use\)"):
        Tokenizer(BPE.backend, chat_templates={"tool_use": "x", "rag": "y"}).render(USER)


# ---- other tokenizers than the two of the fixtures


def test_a_token_that_is_named_becomes_special():
    backend = Backend(models.BPE({"a": 0, "b": 1, "<eos>": 2}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    backend.add_tokens([AddedToken("<eos>", special=False)])
    tokenizer = Tokenizer(backend, {"eos_token": "<eos>"})
    assert tokenizer.encode("a<eos>b") == [0, 2, 1]
    assert tokenizer.decode([0, 2, 1]) == "ab" and tokenizer.decode([0, 2], skip_special=False) == "a<eos>"


def test_importing_is_cheap():
    """The libraries load when they are needed: `burnish --help` has half a second."""
    code = "import sys, burnish.data.tokenizer, burnish.convert.gguf_tokenizer; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"tokenizers", "jinja2", "gguf", "torch", "transformers"} & set(loaded.split())
