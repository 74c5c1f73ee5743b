import csv
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.data.readers import csv_rows, json_file, json_lines
from burnish.errors import InputError

READERS = {
    "jsonl": json_lines,
    "json": json_file,
    "csv": lambda stream, name: csv_rows(stream, name, ","),
    "tsv": lambda stream, name: csv_rows(stream, name, "\t"),
}


def read(kind, content):
    """(place, row) of every row; places without the file's name, errors as their text."""
    stream = io.BytesIO(content if isinstance(content, bytes) else content.encode())
    name = f"train.{kind}"
    found = []
    for part in READERS[kind](stream, name):
        rows = list(part.read())
        assert len(rows) == part.size
        found += rows
    assert all(place.startswith(f"{name}, ") for place, _ in found)
    for place, row in found:
        if isinstance(row, InputError):
            assert str(row).startswith(f"{place}: ") and "\n" not in str(row)
    return [(place.removeprefix(f"{name}, "), row) for place, row in found]


def values(kind, content):
    return [row for _, row in read(kind, content)]


# JSON lines


def test_crlf_blank_lines_and_line_separators_inside_strings():
    line = json.dumps({"a": "x\u2028y\u0085z"}, ensure_ascii=False)
    row = {"a": "x\u2028y\u0085z"}
    assert read("jsonl", f"{line}\r\n\r\n  \n{line}\r\n") == [("line 1", row), ("line 4", row)]
    assert read("jsonl", f"\n\n{line}") == [("line 3", row)]
    assert read("jsonl", "") == read("jsonl", "\n \r\n") == []


def test_numbers_and_constants_are_what_python_reads():
    (row,) = values("jsonl", '{"a": [1, 2.5, true, null, Infinity, -Infinity, 12345678901234567890]}')
    assert row == {"a": [1, 2.5, True, None, float("inf"), float("-inf"), 12345678901234567890]}


BAD_LINES = [
    ('{"prompt": x}', ["not valid JSON", "column 12", "one JSON object a line"]),
    ("[", ["not valid JSON"]),
    ('["a", "b"]', ["expected a JSON object", "a list"]),
    ("3", ["expected a JSON object", "a number"]),
    ("null", ["expected a JSON object", "null"]),
    ('{"a": 1} {"b": 2}', ["not valid JSON (Extra data at column 10)"]),
    ('{"a": "\0"}', ["not valid JSON"]),
    ("\0\0\0", ["not valid JSON"]),
    (b'{"a": "\xff\xfe"}', ["not UTF-8 text; save the file as UTF-8"]),
    ('{"a": ' + "9" * 5000 + "}", ["JSON that cannot be read"]),
    ("[" * 100_000, ["JSON that cannot be read"]),
    ('{"a": 1, "b": 2, "a": 1}', ["the key 'a' is given twice"]),
    ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', ["the key 'content' is given twice"]),
]


@pytest.mark.parametrize(("line", "said"), BAD_LINES, ids=[str(line[:30]) for line, _ in BAD_LINES])
def test_a_bad_json_line_is_an_error_in_its_place_and_the_next_is_read(line, said):
    raw = line if isinstance(line, bytes) else line.encode()
    first, bad, last = read("jsonl", b'{"a": 1}\n\n' + raw + b'\n{"b": 2}')
    assert (first, last) == (("line 1", {"a": 1}), ("line 4", {"b": 2}))
    assert bad[0] == "line 3" and isinstance(bad[1], InputError)
    for words in said:
        assert words in str(bad[1])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
json_rows = st.lists(st.dictionaries(st.text(), json_values, max_size=4), max_size=4)


