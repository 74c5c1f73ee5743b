import gzip
import json
import runpy
import signal
import subprocess
import sys
import tracemalloc
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from burnish.data.batches import Shard
from burnish.data.config import DataConfig, SourceConfig
from burnish.data.parts import sources_of
from burnish.data.stream import StreamBatches
from burnish.errors import InputError

CONFIG = DataConfig(
    max_length=24, lookahead=7, shuffle_buffer=5, seed=1, streaming=True, truncate="drop", bad_rows="drop"
)
LARGE, SMALL = 57, 11


def row(source: int, number: int, length: int | None = None) -> str:
    """Its first two tokens say which row it is."""
    ids = [600 + source, number, *[7] * ((number % 17) if length is None else length - 2)]
    return json.dumps({"input_ids": ids}) + "\n"


@pytest.fixture
def folder(tmp_path):
    """A large file with rows that are unreadable or too long, and a small one."""
    bad = {4: "{\n", 20: row(0, 20, length=30), 41: '{"input_ids": "x"}\n'}
    (tmp_path / "large.jsonl").write_text("".join(bad.get(i) or row(0, i) for i in range(LARGE)))
    (tmp_path / "small.jsonl.gz").write_bytes(gzip.compress("".join(row(1, i) for i in range(SMALL)).encode()))
    return tmp_path


@pytest.fixture
def stream(folder, bpe_tokenizer):
    """Makes the stream of both files, or of files that are named with weights."""

    def make(batch_size=4, shard=Shard(), weights=(3, 1), names=("large.jsonl", "small.jsonl.gz"), **options):
        config = DataConfig(**{**CONFIG.model_dump(), **options})
        sources = [
            SourceConfig(path=str(folder / name), weight=weight) for name, weight in zip(names, weights, strict=False)
        ]
        return StreamBatches(sources_of(sources, config), bpe_tokenizer, batch_size, config, shard)

    return make


def rows_of(batch) -> dict[int, tuple[int, int]]:
    """Draw -> (source, row), in the order of the batch."""
    found = {}
    for r, segments in enumerate(batch["segment_ids"]):
        for segment in range(1, segments.max() + 1):
            slots = np.flatnonzero(segments == segment)
            source, number = batch["tokens"][r][slots[:2]].tolist()
            assert batch["positions"][r][slots].tolist() == list(range(len(slots)))
            assert set(batch["source_ids"][r][slots].tolist()) == {source - 600}
            draw = int(batch["example_ids"][r][slots[0]])
            assert draw not in found
            found[draw] = source - 600, number
    return found


def draws_of(batches) -> list[tuple[int, int]]:
    """(source, row) of every example, in the order drawn."""
    found = {}
    for batch in batches:
        new = rows_of(batch)
        assert not new.keys() & found.keys()
        found |= new
    return [found[draw] for draw in sorted(found)]


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])


# State


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repeat": False},
        {"packing": "none"},
        {"packing": "first_fit", "lookahead": 1, "shuffle_buffer": 1},
        {"lookahead": 50, "shuffle_buffer": 1000, "max_segments": 2},
        {"batch_size": 2, "repeat": False, "lookahead": 3},
    ],
)
def test_killed_and_restored_at_every_batch_it_goes_on_the_same(stream, options):
    straight = stream(**options)
    states, counts, batches = [], [], []
    for _ in range(22):
        states.append(json.loads(json.dumps(straight.get_state())))
        batch = next(straight, None)
        if batch is None:
            break
        batches.append(batch)
        counts.append(straight.counts)
        assert straight.counts.rows == straight.counts.kept + straight.counts.dropped > 0
    assert len(batches) > 8 and straight.counts.dropped > 0
    assert (len(states) > len(batches)) == (options.get("repeat") is False)
    for stop, state in enumerate(states):
        resumed = stream(**options)
        for _ in range(stop % 3):  # wherever it stood before
            next(resumed)
        resumed.set_state(state)
        assert resumed.get_state() == state
        for expected, counted in zip(batches[stop:], counts[stop:], strict=True):
            assert_same(next(resumed), expected)
            assert resumed.counts == counted
        if len(states) > len(batches):
            assert next(resumed, None) is None
            assert next(resumed, None) is None


