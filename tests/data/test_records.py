import json

import pytest

from burnish.data.records import ChatRecord, TextRecord, read_records, records_from_rows
from burnish.errors import InputError

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}


@pytest.fixture
def read(tmp_path):
    def write_and_read(content: bytes | str):
        path = tmp_path / "data.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return read_records(path)

    return write_and_read


def test_both_forms_are_recognised_line_by_line(read):
    rows = [
        {"messages": [USER, ANSWER, USER, ANSWER], "id": 7},
        {"prompt": "2+2?", "completion": "4"},
        {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]},
        {"prompt": "2+2?", "completion": [ANSWER]},
        {"prompt": [USER], "completion": "4"},
        {"messages": [USER, ANSWER], "prompt": "ignored beside messages"},
    ]
    chat, text, lists, left, right, both = read("\n".join(json.dumps(row) for row in rows))
    assert chat.messages == (USER, ANSWER, USER, ANSWER) and chat.first_trained == 0
    assert (text.prompt, text.completion) == ("2+2?", "4")
    # Only the completion is learned, not an answer that is part of the prompt.
    assert lists.messages == (USER, ANSWER, USER, ANSWER) and lists.first_trained == 3
    assert left.messages == right.messages == (USER, ANSWER) and left.first_trained == right.first_trained == 1
    assert both.messages == (USER, ANSWER)
    assert [record.index for record in (chat, text, lists, left, right, both)] == list(range(6))
    assert text.as_chat() == ChatRecord(1, text.place, (USER, ANSWER), first_trained=1)


def test_bom_crlf_blank_lines_and_line_separators_inside_strings(read):
    line = json.dumps({"prompt": "a\u2028b\u0085c", "completion": "é"}, ensure_ascii=False)
    records = read(b"\xef\xbb\xbf" + f"{line}\r\n\r\n  \n{line}\r\n".encode())
    assert [record.prompt for record in records] == ["a\u2028b\u0085c"] * 2
    assert [record.index for record in records] == [0, 1]
    assert records[1].place.endswith("data.jsonl, line 4")


def test_messages_keep_their_other_keys_and_tools(read):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    result = {"role": "tool", "content": "", "name": "add"}
    row = {"messages": [USER, call, result, ANSWER], "tools": [{"name": "add"}]}
    (record,) = read(json.dumps(row))
    assert record.messages[1] == {**call, "content": ""}
    assert record.messages[2] == result
    assert record.tools == ({"name": "add"},)


def test_an_empty_prompt_is_plain_text(read):
    (record,) = read('{"prompt": "", "completion": "Once upon a time"}')
    assert isinstance(record, TextRecord) and record.prompt == ""


def messages(*turns) -> str:
    return json.dumps({"messages": turns})


