import json
import pickle
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.data.config import RowFormat
from burnish.data.formats import DroppedRow, check_format, read_row
from burnish.data.records import ChatRecord, TextRecord, TokensRecord
from burnish.errors import InputError

DOCS = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def read(row, columns=None, form="auto"):
    return read_row(row, 7, "rows.jsonl, line 3", RowFormat(format=form, columns=columns or {}))


def chat(*messages, first=0, tools=None, weights=()):
    return ChatRecord(7, "rows.jsonl, line 3", messages, first, tools, weights)


def text(prompt, completion, raw=False):
    return TextRecord(7, "rows.jsonl, line 3", prompt, completion, raw)


def tokens(ids, weights):
    return TokensRecord(7, "rows.jsonl, line 3", ids, weights)


READ = [
    # messages; other keys are ignored, and the form that is first wins
    ({"messages": [USER, ANSWER, USER, ANSWER], "id": 7}, chat(USER, ANSWER, USER, ANSWER)),
    ({"messages": [USER, ANSWER], "prompt": "a", "completion": "b"}, chat(USER, ANSWER)),
    ({"messages": None, "prompt": "2+2?", "completion": "4"}, text("2+2?", "4")),
    ({"messages": json.dumps([USER, ANSWER]), "tools": json.dumps(TOOLS)}, chat(USER, ANSWER, tools=tuple(TOOLS))),
    ({"messages": [USER, ANSWER], "tools": []}, chat(USER, ANSWER)),
    ({"messages": [USER, ANSWER], "tools": ""}, chat(USER, ANSWER)),
    ({"messages": [USER, ANSWER], "tools": [{"a": {"b": None, "c": 1}}]}, chat(USER, ANSWER, tools=({"a": {"c": 1}},))),
    ({"messages": [USER, ANSWER], "system": "Be brief."}, chat(SYSTEM, USER, ANSWER)),
    ({"messages": [SYSTEM, USER, ANSWER], "system": "Be brief."}, chat(SYSTEM, USER, ANSWER)),
    (
        {"messages": [USER, {**ANSWER, "train": False}], "system": "Be brief."},
        chat(SYSTEM, USER, ANSWER, weights=(None, None, 0.0)),
    ),
    # conversations
    (
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}], "system": ""},
        chat(USER, ANSWER),
    ),
    ({"conversations": [USER, ANSWER], "text": "no"}, chat(USER, ANSWER)),
    # prompt and completion: the completion alone is learned, not an answer that is part of the prompt
    ({"prompt": "2+2?", "completion": "4"}, text("2+2?", "4")),
    ({"prompt": "2+2?", "response": "4"}, text("2+2?", "4")),
    ({"prompt": "", "completion": "\ufeffOnce \x00upon"}, text("", "\ufeffOnce \x00upon")),
    ({"prompt": '[{"role": "user"}]', "completion": " [4] "}, text('[{"role": "user"}]', " [4] ")),
    ({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, chat(USER, ANSWER, USER, ANSWER, first=3)),
    ({"prompt": "2+2?", "completion": [ANSWER]}, chat(USER, ANSWER, first=1)),
    ({"prompt": [USER], "completion": "4"}, chat(USER, ANSWER, first=1)),
    ({"prompt": [SYSTEM], "completion": [USER, ANSWER]}, chat(SYSTEM, USER, ANSWER, first=1)),
    ({"prompt": "2+2?", "completion": "4", "tools": TOOLS}, chat(USER, ANSWER, first=1, tools=tuple(TOOLS))),
    ({"prompt": "2+2?", "completion": "4", "system": "Be brief."}, chat(SYSTEM, USER, ANSWER, first=2)),
    # preference
    ({"prompt": "2+2?", "chosen": "4", "rejected": ""}, text("2+2?", "4")),
    ({"prompt": "2+2?", "chosen": "[4]", "rejected": "[5"}, text("2+2?", "[4]")),
    ({"prompt": "2+2?", "chosen": [ANSWER], "rejected": [WRONG]}, chat(USER, ANSWER, first=1)),
    ({"prompt": [SYSTEM, USER], "chosen": "4", "rejected": "5"}, chat(SYSTEM, USER, ANSWER, first=2)),
    ({"chosen": [USER, ANSWER], "rejected": [USER, WRONG]}, chat(USER, ANSWER, first=1)),
    ({"chosen": json.dumps([USER, ANSWER]), "rejected": json.dumps([USER, WRONG])}, chat(USER, ANSWER, first=1)),
    (
        {"chosen": [SYSTEM, USER, WRONG, USER, ANSWER], "rejected": [SYSTEM, USER, WRONG, USER, WRONG]},
        chat(SYSTEM, USER, WRONG, USER, ANSWER, first=4),
    ),
    # the last message of either is its answer, even where all of it is shared
    ({"chosen": [USER, ANSWER, USER, ANSWER], "rejected": [USER, ANSWER]}, chat(USER, ANSWER, USER, ANSWER, first=1)),
    # the prompt is not doubled where the answers hold it, too
    ({"prompt": "2+2?", "chosen": [USER, ANSWER], "rejected": [USER, WRONG]}, chat(USER, ANSWER, first=1)),
    (
        {"prompt": "2+2?", "chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, WRONG]},
        chat(SYSTEM, USER, ANSWER, first=2),
    ),
    ({"prompt": "2+2?", "completion": "no", "chosen": "4", "rejected": "5"}, text("2+2?", "4")),
    # alpaca
    ({"instruction": "Add.", "input": "2+2", "output": "4"}, text("Add.\n\n2+2", "4")),
    ({"instruction": "2+2?", "input": "", "output": "4", "history": []}, text("2+2?", "4")),
    ({"instruction": "2+2?", "input": None, "output": "4", "system": None, "text": "no"}, text("2+2?", "4")),
    ({"instruction": "", "input": "2+2?", "output": "4", "history": None}, text("2+2?", "4")),
    ({"instruction": "2+2?", "output": "4", "system": "Be brief."}, chat(SYSTEM, USER, ANSWER, first=2)),
    ({"instruction": "2+2?", "output": "4", "history": [["2+2?", "5"]]}, chat(USER, WRONG, USER, ANSWER)),
    # the rest
    ({"question": "2+2?", "answer": "4"}, text("2+2?", "4")),
    ({"text": "\n2+2=4"}, text("", "\n2+2=4", raw=True)),
    ({"input_ids": [0, 5, 6]}, tokens((0, 5, 6), (1.0, 1.0, 1.0))),
    ({"input_ids": "[0, 5, 6]", "labels": "[-100, 5, -100]"}, tokens((0, 5, 6), (0.0, 1.0, 0.0))),
    ({"input_ids": [0, 5], "labels": None, "loss_mask": [0, 1]}, tokens((0, 5), (0.0, 1.0))),
    ({"input_ids": [0, 5], "mask": [False, True]}, tokens((0, 5), (0.0, 1.0))),
    ({"input_ids": [0, 5], "completion_mask": [0, 1]}, tokens((0, 5), (0.0, 1.0))),
    ({"input_ids": [0, 5], "assistant_masks": [0, 1]}, tokens((0, 5), (0.0, 1.0))),
    (
        {"input_ids": [9, 1, 2, 3, 9, 9], "labels": [-100, -100, 2, 3, -100, 9], "attention_mask": [0, 1, 1, 1, 0, 0]},
        tokens((1, 2, 3), (0.0, 1.0, 1.0)),
    ),
]


@pytest.mark.parametrize(("row", "record"), READ, ids=[str(row)[:60] for row, _ in READ])
def test_every_form_gives_its_record(row, record):
    before = json.dumps(row)
    found = read(row)
    assert found == record and type(found) is type(record)
    assert json.dumps(row) == before, "the row is not changed"


def test_the_text_record_is_a_chat_of_the_same_turns():
    assert read({"question": "2+2?", "answer": "4"}).as_chat() == chat(USER, ANSWER, first=1)


@pytest.mark.parametrize(
    "form",
    ["messages", "conversations", "preference", "prompt_completion", "alpaca", "question_answer", "text", "tokens"],
)
def test_a_named_form_is_read_whatever_else_is_there_and_missed_where_it_is_not(form):
    rows = {
        "messages": {"messages": [USER, ANSWER]},
        "conversations": {"conversations": [USER, ANSWER]},
        "preference": {"chosen": [USER, ANSWER], "rejected": [USER, WRONG]},
        "prompt_completion": {"prompt": "2+2?", "completion": "4"},
        "alpaca": {"instruction": "2+2?", "output": "4"},
        "question_answer": {"question": "2+2?", "answer": "4"},
        "text": {"text": "4"},
        "tokens": {"input_ids": [4]},
    }
    everything = {
        key: value for row in rows.values() for key, value in row.items() if key != "prompt" or form[0] == "p"
    }
    if form == "preference":
        del everything["prompt"]
    assert read(everything, form=form) == read(rows[form])
    with pytest.raises(InputError) as caught:
        read({key: value for key, value in everything.items() if key not in rows[form]}, form=form)
    assert all(f"no {key!r}" in str(caught.value) for key in rows[form])


# (row, what the line must say)
REFUSED = [
    ([1], ["expected an object, found a list"]),
    (None, ["expected an object, found null"]),
    ({}, ["no 'messages', nor 'prompt' and 'completion'", "keys found: none", "data.columns"]),
    ({"query": "a", "reply": "b"}, ["'query', 'reply'", "rename the keys"]),
    ({f"c{i}": 1 for i in range(50)}, ["'c11' and 38 more"]),
    ({"prompt": "a"}, ["no 'completion' (keys found: 'prompt')", "rename or add the key"]),
    ({"completion": "a"}, ["no 'prompt'"]),
    ({"response": "a", "instruction": "b"}, ["no 'prompt'", "data.columns"]),
    ({"chosen": "a", "prompt": "b"}, ["no 'rejected'"]),
    (
        {"prompt": "a", "completion": 4},
        ["completion: must be a string or a list", "a number", "completion: '{completion}'"],
    ),
    ({"prompt": None, "completion": "a"}, ["prompt: must be a string or a list of messages, found null"]),
    ({"prompt": "a", "completion": ("b",)}, ["completion: must be", "found tuple"]),
    ({"prompt": "a", "completion": " \n"}, ["completion is empty", "fill it in or remove"]),
    ({"prompt": [USER], "completion": ""}, ["completion is empty"]),
    ({"prompt": "a", "completion": "\ud83d"}, ["completion: \\ud83d is half of a character"]),
    ({"prompt": "\ude00", "completion": "a"}, ["prompt: \\ude00 is half"]),
    ({"prompt": [], "completion": "a"}, ["prompt: must be a non-empty list of messages, found an empty list"]),
    ({"prompt": [USER], "completion": [USER]}, ["completion: starts with the prompt again"]),
    (
        {"prompt": [USER], "completion": [USER, ANSWER]},
        ["completion: starts with the prompt again", "leave the prompt"],
    ),
    ({"prompt": [SYSTEM], "completion": [USER]}, ["completion: no assistant turn"]),
    ({"prompt": [SYSTEM, USER], "completion": [SYSTEM, ANSWER]}, ["completion[0]: a second system message"]),
    ({"messages": "hi"}, ["messages: must be a non-empty list of messages, or JSON of one", "not JSON", "column 1"]),
    ({"messages": '{"role": "user"}'}, ["messages: must be a non-empty list", "found an object"]),
    ({"messages": "9" * 5000}, ["messages", "cannot be read"]),
    ({"messages": "[" * 100_000}, ["messages", "cannot be read"]),
    ({"messages": []}, ["messages: must be a non-empty list", "an empty list"]),
    ({"messages": None}, ["messages: must be", "null"]),
    ({"messages": [USER]}, ["messages: no assistant turn", "add one or remove the line"]),
    ({"messages": [USER, ANSWER], "system": 4}, ["system: must be a string, found a number"]),
    ({"messages": [SYSTEM, USER, ANSWER], "system": "x"}, ["system: differs", "messages; keep one"]),
    (
        {"messages": [USER, ANSWER], "tools": {"name": "add"}},
        ["tools: must be a list of tool descriptions", "an object"],
    ),
    ({"messages": [USER, ANSWER], "tools": ["add"]}, ["tools[0]: must be an object", "a string"]),
    ({"messages": [USER, ANSWER], "tools": "add"}, ["tools: must be a list", "not JSON"]),
    ({"messages": [USER, ANSWER], "tools": [{"name": "\ud83d"}]}, ["tools: \\ud83d is half"]),
    ({"messages": [USER, ANSWER], "tools": '[{"name": "\\ud83d"}]'}, ["tools: \\ud83d is half"]),
    ({"chosen": "a", "rejected": "b"}, ["without a prompt", "column 'prompt'"]),
    ({"prompt": "a", "chosen": "", "rejected": "b"}, ["chosen is empty"]),
    ({"prompt": "a", "chosen": 1, "rejected": "b"}, ["chosen: must be a string or a list of messages, found a number"]),
    ({"chosen": [ANSWER], "rejected": [WRONG]}, ["no first message in common", "add 'prompt'"]),
    ({"prompt": "x", "chosen": [USER, ANSWER], "rejected": [USER, WRONG]}, ["prompt is not what chosen and rejected"]),
    ({"chosen": [USER, ANSWER], "rejected": [USER, 5]}, ["rejected[1]: must be an object"]),
    ({"instruction": 5, "output": "a"}, ["instruction: must be a string, found a number"]),
    ({"instruction": "a", "output": " "}, ["output is empty"]),
    ({"instruction": "a", "input": ["b"], "output": "c"}, ["input: must be a string, found a list"]),
    ({"instruction": "a", "output": "b", "history": [["q"]]}, ["history[0]: must be a pair"]),
    ({"instruction": "a", "output": "b", "history": [["q", ""]]}, ["history[0] is empty"]),
    (
        {"question": "2+2?", "answer": 4},
        ["answer: must be a string, found a number", "data.columns: {answer: '{answer}'}"],
    ),
    ({"question": True, "answer": "4"}, ["question: must be a string, found true or false"]),
    ({"text": ""}, ["text is empty"]),
    ({"text": ["a"]}, ["text: must be a string, found a list"]),
    ({"input_ids": []}, ["input_ids: must be token ids", "none"]),
    ({"input_ids": [1, -1]}, ["input_ids: must be token ids from 0, found -1"]),
    ({"input_ids": [1, True]}, ["input_ids[1]: must be a whole number, found true or false"]),
    ({"input_ids": [1.0]}, ["input_ids[0]: must be a whole number, found another number"]),
    ({"input_ids": [10**5000]}, ["input_ids: holds a number that no token id can be"]),
    ({"input_ids": [1, 2], "labels": [2, -100]}, ["labels[0]: 2, but the input id is 1", "-100", "do not shift"]),
    ({"input_ids": [1, 2], "labels": [1]}, ["labels: has 1 entries for 2 input_ids"]),
    ({"input_ids": [1, 2], "loss_mask": [1]}, ["loss_mask: has 1 entries for 2"]),
    ({"input_ids": [1, 2], "mask": [0, 0.5]}, ["mask[1]: must be 0 or 1, found another number"]),
    ({"input_ids": [1, 2], "mask": [0, None]}, ["mask[1]: must be 0 or 1, found null"]),
    ({"input_ids": [1], "mask": [1], "labels": [1]}, ["labels and mask", "keep one"]),
    ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, ["attention_mask[1]: 0 between tokens", "at the ends"]),
    ({"input_ids": [1], "attention_mask": [0]}, ["nothing but padding"]),
]


