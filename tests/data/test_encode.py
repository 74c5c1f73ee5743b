import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.data.config import DataConfig
from burnish.data.encode import Encoder, encode_records
from burnish.data.records import ChatRecord, TextRecord
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


def learned(tokenizer: Tokenizer, record, **options) -> list[str]:
    """What is learned of a record, one text a turn."""
    tokens, mask = Encoder(tokenizer, **options).encode(record)
    assert tokens.dtype == np.int32 and mask.dtype == bool and len(tokens) == len(mask)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return [tokenizer.decode(tokens[a:b], skip_special=False) for a, b in edges.reshape(-1, 2)]


def reread(tokenizer: Tokenizer, rendered: str) -> str:
    """The text as the tokenizer gives it back: sentence-piece writes a space after each special token."""
    return tokenizer.decode(tokenizer.encode(rendered.rstrip()), skip_special=False)


both_kinds = pytest.mark.parametrize("kind", [byte_level, sentence_piece])


@both_kinds
def test_learned_are_the_answers_with_their_terminators_and_nothing_else(kind):
    tokenizer = kind(CHATML)
    record = chat("The island?", "An answer.", "The answers?", "islands\n", system="user")
    assert learned(tokenizer, record) == ["An answer.<|im_end|>", "islands\n<|im_end|>"]
    tokens, _ = Encoder(tokenizer).encode(record)
    # One rendering, tokenised once, up to the last terminator.
    assert tokens.tolist() == tokenizer.encode(tokenizer.render(record.messages).rstrip())


def test_eos_is_learned_where_it_is_also_the_padding():
    tokenizer = byte_level(CHATML)
    assert tokenizer.pad_id == tokenizer.eos_id
    tokens, mask = Encoder(tokenizer).encode(chat("The island?", "An answer."))
    assert tokens[-1] == tokenizer.eos_id and mask[-1]
    assert (tokens == tokenizer.eos_id).sum() == 2 and mask[tokens == tokenizer.eos_id].tolist() == [
        False,
        True,
    ]


@both_kinds
def test_only_the_completion_is_learned_of_a_prompt_with_answers(kind):
    record = chat("The island?", "An answer.", "The answers?", "islands", first_trained=3)
    assert learned(kind(CHATML), record) == ["islands<|im_end|>"]


def test_what_follows_the_last_answer_is_left_out():
    tokenizer = byte_level(CHATML)
    longer, _ = Encoder(tokenizer).encode(chat("The island?", "An answer.", "user"))
    tokens, _ = Encoder(tokenizer).encode(chat("The island?", "An answer."))
    assert longer.tolist() == tokens.tolist()


@both_kinds
def test_a_template_that_writes_bos_and_eos_and_trims(kind):
    tokenizer = kind(INST, bos_token="<s>")
    record = chat("The island?", "An answer. ", "islands?", "the answers")
    assert [text.lstrip() for text in learned(tokenizer, record)] == [
        "An answer. <|im_end|>",
        "the answers <|im_end|>",
    ]
    tokens, mask = Encoder(tokenizer).encode(record)
    assert (tokens == tokenizer.bos_id).sum() == 1 and tokens[0] == tokenizer.bos_id and not mask[0]


def test_a_template_that_changes_answers_once_they_are_past():
    record = chat("The island?", "why</think>An answer.", "islands?", "so</think>the answers")
    assert learned(byte_level(THINK), record) == [
        "An answer.<|im_end|>",
        "<think>so</think>the answers<|im_end|>",
    ]


def test_calls_to_tools_are_part_of_the_turn():
    template = CHATML.replace("m.content +", "m.content + (m.tool_calls | tojson if m.tool_calls else '') +")
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    result = {"role": "tool", "content": "3"}
    user, answer = chat("The island?", "0").messages
    record = ChatRecord(0, "", (user, call, result, answer, user, call))
    called = '[{"name": "add"}]<|im_end|>'
    assert learned(byte_level(template), record) == [called, "0<|im_end|>", called]
    first = TextRecord(0, "", "The island?", "An answer.").as_chat()
    encoder = Encoder(byte_level(template))
    for record in (ChatRecord(0, "", (user, call)), first):  # what is found at the first serves all
        tokens, mask = encoder.encode(record)
        assert mask.any() and encoder.tokenizer.decode(tokens[mask], skip_special=False).endswith("<|im_end|>")


