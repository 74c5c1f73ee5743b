import bz2
import csv
import gzip
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tracemalloc
from itertools import product

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from burnish.data.sources import RowSource
from burnish.errors import InputError

ROWS = [
    {
        "id": number,
        "messages": [{"role": "user", "content": f"é\u2028{number}"}, {"role": "assistant", "content": ""}],
        "score": None if number % 2 else 0.5,
        "tags": ["a"] * (number % 3),
    }
    for number in range(600)
]
TEXT_ROWS = [{"prompt": f"é\u2028 {number}", "completion": 'a "b",\n\tc'} for number in range(600)]


def lines(rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def separated(rows, delimiter) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def table(rows, write) -> bytes:
    sink = io.BytesIO()
    write(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def arrow_file(rows_table, sink):
    with pa.ipc.new_file(sink, rows_table.schema) as writer:
        writer.write_table(rows_table, max_chunksize=400)


def arrow_stream(rows_table, sink):
    with pa.ipc.new_stream(sink, rows_table.schema) as writer:
        writer.write_table(rows_table)


WRITE = {
    "lines.jsonl": lines,
    "lines.ndjson": lines,
    "list.json": lambda rows: json.dumps(rows).encode(),
    "inside.json": lambda rows: json.dumps({"data": rows}, indent=1).encode(),
    "lines.json": lines,
    "table.csv": lambda rows: separated(rows, ","),
    "table.tsv": lambda rows: separated(rows, "\t"),
    "table.parquet": lambda rows: table(rows, lambda t, sink: parquet.write_table(t, sink, row_group_size=250)),
    "file.arrow": lambda rows: table(rows, arrow_file),
    "stream.arrow": lambda rows: table(rows, arrow_stream),
    "table.feather": lambda rows: table(rows, feather.write_feather),
}


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


def write(path, rows):
    """Rows in the format and compression that the path's name says."""
    compression = next((suffix for suffix in COMPRESS if suffix and path.name.endswith(suffix)), "")
    name = path.name.removesuffix(compression)
    path.write_bytes(COMPRESS[compression](WRITE[name](rows)))
    return path


def values(source, start=0):
    return [row for _, _, row in source.rows(start)]


def one_error(action) -> str:
    with pytest.raises(InputError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Formats


@pytest.mark.parametrize(("name", "compression"), [*product(WRITE, COMPRESS)])
def test_the_same_rows_whatever_they_are_stored_in(tmp_path, name, compression):
    rows = TEXT_ROWS if name.endswith(("csv", "tsv")) else ROWS
    source = RowSource(write(tmp_path / (name + compression), rows))
    assert source.name == name.split(".")[0]
    found = list(source.rows())
    assert [number for number, _, _ in found] == list(range(600))
    assert [row for _, _, row in found] == rows
    assert len({place for _, place, _ in found}) == 600
    for start in (1, 249, 256, 400, 599, 600, 700):
        assert list(source.rows(start)) == found[start:]


def test_suffixes_in_capitals(tmp_path):
    path = tmp_path / "Train.JSONL.GZ"
    path.write_bytes(gzip.compress(lines(ROWS)))
    assert values(RowSource(path)) == ROWS and RowSource(path).name == "Train"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("lines.jsonl", "line 3"),
        ("list.json", "item 3"),
        ("table.csv", "line 6"),
        ("table.parquet", "row 3"),
        ("stream.arrow.gz", "row 3"),
    ],
)
def test_places(tmp_path, name, place):
    path = write(tmp_path / name, TEXT_ROWS)
    assert list(RowSource(path).rows())[2][1] == f"{path}, {place}"


def test_rows_before_the_start_are_not_parsed(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"a": 0}\n\nbroken\n{"a": 2}\nbroken\n')
    number, place, error = list(RowSource(path).rows())[1]
    assert (number, place) == (1, f"{path}, line 3") and isinstance(error, InputError)
    assert next(RowSource(path).rows(2)) == (2, f"{path}, line 4", {"a": 2})
    assert [number for number, _, _ in RowSource(path).rows(3)] == [3]


def test_row_groups_before_the_start_are_not_read(tmp_path):
    path = write(tmp_path / "table.parquet", ROWS)
    data = bytearray(path.read_bytes())
    data[4:500] = bytes(496)  # in the first group
    path.write_bytes(data)
    assert values(RowSource(path), 250) == ROWS[250:]
    assert "table.parquet: cannot be read" in one_error(lambda: values(RowSource(path)))


def test_byte_order_marks(tmp_path):
    bom = b"\xef\xbb\xbf"
    for name, content in (
        ("a.jsonl", b'{"a": "1"}\n'),
        ("a.json", b'[{"a": "1"}]'),
        ("a.csv", b"a\n1\n"),
    ):
        path = tmp_path / name
        path.write_bytes(bom + content)
        assert values(RowSource(path)) == [{"a": "1"}]
        path.write_bytes(bom)
        assert values(RowSource(path)) == []
        path.write_bytes(content.decode().encode("utf-16"))
        assert f"{path}, line 1: not UTF-8 text but UTF-16; save" in one_error(
            lambda path=path: values(RowSource(path))
        )


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.jsonl.gz"])
def test_a_file_without_rows_is_no_error(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    assert values(RowSource(tmp_path / name)) == []


@pytest.mark.parametrize(("name", "compression"), [*product(["lines.jsonl", "table.parquet"], [*COMPRESS][1:])])
def test_a_damaged_compressed_file(tmp_path, name, compression):
    path = write(tmp_path / (name + compression), ROWS)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:-5], b"no such format"):
        path.write_bytes(content)
        message = one_error(lambda: values(RowSource(path)))
        assert message.startswith(f"{path}: cannot be read (") and "copy it again" in message


