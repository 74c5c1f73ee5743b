"""Chat templates by name. What the originals render is in fixtures/chat_templates, by make_chat_templates.py."""

import functools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from burnish.data.chat import ChatTemplate
from burnish.data.named_templates import NAMED, use_template
from burnish.data.tokenizer import Tokenizer
from burnish.errors import InputError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "chat_templates"
CASES = {name: json.loads((FIXTURES / f"{name}.json").read_text()) for name in NAMED if name != "plain"}
VARIABLES = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
END = {name: template.end or "<EOS>" for name, template in NAMED.items()}
WRITE_BOS = ("llama3", "gemma", "mistral", "plain")
FOLD_SYSTEM = ("gemma", "mistral")
OPEN, CLOSE = "\ue000", "\ue001"

SYSTEM = {"role": "system", "content": "sys"}
HI = {"role": "user", "content": "Hi"}
HO = {"role": "assistant", "content": "Ho"}
BYE = [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "So long"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}

each = pytest.mark.parametrize("name", NAMED)


@functools.cache
def compiled(name) -> ChatTemplate:
    return ChatTemplate(NAMED[name].source, name)


@functools.cache
def compiled_with_signs(name) -> ChatTemplate:
    """The template with a character in place of each generation mark."""
    source = NAMED[name].source.replace("{%- generation %}", f"{{{{- '{OPEN}' }}}}")
    return ChatTemplate(source.replace("{%- endgeneration %}", f"{{{{- '{CLOSE}' }}}}"), name)


def render(name, messages, prompt=False, tools=None, **variables) -> str:
    return compiled(name).render(messages, prompt, tools, {**VARIABLES, **variables})


def marked(name, messages, tools=None, **variables) -> tuple[str, list[tuple[int, int]]]:
    """The rendering and the (start, end) characters of what lies in its generation marks."""
    pieces = compiled_with_signs(name).render(messages, False, tools, {**VARIABLES, **variables}).split(OPEN)
    text, spans = pieces[0], []
    for piece in pieces[1:]:
        inside, outside = piece.split(CLOSE)
        spans.append((len(text), len(text) + len(inside)))
        text += inside + outside
    return text, spans