def test_tools_reach_the_template():
    tokenizer = byte_level("{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML)
    record = ChatRecord(0, "", chat("The island?", "An answer.").messages, tools=({"name": "add"},))
    tokens, mask = Encoder(tokenizer).encode(record)
    assert tokenizer.decode(tokens, skip_special=False).startswith('[{"name": "add"}]<|im_start|>')
    assert tokenizer.decode(tokens[mask], skip_special=False) == "An answer.<|im_end|>"


def test_a_terminator_inside_an_answer_ends_nothing():
    record = chat("The island?", "write <|im_end|> here", "islands?", "the answers")
    assert learned(byte_level(CHATML), record)[0] == "write <|im_end|> here<|im_end|>"


@both_kinds
def test_a_template_without_terminator_gets_eos(kind):
    tokenizer = kind(BARE)
    assert learned(tokenizer, chat("The island?", "An answer.")) == ["An answer.<|im_end|>"]
    with pytest.raises(InputError, match=r"data.jsonl, line 1: .*writes nothing after an assistant turn"):
        learned(tokenizer, chat("The island?", "An answer.", "islands?", "the answers"))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (ENDS_LAST_ONLY, "message 1: the chat template does not end this assistant turn with '<|im_end|>'"),
        (COUNTS_MESSAGES, "message 1: the chat template changes what comes before this assistant turn"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        (None, "no chat template"),
    ],
)
def test_templates_that_cannot_be_learned_from(template, said):
    with pytest.raises(InputError) as caught:
        learned(byte_level(template), chat("The island?", "An answer.", "islands?", "the answers"))
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
        tokens, mask = Encoder(tokenizer, "The system").encode(given_)
        assert tokenizer.decode(tokens, skip_special=False).startswith(f"<|im_start|>system\n{system}<|im_end|>")
        assert tokenizer.decode(tokens[mask], skip_special=False) == "An answer.<|im_end|>"
    later = chat("The island?", "An answer.", "The answers?", "islands", first_trained=2)
    assert learned(tokenizer, later, system="The system") == ["islands<|im_end|>"]
    with pytest.raises(InputError, match=r"data\.system is set, but the model has no chat template"):
        Encoder(byte_level(), "The system")


def test_text_becomes_two_turns_for_a_chat_model():
    tokenizer = byte_level(CHATML)
    text, _ = Encoder(tokenizer).encode(TextRecord(0, "", "The island?", "An answer."))
    turns, _ = Encoder(tokenizer).encode(chat("The island?", "An answer."))
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
            tokens, mask = Encoder(tokenizer).encode(record)
            assert (tokens == tokenizer.eos_id).sum() == 1 and tokens[-1] == tokenizer.eos_id
            assert tokens[:1].tolist().count(tokenizer.bos_id) == (tokens == tokenizer.bos_id).sum() == bos
            assert tokenizer.decode(tokens[mask], skip_special=False).lstrip() == "is an answer.<|im_end|>"
            assert tokens[~mask].tolist() == Encoder(tokenizer).prompt(record)


def test_no_eos_token_to_end_with():
    tokenizer = byte_level()
    tokenizer.eos_id = None
    with pytest.raises(InputError, match=r"data\.jsonl, line 4: .*set its eos_token"):
        Encoder(tokenizer).encode(TextRecord(3, "data.jsonl, line 4", "The", " island"))


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
    tokens, mask = Encoder(tokenizer).encode(record)
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
    tokens, mask = Encoder(tokenizer).encode(record)
    assert tokenizer.decode(tokens, skip_special=False) == reread(tokenizer, tokenizer.render(record.messages))
    alone = tokenizer.encode(tokenizer.render(record.messages[:1], add_generation_prompt=True))
    assert tokens[: len(alone)].tolist() == alone and mask[len(alone)]


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
    tokens, _ = Encoder(tokenizer).encode(chat(*contents))
    rendered = tokenizer.render(chat(*contents).messages)
    assert tokenizer.decode(tokens, skip_special=False) == reread(tokenizer, rendered)


TOKENIZERS: dict = {}


def cached(kind, template) -> Tokenizer:
    if (kind, template) not in TOKENIZERS:
        TOKENIZERS[kind, template] = kind(template)
    return TOKENIZERS[kind, template]