@pytest.mark.parametrize("name", ["table.parquet", "file.arrow", "stream.arrow", "table.feather"])
def test_a_damaged_table(tmp_path, name):
    path = write(tmp_path / name, ROWS)
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"ARROW1 no such format at all"):
        path.write_bytes(content)
        message = one_error(lambda: values(RowSource(path)))
        assert message.startswith(f"{path}: cannot be read (")


def test_arrow_offsets_outside_the_file_are_found(tmp_path):
    """Read as they are, they crash the process."""
    path = write(tmp_path / "stream.arrow", [{"text": "a" * 10}] * 100)
    data = path.read_bytes()
    offsets = b"".join((10 * number).to_bytes(4, "little") for number in range(101))
    at = data.index(offsets) + 40
    path.write_bytes(data[:at] + (2**30).to_bytes(4, "little") + data[at + 4 :])
    read = f"from burnish.data.sources import RowSource; list(RowSource({str(path)!r}).rows())"
    ran = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True)
    assert ran.returncode == 1 and "stream.arrow: cannot be read" in ran.stderr


def test_two_columns_of_one_name(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table([["x"], ["y"]], names=["text", "text"]), path)
    assert "a.parquet: two columns are called 'text'" in one_error(lambda: values(RowSource(path)))


def test_structs_have_every_key_and_maps_are_mappings(tmp_path):
    path = tmp_path / "a.parquet"
    kind = pa.list_(pa.struct([("role", pa.string()), ("name", pa.string())]))
    turns = pa.array([[{"role": "user"}], None], kind)
    maps = pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64()))
    parquet.write_table(pa.table({"turns": turns, "map": maps}), path)
    assert values(RowSource(path)) == [
        {"turns": [{"role": "user", "name": None}], "map": {"k": 1}},
        {"turns": None, "map": {}},
    ]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_columns_of_json_text_are_the_values_they_say(tmp_path, name):
    texts = pa.array(['"a"', '[{"n": 1}]', None, "null"], pa.json_())
    structs = pa.StructArray.from_arrays([texts, pa.array(["u", "v", "w", "x"])], ["content", "role"])
    lists = pa.ListArray.from_arrays([0, 3, 4], structs)
    rows = pa.table({"turns": lists, "x": pa.array(["1", '{"b": "c"}'], pa.json_()), "y": ['"z"', "2"]})
    if name == "a.parquet":
        parquet.write_table(rows, tmp_path / name)
    else:
        (tmp_path / name).write_bytes(table([], lambda _, sink: arrow_file(rows, sink)))
    first = [{"content": "a", "role": "u"}, {"content": [{"n": 1}], "role": "v"}, {"content": None, "role": "w"}]
    assert values(RowSource(tmp_path / name)) == [
        {"turns": first, "x": 1, "y": '"z"'},
        {"turns": [{"content": None, "role": "x"}], "x": {"b": "c"}, "y": "2"},
    ]


def test_a_long_file_is_never_in_memory(tmp_path):
    path = tmp_path / "train.jsonl"
    with path.open("w") as file:
        for number in range(2000):
            file.write(f'{{"id": {number}, "text": "{"x" * 10_000}"}}\n')
    assert path.stat().st_size > 20_000_000
    tracemalloc.start()
    try:
        assert sum(row["id"] for _, _, row in RowSource(path).rows()) == 1999 * 1000
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


# Names


