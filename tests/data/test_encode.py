"""Records -> tokens, over tokenizers of two kinds. Every named template is in test_masks_grid.py."""

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.data.config import DataConfig
from burnish.data.encode import Encoder
from burnish.data.records import ChatRecord, TextRecord, TokensRecord
from burnish.data.tokenizer import Tokenizer
from burnish.errors import InputError

CORPUS = [
    "The island is an island of islands.",
    "An answer, the answers.",
    "user assistant system",
    "\n\n  ",
] * 20

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Content trimmed, system folded into the user turn, BOS and EOS written out, no generation prompt of its own.
INST = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# A thought is kept in the last answer and cut from earlier ones; the last one always has one.
THINK = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>' + m.content + '<|im_end|>\n' }}"
    "{% else %}{{ m.content.split('</think>')[-1] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BARE = (
    "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
ENDS_LAST_ONLY = CHATML.replace(
    "'<|im_end|>\n'", "('\n' if m.role == 'assistant' and not loop.last else '<|im_end|>\n')"
)
COUNTS_MESSAGES = "{{ messages | length }}" + CHATML

SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]


def byte_level(template: str | None = None, **named: str) -> Tokenizer:
    """Tokens are learned byte pairs, as of GPT-2."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return finish(backend, template, named)


def sentence_piece(template: str | None = None, **named: str) -> Tokenizer:
    """Spaces are letters, and every text gets one in front, as of Llama 2."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    n = tokenizers.normalizers
    backend.normalizer = n.Sequence([n.Prepend("▁"), n.Replace(" ", "▁")])
    d = tokenizers.decoders
    backend.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    # Trained on single words, so that no token crosses two.
    backend.train_from_iterator([word for text in CORPUS for word in text.split()], trainer)
    return finish(backend, template, named)


def finish(backend, template, named) -> Tokenizer:
    named = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", **named}
    return Tokenizer(backend, named, {"default": template} if template else {})


def chat(*contents: str, first_trained: int = 0, system: str | None = None) -> ChatRecord:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    start = [{"role": "system", "content": system}] if system else []
    return ChatRecord(0, "data.jsonl, line 1", (*start, *turns), first_trained)


