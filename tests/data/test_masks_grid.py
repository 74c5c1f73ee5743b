"""What is learned, for every named template, form of row, `train_on` and way of cutting.

What to expect is written by hand: `turns_of` says in a few lines what each family of templates writes, and `LEARNED`
which messages of each row are learned. Nothing here is found by rendering.
"""

import functools
import json
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from burnish.convert.gguf_tokenizer import tokenizer_from_gguf
from burnish.data.config import DataConfig, RowFormat
from burnish.data.encode import Encoder
from burnish.data.examples import EncodeCounts
from burnish.data.named_templates import NAMED, use_template
from burnish.data.records import ChatRecord
from burnish.data.rows import RowEncoder
from burnish.data.tokenizer import Tokenizer
from burnish.errors import InputError

FIXTURE = Path(__file__).parents[1] / "fixtures" / "tokenizers" / "bpe.gguf"
BOS, EOS = "<BOS>", "<EOS>"
UNMARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = (*NAMED, "unmarked")
WRITES_BOS = ("llama3", "gemma", "mistral", "plain")
FOLDS_SYSTEM = ("gemma", "mistral")
ALL_TRAIN_ON = ("assistant", "completion", "last_turn", "all", "generation")
NO_THOUGHT = "<think>\n\n</think>\n\n"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def tokenizer(name: str, bos: bool = True) -> Tokenizer:
    """SmolLM2's tokens, Llama 3's and Qwen's words, and what the template needs; EOS is the padding, too."""
    backend = Backend.from_str(tokenizer_from_gguf(GGUFReader(FIXTURE)).backend.to_str())
    if name in ("llama3", "qwen3"):
        words = pre_tokenizers.Split(Regex(WORDS if name == "llama3" else WORDS.replace("{1,3}", "")), "isolated")
        rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, rest])
    backend.add_special_tokens([*(NAMED[name].tokens if name in NAMED else ()), *([BOS] if bos else []), EOS])
    named = {"eos_token": EOS, "pad_token": EOS}
    if bos:
        named["bos_token"] = BOS
        backend.post_processor = processors.TemplateProcessing(f"{BOS} $A", None, [(BOS, backend.token_to_id(BOS))])
    made = Tokenizer(backend, named, name="model")
    assert made.adds_bos == bos
    return use_template(made, name) if name in NAMED else made.with_chat_template(UNMARKED)


# ---- what the templates write


def turns_of(name: str, messages: list[dict]) -> list[tuple[str, str, str]]:
    """Of each message: what comes before it, itself with its terminator, and what comes after that."""
    turns, folded = [], ""
    questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
    for number, message in enumerate(messages):
        role, text = message["role"], message["content"]
        answers = role == "assistant"
        if name in ("chatml", "unmarked"):
            turn = (f"<|im_start|>{role}\n", f"{text}<|im_end|>", "\n")
        elif name == "qwen3":
            thinks = answers and number == len(messages) - 1 and number > max(questions, default=-1)
            said = NO_THOUGHT + text.lstrip("\n") if thinks else text
            turn = (f"<|im_start|>{role}\n", f"{said}<|im_end|>", "\n")
        elif name == "llama3":
            turn = (f"<|start_header_id|>{role}<|end_header_id|>\n\n", f"{text.strip()}<|eot_id|>", "")
        elif name == "phi":
            turn = (f"<|{role}|>\n", f"{text}<|end|>", "\n")
        elif name == "plain":
            turn = ("Assistant:", f" {text}{EOS}", "\n") if answers else (f"{role.capitalize()}: ", text, "\n")
        elif role == "system":
            turn, folded = ("", "", ""), f"{text}\n\n"
        elif name == "gemma":
            speaker = "model" if answers else "user"
            turn = (f"<start_of_turn>{speaker}\n{folded}", f"{text.strip()}<end_of_turn>", "\n")
        else:
            turn = ("", f" {text.strip()}{EOS}", "") if answers else (f"[INST] {folded}", f"{text}[/INST]", "")
        if role != "system":
            folded = ""
        turns.append(turn)
    return turns


def opening(name: str, bos: bool) -> str:
    return BOS if bos else ""