def test_a_state_stays_small(stream):
    batches = stream(lookahead=100, shuffle_buffer=1000)
    for _ in range(30):
        next(batches)
    assert len(json.dumps(batches.get_state())) < 3000


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("batch_size", {"batch_size": 2}),
        ("max_length", {"max_length": 25}),
        ("packing", {"packing": "none"}),
        ("max_segments", {"max_segments": 2}),
        ("lookahead", {"lookahead": 8}),
        ("seed", {"seed": 2}),
        ("shuffle_buffer", {"shuffle_buffer": 6}),
        ("repeat", {"repeat": False}),
        ("weights", {"weights": (3, 2)}),
        ("processes", {"shard": Shard(0, 2)}),
        # What decides the tokens of a row decides which rows share a window.
        ("truncate", {"truncate": "keep_end"}),
        ("overlap", {"truncate": "split", "overlap": 3}),
        ("system", {"system": "Be brief."}),
        ("train_on", {"train_on": "all"}),
        ("min_trained_tokens", {"min_trained_tokens": 2}),
        ("bad_rows", {"bad_rows": "refuse"}),
        ("template_variables", {"template_variables": {"thinking": False}}),
        ("rewritten_turns", {"rewritten_turns": "refuse"}),
        ("data", {"format": "tokens"}),
        ("data", {"columns": {"input_ids": "ids"}}),
        ("data", {"names": ("large.jsonl", "large.jsonl")}),
    ],
)
def test_a_state_of_other_options_is_refused(stream, name, change):
    before = {"truncate": "split"} if name == "overlap" else {}
    state = json.loads(json.dumps(stream(**before).get_state()))
    with pytest.raises(InputError, match=f"cannot continue the data: {name} was"):
        stream(**change).set_state(state)