def encode(tokenizer: Tokenizer, record, **options) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a record that is one example, and their weights."""
    ((tokens, weights),) = Encoder(tokenizer, DataConfig(**options)).encode(record)
    assert tokens.dtype == np.int32 and weights.dtype == np.float32 and len(tokens) == len(weights)
    return tokens, weights


def learned(tokenizer: Tokenizer, record, **options) -> list[str]:
    """What is learned of a record, one text a turn, of all its examples."""
    found = []
    for tokens, weights in Encoder(tokenizer, DataConfig(**options)).encode(record):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], weights != 0, [0]])))
        found += [tokenizer.decode(tokens[a:b], skip_special=False) for a, b in edges.reshape(-1, 2)]
    return found


def reread(tokenizer: Tokenizer, rendered: str) -> str:
    """The text as the tokenizer gives it back: sentence-piece writes a space after each special token."""
    return tokenizer.decode(tokenizer.encode(rendered.rstrip()), skip_special=False)


both_kinds = pytest.mark.parametrize("kind", [byte_level, sentence_piece])


@both_kinds
def test_learned_are_the_answers_with_their_terminators_and_nothing_else(kind):
    tokenizer = kind(CHATML)
    record = chat("The island?", "An answer.", "The answers?", "islands\n", system="user")
    assert learned(tokenizer, record) == ["An answer.<|im_end|>", "islands\n<|im_end|>"]
    tokens, _ = encode(tokenizer, record)
    # One rendering, tokenised once, up to the last terminator.
    assert tokens.tolist() == tokenizer.encode(tokenizer.render(record.messages).rstrip())


def test_eos_is_learned_where_it_is_also_the_padding():
    tokenizer = byte_level(CHATML)
    assert tokenizer.pad_id == tokenizer.eos_id
    tokens, mask = encode(tokenizer, chat("The island?", "An answer."))
    assert tokens[-1] == tokenizer.eos_id and mask[-1]
    assert mask[tokens == tokenizer.eos_id].tolist() == [0, 1]


@both_kinds
def test_only_the_completion_is_learned_of_a_prompt_with_answers(kind):
    record = chat("The island?", "An answer.", "The answers?", "islands", first_trained=3)
    assert learned(kind(CHATML), record) == ["islands<|im_end|>"]


def test_what_follows_the_last_answer_is_left_out():
    tokenizer = byte_level(CHATML)
    longer, _ = encode(tokenizer, chat("The island?", "An answer.", "user"))
    tokens, _ = encode(tokenizer, chat("The island?", "An answer."))
    assert longer.tolist() == tokens.tolist()


@both_kinds
def test_a_template_that_writes_bos_and_eos_and_trims(kind):
    tokenizer = kind(INST, bos_token="<s>")
    record = chat("The island?", "An answer. ", "islands?", "the answers")
    assert [text.lstrip() for text in learned(tokenizer, record)] == [
        "An answer. <|im_end|>",
        "the answers <|im_end|>",
    ]
    tokens, mask = encode(tokenizer, record)
    assert (tokens == tokenizer.bos_id).sum() == 1 and tokens[0] == tokenizer.bos_id and not mask[0]


def test_a_template_that_changes_answers_once_they_are_past():
    record = chat("The island?", "why</think>An answer.", "islands?", "so</think>the answers")
    assert learned(byte_level(THINK), record) == [
        "<think>why</think>An answer.<|im_end|>",
        "<think>so</think>the answers<|im_end|>",
    ]
    with pytest.raises(InputError, match="rewritten_turns=split"):
        learned(byte_level(THINK), record, rewritten_turns="refuse")


def test_calls_to_tools_are_part_of_the_turn():
    template = CHATML.replace("m.content +", "m.content + (m.tool_calls | tojson if m.tool_calls else '') +")
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    result = {"role": "tool", "content": "3"}
    user, answer = chat("The island?", "0").messages
    record = ChatRecord(0, "", (user, call, result, answer, user, call))
    called = '[{"name": "add"}]<|im_end|>'
    assert learned(byte_level(template), record) == [called, "0<|im_end|>", called]
    first = TextRecord(0, "", "The island?", "An answer.").as_chat()
    encoder = Encoder(byte_level(template), DataConfig())
    for record in (ChatRecord(0, "", (user, call)), first):  # what is found at the first serves all
        ((tokens, weights),) = encoder.encode(record)
        assert weights.any() and weights[-1] == 1
        assert tokens[-1] == encoder.tokenizer.eos_id


def test_tools_reach_the_template():
    tokenizer = byte_level("{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML)
    record = ChatRecord(0, "", chat("The island?", "An answer.").messages, tools=({"name": "add"},))
    tokens, mask = encode(tokenizer, record)
    assert tokenizer.decode(tokens, skip_special=False).startswith('[{"name": "add"}]<|im_start|>')
    assert tokenizer.decode(tokens[mask > 0], skip_special=False) == "An answer.<|im_end|>"


def test_a_terminator_inside_an_answer_ends_nothing():
    record = chat("The island?", "write <|im_end|> here", "islands?", "the answers")
    assert learned(byte_level(CHATML), record)[0] == "write <|im_end|> here<|im_end|>"


@both_kinds
def test_a_template_without_terminator_gets_eos(kind):
    tokenizer = kind(BARE)
    assert learned(tokenizer, chat("The island?", "An answer.")) == ["An answer.<|im_end|>"]
    record = chat("The island?", "An answer.", "islands?", "the answers")
    with pytest.raises(InputError, match=r"data.jsonl, line 1: .*writes nothing after an assistant turn"):
        learned(tokenizer, record, rewritten_turns="refuse")
    # Each turn by itself has an end, and EOS is it.
    assert learned(tokenizer, record) == ["An answer.<|im_end|>", "the answers<|im_end|>"]
    assert len(Encoder(tokenizer, DataConfig()).encode(record)) == 2


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (ENDS_LAST_ONLY, "message 1: the chat template changes this turn once later ones are there ('<|im_end|>'"),
        (COUNTS_MESSAGES, "message 1: the chat template changes this turn once later ones are there ('2"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        (None, "no chat template"),
    ],
)
def test_templates_that_cannot_be_learned_from(template, said):
    with pytest.raises(InputError) as caught:
        record = chat("The island?", "An answer.", "islands?", "the answers")
        learned(byte_level(template), record, rewritten_turns="refuse")
    assert str(caught.value).startswith("data.jsonl, line 1: ") and said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_answer_to_nothing_is_refused():
    record = ChatRecord(0, "data.jsonl, line 1", ({"role": "assistant", "content": "An answer."},))
    with pytest.raises(InputError, match=r"line 1: message 0: .* start with a user turn"):
        learned(byte_level(CHATML), record)


def test_the_default_system_message():
    tokenizer = byte_level(CHATML)
    record = chat("The island?", "An answer.", first_trained=1)
    for given_, system in ((record, "The system"), (chat("The island?", "An answer.", system="own"), "own")):
        tokens, mask = encode(tokenizer, given_, system="The system")
        assert tokenizer.decode(tokens, skip_special=False).startswith(f"<|im_start|>system\n{system}<|im_end|>")
        assert tokenizer.decode(tokens[mask > 0], skip_special=False) == "An answer.<|im_end|>"
    later = chat("The island?", "An answer.", "The answers?", "islands", first_trained=2)
    assert learned(tokenizer, later, system="The system") == ["islands<|im_end|>"]
    with pytest.raises(InputError, match=r"data\.system is set, but the model has no chat template"):
        Encoder(byte_level(), DataConfig(system="The system"))


def test_text_becomes_two_turns_for_a_chat_model():
    tokenizer = byte_level(CHATML)
    text, _ = encode(tokenizer, TextRecord(0, "", "The island?", "An answer."))
    turns, _ = encode(tokenizer, chat("The island?", "An answer."))
    assert text.tolist() == turns.tolist()


@both_kinds
def test_raw_text_ends_with_one_eos_and_starts_with_one_bos(kind):
    plain, with_bos = kind(), kind(bos_token="<s>")
    with_bos.adds_bos = True
    for tokenizer, bos in ((plain, 0), (with_bos, 1)):
        for prompt, completion in (
            ("The island", " is an answer."),
            ("<s>The island" if bos else "The island", " is an answer.<|im_end|>"),
        ):
            record = TextRecord(0, "", prompt, completion)
            tokens, mask = encode(tokenizer, record)
            assert (tokens == tokenizer.eos_id).sum() == 1 and tokens[-1] == tokenizer.eos_id
            assert tokens[:1].tolist().count(tokenizer.bos_id) == (tokens == tokenizer.bos_id).sum() == bos
            assert tokenizer.decode(tokens[mask > 0], skip_special=False).lstrip() == "is an answer.<|im_end|>"
            start = int(np.flatnonzero(mask)[0])
            assert mask[start:].all() and tokens[:start].tolist() == tokenizer.encode("The island", add_bos=True)


def test_a_bos_token_that_no_text_begins_with():
    tokenizer = byte_level(bos_token="<s>")
    tokens, _ = encode(tokenizer, TextRecord(0, "", "The", " island"))
    assert tokenizer.bos_id is not None and not tokenizer.adds_bos and tokenizer.bos_id not in tokens.tolist()


def test_no_eos_token_to_end_with():
    tokenizer = byte_level()
    tokenizer.eos_id = None
    with pytest.raises(InputError, match=r"data\.jsonl, line 4: .*set its eos_token"):
        encode(tokenizer, TextRecord(3, "data.jsonl, line 4", "The", " island"))


# Prompt ends and answer starts that a tokenizer reads as one: a word cut in two, white space on either side.
SEAMS = [
    ("The is", "land"),
    ("The answer ", "island"),
    ("The\n\n", "answer"),
    ("The", "\n\nanswer"),
    ("\n", "\n"),
    ("T", "he"),
]


@both_kinds
@pytest.mark.parametrize(("prompt", "completion"), SEAMS)
def test_the_prompt_is_what_generation_sees_where_tokens_would_merge(kind, prompt, completion):
    tokenizer = kind()
    record = TextRecord(0, "", prompt, completion)
    tokens, mask = encode(tokenizer, record)
    alone = tokenizer.encode(prompt)
    assert tokens[: len(alone)].tolist() == alone and not mask[: len(alone)].any()
    assert mask[len(alone) :].all()
    assert tokenizer.decode(tokens, skip_special=False) == prompt + completion + "<|im_end|>"


def test_a_merge_across_the_seam_would_have_happened():
    for kind in (byte_level, sentence_piece):
        tokenizer = kind()
        alone = tokenizer.encode("The is")
        assert tokenizer.encode("The island")[: len(alone)] != alone, "or the test above tests nothing"


NO_GAP = CHATML.replace("'<|im_start|>' + m.role + '\n' +", "'[' + m.role + ' is' +").replace(
    "'<|im_start|>assistant\n'", "'[assistant is'"
)


@both_kinds
def test_merges_in_a_conversation_of_several_turns(kind):
    tokenizer = kind(NO_GAP)
    record = chat("The island?", "land", "islands?", "lands\n", "user", "land")
    assert learned(tokenizer, record) == ["land<|im_end|>", "lands\n<|im_end|>", "land<|im_end|>"]
    tokens, mask = encode(tokenizer, record)
    assert tokenizer.decode(tokens, skip_special=False) == reread(tokenizer, tokenizer.render(record.messages))
    alone = tokenizer.encode(tokenizer.render(record.messages[:1], add_generation_prompt=True))
    assert tokens[: len(alone)].tolist() == alone and mask[len(alone)]


@both_kinds
def test_a_terminator_of_one_character_where_merges_are_cut(kind):
    """What follows it is in no turn, to the character."""
    tokenizer = kind(NO_GAP.replace("<|im_end|>", "#"))
    assert learned(tokenizer, chat("The island?", "land", "islands?", "lands")) == ["land#", "lands#"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("island er.01\n<é😀", min_size=1, max_size=8).filter(str.strip), min_size=2, max_size=6),
    st.sampled_from([byte_level, sentence_piece]),
    st.sampled_from([CHATML, NO_GAP]),
)
def test_any_conversation_is_learned_exactly(contents, kind, template):
    contents = contents[: len(contents) // 2 * 2]
    tokenizer = cached(kind, template)
    texts = learned(tokenizer, chat(*contents))
    # The first space of a text is lost in sentence-piece decoding, in decoding alone.
    strip = str if kind is byte_level else str.lstrip
    assert [strip(text) for text in texts] == [strip(answer + "<|im_end|>") for answer in contents[1::2]]
    tokens, _ = encode(tokenizer, chat(*contents))
    rendered = tokenizer.render(chat(*contents).messages)
    assert tokenizer.decode(tokens, skip_special=False) == reread(tokenizer, rendered)


TOKENIZERS: dict = {}


def cached(kind, template) -> Tokenizer:
    if (kind, template) not in TOKENIZERS:
        TOKENIZERS[kind, template] = kind(template)
    return TOKENIZERS[kind, template]


# ---- weights


def test_weights_are_those_the_row_gives():
    record = chat("The island?", "An answer.", "islands?", "the answers", "user", "system")
    record = ChatRecord(0, "", record.messages, weights=(None, 0.5, None, 0.0, 0.0, None))
    tokens, weights = encode(byte_level(CHATML), record)
    spans = {0.5: "An answer.<|im_end|>", 1.0: "system<|im_end|>"}
    assert set(weights.tolist()) == {0.0, *spans}
    for weight, text in spans.items():
        assert byte_level(CHATML).decode(tokens[weights == weight], skip_special=False) == text
    seam = NO_GAP  # the same where a merge is cut
    record = ChatRecord(0, "", chat("The island?", "land", "is", "lands").messages, weights=(None, 0.5, None, 2.0))
    tokens, weights = encode(byte_level(seam), record)
    for weight, text in {0.5: "land<|im_end|>", 2.0: "lands<|im_end|>"}.items():
        assert byte_level(seam).decode(tokens[weights == weight], skip_special=False) == text


def test_eos_behind_what_is_not_learned_is_not_learned():
    """A template without terminator, all learned but the last answer: EOS is that answer's."""
    messages = chat("The island?", "An answer.").messages
    tokenizer = byte_level(BARE)
    tokens, weights = encode(tokenizer, ChatRecord(0, "", messages, weights=(None, 0.0)), train_on="all")
    assert tokens[-1] == tokenizer.eos_id and weights[-1] == 0
    assert tokenizer.decode(tokens[weights > 0]) == "## user:\nThe island?\n\n"
    spaced = encode(tokenizer, chat("The island?", "An answer. \n"), train_on="all")[0]
    assert tokenizer.decode(spaced).endswith("An answer. \n"), "white space is the template's only in its ending"
    tokens, weights = encode(tokenizer, ChatRecord(0, "", messages, weights=(0.0, None)), train_on="all")
    assert tokenizer.decode(tokens[weights > 0], skip_special=False) == "### assistant:\nAn answer.<|im_end|>"