@pytest.mark.parametrize(("row", "said"), REFUSED, ids=[str(said[-1]) + str(i) for i, (_, said) in enumerate(REFUSED)])
def test_bad_rows_get_one_line_that_names_place_key_and_mend(row, said):
    message = refusal(row)
    for words in said:
        assert words in message


def test_nesting_without_end_is_refused():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert "nested too deep" in refusal({"messages": [USER, {**ANSWER, "odd": deep}]})


def refusal(row, columns=None, form="auto") -> str:
    with pytest.raises(InputError) as caught:
        read(row, columns, form)
    message = str(caught.value)
    assert message.startswith("rows.jsonl, line 3: ") and len(message.splitlines()) == 1 and len(message) < 400
    assert not isinstance(caught.value, DroppedRow)
    return message


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "b"}]},
        {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "name": None}]},
    ],
)
def test_identical_pairs_are_dropped_with_a_reason(row):
    with pytest.raises(DroppedRow, match=r"rows\.jsonl, line 3: chosen and rejected are the same") as caught:
        read(row)
    assert caught.value.reason == "chosen and rejected are the same"
    sent = pickle.loads(pickle.dumps(caught.value))  # a process that reads rows can tell another
    assert (str(sent), sent.reason) == (str(caught.value), caught.value.reason)