def test_a_state_of_other_files_or_another_tokenizer_is_refused(stream, folder, bpe_tokenizer):
    before = stream()
    state = before.get_state()
    other = bpe_tokenizer.with_chat_template("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    changed = StreamBatches(before._parts, other, 4, CONFIG)
    with pytest.raises(InputError, match="cannot continue the data: tokenizer was"):
        changed.set_state(state)
    with (folder / "large.jsonl").open("a") as file:
        file.write(row(0, 57))
    with pytest.raises(InputError, match="cannot continue the data: data was"):
        stream().set_state(state)


def test_killed_between_two_checkpoints_a_run_sees_the_same_examples(folder):
    (folder / "large.jsonl").write_text("".join(row(0, i) for i in range(LARGE)))
    straight, killed = folder / "straight", folder / "killed"
    for where in (straight, killed):
        where.mkdir()
        for name in ("large.jsonl", "small.jsonl.gz"):
            (where / name).write_bytes((folder / name).read_bytes())
    script = Path(__file__).with_name("stream_killed.py")

    def run(killed_at: int) -> int:
        words = [sys.executable, str(script), str(killed), "40", str(killed_at)]
        return subprocess.run(words, check=False).returncode

    runpy.run_path(str(script))["main"](straight, 40, -1)
    assert run(killed_at=22) == -signal.SIGKILL
    assert len((killed / "batches.txt").read_text().splitlines()) == 23
    assert json.loads((killed / "state.json").read_text())["done"] == 20
    assert run(killed_at=-1) == 0
    assert (killed / "batches.txt").read_text() == (straight / "batches.txt").read_text()
    assert len(set((straight / "batches.txt").read_text().splitlines())) == 40


# Order


def test_blocks_are_shuffled_each_in_itself_and_anew_in_each_pass(stream, folder):
    (folder / "whole.jsonl").write_text("".join(row(0, i) for i in range(23)))
    batches = stream(names=["whole.jsonl"], packing="none")
    order = [number for _, number in draws_of(islice(batches, 40))]
    passes = [order[i : i + 23] for i in range(0, 115, 23)]
    for one in passes:
        for start in range(0, 23, 5):
            assert sorted(one[start : start + 5]) == list(range(start, min(start + 5, 23)))
    assert len(set(map(tuple, passes))) == 5
    assert len({tuple(number - start for number in passes[0][start : start + 5]) for start in range(0, 20, 5)}) > 1
    other_seed = [number for _, number in draws_of(islice(stream(names=["whole.jsonl"], packing="none", seed=2), 6))]
    assert other_seed != order[:23]


def test_every_row_of_a_source_comes_once_in_each_of_its_passes(stream):
    found = defaultdict(list)
    for source, number in draws_of(islice(stream(packing="none"), 60)):
        found[source].append(number)
    sizes = {0: set(range(LARGE)) - {4, 20, 41}, 1: set(range(SMALL))}
    for source, numbers in found.items():
        size = len(sizes[source])
        assert len(numbers) > 2 * size
        for start in range(0, len(numbers) - size + 1, size):
            assert set(numbers[start : start + size]) == sizes[source]


@pytest.mark.parametrize("weights", [(3, 1), (1, 1), (1, 9)])
def test_shares_of_the_draws_approach_the_weights(stream, weights):
    batches = stream(batch_size=50, packing="none", weights=weights, bad_rows="drop")
    times = Counter(source for batch in islice(batches, 40) for source, _ in rows_of(batch).values())
    # 3 of 57 rows of the first are dropped; five deviations of about a hundredth each.
    expected = weights[0] * 54 / 57 / (weights[0] * 54 / 57 + weights[1])
    assert times[0] / times.total() == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("repeat", [True, False])
def test_packed_rows_are_full_and_hold_what_the_unpacked_hold(stream, repeat):
    packed = stream(repeat=repeat, lookahead=100)
    unpacked = stream(repeat=repeat, packing="none")
    batches = list(islice(packed, 20))
    together = {draw: row for batch in batches for draw, row in rows_of(batch).items()}
    alone = {draw: row for batch in islice(unpacked, 60) for draw, row in rows_of(batch).items()}
    assert together.items() <= alone.items()
    used = sum((batch["segment_ids"] > 0).sum() for batch in batches)
    if repeat:
        assert len(together) > LARGE + SMALL
        assert used / (20 * 4 * 24) > 0.85
        assert all(batch["tokens"].shape == (4, 24) for batch in batches)
    else:
        kept = [(0, i) for i in range(LARGE) if i not in (4, 20, 41)] + [(1, i) for i in range(SMALL)]
        assert sorted(together.values()) == sorted(alone.values()) == kept


def test_one_source_needs_no_weight_and_several_do(stream):
    assert draws_of(islice(stream(names=["large.jsonl"], weights=(None,)), 5))
    for weights in [(None, None), (1, None)]:
        with pytest.raises(InputError, match=r"data\.sources: a stream does not know how large they are; give each"):
            stream(weights=weights)


def test_concatenated_text_is_streamed(stream, folder):
    (folder / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"story {i} " * (i % 9 + 1)}) + "\n" for i in range(20))
    )
    batches = list(stream(names=["text.jsonl"], packing="concat", repeat=False, lookahead=1000))
    used = np.concatenate([(batch["segment_ids"] > 0).sum(axis=1) for batch in batches])
    assert (used[:-4] >= 23).all()
    with pytest.raises(InputError, match=r"data\.packing=concat cuts rows anywhere"):
        next(stream(packing="concat", bad_rows="refuse", names=["small.jsonl.gz"]))