# ---- tokens as they are


def test_given_tokens_stay_as_they_are():
    """No BOS, no EOS; a first token that is nobody's target; ids of another tokenizer are refused."""
    tokenizer = byte_level(CHATML, bos_token="<s>")
    tokenizer.adds_bos = True
    tokens, weights = encode(tokenizer, TokensRecord(0, "", (9, 8, 2, 7), (1.0, 0.0, 0.5, 1.0)))
    assert tokens.tolist() == [9, 8, 2, 7] and weights.tolist() == [0, 0, 0.5, 1]
    size = tokenizer.vocab_size
    encode(tokenizer, TokensRecord(0, "", (9, size - 1), (1.0, 1.0)))
    with pytest.raises(
        InputError, match=rf"^line 5: input_ids\[1\]: {size} is no id of this tokenizer, which has {size}"
    ):
        encode(tokenizer, TokensRecord(0, "line 5", (9, size), (1.0, 1.0)))


def test_a_first_token_that_nothing_predicts_is_no_target():
    tokenizer = byte_level()
    tokens, weights = encode(tokenizer, TextRecord(0, "", "", "bb"))
    assert tokenizer.decode(tokens, skip_special=False) == "bb<|im_end|>" and weights.tolist() == [0, 1, 1]


# ---- where a turn's header is not far