COLUMNS = [
    ({"q": "2+2?", "a": "4"}, {"prompt": "q", "completion": "a"}, text("2+2?", "4")),
    ({"q": "2+2?", "a": 4}, {"question": "q", "answer": "{a}"}, text("2+2?", "4")),
    ({"q": "2+2?", "a": 0.5}, {"question": "{{{q}}}", "answer": "<{a}>{a}"}, text("{2+2?}", "<0.5>0.5")),
    ({"a.b c": "x", "d": "{q}"}, {"prompt": "{a.b c}\n", "completion": "{d}"}, text("x\n", "{q}")),
    # what is mapped decides, not what else is there
    ({"messages": [USER, ANSWER], "text": "no", "body": "yes"}, {"text": "body"}, text("", "yes", raw=True)),
    # names may be swapped
    ({"question": "4", "answer": "2+2?"}, {"question": "answer", "answer": "question"}, text("2+2?", "4")),
    # tools and system are read all the same, and can be mapped themselves
    (
        {"m": [USER, ANSWER], "tools": TOOLS, "system": "Be brief."},
        {"messages": "m"},
        chat(SYSTEM, USER, ANSWER, tools=tuple(TOOLS)),
    ),
    (
        {"m": [USER, ANSWER], "system": "no", "s": "Be brief."},
        {"messages": "m", "system": "s"},
        chat(SYSTEM, USER, ANSWER),
    ),
    ({"ids": [1], "keep": [1], "labels": [5]}, {"input_ids": "ids", "mask": "keep"}, tokens((1,), (1.0,))),
]