def test_the_prompt_for_generation_is_what_comes_before_the_last_answer():
    tokenizer = byte_level(CHATML)
    record = chat("The island?", "An answer.", "islands?", "the answers")
    tokens, mask = Encoder(tokenizer).encode(record)
    last = np.flatnonzero(~mask)[-1] + 1
    assert Encoder(tokenizer).prompt(record) == tokens[:last].tolist()


# ---- cutting and counting


def raw_records(*sizes: tuple[int, int]) -> list[TextRecord]:
    return [TextRecord(i, f"row {i}", "a" * p, "b" * c) for i, (p, c) in enumerate(sizes)]


def encode(records, tokenizer=None, **options):
    return encode_records(records, tokenizer or cached(byte_level, None), DataConfig(**options))


def test_long_rows_keep_their_end_by_default():
    tokenizer = cached(byte_level, None)
    record = TextRecord(5, "", "The start. " + "user " * 30 + "The question?", " An answer.")
    (whole,), _ = encode([record])
    (cut,), counts = encode([record], max_length=16)
    assert cut.tokens.tolist() == whole.tokens[-16:].tolist()
    assert cut.loss_mask.tolist() == whole.loss_mask[-16:].tolist() and cut.example_id == 5
    assert "question?" in tokenizer.decode(cut.tokens)
    assert (counts.rows, counts.kept, counts.truncated, counts.dropped) == (1, 1, 1, 0)
    (start,), _ = encode([TextRecord(0, "", "The is", "land " * 30)], max_length=16, truncate="keep_start")
    assert tokenizer.decode(start.tokens).startswith("The island") and len(start.tokens) == 16


def test_bos_survives_the_cut():
    tokenizer = byte_level(bos_token="<s>")
    tokenizer.adds_bos = True
    (cut,), _ = encode(raw_records((50, 3)), tokenizer, max_length=8)
    assert len(cut.tokens) == 8 and (cut.tokens == tokenizer.bos_id).tolist() == [True] + [False] * 7


def test_rows_with_nothing_left_to_learn_are_dropped_and_counted():
    records = raw_records((50, 3), (2, 3), (8, 1), (7, 1), (2, 20))
    examples, counts = encode(records, max_length=8, truncate="keep_start")
    # Row 3 keeps its one answer token but not its EOS; row 2 keeps nothing that is learned.
    assert [e.example_id for e in examples] == [1, 3, 4]
    assert (counts.rows, counts.kept, counts.truncated) == (5, 3, 2)
    assert (counts.dropped_no_target, counts.dropped_too_long, counts.dropped) == (2, 0, 2)
    assert counts.tokens == sum(len(e.tokens) for e in examples) == 6 + 8 + 8
    assert counts.trained_tokens == sum(e.loss_mask.sum() for e in examples) == 4 + 1 + 6
    examples, counts = encode(records, max_length=8, truncate="drop")
    assert [e.example_id for e in examples] == [1]
    assert (counts.dropped_too_long, counts.truncated) == (4, 0)


def test_a_first_token_that_nothing_predicts_is_no_target():
    (example,), counts = encode([TextRecord(0, "", "", "bb")])
    assert example.loss_mask.tolist() == [False, True, True] and counts.trained_tokens == 2


@pytest.mark.parametrize("truncate", ["drop", "keep_start"])
def test_no_rows_left_is_an_error(truncate):
    with pytest.raises(InputError, match=r"all 2 rows were dropped at data\.max_length=8 .*raise data\.max_length"):
        encode(raw_records((50, 3), (60, 3)), max_length=8, truncate=truncate)
    with pytest.raises(InputError, match="empty"):
        encode([])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=8),
    st.integers(2, 16),
    st.sampled_from(["keep_end", "keep_start", "drop"]),
)
def test_rows_in_are_rows_kept_and_rows_dropped(sizes, max_length, truncate):
    records = raw_records(*sizes)
    try:
        examples, counts = encode(records, max_length=max_length, truncate=truncate)
    except InputError as error:
        assert truncate != "keep_end" and f"all {len(records)} rows were dropped" in str(error)
        return
    assert counts.rows == len(records) == counts.kept + counts.dropped
    assert counts.kept == len(examples)
    assert all(2 <= len(e.tokens) <= max_length and e.loss_mask.any() and not e.loss_mask[0] for e in examples)
    if truncate == "keep_end":
        assert counts.dropped == 0, "the end of a row is always learned"
