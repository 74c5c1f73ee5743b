"""A survey says of every row what becomes of it, and of the whole what training would make of it."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.data.config import DataConfig, SourceConfig
from burnish.data.dataset import load_examples
from burnish.data.parts import sources_of
from burnish.data.survey import histogram, quantiles, survey
from burnish.errors import InputError


def row(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion}


def look(rows, tokenizer, batch_size=4, limit=None, **options):
    config = DataConfig(**{"max_length": 64, "cache": False, **options})
    return survey(sources_of(rows, config), tokenizer, config, batch_size, limit)


ROWS = [row("one", "two"), {"prompt": "no answer"}, row("word " * 90, "yes"), row("three", "four")]


def test_every_row_is_there_with_what_became_of_it(bpe_tokenizer) -> None:
    seen = look(ROWS, bpe_tokenizer)
    assert [each.place for each in seen.rows] == ["data[0]", "data[1]", "data[2]", "data[3]"]
    assert [each.counts.dropped_unreadable for each in seen.rows] == [0, 1, 0, 0]
    assert [each.counts.truncated for each in seen.rows] == [0, 0, 1, 0]
    assert [each.whole for each in seen.rows] == [True, False, False, True]
    assert (seen.total.rows, seen.total.kept, seen.total.dropped) == (4, 3, 1)
    for each, text in zip((seen.rows[0], seen.rows[3]), ("two", "four"), strict=True):
        [example] = each.examples
        trained = example.tokens[example.weights != 0]
        assert bpe_tokenizer.decode(trained, skip_special=False) == f"{text}<|im_end|>"


def test_a_cut_row_knows_its_length_before(bpe_tokenizer) -> None:
    whole = look(ROWS, bpe_tokenizer, max_length=4096).rows[2]
    for truncate in ("keep_end", "keep_start", "split", "drop"):
        cut = look(ROWS, bpe_tokenizer, truncate=truncate).rows[2]
        assert cut.length == whole.length == len(whole.examples[0].tokens) > 64
        assert all(len(example.tokens) <= 64 for example in cut.examples)


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_the_examples_are_those_that_are_trained_on(bpe_tokenizer, packing) -> None:
    config = DataConfig(max_length=64, packing=packing, bad_rows="drop", cache=False)
    wanted = load_examples(ROWS, bpe_tokenizer, config)
    seen = look(ROWS, bpe_tokenizer, packing=packing).examples
    for name in ("tokens", "weights", "starts", "ids", "sources", "counts"):
        assert np.array_equal(getattr(seen, name), getattr(wanted, name)), name


def test_packing_is_counted_as_by_hand(bpe_tokenizer) -> None:
    rows = [row("q" * n, "a" * n) for n in (1, 5, 9, 13)]
    for batch_size in (1, 4, 6):
        seen = look(rows, bpe_tokenizer, batch_size, max_length=200)
        lengths = seen.examples.lengths.tolist()
        assert sum(lengths) <= 200 and len(set(lengths)) > 1  # all fit in one row
        assert (seen.packed.rows, seen.packed.steps) == (1, 1)
        assert seen.packed.efficiency == pytest.approx(sum(lengths) / (200 * batch_size))
        padded = 1.0 if batch_size == 1 else sum(lengths) / (4 * max(lengths))
        assert seen.packed.padded == pytest.approx(padded)


def test_sources_are_told_apart_and_one_without_examples_stops_nothing(bpe_tokenizer, tmp_path) -> None:
    for name, rows in (("a", ROWS), ("b", [row("x " * 200, "y")] * 2)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    sources = [SourceConfig(path=str(tmp_path / f"{name}.jsonl"), weight=1) for name in "ab"]
    seen = look(sources, bpe_tokenizer, truncate="drop")
    assert seen.names == ("a", "b") and [each.source for each in seen.rows] == [0, 0, 0, 0, 1, 1]
    assert [(each.rows, each.kept) for each in seen.counts] == [(4, 2), (2, 0)]
    assert seen.packed is None and len(seen.examples) == 2
    assert look(sources, bpe_tokenizer, limit=1).total.rows == 2


def test_a_file_that_breaks_off_is_read_so_far(bpe_tokenizer, tmp_path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('prompt,completion\na,b\nc,d\ne,"f\n')
    seen = look(str(path), bpe_tokenizer)
    assert seen.total.rows == 2 and len(seen.unfinished) == 1 and "t.csv, line 4" in seen.unfinished[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "holds no records"), ("{\n[]\n", "none of the 2 rows can be read; the first: .*line 1"), ("[{", "line 1")],
)
def test_nothing_to_look_at_is_refused(bpe_tokenizer, tmp_path, text, said) -> None:
    path = tmp_path / ("t.json" if text == "[{" else "t.jsonl")
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        look(str(path), bpe_tokenizer)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50))
def test_every_length_is_in_its_bin(lengths) -> None:
    bins = histogram(np.array(lengths))
    assert len(bins) <= 12
    assert [each.count for each in bins] == [sum(b.first <= n <= b.last for n in lengths) for b in bins]
    assert sum(each.count for each in bins) == len(lengths) and bins[0].count and bins[-1].count
    assert all(a.last + 1 == b.first for a, b in pairwise(bins))
    assert len({b.last - b.first for b in bins}) == 1


def test_quantiles_are_lengths_that_occur() -> None:
    found = quantiles(np.arange(1, 102))
    assert found == {"p0": 1, "p5": 6, "p25": 26, "p50": 51, "p75": 76, "p95": 96, "p99": 100, "p100": 101}
    assert quantiles(np.array([], int)) == {} and histogram(np.array([], int)) == []