@pytest.fixture
def folder(tmp_path):
    """Two rows in each of four files, numbered in the order of their paths."""
    root = tmp_path / "data"
    files = ["a.jsonl", "b/c.jsonl.gz", "b/d.csv", "e.json"]
    for number, name in enumerate(files):
        rows = [{"n": f"{number}.0"}, {"n": f"{number}.1"}]
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {".csv": separated(rows, ","), ".json": json.dumps(rows).encode()}.get(path.suffix, lines(rows))
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    for name in ("README.md", "LICENSE", "dataset_info.json", "state.json", ".hidden.jsonl", ".cache/x.jsonl"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("{}")
    return root


IN_ORDER = [{"n": f"{file}.{row}"} for file in range(4) for row in range(2)]


def test_a_folder_is_its_files_in_order_numbered_through(folder):
    source = RowSource(folder)
    assert source.name == "data"
    assert [path.relative_to(folder).as_posix() for path in source.files] == [
        "a.jsonl",
        "b/c.jsonl.gz",
        "b/d.csv",
        "e.json",
    ]
    found = list(source.rows())
    assert [row for _, _, row in found] == IN_ORDER
    assert [number for number, _, _ in found] == list(range(8))
    assert found[5][1] == f"{folder}/b/d.csv, line 3" and found[6][1] == f"{folder}/e.json, item 1"
    for start in range(9):
        assert list(source.rows(start)) == found[start:]


def test_globs(folder, monkeypatch):
    everything = RowSource(f"{folder}/**")
    assert values(everything) == IN_ORDER and everything.name == "data"
    assert values(RowSource(f"{folder}/**/*.json*")) == IN_ORDER[:4] + IN_ORDER[6:]
    one = RowSource(f"{folder}/b/*.gz")
    assert values(one) == IN_ORDER[2:4] and one.name == "c"
    for name in ("code-1.jsonl", "code-2.jsonl"):
        shutil.copy(folder / "a.jsonl", folder / name)
    assert RowSource(f"{folder}/code-*.jsonl").name == "code"
    monkeypatch.chdir(folder)
    assert RowSource("[ac]*.jsonl").name == RowSource(".").name == "data"
    (folder / "odd[1].jsonl").write_text('{"n": 1}')
    assert values(RowSource("odd[1].jsonl")) == [{"n": 1}]


def test_a_home_folder(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert values(RowSource("~/data")) == values(RowSource("~/data/**")) == IN_ORDER


def test_names_that_stand_for_nothing(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/notes.txt").write_text("x")
    for spec, said in [
        (tmp_path / "none.jsonl", "no such file or folder"),
        (f"{tmp_path}/none*.jsonl", "matches no file; give .jsonl"),
        (tmp_path / "empty", "no data file is in it; give .jsonl, .ndjson, .json, .csv"),
        (f"{tmp_path}/empty/*", "none of the 1 files it matches is a data file"),
        (tmp_path / "empty/notes.txt", "cannot tell its format by its name; give .jsonl"),
        (tmp_path / "empty/notes.txt/a.jsonl", "no such file or folder"),
        ("", "no such file or folder"),
        ("HuggingFaceH4/ultrachat_200k", "no such file; for a Hub data set write hf:HuggingFaceH4/ultrachat_200k"),
        ("nowhere/train.jsonl", "no such file or folder"),
        ("a\0b.jsonl", "cannot be read"),
        ("x" * 5000, "cannot be read"),
        ("hf:", "write hf:ORG/NAME"),
        ("hf:a/b/c", "write hf:ORG/NAME"),
    ]:
        assert said in one_error(lambda spec=spec: RowSource(spec))
    for option in ({"subset": "main"}, {"split": "test"}):
        assert "for Hub data sets" in one_error(lambda option=option: RowSource(folder, **option))


def test_a_file_that_goes_away(folder):
    source = RowSource(folder)
    (folder / "b/d.csv").unlink()
    rows = source.rows()
    assert [next(rows)[0] for _ in range(4)] == [0, 1, 2, 3]
    assert "b/d.csv: cannot be read (No such file or directory)" in one_error(lambda: next(rows))
    assert "b/d.csv: cannot be read" in one_error(source.fingerprint)


# Fingerprints


def test_a_fingerprint_is_of_content_format_and_order(folder, tmp_path):
    first = RowSource(folder).fingerprint()
    shutil.copytree(folder, tmp_path / "other/copy")
    other = tmp_path / "other/copy"
    assert RowSource(other).fingerprint() == RowSource(f"{other}/**").fingerprint() == first
    (other / "a.jsonl").rename(other / "aa.jsonl")
    assert RowSource(other).fingerprint() == first  # another name, the same rows in the same order
    (other / "aa.jsonl").rename(other / "z.jsonl")
    assert RowSource(other).fingerprint() != first
    (other / "z.jsonl").rename(other / "a.csv")
    assert RowSource(other).fingerprint() != first
    (other / "a.csv").rename(other / "a.jsonl")
    os.utime(other / "a.jsonl", (0, 0))
    assert RowSource(other).fingerprint() == first
    (other / "a.jsonl").write_bytes((other / "a.jsonl").read_bytes().replace(b"0.1", b"0.2"))
    assert RowSource(other).fingerprint() != first


# Hub


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The package, without the network and with a cache of its own."""
    module = pytest.importorskip("datasets")
    import huggingface_hub

    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    module.disable_progress_bars()
    return module


CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: data/train.parquet}
  - {split: test, path: data/test.parquet}
- config_name: short
  data_files: [{split: train, path: data/test.parquet}]
---
# Some rows
"""


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repo"
    (root / "data").mkdir(parents=True)
    (root / "README.md").write_text(CARD)
    (root / "data/train.parquet").write_bytes(WRITE["table.parquet"](ROWS))
    (root / "data/test.parquet").write_bytes(WRITE["table.parquet"](ROWS[:3]))
    return root


def test_a_hub_data_set(datasets, repository):
    spec = f"hf:{repository}"
    source = RowSource(spec, subset="main")
    assert (source.name, source.files) == ("repo", ())
    found = list(source.rows())
    assert [row for _, _, row in found] == ROWS
    assert found[2][:2] == (2, f"{spec}, row 3")
    for start in (1, 599, 600, 700):
        assert list(source.rows(start)) == found[start:]
    assert values(RowSource(spec, subset="main", split="test")) == ROWS[:3]
    assert values(RowSource(spec, subset="short")) == ROWS[:3]
    assert values(RowSource(spec, subset="main", split="train[10:20]")) == ROWS[10:20]
    prints = [
        RowSource(spec, subset=subset, split=split).fingerprint()
        for subset, split in (("main", "train"), ("main", "test"), ("main", "train[:5]"), ("short", "train"))
    ]
    assert source.fingerprint() == prints[0] and len(set(prints)) == 4


def test_a_hub_data_set_of_mixed_values(datasets, tmp_path):
    rows = [{"content": "a", "x": {"k": 1}}, {"content": [{"text": "b"}], "x": 3}]
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo/train.jsonl").write_bytes(lines(rows))
    source = RowSource(f"hf:{tmp_path}/repo")
    assert values(source) == rows
    source._dataset.save_to_disk(tmp_path / "saved")
    assert values(RowSource(tmp_path / "saved")) == rows
    source._dataset.to_parquet(tmp_path / "rows.parquet")
    assert values(RowSource(tmp_path / "rows.parquet")) == rows


def test_a_saved_data_set_is_a_folder_of_arrow_files(datasets, tmp_path):
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "saved", num_shards=3)
    (tmp_path / "saved/cache-0123.arrow").write_bytes(b"what a map left")
    source = RowSource(tmp_path / "saved")
    assert len(source.files) == 3 and values(source) == ROWS and values(source, 450) == ROWS[450:]
    datasets.DatasetDict(train=dataset, test=dataset).save_to_disk(tmp_path / "both")
    assert "both holds splits (test, train); name the folder of one" in one_error(lambda: RowSource(tmp_path / "both"))
    assert values(RowSource(tmp_path / "both/test")) == ROWS
    message = one_error(lambda: values(RowSource(f"hf:{tmp_path}/saved")))
    assert "was saved by save_to_disk; name the folder" in message


def test_a_hub_data_set_that_cannot_be_loaded(datasets, repository, tmp_path):
    (tmp_path / "empty").mkdir()
    for spec, options, said in [
        (f"hf:{repository}", {}, "['main', 'short']"),
        (f"hf:{repository}", {"subset": "none"}, "['main', 'short']"),
        (f"hf:{repository}", {"subset": "main", "split": "dev"}, "['train', 'test']"),
        (f"hf:{tmp_path}/empty", {}, "cannot be loaded"),
        ("hf:nobody/nothing", {}, "nobody/nothing"),
    ]:
        message = one_error(lambda spec=spec, options=options: values(RowSource(spec, **options)))
        assert message.startswith(f"{spec}: cannot be loaded (") and said in message and "check the name" in message


def test_without_the_datasets_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'burnish[hub]'" in one_error(lambda: values(RowSource("hf:org/name")))