@pytest.mark.parametrize(("row", "columns", "record"), COLUMNS)
def test_columns_of_other_names(row, columns, record):
    check_format(RowFormat(columns=columns))
    assert read(row, columns) == record


@pytest.mark.parametrize(
    ("columns", "form", "said"),
    [
        ({"qestion": "q", "answer": "a"}, "auto", ["no form has 'qestion'", "question,"]),
        ({"prompt": "q"}, "auto", ["no 'completion'", "all that is read"]),
        ({"prompt": "q", "completion": "a"}, "alpaca", ["no 'instruction' and no 'output'"]),
        ({"messages": "m", "prompt": "p"}, "auto", ["data.columns.prompt: rows of form messages do not have it"]),
        ({"text": "{a"}, "auto", ["data.columns.text:", "{column}"]),
        ({"text": "{a} }"}, "auto", ["data.columns.text:", "{{ and }}".replace("and", "or")]),
        ({"text": "{}"}, "auto", ["braces hold the name of a column and nothing else"]),
        ({"text": "{a:>5}"}, "auto", ["braces hold the name"]),
        ({"text": "{a!r}"}, "auto", ["braces hold the name"]),
    ],
)
def test_columns_that_make_no_form_are_refused_without_a_row(columns, form, said):
    with pytest.raises(InputError, match=r"^data\.columns") as caught:
        check_format(RowFormat(columns=columns, format=form))
    in_row = refusal({"q": "a", "a": "b", "m": [USER, ANSWER], "p": ""}, columns, form)
    assert all(words in str(caught.value) and words in in_row for words in said)