def prompt_of(name: str, messages: list[dict], number: int, bos: bool) -> str:
    """What generation is given to write message `number`, BOS and all."""
    before = "".join(map("".join, turns_of(name, messages[:number])))
    return opening(name, bos) + before + turns_of(name, messages[: number + 1])[number][0]


def expected(name: str, messages: list[dict], learned: dict[int, float], bos: bool) -> list[tuple]:
    """(text, [(piece, weight), ...], [prompt, ...]) of each example, where turns are learned."""
    if not learned:
        return []
    if name == "qwen3" and len(learned) > 1:  # an answer loses its thought once another message follows
        return [each for n, weight in learned.items() for each in expected(name, messages, {n: weight}, bos)]
    last = max(learned)
    turns = turns_of(name, messages[: last + 1])
    pieces = [(turns[number][1], weight) for number, weight in learned.items()]
    prompts = [prompt_of(name, messages, number, bos) for number in learned]
    return [(prompts[-1] + turns[last][1], pieces, prompts)]


def expected_of_all(name: str, messages: list[dict], weights: dict[int, float], bos: bool) -> list[tuple]:
    """The same where all is learned: every message with what is before and after it, its weight 1 if not given."""
    runs = [(opening(name, bos), 1.0)]
    for number, (before, body, after) in enumerate(turns_of(name, messages)):
        weight = weights.get(number, 1.0)
        # Phi ends a conversation by EOS behind the new line, so that a message ends before it.
        runs += [(before + body, weight), (after, weights.get(number + 1, 1.0) if name == "phi" else weight)]
    if name == "phi":
        runs[-1:] = [("\n", runs[-2][1]), (EOS, runs[-2][1])]
    text = "".join(run for run, _ in runs)
    if text.endswith("\n"):
        text, runs = text[:-1], runs[:-1]
    joined = [("".join(run for run, _ in group), weight) for weight, group in groupby(runs, key=lambda run: run[1])]
    first = tokenizer(name, bos).decode(tokenizer(name, bos).encode(text)[:1], skip_special=False)
    joined[0] = (joined[0][0].removeprefix(first), joined[0][1])  # it follows nothing
    return [(text, [run for run in joined if run[1] and run[0]], [])]


# ---- rows, and what is learned of them


def turn(role: str, content: str, **more) -> dict:
    return {"role": role, "content": content, **more}


def plain(messages: list[dict]) -> list[dict]:
    return [{"role": message["role"], "content": message["content"]} for message in messages]


TALK = [
    turn("system", "Be terse. §"),
    turn("user", "Is the island far? \U0001f3dd"),
    turn("assistant", "land ho, 12 miles"),
    turn("user", "And\n\nthe other one?"),
    turn("assistant", "Not  so far."),
]
FLAGGED = [
    turn("user", "one"),
    turn("assistant", "eins", weight=0.5),
    turn("user", "two"),
    turn("assistant", "zwei", train=False),
    turn("user", "three"),
    turn("assistant", "drei"),
]
LAST_OFF = [*TALK[1:4], {**TALK[4], "weight": 0}]
ASKED = [turn("user", "Q1"), turn("assistant", "A1"), turn("user", "Q2")]
ROWS: dict[str, dict] = {
    "messages": {"messages": TALK},
    "system beside": {"system": TALK[0]["content"], "messages": TALK[1:]},
    "sharegpt": {"conversations": [{"from": t["role"], "value": t["content"]} for t in TALK]},
    "texts": {"prompt": "Is the is", "completion": "land far?"},
    "flagged": {"messages": FLAGGED},
    "last off": {"messages": LAST_OFF},
    "completion of messages": {"prompt": ASKED, "completion": [turn("assistant", "A2")]},
    "preference": {"prompt": "Q", "chosen": "good", "rejected": "bad"},
    "history": {"instruction": "Q2", "input": "", "output": "A2", "history": [["Q1", "A1"]]},
    "question last": {"messages": ASKED},
    "as the history says": {"messages": [*ASKED, turn("assistant", "A2", train=False)]},
}
SAID = {
    **dict.fromkeys(("messages", "system beside", "sharegpt"), TALK),
    "texts": [turn("user", "Is the is"), turn("assistant", "land far?")],
    "flagged": plain(FLAGGED),
    "last off": plain(LAST_OFF),
    "completion of messages": [*ASKED, turn("assistant", "A2")],
    "preference": [turn("user", "Q"), turn("assistant", "good")],
    "history": [*ASKED, turn("assistant", "A2")],
    "question last": ASKED,
    "as the history says": [*ASKED, turn("assistant", "A2")],
}
# Of each row: the turns and weights learned by assistant, completion, last_turn, generation; and flags under `all`.
BOTH, LAST = {2: 1.0, 4: 1.0}, {4: 1.0}
LEARNED: dict[str, tuple[dict[int, float], ...]] = {
    "messages": (BOTH, LAST, LAST, BOTH, {}),
    "system beside": (BOTH, LAST, LAST, BOTH, {}),
    "sharegpt": (BOTH, LAST, LAST, BOTH, {}),
    "texts": ({1: 1.0}, {1: 1.0}, {1: 1.0}, {1: 1.0}, {}),
    "flagged": (*[{1: 0.5, 5: 1.0}] * 4, {1: 0.5, 3: 0.0}),
    "last off": ({1: 1.0}, {}, {}, {1: 1.0}, {3: 0.0}),
    "completion of messages": ({3: 1.0}, {3: 1.0}, {3: 1.0}, {3: 1.0}, {}),
    "preference": ({1: 1.0}, {1: 1.0}, {1: 1.0}, {1: 1.0}, {}),
    "history": ({1: 1.0, 3: 1.0}, {3: 1.0}, {3: 1.0}, {1: 1.0, 3: 1.0}, {}),
    "question last": ({1: 1.0}, {}, {1: 1.0}, {1: 1.0}, {}),
    "as the history says": ({1: 1.0}, {}, {}, {1: 1.0}, {3: 0.0}),
}