# (the bad third line, what the message must say)
BROKEN = [
    ('{"prompt": x}', ["not valid JSON", "column 12", "one JSON object a line"]),
    ("[", ["not valid JSON"]),
    ('["a", "b"]', ["expected a JSON object", "a list"]),
    ("3", ["expected a JSON object", "a number"]),
    ("null", ["expected a JSON object", "null"]),
    (
        '{"question": "a", "answer": "b"}',
        ["no 'messages', or 'prompt' and 'completion'", "'question', 'answer'"],
    ),
    ("{}", ["keys found: none"]),
    ('{"prompt": "a"}', ["no 'completion'", "keys found: 'prompt'"]),
    ('{"completion": "a", "text": "b"}', ["no 'prompt'", "'completion', 'text'"]),
    ('{"prompt": "a", "completion": 4}', ["completion: must be a non-empty list of messages", "a number"]),
    ('{"prompt": null, "completion": "a"}', ["prompt: must be", "null"]),
    ('{"prompt": "a", "completion": " "}', ["completion is empty"]),
    ('{"prompt": "a", "completion": "\\ud83d"}', ["completion: \\ud83d is half of a character"]),
    ('{"messages": "hi"}', ["messages: must be a non-empty list", "a string"]),
    ('{"messages": []}', ["messages: must be a non-empty list", "an empty list"]),
    (messages("hi"), ["messages[0]: must be an object", "a string"]),
    (messages({"from": "human", "value": "a"}), ["messages[0]: no 'role'", "'from', 'value'"]),
    (
        messages({"role": "human", "content": "a"}),
        ["messages[0].role: 'human' is not a role", "write 'user'"],
    ),
    (messages(USER, {"role": "gpt", "content": "a"}), ["messages[1].role", "write 'assistant'"]),
    (messages({"role": "narrator", "content": "a"}), ["one of system, user, assistant, tool"]),
    (messages({"role": ["user"], "content": "a"}), ["messages[0].role: ['user'] is not a role"]),
    (messages({"role": "user"}), ["messages[0].content: must be a string, found nothing"]),
    (messages({"role": "user", "content": None}), ["messages[0].content: must be a string, found null"]),
    (messages({"role": "user", "content": 5}), ["found a number"]),
    (messages({"role": "user", "content": True}), ["found true or false"]),
    (messages({"role": "user", "content": [{"text": "a"}]}), ["found a list"]),
    (messages(USER, {"role": "assistant", "content": ""}), ["messages[1].content", "empty"]),
    (messages(USER, {"role": "assistant", "content": None}), ["messages[1].content", "null"]),
    (messages(USER), ["messages: no assistant turn"]),
    (json.dumps({"prompt": [USER], "completion": [USER]}), ["completion: no assistant turn"]),
    (
        json.dumps({"messages": [USER, ANSWER], "tools": {"name": "add"}}),
        ["tools must be a list", "an object"],
    ),
    ('{"prompt": ' + "9" * 5000 + ', "completion": "a"}', ["JSON that cannot be read"]),
    ("[" * 100_000, ["line 3"]),
]


@pytest.mark.parametrize(("line", "said"), BROKEN, ids=[line[:40] for line, _ in BROKEN])
def test_bad_input_gets_one_line_that_names_file_line_and_key(read, line, said):
    good = messages(USER, ANSWER)
    with pytest.raises(InputError) as caught:
        read(f"{good}\n\n{line}\n{good}\n")
    message = str(caught.value)
    assert "data.jsonl, line 3" in message and "\n" not in message
    for words in said:
        assert words in message


def test_unusable_files(tmp_path, read):
    for path, said in ((tmp_path / "missing.jsonl", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError, match=said) as caught:
            read_records(path)
        assert str(path) in str(caught.value)
    for content in (b"", b"\n \r\n", b"\xef\xbb\xbf"):
        with pytest.raises(InputError, match=r"data\.jsonl holds no records"):
            read(content)
    with pytest.raises(InputError, match=r"data\.jsonl, line 2: not UTF-8"):
        read(messages(USER, ANSWER).encode() + b'\n{"prompt": "\xff\xfe"}\n')
    with pytest.raises(InputError, match=r"line 1: not UTF-8"):
        read(messages(USER, ANSWER).encode("utf-16"))


def test_rows_in_memory():
    rows = ({"messages": [USER, ANSWER]}, {"prompt": "2+2?", "completion": "4"})
    chat, text = records_from_rows(rows)
    assert chat == ChatRecord(0, "data[0]", (USER, ANSWER))
    assert text == TextRecord(1, "data[1]", "2+2?", "4")
    for bad, said in (
        ([*rows, {"prompt": "a"}], r"data\[2\]: no 'completion'"),
        (["text"], r"data\[0\]: expected a mapping, found a string"),
        ([{"prompt": "a", "completion": ("b",)}], r"data\[0\]: completion: .* found tuple"),
        ([], "data holds no records"),
    ):
        with pytest.raises(InputError, match=said):
            records_from_rows(bad)
