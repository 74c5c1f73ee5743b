import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.data.config import RowFormat
from burnish.data.formats import read_row
from burnish.errors import InputError

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "add"}


def read(*turns, key="messages"):
    return read_row({key: list(turns)}, 0, "data[0]", RowFormat())


def sharegpt(*pairs):
    return read(*({"from": name, "value": value} for name, value in pairs), key="conversations").messages


def refusal(*turns, key="messages") -> str:
    with pytest.raises(InputError) as caught:
        read(*turns, key=key)
    message = str(caught.value)
    assert message.startswith(f"data[0]: {key}") and len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        {"name": "add", "arguments": {"a": 2, "b": 2}},
        {"name": "add", "arguments": '{"a": 2, "b": 2}'},
        {**CALL, "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}},
    ],
)
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize("cell", [list, json.dumps])
def test_every_way_to_write_a_call_is_one(call, content, cell):
    calling = {"role": "assistant", **content, "tool_calls": cell([call])}
    assert read(USER, calling, RESULT, ANSWER).messages == (USER, CALLING, RESULT, ANSWER)


def test_what_else_a_call_says_is_kept():
    calling = {"role": "assistant", "content": "Wait.", "tool_calls": [{"id": "c1", "name": "now", "index": 0}]}
    found = read(USER, calling).messages[1]
    call = {"type": "function", "id": "c1", "index": 0, "function": {"name": "now", "arguments": {}}}
    assert found == {"role": "assistant", "content": "Wait.", "tool_calls": [call]}


def test_nulls_are_dropped_where_parquet_writes_them_and_kept_where_a_string_spells_them():
    padded = {"name": "add", "arguments": {"a": 2, "b": {"c": None}, "d": None}, "id": None}
    spelled = {"name": "add", "arguments": '{"a": null}', "x": [None, {"y": None}]}
    turn = {"role": "assistant", "content": None, "name": None, "tool_calls": [padded, spelled], "reasoning": None}
    assert read(USER, turn, {**ANSWER, "tool_calls": None}).messages[1:] == (
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": {}}}},
                {"type": "function", "function": {"name": "add", "arguments": {"a": None}}, "x": [None, {}]},
            ],
        },
        ANSWER,
    )


def test_text_parts_are_joined_and_empty_calls_are_none():
    parts = [{"type": "text", "text": "2+", "image_url": None}, {"type": "text", "text": "2?"}]
    assert read({"role": "user", "content": parts}, {**ANSWER, "tool_calls": []}).messages == (USER, ANSWER)


@pytest.mark.parametrize(
    ("flags", "weight"),
    [
        ({"train": True}, 1.0),
        ({"train": False}, 0.0),
        ({"training": False}, 0.0),
        ({"train": True, "training": True}, 1.0),
        ({"weight": 0}, 0.0),
        ({"weight": 1}, 1.0),
        ({"weight": 0.25, "train": True}, 0.25),
        ({"weight": 0, "train": False}, 0.0),
        ({"weight": 1e6, "train": None}, 1e6),
        ({"weight": None, "train": None, "training": None}, None),
    ],
)
def test_flags_become_weights_and_reach_no_template(flags, weight):
    for key, name in (("messages", {**ANSWER}), ("conversations", {"from": "gpt", "value": "4"})):
        record = read(USER, {**name, **flags}, key=key)
        assert record.messages == (USER, ANSWER)
        assert record.weights == (() if weight is None else (None, weight))
        assert all(type(value) is float for value in record.weights[1:])


def test_flags_of_a_given_turn_are_read_too():
    row = {"prompt": [{**USER, "weight": 1}], "completion": [{**ANSWER, "train": False}, USER]}
    record = read_row(row, 0, "data[0]", RowFormat())
    assert (record.messages, record.weights, record.first_trained) == ((USER, ANSWER, USER), (1.0, 0.0, None), 1)


@pytest.mark.parametrize("name", ["human", "user"])
@pytest.mark.parametrize("other", ["gpt", "assistant", "model", "bot", "chatgpt"])
def test_sharegpt_names(name, other):
    assert sharegpt(("system", "s"), (name, "2+2?"), (other, "4")) == ({"role": "system", "content": "s"}, USER, ANSWER)


@pytest.mark.parametrize("name", ["tool", "function", "observation"])
def test_sharegpt_tools(name):
    result = {"role": "tool", "content": "4"}
    call = {"name": "add", "arguments": {"a": 2, "b": 2}}
    for value in (call, [call], json.dumps(call), json.dumps([call])):
        found = sharegpt(("human", "2+2?"), ("function_call", value), (name, "4"), ("gpt", "4"))
        assert found == (USER, CALLING, result, ANSWER)
    # calls in a text, as is usual there
    in_text = "<tool_call>add</tool_call>"
    found = sharegpt(("human", "2+2?"), ("gpt", in_text), (name, "4"), ("gpt", "4"))
    assert found == (USER, {"role": "assistant", "content": in_text}, result, ANSWER)