def wanted(name: str, row: str, train_on: str, bos: bool) -> list[tuple]:
    """What to expect of a row; refused rows are not asked for."""
    columns = ("assistant", "completion", "last_turn", "generation", "all")
    learned = LEARNED[row][columns.index(train_on)]
    if train_on == "all":
        return expected_of_all(name, SAID[row], learned, bos)
    if name == "qwen3" and train_on == "generation" and learned:  # what is marked, in one rendering of all there is
        turns = turns_of(name, SAID[row])
        last = max(learned)
        text = opening(name, bos) + "".join(map("".join, turns[:last])) + "".join(turns[last][:2])
        return [(text, [(turns[number][1], weight) for number, weight in learned.items()], [])]
    return expected(name, SAID[row], learned, bos)


def is_refused(name: str, row: str, train_on: str) -> bool:
    if train_on == "generation":
        return name == "unmarked"
    # Qwen 3 writes the answer that a flag ends at otherwise once more follows.
    return name == "qwen3" and train_on == "all" and row == "flagged"


def encode(name: str, row: str, bos: bool = True, **options):
    counts = EncodeCounts()
    config = DataConfig(**{"max_length": 4096, **options})
    rows = RowEncoder(tokenizer(name, bos), config, RowFormat())
    (record,) = rows.records([(7, "rows, line 8", ROWS[row])], counts)
    return rows.encode(record, counts), counts


def runs_of(chosen: Tokenizer, tokens, weights) -> list[tuple[str, float]]:
    """The stretches of tokens with one weight, as text; those that are not learned left out."""
    pairs = zip(tokens.tolist(), weights.tolist(), strict=True)
    groups = [(weight, [id for id, _ in group]) for weight, group in groupby(pairs, key=lambda pair: pair[1])]
    return [(chosen.decode(ids, skip_special=False), weight) for weight, ids in groups if weight]


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("train_on", ALL_TRAIN_ON)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_learned(name, train_on, bos):
    chosen = tokenizer(name, bos)
    for row in ROWS:
        if is_refused(name, row, train_on):
            with pytest.raises(InputError, match=r"^rows, line 8: .*(marks nothing|its flag has no place)"):
                encode(name, row, bos, train_on=train_on)
            continue
        examples, counts = encode(name, row, bos, train_on=train_on)
        right = wanted(name, row, train_on, bos)
        assert len(examples) == len(right), row
        assert (counts.rows, counts.kept, counts.dropped_no_target) == (1, int(bool(right)), int(not right)), row
        for example, (text, pieces, prompts) in zip(examples, right, strict=True):
            assert chosen.decode(example.tokens, skip_special=False) == text, row
            assert runs_of(chosen, example.tokens, example.weights) == pieces, row
            assert example.tokens.dtype == np.int32 and example.weights.dtype == np.float32
            assert example.example_id == 7
            # One BOS, before everything, and nothing learns to write it.
            assert (example.tokens == chosen.bos_id).nonzero()[0].tolist() == [0] * bos
            assert example.weights[0] == 0
            # What stands before an answer is what generation is given, token by token.
            first = np.flatnonzero(np.diff(example.weights, prepend=0) > 0)
            for start, prompt in zip(first, prompts, strict=False):
                assert example.tokens[:start].tolist() == chosen.encode(prompt), row
            if prompts:
                assert len(first) == len(prompts) and example.prompt.tolist() == chosen.encode(prompts[-1])