@pytest.mark.parametrize("length", [1, 62, 63, 64, 65, 66, 200])
def test_a_header_far_behind(length):
    """The check of what is before an answer looks for an added token behind it: any distance gives the same."""
    template = CHATML.replace("'<|im_start|>assistant\n'", f"'<|im_start|>assistant{' The' * length} is'")
    template = template.replace(
        "m.role + '\n'", f"m.role + ('{' The' * length} is' if m.role == 'assistant' else '\n')"
    )
    tokenizer = byte_level(template)
    for answer in ("land", "\nland", " a"):
        record = chat("The island?", answer)
        tokens, weights = encode(tokenizer, record)
        alone = tokenizer.encode(tokenizer.render(record.messages[:1], add_generation_prompt=True))
        assert tokens[: len(alone)].tolist() == alone
        assert tokenizer.decode(tokens[weights > 0], skip_special=False) == f"{answer}<|im_end|>"


@pytest.mark.parametrize("option", ["lstrip", "rstrip"])
def test_added_tokens_that_take_white_space_with_them(option):
    """As Phi's do: what an answer loses by it is lost to generation, too; nothing more is."""
    tokenizer = byte_level(CHATML)
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens([tokenizers.AddedToken("<|x|>", special=True, normalized=False, **{option: True})])
    template = CHATML.replace("'<|im_start|>assistant\n'", "'<|x|>'").replace(
        "'<|im_start|>' + m.role + '\n'", "('<|x|>' if m.role == 'assistant' else '<|im_start|>' + m.role + '\n')"
    )
    stripping = Tokenizer(backend, tokenizer.special_tokens, {"default": template})
    record = chat("The island? ", "  An answer. ")
    tokens, weights = encode(stripping, record)
    alone = stripping.encode(stripping.render(record.messages[:1], add_generation_prompt=True))
    assert tokens[: len(alone)].tolist() == alone and (weights > 0).tolist() == [False] * len(alone) + [True] * (
        len(tokens) - len(alone)
    )
    text = stripping.decode(tokens[weights > 0], skip_special=False)
    assert text == ("An answer. <|im_end|>" if option == "rstrip" else "  An answer. <|im_end|>")


def test_a_tokenizer_that_trims_what_its_offsets_say():
    """As Pythia's does: words are looked up for ASCII only, and the masks are the same for both."""
    trims = byte_level(CHATML)
    trims.backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    for template in (CHATML, NO_GAP, INST):
        for answer in ("An answer ", " island", "\n land\n", "  "):
            for question in ("The island?", "The é "):
                record = chat(question, answer, "is ", answer)
                tokens, weights = encode(byte_level(template, bos_token="<s>"), record)
                again, trimmed = encode(
                    Tokenizer(trims.backend, {**trims.special_tokens, "bos_token": "<s>"}, {"default": template}),
                    record,
                )
                assert again.tolist() == tokens.tolist() and trimmed.tolist() == weights.tolist(), (template, record)