def test_sharegpt_turns_may_be_of_either_kind_and_keep_other_keys():
    turns = ({"role": "human", "content": "2+2?"}, {"from": "gpt", "value": "4", "reasoning_content": "add", "x": None})
    assert read(*turns, key="conversations").messages == (USER, {**ANSWER, "reasoning_content": "add"})


REFUSED = [
    (["hi"], ["messages[0]: must be an object", "a string"]),
    ([{"from": "human", "value": "a"}], ["[0]: no 'role'", "'from', 'value'", "columns: {conversations: messages}"]),
    ([{"role": "human", "content": "a"}], ["messages[0].role: 'human' is not a role", "write 'user'"]),
    ([USER, {"role": "gpt", "content": "a"}], ["messages[1].role", "write 'assistant'"]),
    ([{"role": "developer", "content": "a"}], ["'developer' is not a role; write 'system'"]),
    ([{"role": "function", "content": "a"}], ["write 'tool'"]),
    ([{"role": "narrator", "content": "a"}], ["one of system, user, assistant, tool"]),
    ([{"role": "x" * 500, "content": "a"}], ["xxx...' is not a role"]),
    ([{"role": ["user"], "content": "a"}], ["messages[0].role: a list is not a role"]),
    ([{"role": 10**5000, "content": "a"}], ["messages[0].role: a number is not a role"]),
    ([{"role": "user"}], ["messages[0].content: must be a string, found nothing"]),
    ([{"role": "user", "content": None}], ["messages[0].content: must be a string, found null"]),
    ([{"role": "user", "content": 5}], ["messages[0].content: must be a string, found a number"]),
    ([{"role": "user", "content": True}], ["found true or false"]),
    ([{"role": "user", "content": "\ud83d"}], ["messages[0].content: \\ud83d is half"]),
    ([{"role": "user", "content": "a", "name": "\ud83d"}], ["messages[0].name: \\ud83d is half"]),
    ([{"role": "user", "content": "a", "b\nc": "\ud83d"}], ["messages[0]['b\\nc']: \\ud83d is half"]),
    ([{"role": "user", "content": "a", 5: "b"}], ["messages[0]: must be a string, found a number"]),
    ([{"role": "user", "content": ["a"]}], ["messages[0].content[0]: must be an object", "a string"]),
    ([{"role": "user", "content": [{"text": "a"}]}], ["messages[0].content[0].type: null", "text only"]),
    ([{"role": "user", "content": [{"type": "image_url"}]}], ["content[0].type: 'image_url'", "remove the part"]),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], ["content[0].text: must be a string"]),
    ([USER, {"role": "assistant", "content": ""}], ["messages[1].content: an assistant turn is empty"]),
    ([USER, {"role": "assistant", "content": [{"type": "text", "text": " "}]}], ["[1].content: an assistant turn is"]),
    ([USER, {"role": "assistant", "content": None}], ["messages[1].content", "null"]),
    ([USER, {"role": "assistant", "content": None, "tool_calls": []}], ["messages[1].content", "null"]),
    ([USER, {**ANSWER, "reasoning_content": 5}], ["messages[1].reasoning_content: must be a string, found a number"]),
    ([USER, {**ANSWER, "thinking": ["a"]}], ["messages[1].thinking: must be a string, found a list"]),
    ([USER, ANSWER, {"role": "system", "content": "a"}], ["messages[2]: a system message that is not first"]),
    ([{"role": "system", "content": "a"}] * 2, ["messages[1]: a second system message; join them"]),
    ([USER, RESULT, ANSWER], ["messages[1]: a tool turn, but no assistant turn before it has tool_calls"]),
    ([USER, ANSWER, RESULT, CALLING], ["messages[2]: a tool turn"]),
    ([{**USER, "tool_calls": [CALL]}, ANSWER], ["messages[0].tool_calls: in a user turn"]),
    ([USER, {**ANSWER, "function_call": {"name": "add"}}], ["messages[1].function_call: the old name", "tool_calls"]),
    ([USER, {**ANSWER, "tool_calls": {"name": "add"}}], ["messages[1].tool_calls: must be a list of calls"]),
    ([USER, {**ANSWER, "tool_calls": "add(2)"}], ["messages[1].tool_calls: must be a list", "not JSON"]),
    ([USER, {**ANSWER, "tool_calls": ["add"]}], ["messages[1].tool_calls[0]: must be an object"]),
    ([USER, {**ANSWER, "tool_calls": [{"function": "add"}]}], ["tool_calls[0].function: must be an object"]),
    ([USER, {**ANSWER, "tool_calls": [{"tool": "add"}]}], ["tool_calls[0]: a call without a name"]),
    ([USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "2"}]}], ["[0].arguments: must be an object"]),
    ([USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": "a=2"}]}], ["[0].arguments: must be", "not JSON"]),
    (
        [USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": '{"a": "\\ud83d"}'}]}],
        ["arguments: \\ud83d is half"],
    ),
    ([USER, {**ANSWER, "train": 1}], ["messages[1].train: must be true or false, found a number"]),
    ([USER, {**ANSWER, "training": "false"}], ["messages[1].training: must be true or false, found 'false'"]),
    ([USER, {**ANSWER, "train": True, "training": False}], ["messages[1]: train and training differ"]),
    ([USER, {**ANSWER, "train": False, "weight": 1}], ["messages[1]: train is false, but weight is 1"]),
    ([USER, {**ANSWER, "train": True, "weight": 0}], ["messages[1]: train is true, but weight is 0"]),
    ([USER, {**ANSWER, "weight": -1}], ["messages[1].weight: must be a number from 0 to 1000000"]),
    ([USER, {**ANSWER, "weight": 1e7}], ["messages[1].weight", "found 1e+07"]),
    ([USER, {**ANSWER, "weight": float("nan")}], ["messages[1].weight", "found nan"]),
    ([USER, {**ANSWER, "weight": 10**5000}], ["messages[1].weight"]),
    ([USER, {**ANSWER, "weight": True}], ["messages[1].weight", "found true or false"]),
    ([USER, {**ANSWER, "weight": "1"}], ["messages[1].weight", "found '1'"]),
]


@pytest.mark.parametrize(("turns", "said"), REFUSED, ids=[str(i) + said[0] for i, (_, said) in enumerate(REFUSED)])
def test_messages_that_are_none(turns, said):
    message = refusal(*turns)
    assert all(words in message for words in said), message


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ([{"value": "a"}], ["conversations[0]: no 'from'", "'role' and 'content'"]),
        ([{"from": "narrator", "value": "a"}], ["conversations[0].from: 'narrator' is not a role", "human"]),
        ([{"role": "developer", "content": "a"}], ["conversations[0].role: 'developer' is not a role"]),
        ([{"from": "human"}], ["conversations[0].value: must be a string, found nothing"]),
        ([{"from": "human", "value": None}], ["conversations[0].value: must be a string, found null"]),
        ([{"from": "human", "value": 5}], ["conversations[0].value: must be a string, found a number"]),
        ([{"from": "function_call", "value": "add(2)"}], ["conversations[0].value: must be a call", "not JSON"]),
        ([{"from": "function_call", "value": "[]"}], ["conversations[0].value: no call in it"]),
        ([{"from": "human", "value": "a"}, {"from": "tool", "value": "b"}], ["conversations[1]: a tool turn"]),
        ([{"from": "human", "value": "a"}, {"from": "gpt", "value": " "}], ["conversations[1].content: an assistant"]),
        ([{"from": "human", "value": "a"}], ["conversations: no assistant turn"]),
    ],
)
def test_sharegpt_turns_that_are_none(turns, said):
    message = refusal(*turns, key="conversations")
    assert all(words in message for words in said), message