@pytest.mark.parametrize("name", NAMES)
def test_the_grid_is_no_empty_one(name):
    """Rows differ in what is learned of them; every learned turn ends by the template's own terminator."""
    end = NAMED[name].end or EOS if name in NAMED else "<|im_end|>"
    for row in ROWS:
        for _, pieces, _ in wanted(name, row, "assistant", True):
            assert all(piece.endswith(end) for piece, _ in pieces)
    (text, _, _), *_ = wanted(name, "messages", "assistant", True)
    assert text.count("Be terse. §") == 1
    assert wanted(name, "last off", "last_turn", True) == []
    assert {weight for _, pieces, _ in wanted(name, "flagged", "assistant", True) for _, weight in pieces} == {0.5, 1}


@pytest.mark.parametrize("bos", [True, False])
def test_raw_text_and_texts_without_a_template(bos):
    """BOS once, EOS once, whatever the text brings; the prompt is the one that is not learned."""
    bare = Tokenizer(tokenizer("plain", bos).backend, tokenizer("plain", bos).special_tokens)
    first = BOS if bos else ""
    for row, prompt, answer in [
        ({"prompt": "Is the is", "completion": "land far?"}, "Is the is", "land far?"),
        ({"prompt": first + "Is", "completion": " it?" + EOS}, "Is", " it?"),
        ({"text": "An island."}, "", "An island."),
        ({"text": first + "An island." + EOS}, "", "An island."),
    ]:
        for train_on in ("assistant", "completion", "last_turn", "all"):
            counts = EncodeCounts()
            rows = RowEncoder(bare, DataConfig(train_on=train_on), RowFormat())
            (record,) = rows.records([(0, "", row)], counts)
            (example,) = rows.encode(record, counts)
            assert bare.decode(example.tokens, skip_special=False) == first + prompt + answer + EOS
            text = prompt + answer if train_on == "all" else answer
            if not bos and text == prompt + answer:
                text = text[len(bare.decode(example.tokens[:1])) :]  # the first token follows nothing
            assert runs_of(bare, example.tokens, example.weights) == [(text + EOS, 1.0)], (row, train_on)
            assert (example.tokens == bare.eos_id).sum() == 1 and example.tokens[-1] == bare.eos_id


@pytest.mark.parametrize("name", NAMES)
def test_a_systems_message_of_the_recipe(name):
    """It comes into conversations that have none, moves no flag and no prompt, and leaves another alone."""
    for row in ("flagged", "completion of messages", "texts", "messages"):
        own = row == "messages"
        said = SAID[row] if own else [turn("system", "Be kind."), *SAID[row]]
        learned = {number + (not own): weight for number, weight in LEARNED[row][0].items()}
        examples, _ = encode(name, row, system="Be kind.")
        right = expected(name, said, learned, True)
        assert len(examples) == len(right)
        for example, (text, pieces, _) in zip(examples, right, strict=True):
            assert tokenizer(name).decode(example.tokens, skip_special=False) == text
            assert runs_of(tokenizer(name), example.tokens, example.weights) == pieces


# ---- tools and reasoning