@given(json_rows, st.booleans(), st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_any_rows_come_back_from_json_lines(rows, ascii_only, end):
    text = "".join(json.dumps(row, ensure_ascii=ascii_only) + end for row in rows)
    assert values("jsonl", text) == rows


# JSON files


@given(json_rows, st.sampled_from([None, 2]))
def test_any_rows_come_back_from_a_json_list(rows, indent):
    assert values("json", json.dumps(rows, indent=indent)) == rows


ROWS = [{"a": "x", "b": [1]}, {"a": "y", "b": []}]
CONVERSATION = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
PAIR = {"chosen": CONVERSATION["messages"], "rejected": [{"from": "gpt", "value": "c"}]}


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("before", ["", " \n\n"])
@pytest.mark.parametrize(
    ("document", "rows"),
    [
        (ROWS, ROWS),
        ([], []),
        ({"data": ROWS}, ROWS),
        ({"version": "1.1", "tags": ["x"], "data": ROWS}, ROWS),
        ({"prompt": "a", "completion": "b"}, [{"prompt": "a", "completion": "b"}]),
        (CONVERSATION, [CONVERSATION]),  # a list of objects, but of turns: the object is the row
        (PAIR, [PAIR]),
    ],
)
def test_forms_of_a_json_file(document, rows, before, indent):
    found = read("json", before + json.dumps(document, indent=indent) + "\n\n")
    assert found == [(f"item {number}", row) for number, row in enumerate(rows, start=1)]


def test_json_lines_under_the_name_of_json_are_read_as_lines():
    text = "\n" + "\n\n".join(json.dumps(row) for row in ROWS)
    assert read("json", text) == [("line 2", ROWS[0]), ("line 4", ROWS[1])]
    assert read("json", json.dumps(CONVERSATION) + "\n" + json.dumps(CONVERSATION))[1] == ("line 2", CONVERSATION)
    (first, bad), (second, row) = read("json", '{"a": x}\n{"a": 1}')
    assert (first, second, row) == ("line 1", "line 2", {"a": 1}) and "column 7" in str(bad)
    assert read("json", "") == read("json", " \n") == []


def test_a_bad_item_of_a_json_list_is_an_error_in_its_place():
    found = read("json", '[{"a": 1}, {"b": 1, "b": 2}, 3, {"c": ' + "9" * 5000 + '}, null, {"d": 1}]')
    assert [place for place, _ in found] == [f"item {number}" for number in range(1, 7)]
    rows = [row for _, row in found]
    assert (rows[0], rows[5]) == ({"a": 1}, {"d": 1})
    said = ["the key 'b' is given twice", "found a number", "cannot be read", "found null"]
    assert all(words in str(row) for words, row in zip(said, rows[1:5], strict=True))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"a": 1},\n {"a" 2}]', "line 2: not valid JSON (Expecting ':' delimiter at column 7)"),
        ('[{"a": 1}\n {"a": 2}]', "line 2: not valid JSON (Expecting ',' or ']' after item 1 at column 2)"),
        ('[{"a": 1}, {"a": 2}', "line 1: not valid JSON (Expecting ',' or ']' after item 2 at column 20)"),
        ('[{"a": 1},]', "line 1: not valid JSON (Expecting value at column 11)"),
        ("[", "line 1: not valid JSON (Expecting value at column 2)"),
        ('[{"a": 1}]\n[{"a": 2}]', "line 2: not valid JSON (Extra data after the list at column 1)"),
        ('{\n"data": [', "line 2: not valid JSON"),
        ('{\n"a": 1,\n"a": 2}', "train.json: JSON that cannot be read (the key 'a' is given twice)"),
        ('[{"a": 1}, ' + "[" * 100_000, "item 2: JSON that cannot be read"),
        ('{"a": ' + "[" * 100_000, "train.json: JSON that cannot be read"),
        (b'[{"a": 1},\n{"a": "\xe9"}]', "line 2: not UTF-8 text; save the file as UTF-8"),
        (json.dumps({"train": ROWS, "test": ROWS}), "several lists of objects ('train', 'test')"),
    ],
)
def test_a_json_file_of_which_the_rest_cannot_be_told(text, said):
    with pytest.raises(InputError) as caught:
        read("json", text)
    message = str(caught.value)
    assert said in message and message.startswith("train.json") and "\n" not in message


def test_a_json_file_that_holds_no_object():
    ((place, row),) = read("json", "3")
    assert place == "item 1" and "found a number" in str(row)


# CSV

cells = st.text(st.characters(exclude_categories=["Cs"]))


# Python's writer leaves a lone carriage return unquoted where lines end in a newline, so there all is quoted.
ends = st.sampled_from([("\r\n", csv.QUOTE_MINIMAL), ("\n", csv.QUOTE_ALL)])


@given(st.lists(st.tuples(cells, cells), max_size=4), st.sampled_from(["csv", "tsv"]), ends)
def test_any_cells_come_back_from_csv(pairs, kind, end):
    text = io.StringIO(newline="")
    delimiter = "," if kind == "csv" else "\t"
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end[0], quoting=end[1])
    writer.writerows([("prompt", "completion"), *pairs])
    expected = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    assert values(kind, text.getvalue()) == expected


def test_csv_rows_are_called_by_the_line_they_begin_on():
    text = 'prompt,completion\n"a\n\nb",c\n\n1,\n"d ""e""","f,g"\n'
    assert read("csv", text) == [
        ("line 2", {"prompt": "a\n\nb", "completion": "c"}),
        ("line 6", {"prompt": "1", "completion": ""}),
        ("line 7", {"prompt": 'd "e"', "completion": "f,g"}),
    ]
    assert read("csv", "") == read("csv", "a,b\n") == read("csv", "\n\na,b\n\n") == []
    assert read("csv", 'a\n""\n\n') == [("line 2", {"a": ""})]


def test_a_cell_may_be_long():
    assert values("csv", f"a,b\n{'x' * 200_000},y") == [{"a": "x" * 200_000, "b": "y"}]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"1", "1 cells under 2 column names"),
        (b"1,2,3", "3 cells under 2 column names"),
        (b'"a" b,c', "not valid CSV"),
        (b"\xe9,c", "not UTF-8 text; save the file as UTF-8"),
    ],
)
def test_a_bad_csv_row_is_an_error_in_its_place_and_the_next_is_read(line, said):
    first, bad, last = read("csv", b"a,b\n1,2\n" + line + b"\n3,4\n")
    assert (first, last) == (("line 2", {"a": "1", "b": "2"}), ("line 4", {"a": "3", "b": "4"}))
    assert bad[0] == "line 3" and said in str(bad[1])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,,c\n1,2,3", "line 1: column 2 has no name"),
        ("\na,b,a\n1,2,3", "line 2: two columns are called 'a'"),
        (b"\xe9,b\n1,2", "line 1: not UTF-8"),
        ('"a" x,b\n1,2', "line 1: not a valid header"),
        ('a,b\n1,2\n"3,4\n5,6\n', "line 3: a quote that opens here is never closed"),
    ],
)
def test_a_csv_file_that_cannot_be_used(text, said):
    with pytest.raises(InputError) as caught:
        read("csv", text)
    assert said in str(caught.value) and "\n" not in str(caught.value)