# The end


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16])
def test_without_repeat_it_ends_after_the_last_row(stream, folder, rows):
    (folder / "some.jsonl").write_text("".join(row(0, i) for i in range(rows)))
    batches = stream(names=["some.jsonl"], packing="none", repeat=False, lookahead=4)
    found = []
    for batch in batches:
        assert len(batch["tokens"]) == 4
        found.append((batch["segment_ids"] > 0).any(axis=1).tolist())
    assert len(found) == -(-rows // 4)
    flat = [full for batch in found for full in batch]
    assert flat == [True] * rows + [False] * (len(flat) - rows), "rows of padding come last"
    assert batches.counts.rows == batches.counts.kept == rows


@pytest.mark.parametrize("rows", [8, 9])
def test_restored_at_the_very_end_it_gives_nothing_more(stream, folder, rows):
    (folder / "some.jsonl").write_text("".join(row(0, i) for i in range(rows)))
    batches = stream(names=["some.jsonl"], packing="none", repeat=False, lookahead=4)
    for _ in range(-(-rows // 4)):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    assert next(batches, None) is None
    restored = stream(names=["some.jsonl"], packing="none", repeat=False, lookahead=4)
    restored.set_state(state)
    assert next(restored, None) is None


@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("names", [["bad.jsonl"], ["bad.jsonl", "large.jsonl"], ["large.jsonl", "bad.jsonl"]])
def test_a_source_of_which_nothing_is_kept_is_an_error(stream, folder, names, repeat):
    (folder / "bad.jsonl").write_text(row(0, 0, length=30) * 3 + "{\n")
    with pytest.raises(InputError, match=r"^bad: all 4 rows were dropped .*3 too long, 1 unreadable"):
        list(islice(stream(names=names, repeat=repeat), 1000))


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_source_without_rows_is_an_error(stream, folder, content):
    (folder / "none.jsonl").write_text(content)
    with pytest.raises(InputError, match=r"none\.jsonl holds no records"):
        list(islice(stream(names=["large.jsonl", "none.jsonl"]), 1000))


def test_a_bad_row_is_refused_by_its_place(stream):
    with pytest.raises(InputError, match=r"large\.jsonl, line 5: not valid JSON"):
        list(islice(stream(bad_rows="refuse"), 1000))


# Processes


@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_the_draws_among_them(stream, count):
    alone = {}
    for batch in islice(stream(packing="none"), 60):
        alone |= rows_of(batch)
    shards = [stream(shard=Shard(i, count), packing="none") for i in range(count)]
    seen = {}
    for index, shard in enumerate(shards):
        for batch in islice(shard, 50):
            assert batch["tokens"].shape == (4 // count, 24)
            mine = rows_of(batch)
            assert all(draw % count == index for draw in mine)
            assert not mine.keys() & seen.keys()
            seen |= mine
    assert {draw: seen[draw] for draw in alone if draw < 150} == {d: r for d, r in alone.items() if d < 150}
    assert all(shard.counts.rows == shard.counts.kept + shard.counts.dropped for shard in shards)


def test_a_process_goes_on_where_it_was(stream):
    first = stream(shard=Shard(1, 2))
    for _ in range(7):
        next(first)
    second = stream(shard=Shard(1, 2))
    second.set_state(json.loads(json.dumps(first.get_state())))
    for _ in range(10):
        assert_same(next(first), next(second))


def test_a_source_that_is_useful_to_another_process_is_no_error(stream, folder):
    # One row in four is kept: some process sees bad ones alone for a while.
    (folder / "few.jsonl").write_text(row(0, 0, length=30) * 3 + row(0, 3))
    for index in range(4):
        drawn = draws_of(islice(stream(shard=Shard(index, 4), names=["few.jsonl"], lookahead=3), 5))
        assert set(drawn) == {(0, 3)}


@pytest.mark.parametrize("index", [0, 1])
def test_a_source_of_which_nothing_is_kept_stops_every_process(stream, folder, index):
    (folder / "bad.jsonl").write_text(row(0, 0, length=30) * 3)
    with pytest.raises(InputError, match=r"^bad: "):
        next(stream(shard=Shard(index, 2), names=["bad.jsonl"]))


def test_what_processes_cannot_share_is_refused(stream):
    with pytest.raises(InputError, match="4 rows cannot be shared by 3 processes"):
        stream(shard=Shard(0, 3))
    with pytest.raises(InputError, match=r"data\.repeat=false: several processes would not end at the same step"):
        stream(shard=Shard(0, 2), repeat=False)
    with pytest.raises(InputError, match="batch_size=0"):
        stream(batch_size=0)


# Memory


def test_a_large_file_is_never_in_memory(stream, folder):
    line = json.dumps({"input_ids": [1, 2, 3], "note": "x" * 20_000}) + "\n"
    (folder / "huge.jsonl").write_text(line * 1000)
    batches = stream(names=["huge.jsonl"], repeat=False, shuffle_buffer=32, lookahead=64)
    next(batches)
    tracemalloc.start()
    try:
        rows = sum(len(rows_of_ids) for rows_of_ids in (set(b["example_ids"].ravel()) - {-1} for b in batches))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows > 900
    assert peak < 4e6, "of 20 MB"