def tokenizer(tokens=(), bos: str | None = "<BOS>", eos: str | None = "<EOS>") -> Tokenizer:
    """Byte by byte, with `tokens` and a BOS before every text where there is one."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([token for token in (*tokens, bos, eos) if token is not None])
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, backend.token_to_id(bos))])
    named = {"bos_token": bos, "eos_token": eos}
    return Tokenizer(backend, {key: token for key, token in named.items() if token is not None}, name="the model")


# ---- the rendered text


@pytest.mark.parametrize("name", CASES)
def test_renders_what_the_original_does(name):
    for case in CASES[name]:
        text = compiled(name).render(case["messages"], case["add_generation_prompt"], case["tools"], case["variables"])
        assert text == case["expected"], (case["messages"], case["variables"])


BY_HAND = {
    "gemma": (
        "<BOS><start_of_turn>user\nsys\n\nHi<end_of_turn>\n<start_of_turn>model\nHo<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\nSo long<end_of_turn>\n"
    ),
    "mistral": "<BOS>[INST] sys\n\nHi[/INST] Ho<EOS>[INST] Bye[/INST] So long<EOS>",
    "plain": "<BOS>System: sys\nUser: Hi\nAssistant: Ho<EOS>\nUser: Bye\nAssistant: So long<EOS>\n",
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    assert render(name, [SYSTEM, HI, HO, *BYE]) == BY_HAND[name]


def test_plain_keeps_white_space():
    messages = [{"role": "user", "content": " a\n\n"}, {"role": "assistant", "content": "  b\n"}]
    assert render("plain", messages) == "<BOS>User:  a\n\n\nAssistant:   b\n<EOS>\n"
    assert render("plain", messages[:1], prompt=True) == "<BOS>User:  a\n\n\nAssistant:"


TEXT = st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=20)


@each
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_what_holds_for_any_conversation(name, data):
    """Each turn is marked from where generation starts to its terminator; the system message is there once."""
    pairs = data.draw(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
    messages = [{"role": "system", "content": "be §terse§"}] if data.draw(st.booleans()) else []
    for said, answer in pairs:
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
    text, spans = marked(name, messages)
    assert text == render(name, messages)
    assert text.count("be §terse§") == text.count("§terse§") == int(messages[0]["role"] == "system")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(spans) == len(turns)
    for turn, (start, end) in zip(turns, spans, strict=True):
        assert text[:start] == render(name, messages[:turn], prompt=True)
        assert text[:end].endswith(END[name])
        learned = text[start : end - len(END[name])]
        # Qwen's own rule: a literal </think> in an answer ends its reasoning. No such text is drawn here.
        assert learned.strip().endswith(messages[turn]["content"].strip())
        assert messages[turn - 1]["content"].strip() in text[:start]


@pytest.mark.parametrize("name", CASES)
def test_marks_of_the_grid(name):
    """The marks change nothing, hold every assistant turn, and start where the prompt ends (Qwen: if it thinks)."""
    for case in CASES[name]:
        variables = case["variables"]
        if case["add_generation_prompt"]:
            continue
        text, spans = marked(name, case["messages"], tools=case["tools"], **variables)
        assert text == case["expected"]
        turns = [i for i, message in enumerate(case["messages"]) if message["role"] == "assistant"]
        assert len(spans) == len(turns)
        for turn, (start, end) in zip(turns, spans, strict=True):
            assert text[:end].endswith(NAMED[name].end or variables["eos_token"])
            if variables.get("enable_thinking", True):
                prompt = render(name, case["messages"][:turn], True, case["tools"], **variables)
                assert text[:start] == prompt


def test_qwen3_without_thinking_gives_the_empty_thought():
    messages = [HI, HO, *BYE]
    text, spans = marked("qwen3", messages, enable_thinking=False)
    assert [text[start:end] for start, end in spans] == ["Ho<|im_end|>", "So long<|im_end|>"]
    assert text[: spans[1][0]] == render("qwen3", messages[:3], prompt=True, enable_thinking=False)
    # An earlier turn has lost the empty thought that generation was given: no prefix, as with the original.
    assert not text.startswith(render("qwen3", messages[:1], prompt=True, enable_thinking=False))
    reasoned = [HI, {**HO, "reasoning_content": "Hm."}]
    text, spans = marked("qwen3", reasoned, enable_thinking=False)
    assert [text[start:end] for start, end in spans] == ["<think>\nHm.\n</think>\n\nHo<|im_end|>"]


def test_qwen3_drops_the_reasoning_of_a_tool_call_once_a_question_follows():
    """The one place where what generation saw is rewritten while Qwen thinks; the original does the same."""
    function = {"name": "f", "arguments": {}}
    call = {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [{"function": function}]}
    messages = [HI, call, {"role": "tool", "content": "1"}, HO]
    before = render("qwen3", messages[:3], prompt=True)
    assert "Hm." in before and render("qwen3", messages).startswith(before)
    later = render("qwen3", [*messages, *BYE])
    assert "Hm." not in later and not later.startswith(before)


@each
def test_bos_is_there_once(name):
    with_bos = use_template(tokenizer(NAMED[name].tokens), name)
    text = with_bos.render([SYSTEM, HI, HO, *BYE])
    assert text.count("<BOS>") == int(name in WRITE_BOS) == int(text.startswith("<BOS>"))
    ids = with_bos.encode(text, add_bos=True)
    assert ids.count(with_bos.bos_id) == 1 and ids[0] == with_bos.bos_id
    without = use_template(tokenizer(NAMED[name].tokens, bos=None), name)
    assert without.render([SYSTEM, HI, HO, *BYE]) == text.removeprefix("<BOS>")


@each
def test_the_terminator_is_a_stop_token(name):
    chosen = use_template(tokenizer(NAMED[name].tokens), name)
    assert chosen.backend.token_to_id(END[name]) in chosen.stop_ids


# ---- what is refused


@each
@pytest.mark.parametrize("messages", [[{**SYSTEM, "content": "§"}], [{**SYSTEM, "content": "§"}, HO]])
def test_a_system_message_without_user_is_not_dropped(name, messages):
    if name in FOLD_SYSTEM:
        with pytest.raises(InputError, match=r"system message needs a user|message 1 has role assistant where user"):
            render(name, messages)
    else:
        assert render(name, messages).count("§") == render(name, messages, prompt=True).count("§") == 1


@pytest.mark.parametrize("name", FOLD_SYSTEM)
@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([HI, HI], "message 1 has role user where assistant has to come"),
        ([HO], "message 0 has role assistant where user"),
        ([SYSTEM, HI, HI], "message 2 has role user where assistant"),
        ([HI, HO, SYSTEM, *BYE], "message 2 has role system where user"),
        ([SYSTEM, SYSTEM, HI], "message 1 has role system where user"),
    ],
)
def test_turns_that_do_not_alternate(name, messages, words):
    with pytest.raises(InputError, match=words):
        render(name, messages)


@each
@pytest.mark.parametrize("role", ["developer", "function", "Assistant", ""])
def test_an_unknown_role(name, role):
    with pytest.raises(InputError, match=f"message 2 has role {role}, known are system, user"):
        render(name, [HI, HO, {"role": role, "content": "x"}, HI, HO])


@pytest.mark.parametrize("call", [{"name": "f"}, {"arguments": {}}, {"function": {"name": "f"}}])
def test_qwen3_call_without_name_or_arguments(call):
    with pytest.raises(InputError, match="message 1 calls a tool without a name or without arguments"):
        render("qwen3", [HI, {**HO, "tool_calls": [call]}])


@each
def test_content_that_is_no_text(name):
    with pytest.raises(InputError, match="message 0 has no text as its content"):
        render(name, [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, HO])


@pytest.mark.parametrize("name", [name for name in NAMED if name != "qwen3"])
@pytest.mark.parametrize(
    ("messages", "tools", "words"),
    [
        ([HI, HO], [TOOL], "no place for tools"),
        ([HI, HO, {"role": "tool", "content": "x"}, HO], None, "message 2 has role tool"),
        ([HI, {**HO, "tool_calls": [TOOL]}], None, "message 1 has tool_calls"),
        ([HI, {**HO, "reasoning_content": "hm"}], None, "message 1 has reasoning_content"),
    ],
)
def test_tools_and_reasoning_without_a_place(name, messages, tools, words):
    with pytest.raises(InputError, match=words):
        render(name, messages, tools=tools)
    assert render(name, [HI, {**HO, "tool_calls": [], "reasoning_content": ""}], tools=[]) == render(name, [HI, HO])


# ---- choosing one


@each
def test_missing_tokens_are_named(name):
    tokens = NAMED[name].tokens
    if not tokens:
        return
    with pytest.raises(InputError) as error:
        use_template(tokenizer(), name)
    assert f"chat template {name} writes {', '.join(tokens)}, which the model does not have" in str(error.value)
    assert f"vocabulary.add_tokens={json.dumps(list(tokens))}" in str(error.value)
    with pytest.raises(InputError, match=r"as a single token; add it: ") as error:
        use_template(tokenizer(tokens[1:]), name)
    assert f"vocabulary.add_tokens={json.dumps([tokens[0]])} (in Python" in str(error.value)
    assert use_template(tokenizer(tokens), name).chat_template == NAMED[name].source


def test_a_word_of_the_vocabulary_that_is_cut_up_is_missing():
    chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*chars, "[INST]", "[/INST]"])}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    with pytest.raises(InputError, match=r"writes \[INST\], \[/INST\], which"):
        use_template(Tokenizer(backend, {"eos_token": "<EOS>"}), "mistral")


@pytest.mark.parametrize("name", ["plain", "mistral"])
def test_eos_is_needed(name):
    with pytest.raises(InputError, match=f"chat template {name} ends a turn with the tokenizer's EOS, and the model"):
        use_template(tokenizer(NAMED[name].tokens, eos=None), name)


@pytest.mark.parametrize(("spec", "near"), [("llama-3", "llama3"), ("ChatML", "chatml"), ("qwen", "qwen3")])
def test_unknown_name(spec, near):
    with pytest.raises(InputError) as error:
        use_template(tokenizer(), spec)
    assert f"{spec!r} is no chat template; did you mean {near}? known: {', '.join(NAMED)}, or" in str(error.value)


def test_a_file(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}é{{ m.content }}{% endfor %}", encoding="utf-8")
    before = tokenizer()
    after = use_template(before, str(path))
    assert after.render([HI, HO]) == "éHiéHo" and before.chat_template is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "there is no Jinja template in it"),
        (b" \n", "there is no Jinja template in it"),
        (b"hello", "there is no Jinja template in it"),
        (b"{% if %}", "line 1"),
        (b"\xff\xfe", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, content, words):
    path = tmp_path / "own.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=words) as error:
        use_template(tokenizer(), str(path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)


# ---- elsewhere


@pytest.mark.parity
@each
def test_transformers_reads_them_alike(name):
    """Text and marks, so that a saved model is prompted elsewhere as it was trained here."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for messages in ([HI, HO], [SYSTEM, HI, HO, *BYE]):
        rendered, marks = utils.render_jinja_template(
            conversations=[messages],
            chat_template=NAMED[name].source,
            return_assistant_tokens_mask=True,
            **VARIABLES,
        )
        assert (rendered[0], [tuple(mark) for mark in marks[0]]) == marked(name, messages)