CALL = turn("assistant", "", tool_calls=[{"name": "f", "arguments": {"x": 1}}])
CALLED = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
QWEN_TOOLS = "".join(
    [
        "<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n",
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n",
        '{"name": "f"}\n',
        "</tools>\n\nFor each function call, return a json object with function name and arguments ",
        "within <tool_call></tool_call> XML tags:\n<tool_call>\n",
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n',
    ]
)


def test_tool_turns_are_masked_and_calls_are_learned():
    """In a chain of calls Qwen 3 keeps the reasoning: one text, and every turn of the assistant's in it."""
    name = "qwen3"
    call = {**CALL, "reasoning_content": "Call f."}
    done = turn("assistant", "It is 1.", reasoning_content="Got 1.")
    row = {"messages": [turn("user", "f?"), call, turn("tool", "1"), done], "tools": [{"name": "f"}]}
    counts = EncodeCounts()
    for train_on in ("assistant", "completion", "generation"):
        rows = RowEncoder(tokenizer(name), DataConfig(max_length=4096, train_on=train_on), RowFormat())
        (record,) = rows.records([(0, "", row)], counts)
        (example,) = rows.encode(record, counts)
        learned = [f"<think>\nCall f.\n</think>\n\n{CALLED}", "<think>\nGot 1.\n</think>\n\nIt is 1.<|im_end|>"]
        between = "\n<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        text = f"<|im_start|>user\nf?<|im_end|>\n<|im_start|>assistant\n{learned[0]}{between}{learned[1]}"
        assert tokenizer(name).decode(example.tokens, skip_special=False) == BOS + QWEN_TOOLS + text
        assert runs_of(tokenizer(name), example.tokens, example.weights) == [(piece, 1.0) for piece in learned]
    assert counts.split_turns == 0


@pytest.mark.parametrize("name", [name for name in NAMED if name != "qwen3"])
def test_tools_without_a_place_are_refused_not_dropped(name):
    for row in (
        {"messages": TALK, "tools": [{"name": "f"}]},
        {"messages": [turn("user", "f?"), CALL, turn("tool", "1"), turn("assistant", "1")]},
    ):
        counts = EncodeCounts()
        rows = RowEncoder(tokenizer(name), DataConfig(bad_rows="drop"), RowFormat())
        (record,) = rows.records([(0, "rows, line 1", row)], counts)
        assert rows.encode(record, counts) == [] and counts.dropped_unreadable == 1
        with pytest.raises(InputError, match=r"^rows, line 1: .*tool"):
            RowEncoder(tokenizer(name), DataConfig(), RowFormat()).encode(record, counts)


REASONED = [
    turn("user", "1+1?"),
    turn("assistant", "2", reasoning_content="One and one."),
    turn("user", "2+2?"),
    turn("assistant", "4", reasoning_content="Two and two."),
    turn("user", "3+3?"),
    turn("assistant", "6", train=False),
]


def test_rewritten_turns_are_examples_of_their_own():
    """Each is what generation saw then: earlier answers without the thoughts they were learned with."""
    chosen = tokenizer("qwen3")
    rows = RowEncoder(chosen, DataConfig(), RowFormat())
    counts = EncodeCounts()
    (record,) = rows.records([(3, "", {"messages": REASONED})], counts)
    examples = rows.encode(record, counts)
    asked = "<BOS><|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    again = asked + "2<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    right = [
        (asked, "<think>\nOne and one.\n</think>\n\n2<|im_end|>"),
        (again, "<think>\nTwo and two.\n</think>\n\n4<|im_end|>"),
    ]
    assert (counts.rows, counts.kept, counts.examples, counts.split_turns, counts.split) == (1, 1, 2, 1, 0)
    for example, (prompt, answer) in zip(examples, right, strict=True):
        assert example.example_id == 3 and example.prompt.tolist() == chosen.encode(prompt)
        assert chosen.decode(example.tokens, skip_special=False) == prompt + answer
        assert runs_of(chosen, example.tokens, example.weights) == [(answer, 1.0)]
    # A turn that is alone needs no splitting, wherever it is.
    rows = RowEncoder(chosen, DataConfig(rewritten_turns="refuse", train_on="last_turn"), RowFormat())
    (record,) = rows.records([(3, "", {"messages": REASONED[:4]})], counts)
    (example,) = rows.encode(record, counts)
    assert runs_of(chosen, example.tokens, example.weights) == [(right[1][1], 1.0)]


