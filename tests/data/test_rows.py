"""Rows -> examples: every row is counted once, as kept or as dropped, whatever it is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.data.config import DataConfig, RowFormat
from burnish.data.examples import MOST_NOTES, EncodeCounts
from burnish.data.rows import RowEncoder, nothing_left
from burnish.data.tokenizer import Tokenizer
from burnish.errors import InputError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def ask(question: str, answer: str, **more) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]}


# What becomes of a row, at a length of 24 tokens with keep_start; and the row.
ROWS = [
    ("kept", ask("Hi", "Ho")),
    ("kept", {"prompt": "Hi", "completion": "Ho"}),
    ("kept", {"text": "An island."}),
    ("kept", {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}),
    ("truncated", ask("Hi", "an answer, " * 20)),
    ("no_target", ask("a question? " * 20, "Ho")),
    ("no_target", ask("Hi", "Ho", train=False)),
    ("no_target", {"input_ids": [5, 6], "labels": [-100, -100]}),
    ("no_target", {"input_ids": [5]}),
    ("identical", {"prompt": "Hi", "chosen": "Ho", "rejected": "Ho"}),
    ("unreadable", InputError("broken.jsonl, line 3: not JSON")),
    ("unreadable", {}),
    ("unreadable", {"messages": []}),
    ("unreadable", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("unreadable", {"messages": [{"role": "robot", "content": "Hi"}]}),
    ("unreadable", {"messages": [{"role": "user", "content": None}]}),
    ("unreadable", {"messages": "no JSON"}),
    ("unreadable", {"messages": 3}),
    ("unreadable", {"messages": [{"role": "tool", "content": "Ho"}, {"role": "assistant", "content": "Ho"}]}),
    ("unreadable", ask("Hi", "Ho", weight=-1)),
    ("unreadable", ask("half \ud83d", "Ho")),
    ("unreadable", {"prompt": "Hi", "completion": ""}),
    ("unreadable", {"prompt": 3, "completion": "Ho"}),
    ("unreadable", {"text": " \n"}),
    ("unreadable", {"input_ids": [10**6]}),
    ("unreadable", {"input_ids": [-1]}),
    ("unreadable", {"input_ids": [1, 2], "labels": [1]}),
    ("unreadable", {"chosen": [], "rejected": []}),
    ("unreadable", [1, 2]),
    ("unreadable", None),
]
GOOD = [number for number, (fate, _) in enumerate(ROWS) if fate not in ("unreadable",)]


def encode(tokenizer: Tokenizer, rows: list, **options):
    """All examples of rows, and the counts."""
    encoder, counts = RowEncoder(tokenizer, DataConfig(**options), RowFormat()), EncodeCounts()
    numbered = [(number, f"rows, line {number + 1}", row) for number, row in enumerate(rows)]
    return [each for record in encoder.records(numbered, counts) for each in encoder.encode(record, counts)], counts


def is_whole(counts: EncodeCounts, rows: int) -> None:
    """Every row is counted once."""
    dropped = [
        counts.dropped_too_long,
        counts.dropped_no_target,
        counts.dropped_few_trained,
        counts.dropped_identical,
        counts.dropped_unreadable,
    ]
    assert counts.rows == rows == counts.kept + sum(dropped)
    assert counts.dropped == sum(dropped)


@pytest.mark.parametrize(("fate", "row"), ROWS)
def test_what_becomes_of_a_row(bpe_tokenizer, fate, row):
    examples, counts = encode(bpe_tokenizer, [row], bad_rows="drop", max_length=24, truncate="keep_start")
    is_whole(counts, 1)
    assert len(examples) == counts.examples == counts.kept == int(fate in ("kept", "truncated"))
    assert counts.truncated == int(fate == "truncated")
    assert (counts.dropped_no_target, counts.dropped_identical, counts.dropped_unreadable) == (
        int(fate == "no_target"),
        int(fate == "identical"),
        int(fate == "unreadable"),
    )
    assert len(counts.notes) == counts.dropped_unreadable
    if fate == "unreadable":
        with pytest.raises(InputError) as refused:
            encode(bpe_tokenizer, [row])
        assert str(refused.value).startswith(("rows, line 1: ", "broken.jsonl, line 3: "))
        assert counts.notes == [str(refused.value)] and "\n" not in str(refused.value)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, len(ROWS) - 1), max_size=12),
    st.sampled_from(["keep_end", "keep_start", "split", "drop"]),
    st.integers(2, 40),
    st.integers(1, 4),
    st.sampled_from(["assistant", "completion", "last_turn", "all"]),
)
def test_any_rows_are_counted_once(bpe_tokenizer, numbers, truncate, max_length, least, train_on):
    rows = [ROWS[number][1] for number in numbers]
    options = {"truncate": truncate, "max_length": max_length, "min_trained_tokens": least, "train_on": train_on}
    examples, counts = encode(bpe_tokenizer, rows, bad_rows="drop", **options)
    is_whole(counts, len(rows))
    assert counts.kept == len({example.example_id for example in examples})
    assert counts.examples == len(examples) >= counts.kept
    assert counts.tokens == sum(len(example.tokens) for example in examples)
    assert counts.trained_tokens == sum(int(np.count_nonzero(example.weights)) for example in examples)
    assert counts.truncated + counts.split <= counts.kept
    assert len(counts.notes) <= min(counts.dropped_unreadable, MOST_NOTES)
    assert bool(counts.notes) == bool(counts.dropped_unreadable) and len(set(counts.notes)) == len(counts.notes)
    for example in examples:
        assert len(example.tokens) <= max_length and example.weights[0] == 0
        assert np.count_nonzero(example.weights) >= least
        assert rows[example.example_id] is not None
    # A row's examples are its own, whatever is beside it.
    for number, row in enumerate(rows):
        alone, _ = encode(bpe_tokenizer, [row], bad_rows="drop", **options)
        here = [example for example in examples if example.example_id == number]
        assert [e.tokens.tolist() for e in alone] == [e.tokens.tolist() for e in here]
        assert [e.weights.tolist() for e in alone] == [e.weights.tolist() for e in here]
    # Where they refuse, the first that cannot be read is named.
    bad = [number for number in numbers if ROWS[number][0] == "unreadable"]
    if bad:
        with pytest.raises(InputError) as refused:
            encode(bpe_tokenizer, rows, **options)
        at = "broken.jsonl, line 3" if bad[0] == 10 else f"rows, line {numbers.index(bad[0]) + 1}: "
        assert str(refused.value).startswith(at)
        assert counts.notes[0] == str(refused.value)
    else:
        assert len(encode(bpe_tokenizer, rows, **options)[0]) == len(examples)


def test_the_row_of_the_broken_file_is_the_tenth():
    assert isinstance(ROWS[10][1], InputError)


def test_rows_with_too_little_to_learn(bpe_tokenizer):
    rows = [ask("Hi", answer) for answer in ("a", "a b c d e f")]
    for least in (1, 2, 3, 100):
        examples, counts = encode(bpe_tokenizer, rows, min_trained_tokens=least)
        learned = [len(bpe_tokenizer.encode(answer)) + 1 for answer in ("a", "a b c d e f")]  # and the terminator
        right = [number for number, tokens in enumerate(learned) if tokens >= least]
        assert [example.example_id for example in examples] == right
        assert counts.dropped_few_trained == 2 - len(right) == counts.dropped
        is_whole(counts, 2)


def test_pieces_that_are_dropped_of_a_row_that_is_kept(bpe_tokenizer):
    """A long prompt in front: its pieces have nothing to learn."""
    row = ask("a question? " * 20, "Ho")
    examples, counts = encode(bpe_tokenizer, [row], max_length=16, truncate="split")
    whole, _ = encode(bpe_tokenizer, [row], max_length=4096)
    pieces = -(-(len(whole[0].tokens) - 1) // 15)  # each begins with one token of the piece before it
    assert (counts.kept, counts.split, counts.examples, counts.dropped_pieces) == (1, 1, 1, pieces - 1)
    assert np.count_nonzero(examples[0].weights) == np.count_nonzero(whole[0].weights)
    is_whole(counts, 1)


def test_one_row_in_many_pieces_is_one_row(bpe_tokenizer):
    row = ask("Hi", "an answer, " * 20)
    (whole,), _ = encode(bpe_tokenizer, [row], max_length=4096)
    examples, counts = encode(bpe_tokenizer, [row, row], max_length=16, truncate="split")
    assert (counts.rows, counts.kept, counts.split, counts.truncated) == (2, 2, 2, 0)
    assert counts.examples == len(examples) > 4
    assert counts.trained_tokens == 2 * np.count_nonzero(whole.weights)
    is_whole(counts, 2)


def test_what_a_cut_begins_with(bpe_tokenizer):
    """BOS, where the model wants one or the template writes it; not the opening of a turn that is called BOS."""
    row = ask("a question? " * 20, "Ho")
    opens = bpe_tokenizer.bos_id
    assert bpe_tokenizer.decode([opens], skip_special=False) == "<|im_start|>" and not bpe_tokenizer.adds_bos
    (end,), _ = encode(bpe_tokenizer, [row], max_length=16)
    (whole,), _ = encode(bpe_tokenizer, [row], max_length=4096)
    assert end.tokens.tolist() == whole.tokens[-16:].tolist()
    writes = bpe_tokenizer.with_chat_template("{{ bos_token }}" + CHATML)
    (end,), _ = encode(writes, [row], max_length=16)
    assert end.tokens.tolist() == [opens, *whole.tokens[-15:].tolist()]


def test_concat_is_for_raw_text_and_cuts_nothing(bpe_tokenizer):
    long = {"text": "An island. " * 20}
    (example,), counts = encode(bpe_tokenizer, [long], packing="concat", max_length=8)
    (whole,), _ = encode(bpe_tokenizer, [long], max_length=4096)
    assert example.tokens.tolist() == whole.tokens.tolist() and counts.truncated == 0
    for row in (ask("Hi", "Ho"), {"prompt": "Hi", "completion": "Ho"}, {"input_ids": [5, 6]}):
        with pytest.raises(InputError, match=r"^rows, line 2: data\.packing=concat .* set data\.packing=best_fit"):
            encode(bpe_tokenizer, [long, row], packing="concat")
        _, counts = encode(bpe_tokenizer, [long, row], packing="concat", bad_rows="drop")
        assert (counts.kept, counts.dropped_unreadable) == (1, 1)


def test_a_row_of_no_characters_that_the_tokenizer_has():
    """It is named, not met as an IndexError."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    few = Tokenizer(Backend(models.BPE({"a": 0, "<e>": 1}, [])), {"eos_token": "<e>"})
    (example,), _ = encode(few, [{"text": "aa"}])
    assert example.tokens.tolist() == [0, 0, 1] and example.weights.tolist() == [0, 1, 1]
    with pytest.raises(InputError, match="rows, line 1: the tokenizer reads nothing in it"):
        encode(few, [{"text": "xyz"}])


