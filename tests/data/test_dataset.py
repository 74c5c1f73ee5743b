import bz2
import csv
import gzip
import io
import json
import lzma

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

from burnish.data.batches import Shard, TrainBatches  # noqa: E402
from burnish.data.config import DataConfig, SourceConfig  # noqa: E402
from burnish.data.dataset import load_dataset, load_examples  # noqa: E402
from burnish.data.records import TextRecord  # noqa: E402
from burnish.data.stream import StreamBatches  # noqa: E402
from burnish.errors import InputError  # noqa: E402

CONFIG = DataConfig(max_length=64, holdout=0.1)
ROWS = [{"question": f"What, is {i}?\n", "answer": f'It is "{i}" é.'} for i in range(40)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))


def lines(rows=ROWS) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_csv() -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["question", "answer"])
    writer.writeheader()
    writer.writerows(ROWS)
    return text.getvalue().encode()


def as_parquet() -> bytes:
    sink = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(ROWS), sink, row_group_size=7)
    return sink.getvalue()


def as_arrow() -> bytes:
    sink, table = io.BytesIO(), pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    return sink.getvalue()


FORMATS = {
    "jsonl": lines,
    "json": lambda: json.dumps(ROWS).encode(),
    "csv": as_csv,
    "parquet": as_parquet,
    "arrow": as_arrow,
}
COMPRESSIONS = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def epoch(examples, config=CONFIG):
    batches = TrainBatches(examples, 4, config)
    return [next(batches) for _ in range(batches.steps_per_epoch())]


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.fixture(scope="module")
def expected(bpe_tokenizer):
    """An epoch of the rows, and the held-out ones', without any file."""
    data = load_dataset(ROWS, None, bpe_tokenizer, CONFIG)
    assert len(data.train) == 36 and len(data.held_out) == 4
    return epoch(data.train), epoch(data.held_out)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("form", FORMATS)
def test_the_same_rows_make_the_same_batches_whatever_the_file(tmp_path, bpe_tokenizer, expected, form, compression):
    path = tmp_path / f"train.{form}{compression}"
    path.write_bytes(COMPRESSIONS[compression](FORMATS[form]()))
    for _ in range(2):  # from the file, and from the cache
        data = load_dataset(path, None, bpe_tokenizer, CONFIG)
        assert_same(epoch(data.train), expected[0])
        assert_same(epoch(data.held_out), expected[1])
        assert data.names == data.held_out_names == ("train",)


def test_a_folder_and_a_glob_are_read_in_order(tmp_path, bpe_tokenizer, expected):
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(ROWS[:13]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[13:14])))
    (folder / "c.json").write_text(json.dumps(ROWS[14:]))
    for source in (folder, f"{folder}/*"):
        data = load_dataset(source, None, bpe_tokenizer, CONFIG)
        assert_same(epoch(data.train), expected[0])
        assert data.names == ("parts",)


def test_records_are_taken_as_they_are(bpe_tokenizer, expected):
    records = [TextRecord(i, f"row {i}", row["question"], row["answer"]) for i, row in enumerate(ROWS)]
    assert_same(epoch(load_dataset(records, None, bpe_tokenizer, CONFIG).train), expected[0])


# Several sources


@pytest.fixture
def sources(tmp_path):
    found = []
    for number, size in enumerate((30, 20, 10)):
        folder = tmp_path / f"folder{number}"
        folder.mkdir()
        rows = [{"prompt": f"{number}: {i}", "completion": "yes"} for i in range(size)]
        (folder / "train.jsonl").write_bytes(lines(rows))
        found.append(SourceConfig(path=str(folder / "train.jsonl")))
    return found


def test_sources_have_names_numbers_and_ids_of_their_own(sources, bpe_tokenizer):
    data = load_dataset(sources, None, bpe_tokenizer, CONFIG)
    assert data.names == data.held_out_names == ("train", "train-2", "train-3")
    for examples, sizes in ((data.train, [27, 18, 9]), (data.held_out, [3, 2, 1])):
        assert np.bincount(examples.sources).tolist() == sizes
        assert len(set(examples.ids.tolist())) == sum(sizes), "no two examples have one id"
        assert examples.counts.rows == examples.counts.kept == sum(sizes)
        texts = [bpe_tokenizer.decode(example.tokens) for example in examples]
        assert all(f"user\n{e.source}: " in text for e, text in zip(examples, texts, strict=True))
    prompts = {bpe_tokenizer.decode(e.tokens) for e in data.train} & {
        bpe_tokenizer.decode(e.tokens) for e in data.held_out
    }
    assert not prompts