def test_rewritten_turns_are_refused_if_asked():
    rows = RowEncoder(tokenizer("qwen3"), DataConfig(rewritten_turns="refuse"), RowFormat())
    (record,) = rows.records([(0, "rows, line 1", {"messages": REASONED})], EncodeCounts())
    with pytest.raises(InputError, match=r"^rows, line 1: message 1: .* changes .*rewritten_turns=split"):
        rows.encode(record, EncodeCounts())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "qwen3"])
def test_other_templates_rewrite_nothing(name):
    """Phi writes EOS at the end of a conversation: that is no rewriting."""
    examples, counts = encode(name, "history", rewritten_turns="refuse")
    assert len(examples) == 1 and counts.split_turns == 0


def test_the_templates_variables():
    """Without thinking the empty thought is the prompt's, and is not learned."""
    examples, _ = encode("qwen3", "texts", template_variables={"enable_thinking": False})
    assert runs_of(tokenizer("qwen3"), examples[0].tokens, examples[0].weights) == [("land far?<|im_end|>", 1.0)]
    assert tokenizer("qwen3").decode(examples[0].prompt).endswith(f"assistant\n{NO_THOUGHT}")


# ---- flags


@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize("train_on", ALL_TRAIN_ON)
def test_a_flag_on_what_others_say(role, train_on):
    """An option that is not heeded is refused; `all` heeds it."""
    rows = RowEncoder(tokenizer("chatml"), DataConfig(train_on=train_on), RowFormat())
    talk = [turn("system", "s"), turn("user", "u"), turn("assistant", "a")]
    number = 0 if role == "system" else 1
    for flag in ({"train": True}, {"weight": 0.5}):
        messages = [{**each, **flag} if n == number else each for n, each in enumerate(talk)]
        (record,) = rows.records([(0, "rows, line 1", {"messages": messages})], EncodeCounts())
        if train_on == "all":
            (example,) = rows.encode(record, EncodeCounts())
            assert set(example.weights[1:].tolist()) == {1.0, flag.get("weight", 1.0)}
            continue
        with pytest.raises(InputError, match=rf"line 1: message {number}: a {role} turn that asks to be learned; set"):
            rows.encode(record, EncodeCounts())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_all_but_one_message(name, number):
    """A flag of 0 masks that message, and no more."""
    messages = [dict(each) for each in TALK[1:]]
    messages[number]["weight"] = 0
    counts = EncodeCounts()
    rows = RowEncoder(tokenizer(name), DataConfig(train_on="all"), RowFormat())
    (record,) = rows.records([(0, "", {"messages": messages})], counts)
    if name == "qwen3" and number in (1, 2):  # written otherwise once more follows, so it has no end
        with pytest.raises(InputError, match="its flag has no place"):
            rows.encode(record, counts)
        return
    (example,) = rows.encode(record, counts)
    ((text, pieces, _),) = expected_of_all(name, TALK[1:], {number: 0.0}, True)
    assert tokenizer(name).decode(example.tokens, skip_special=False) == text
    assert runs_of(tokenizer(name), example.tokens, example.weights) == pieces


# ---- cutting