def dicts(values):
    return st.dictionaries(st.text(max_size=20), values, max_size=3)


contents = st.text(max_size=20)
answers = st.text(max_size=20).filter(str.strip)
plain_data = st.recursive(
    st.booleans() | st.integers() | contents, lambda inner: st.lists(inner, max_size=3) | dicts(inner), max_leaves=5
)


calls = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": contents.filter(bool), "arguments": dicts(plain_data)}),
    },
    optional={"id": contents},
)
exchanges = st.tuples(
    st.fixed_dictionaries({"role": st.just("user"), "content": contents}, optional={"name": contents}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": contents, "tool_calls": st.lists(calls, min_size=1, max_size=2)}
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "content": contents}, optional={"tool_call_id": contents}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": answers}, optional={"reasoning_content": contents, "odd": plain_data}
    ),
)
conversations = st.lists(exchanges, min_size=1, max_size=2).map(lambda pairs: [turn for pair in pairs for turn in pair])
flags = st.sampled_from([{}, {}, {"train": True}, {"train": False}, {"weight": 0.5}, {"weight": None, "x": None}])


@settings(max_examples=60, deadline=None)
@given(conversations, st.data())
def test_a_conversation_is_read_as_it_is_without_its_flags(turns, data):
    drawn = data.draw(st.lists(flags, min_size=len(turns), max_size=len(turns)))
    record = read(*({**turn, **said} for turn, said in zip(turns, drawn, strict=True)))
    assert record.messages == tuple(turns)
    expected = tuple(float(said["train"]) if "train" in said else said.get("weight") for said in drawn)
    assert record.weights == (expected if any(weight is not None for weight in expected) else ())
