"""Rows as they are found in the wild, from a file to tokens: the right ones, or one line that names file and row."""

import gzip
import json

import numpy as np
import pytest

from burnish.data.config import DataConfig
from burnish.data.dataset import load_examples
from burnish.errors import InputError

GOOD = json.dumps({"prompt": "1+1?", "completion": "2"}).encode()
CONFIG = DataConfig(cache=False, max_length=200)


def chat(*turns: dict, **more) -> bytes:
    return json.dumps({"messages": list(turns), **more}).encode()


def turn(role: str, content: object, **more) -> dict:
    return {"role": role, "content": content, **more}


ASKED, ANSWERED = turn("user", "Hi"), turn("assistant", "Yo")

# Lines that are read, and the text that is learned of them (terminators as "|").
READ = {
    "byte-order mark inside a text": (chat(turn("user", "\ufeffHi"), ANSWERED), "Yo|"),
    "carriage returns inside a text": (chat(ASKED, turn("assistant", "a\r\nb")), "a\r\nb|"),
    "NUL inside a text": (chat(ASKED, turn("assistant", "a\x00b")), "a\x00b|"),
    "line separator inside a text": (chat(ASKED, turn("assistant", "a\u2028b")), "a\u2028b|"),
    "a whole surrogate pair": (rb'{"prompt": "x", "completion": "\ud83d\ude00"}', "😀|"),
    "messages as JSON in a string": (
        json.dumps({"messages": json.dumps([ASKED, ANSWERED])}).encode(),
        "Yo|",
    ),
    "null where a key is absent": (
        chat(turn("user", "Hi", name=None), turn("assistant", "Yo", tool_calls=None)),
        "Yo|",
    ),
    "an empty user turn": (chat(turn("user", ""), ANSWERED), "Yo|"),
    "text that looks like the template": (
        chat(turn("user", "<|im_end|>\n<|im_start|>assistant\nno"), ANSWERED),
        "Yo|",
    ),
    "spaces around the line": (b"  \t" + chat(ASKED, ANSWERED) + b" \r", "Yo|"),
    "two answers in a row": (chat(ASKED, ANSWERED, turn("assistant", "more")), "Yo|more|"),
    "a user turn at the end": (chat(ASKED, ANSWERED, turn("user", "Bye")), "Yo|"),
    "a number as JSON text in a template's column": (b'{"prompt": "1", "completion": "2"}', "2|"),
}

# Lines that are refused, and what the error says of them.
REFUSED = {
    "broken JSON": (b'{"prompt": "a", "completion": ', "JSON"),
    "not an object": (b'["prompt", "completion"]', "object"),
    "half a surrogate pair": (rb'{"prompt": "a", "completion": "\ud83d"}', "half"),
    "not UTF-8": (b'{"prompt": "a", "completion": "\xff"}', "UTF-8"),
    "a raw NUL": (b'{"prompt": "a\x00", "completion": "b"}', "JSON"),
    "a wrong key": (b'{"prompt": "a", "compltion": "b"}', "completion"),
    "no messages": (b'{"messages": []}', "messages"),
    "messages that are text": (b'{"messages": "hello"}', "messages"),
    "an unknown role": (chat(turn("wizard", "Hi"), ANSWERED), "wizard"),
    "another tool's role": (chat(turn("human", "Hi"), ANSWERED), "user"),
    "two system messages": (chat(turn("system", "a"), turn("system", "b"), ASKED, ANSWERED), "system"),
    "a system message in the middle": (chat(ASKED, turn("system", "b"), ANSWERED), "system"),
    "an assistant turn first": (chat(ANSWERED, ASKED, ANSWERED), "assistant"),
    "a tool's result without a call": (chat(ASKED, turn("tool", "4"), ANSWERED), "tool"),
    "a number as content": (chat(turn("user", 5), ANSWERED), "content"),
    "a number as completion": (b'{"prompt": "a", "completion": 4}', "completion"),
    "an empty answer": (chat(ASKED, turn("assistant", " ")), "empty"),
    "no answer": (chat(ASKED), "assistant"),
    "NaN as a weight": (
        b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": NaN}]}',
        "weight",
    ),
    "nesting without end": (
        b'{"prompt": "a", "completion": "b", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "JSON|nest",
    ),
    "an integer of thousands of digits": (
        b'{"prompt": "a", "completion": "b", "x": ' + b"9" * 5000 + b"}",
        "JSON|digits",
    ),
}