@pytest.mark.parametrize("truncate", ["keep_end", "keep_start", "split", "drop"])
@pytest.mark.parametrize("name", NAMES)
def test_cutting(name, truncate):
    """Nothing is learned twice or without BOS; a row that loses its targets is dropped and counted."""
    for row, train_on in (("messages", "assistant"), ("flagged", "assistant"), ("texts", "all"), ("history", "all")):
        wholes, _ = encode(name, row, train_on=train_on)
        bos = tokenizer(name).bos_id
        longest = max(len(whole.tokens) for whole in wholes)
        for length in sorted({2, 3, 5, 8, 13, longest // 2, longest - 1, longest, longest + 1}):
            examples, counts = encode(name, row, train_on=train_on, truncate=truncate, max_length=length)
            assert counts.rows == 1 == counts.kept + counts.dropped
            assert counts.kept == int(bool(examples)) and counts.examples == len(examples)
            assert counts.trained_tokens == sum(int((e.weights > 0).sum()) for e in examples)
            for example in examples:
                assert 2 <= len(example.tokens) <= length and example.weights.any() and not example.weights[0]
                assert (example.tokens == bos).nonzero()[0].tolist() == [0]
            fit = [whole for whole in wholes if len(whole.tokens) <= length]
            if truncate == "drop":
                assert [e.tokens.tolist() for e in examples] == [whole.tokens.tolist() for whole in fit]
                assert counts.dropped_too_long == int(not fit) and counts.truncated == 0
                assert counts.dropped_pieces == (len(wholes) - len(fit) if fit else 0)
            elif truncate == "split":
                assert learned_of(examples) == learned_of(wholes)
                assert counts.split == int(len(fit) < len(wholes))
            else:
                cut = [ends_of(whole, length, truncate) for whole in wholes]
                right = [(ids, weights) for ids, weights in cut if any(weights)]
                assert [(e.tokens.tolist(), e.weights.tolist()) for e in examples] == right
                assert counts.dropped_no_target == int(not right)
                assert counts.truncated == int(bool(right) and len(fit) < len(wholes))


def learned_of(examples) -> list[tuple[int, float]]:
    """All that is learned, in order."""
    pairs = [pair for e in examples for pair in zip(e.tokens.tolist(), e.weights.tolist(), strict=True)]
    return [pair for pair in pairs if pair[1]]


def ends_of(whole, length: int, truncate: str) -> tuple[list[int], list[float]]:
    ids, weights = whole.tokens.tolist(), whole.weights.tolist()
    if len(ids) <= length:
        return ids, weights
    if truncate == "keep_start":
        return ids[:length], weights[:length]
    return [ids[0], *ids[1 - length :]], [0.0, *weights[1 - length :]]  # every whole starts with BOS


# ---- any conversation

TEXT = st.lists(
    st.sampled_from(
        [
            *("a", "land", "is", "The", " ", "  ", "\n", "\n\n", "\r\n", "\t", "1", "12", ".", "!", "[", "<", "<|"),
            *("<|im_end|>", "<|im_start|>", "<|eot_id|>", "[/INST]", "<end_of_turn>", "<EOS>", "é", "😀", "島"),
            *("\U0001f469\u200d\U0001f467", "|>", "\u00a0", "\u200b", "\x1c", "{{ x }}", "<think>", "User: ", "'s"),
        ]
    )
    | st.characters(exclude_categories=["Cs"]),
    max_size=6,
).map("".join)
WEIGHTS = st.sampled_from([None, None, 0.0, 0.5, 2.0])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "qwen3"])
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT, WEIGHTS), min_size=1, max_size=3), st.booleans(), st.none() | TEXT)
def test_any_conversation(name, talk, bos, system):
    messages = [] if system is None or not system.strip() else [turn("system", system)]
    weights: list[float | None] = [None] * len(messages)
    for said, answer, weight in talk:
        messages += [turn("user", said), turn("assistant", answer)]
        weights += [None, weight]
    learned = {n: 1.0 if weights[n] is None else weights[n] for n, m in enumerate(messages) if m["role"] == "assistant"}
    right = expected(name, messages, {n: weight for n, weight in learned.items() if weight}, bos)
    chosen = tokenizer(name, bos)
    record = ChatRecord(0, "", tuple(messages), weights=tuple(weights))
    found = Encoder(chosen, DataConfig()).encode(record)
    assert len(found) == len(right)
    for (ids, loss_weights), (text, pieces, prompts) in zip(found, right, strict=True):
        assert chosen.decode(ids, skip_special=False) == text
        assert runs_of(chosen, ids, loss_weights) == pieces
        # Where the prompt's end and the answer's start would merge, they are cut; what follows keeps the cut, and so is
        # no more what that text alone would be.
        for prompt, (piece, _) in zip(prompts, pieces, strict=True):
            alone = chosen.encode(prompt)
            assert ids[: len(alone)].tolist() == alone
            assert loss_weights[len(alone) - 1] == 0 < loss_weights[len(alone)]
            if chosen.encode(prompt + piece)[: len(alone)] != alone:
                break


def test_rows_are_json():
    """Or a row of the grid is one that no file can hold."""
    assert json.loads(json.dumps(ROWS)) == ROWS