def test_the_same_tokens_whatever_the_form(bpe_tokenizer):
    """One conversation in six forms is one example."""
    forms = [
        ask("Hi", "Ho"),
        {"prompt": "Hi", "completion": "Ho"},
        {"prompt": [{"role": "user", "content": "Hi"}], "completion": "Ho"},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        {"instruction": "Hi", "output": "Ho"},
        {"question": "Hi", "answer": "Ho"},
        {"prompt": "Hi", "chosen": "Ho", "rejected": "Hm"},
    ]
    examples, _ = encode(bpe_tokenizer, forms)
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>"
    tokens = bpe_tokenizer.encode(text)
    tokens_of_answer = len(bpe_tokenizer.encode("Ho<|im_end|>"))
    weights = [0.0] * (len(tokens) - tokens_of_answer) + [1.0] * tokens_of_answer
    again, _ = encode(bpe_tokenizer, [{"input_ids": tokens, "loss_mask": [int(w) for w in weights]}])
    for example in (*examples, *again):
        assert example.tokens.tolist() == tokens and example.weights.tolist() == weights


# ---- nothing left


@pytest.mark.parametrize("bad_rows", ["drop", "refuse"])
def test_nothing_left_says_why(bpe_tokenizer, bad_rows):
    rows = [
        ask("a question? " * 20, "Ho"),
        ask("Hi", "Ho", train=False),
        {"prompt": "Hi", "chosen": "x", "rejected": "x"},
    ]
    rows += [{}] if bad_rows == "drop" else []
    config = DataConfig(max_length=8, truncate="keep_start", bad_rows=bad_rows)
    encoder, counts = RowEncoder(bpe_tokenizer, config, RowFormat()), EncodeCounts()
    records = list(encoder.records([(n, f"line {n + 1}", row) for n, row in enumerate(rows)], counts))
    with pytest.raises(InputError) as nothing:
        encoder.encode_all(records, counts, "rows.jsonl")
    said = str(nothing.value)
    assert "\n" not in said and said.startswith(f"rows.jsonl: all {len(rows)} rows were dropped")
    assert "2 with nothing left to learn" in said and "1 with the same answer chosen and rejected" in said
    assert ("1 unreadable" in said and "line 4: no 'messages'" in said) == (bad_rows == "drop")


def test_no_rows_at_all(bpe_tokenizer):
    encoder = RowEncoder(bpe_tokenizer, DataConfig(), RowFormat())
    with pytest.raises(InputError, match="empty"):
        encoder.encode_all([], EncodeCounts(), "rows.jsonl")
    assert "too few tokens" in nothing_left(EncodeCounts(rows=1, dropped_few_trained=1), DataConfig())