def test_weights_of_the_sources_reach_the_batches(sources, bpe_tokenizer):
    weighted = [source.model_copy(update={"weight": 1.0}) for source in sources]
    batches = load_dataset(weighted, None, bpe_tokenizer, CONFIG).batches(bpe_tokenizer, 4, CONFIG)
    assert batches.get_state()["made_from"]["mixture"] == [27, 27, 27]
    shard = load_dataset(sources, None, bpe_tokenizer, CONFIG).batches(bpe_tokenizer, 4, CONFIG, Shard(1, 2))
    assert len(next(shard)["tokens"]) == 2


def test_a_source_may_have_a_form_of_its_own(tmp_path, sources, bpe_tokenizer):
    own = tmp_path / "own.jsonl"
    own.write_bytes(lines([{"frage": str(i), "antwort": "ja"} for i in range(5)]))
    config = CONFIG.model_copy(update={"holdout": 0.0})
    mixed = [*sources, SourceConfig(path=str(own), columns={"prompt": "frage", "completion": "antwort"})]
    assert len(load_examples(mixed, bpe_tokenizer, config)) == 65


# Evaluation


def test_evaluation_data_leaves_all_rows_to_training(tmp_path, bpe_tokenizer):
    path = tmp_path / "heldout.jsonl"
    path.write_bytes(lines(ROWS[:5]))
    data = load_dataset(ROWS, path, bpe_tokenizer, CONFIG)
    assert (len(data.train), len(data.held_out)) == (40, 5)
    assert (data.names, data.held_out_names) == (("data",), ("heldout",))
    none = load_dataset(ROWS, None, bpe_tokenizer, CONFIG.model_copy(update={"holdout": 0.0}))
    assert (len(none.train), len(none.held_out)) == (40, 0)


def test_a_stream_reads_only_what_it_is_evaluated_on(tmp_path, bpe_tokenizer):
    path = tmp_path / "train.jsonl"
    path.write_bytes(lines())
    config = DataConfig(max_length=64, streaming=True)
    data = load_dataset(path, None, bpe_tokenizer, config)
    assert data.train is None and len(data.held_out) == 0
    batches = data.batches(bpe_tokenizer, 4, config)
    assert isinstance(batches, StreamBatches) and next(batches)["tokens"].shape == (4, 64)
    assert len(load_dataset(path, ROWS[:3], bpe_tokenizer, config).held_out) == 3
    explicit = DataConfig(max_length=64, streaming=True, holdout=0.1)
    with pytest.raises(InputError, match=r"data\.holdout: a stream is read once; give data\.eval_path"):
        load_dataset(path, None, bpe_tokenizer, explicit)
    assert len(load_dataset(path, ROWS[:3], bpe_tokenizer, explicit).held_out) == 3


# Errors name the source


def test_errors_name_the_source(tmp_path, sources, bpe_tokenizer):
    bad = tmp_path / "bad.jsonl"

    def fails(content: bytes, match: str, **options):
        bad.write_bytes(content)
        config = CONFIG.model_copy(update=options)
        with pytest.raises(InputError, match=match) as caught:
            load_dataset([SourceConfig(path=str(bad)), *sources], None, bpe_tokenizer, config)
        assert "\n" not in str(caught.value) and str(bad) in str(caught.value)

    same = [{"prompt": "a", "completion": "b"}] * 3
    fails(b"", r"holds no records")
    fails(lines(same), r"data\.holdout=0\.1 cannot hold out rows: all 3 have the same prompt")
    fails(b"{\n" * 3, r"all 3 rows were dropped .*3 unreadable.*line 1: not valid JSON", bad_rows="drop")
    fails(b"{\n" * 3, r"line 1: not valid JSON")
    fails(lines(ROWS), r"all 36 rows were dropped .*36 too long", truncate="drop", max_length=10)
    with pytest.raises(InputError, match="data holds no records"):
        load_dataset([], None, bpe_tokenizer, CONFIG)
    with pytest.raises(InputError, match=r"data\[1\]: expected a mapping, found a string; files are given as"):
        load_dataset([ROWS[0], "text"], None, bpe_tokenizer, CONFIG)


def test_bad_rows_are_counted_once(bpe_tokenizer):
    config = CONFIG.model_copy(update={"bad_rows": "drop"})
    data = load_dataset([*ROWS, {"question": "?"}, 5], None, bpe_tokenizer, config)
    assert (data.train.counts.rows, data.train.counts.kept, data.train.counts.dropped_unreadable) == (38, 36, 2)
    assert (data.held_out.counts.rows, data.held_out.counts.dropped) == (4, 0)


def test_the_first_tiny_files(tmp_path, bpe_tokenizer):
    path = tmp_path / "one.jsonl"
    path.write_bytes(lines(ROWS[:1]))
    config = DataConfig(max_length=2, holdout=0)
    batch = next(load_dataset(path, None, bpe_tokenizer, config).batches(bpe_tokenizer, 4, config))
    assert batch["weights"].sum() == 1