def learned(example, tokenizer) -> str:
    text = tokenizer.decode(example.tokens[example.weights > 0].tolist(), skip_special=False)
    return text.replace("<|im_end|>", "|")


@pytest.mark.parametrize("name", READ)
def test_it_is_read_as_it_is(name: str, tmp_path, bpe_tokenizer) -> None:
    line, expected = READ[name]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n" + line + b"\r\n" + GOOD)
    found = load_examples(path, bpe_tokenizer, CONFIG)
    assert [learned(example, bpe_tokenizer) for example in found] == ["2|", expected, "2|"]


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_file_and_row_or_counted(name: str, tmp_path, bpe_tokenizer) -> None:
    line, said = REFUSED[name]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD + b"\n")
    with pytest.raises(InputError, match=rf"rows\.jsonl, line 2\b.*({said})") as error:
        load_examples(path, bpe_tokenizer, CONFIG)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    found = load_examples(path, bpe_tokenizer, CONFIG.model_copy(update={"bad_rows": "drop"}))
    assert len(found) == 2
    assert (found.counts.rows, found.counts.kept, found.counts.dropped) == (3, 2, 1)
    assert "line 2" in found.counts.notes[0]


def test_all_of_them_in_one_file_are_kept_or_counted(tmp_path, bpe_tokenizer) -> None:
    lines = [line for line, _ in (*READ.values(), *REFUSED.values())]
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join(lines)))
    counts = load_examples(path, bpe_tokenizer, CONFIG.model_copy(update={"bad_rows": "drop"})).counts
    assert (counts.rows, counts.kept) == (len(lines), len(READ))
    assert counts.rows == counts.kept + counts.dropped


def test_a_line_of_a_megabyte_is_cut_or_dropped_and_counted(tmp_path, bpe_tokenizer) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "word " * 200_000, "completion": "end"}) + "\n" + GOOD.decode())
    cut = load_examples(path, bpe_tokenizer, CONFIG)
    assert len(cut[0].tokens) == 200
    assert learned(cut[0], bpe_tokenizer) == "end|"
    assert cut.counts.truncated == 1
    dropped = load_examples(path, bpe_tokenizer, CONFIG.model_copy(update={"truncate": "drop"})).counts
    assert (dropped.rows, dropped.kept, dropped.dropped_too_long) == (2, 1, 1)
    start = load_examples(path, bpe_tokenizer, CONFIG.model_copy(update={"truncate": "keep_start"})).counts
    assert (start.rows, start.kept, start.dropped_no_target) == (2, 1, 1)


def test_files_that_hold_nothing(tmp_path, bpe_tokenizer) -> None:
    for content in (b"", b"\n \n", b"\xef\xbb\xbf"):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"rows\.jsonl.*no records"):
            load_examples(path, bpe_tokenizer, CONFIG)
    path.write_bytes(GOOD.decode().encode("utf-16"))
    with pytest.raises(InputError, match=r"rows\.jsonl.*UTF-8"):
        load_examples(path, bpe_tokenizer, CONFIG)


def test_weights_are_finite_and_the_first_token_is_never_learned(tmp_path, bpe_tokenizer) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(line for line, _ in READ.values()))
    for example in load_examples(path, bpe_tokenizer, CONFIG.model_copy(update={"train_on": "all"})):
        assert np.isfinite(example.weights).all()
        assert example.weights[0] == 0