@pytest.mark.parametrize(
    ("row", "columns", "said"),
    [
        ({"q": "x", "b": "y"}, {"prompt": "q", "completion": "a"}, ["no 'a'", "data.columns.completion", "'q', 'b'"]),
        (
            {"q": "x", "b": "y"},
            {"prompt": "q", "completion": "-{a}"},
            ["no 'a'", "data.columns.completion", "'q', 'b'"],
        ),
        ({"q": "x", "a": None}, {"prompt": "q", "completion": "-{a}"}, ["'a'", "data.columns.completion", "null"]),
        ({"q": "x", "a": True}, {"prompt": "q", "completion": "-{a}"}, ["'a'", "true or false"]),
        ({"q": "x", "a": float("nan")}, {"prompt": "q", "completion": "-{a}"}, ["'a'", "that JSON cannot spell"]),
        ({"q": "x", "a": 10**5000}, {"prompt": "q", "completion": "-{a}"}, ["'a'", "that JSON cannot spell"]),
        ({"q": "x", "a": ["b"]}, {"prompt": "q", "completion": "-{a}"}, ["'a'", "a list"]),
        ({"q": "x", "a": None}, {"prompt": "q", "completion": "a"}, ["completion: must be a string", "null"]),
    ],
)
def test_rows_without_what_columns_name(row, columns, said):
    message = refusal(row, columns)
    assert all(words in message for words in said)


def test_columns_are_parsed_once_but_not_mixed_up():
    row = {"a": "x", "b": "y"}
    assert read(row, {"text": "a"}).completion == "x"
    assert read(row, {"text": "b"}).completion == "y"
    assert read(row, {"text": "a"}, form="text").completion == "x"


def test_the_rows_of_the_documentation_are_read():
    table = re.findall(r"^\| `(\w+)` \| `(\{.*\})` \|$", DOCS, flags=re.MULTILINE)
    assert [name for name, _ in table] == list(RowFormat.model_fields["format"].annotation.__args__)[1:]
    expected = {
        "messages": chat(USER, ANSWER),
        "conversations": chat(USER, ANSWER),
        "alpaca": text("Add.\n\n2+2", "4"),
        "text": text("", "Two and two are four.", raw=True),
        "tokens": tokens((1, 50, 60, 2), (0.0, 0.0, 1.0, 1.0)),
    }
    for name, row in table:
        assert read(json.loads(row)) == read(json.loads(row), form=name) == expected.get(name, text("2+2?", "4"))
    (flagged,) = re.findall(r'^    (\{"messages".*\})$', DOCS, flags=re.MULTILINE)
    assert read(json.loads(flagged)).weights == (None, 0.0, None, 2.0)
    mapped = re.findall(r"^    (\{.*\}) +columns: (\{.*\})$", DOCS, flags=re.MULTILINE)
    found = [read(yaml.safe_load(row), yaml.safe_load(columns)) for row, columns in mapped]
    assert found == [text("2+2?", "4"), text("Q: 2+2?\nA:", " 4"), chat(USER, ANSWER)]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.sampled_from(["\ud800\n", "["]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "\r", "name"]), inner),
    max_leaves=5,
)
rich = {"messages": [{**USER, "content": [{"type": "text", "text": "a"}]}, {**ANSWER, "train": True, "weight": 1}]}
calling = {"messages": [USER, {**ANSWER, "tool_calls": [{"name": "add", "arguments": {"a": 2}}]}], "tools": TOOLS}
called = {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "function_call", "value": {"name": "add"}}]}
SOUND = [row for row, _ in READ] + [rich, calling, called] * 5


def changed(value, steps, new):
    """A copy of `value` with `new` somewhere in it: each step chooses a key, or stops."""
    if not steps or not isinstance(value, dict | list) or not value:
        return new
    entries = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    key, old = entries[steps[0] % len(entries)]
    copy = value.copy()
    copy[key] = changed(old, steps[1:], new)
    return copy


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SOUND), st.lists(st.integers(0, 9), max_size=6), values, st.sampled_from(["auto", None]))
def test_any_row_gives_a_record_or_one_line(row, steps, new, form):
    names = RowFormat.model_fields["format"].annotation.__args__
    try:
        record = read(changed(row, steps, new), form=form or names[len(steps)])
    except InputError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 500
        str(error).encode()
    else:
        assert record.index == 7 and record.place == "rows.jsonl, line 3"
