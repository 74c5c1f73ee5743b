import json
import os
import threading

import numpy as np
import pytest

from burnish.data import cache
from burnish.data.cache import cached
from burnish.data.config import DataConfig, SourceConfig
from burnish.data.dataset import load_dataset
from burnish.data.examples import EncodeCounts, Encoded, Examples
from burnish.data.rows import RowEncoder

CONFIG = DataConfig(max_length=64)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"question {i}", "completion": f"answer {i}"}) + "\n" for i in range(20))
    )
    return path


@pytest.fixture
def encoded(monkeypatch):
    """The records that were tokenised."""
    found, encode = [], RowEncoder.encode

    def counting(self, record, counts):
        found.append(record)
        return encode(self, record, counts)

    monkeypatch.setattr(RowEncoder, "encode", counting)
    return found


def assert_same(left: Examples, right: Examples):
    for name in ("tokens", "weights", "starts", "ids", "sources"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
        assert getattr(left, name).dtype == getattr(right, name).dtype
    assert left.counts == right.counts


def some(seed: int) -> dict[str, Examples]:
    rng = np.random.default_rng(seed)
    made = [Encoded(i, rng.integers(0, 9, 5).astype(np.int32), rng.random(5).astype(np.float32), 2) for i in range(4)]
    return {"train": Examples.of(made, EncodeCounts(rows=5, kept=4, notes=["x"])), "held_out": Examples.of([])}


# What is found


def test_the_second_time_nothing_is_tokenised(file, bpe_tokenizer, encoded, monkeypatch):
    first = load_dataset(file, None, bpe_tokenizer, CONFIG)
    assert len(encoded) == 20 and len(first.held_out) == 2
    monkeypatch.setattr(RowEncoder, "encode", None)
    monkeypatch.setattr(RowEncoder, "records", None)
    second = load_dataset(file, None, bpe_tokenizer, CONFIG)
    assert_same(first.train, second.train)
    assert_same(first.held_out, second.held_out)
    assert isinstance(second.train.tokens, np.memmap)


def test_evaluation_data_and_every_source_of_a_mixture_are_kept(file, tmp_path, bpe_tokenizer, encoded):
    other = tmp_path / "other.jsonl"
    other.write_bytes(file.read_bytes().replace(b"answer", b"reply"))
    sources = [SourceConfig(path=str(file)), SourceConfig(path=str(other))]
    first = load_dataset(sources, other, bpe_tokenizer, CONFIG)
    assert len(encoded) == 40, "evaluation reads what was kept for training"
    second = load_dataset(sources, other, bpe_tokenizer, CONFIG)
    assert len(encoded) == 40
    assert_same(first.train, second.train)
    assert_same(first.held_out, second.held_out)


def test_a_copy_elsewhere_is_found_and_rows_in_memory_are_not_kept(file, tmp_path, bpe_tokenizer, encoded, folder):
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for _ in range(2):
        load_dataset(rows, None, bpe_tokenizer, CONFIG)
    load_dataset(file, None, bpe_tokenizer, CONFIG.model_copy(update={"cache": False}))
    assert len(encoded) == 60 and not folder.exists()
    load_dataset(file, None, bpe_tokenizer, CONFIG)
    load_dataset(file.rename(tmp_path / "renamed.jsonl"), None, bpe_tokenizer, CONFIG)
    assert len(encoded) == 80


# The key

# Every option, and a change of it; whether the tokens, or what is held out, may be others then.
DECIDES = {
    "format": "prompt_completion",
    "columns": {"prompt": "completion", "completion": "prompt"},
    "chat_template": "chatml",
    "template_variables": {"day": "2026-01-01", "thinking": True},
    "date": "2026-01-01",
    "system": "Be brief.",
    "train_on": "all",
    "rewritten_turns": "refuse",
    "bad_rows": "drop",
    "max_length": 63,
    "truncate": "split",
    "overlap": 3,
    "min_trained_tokens": 2,
    "holdout": 0.3,
    "seed": 1,
}
DOES_NOT = {
    "packing": "none",
    "max_segments": 3,
    "lookahead": 5,
    "temperature": 2.0,
    "repeat": False,
    "shuffle_buffer": 7,
}


def test_every_option_is_in_one_of_the_lists():
    assert DECIDES.keys() | DOES_NOT.keys() | {"streaming", "cache"} == DataConfig.model_fields.keys()


@pytest.mark.parametrize("name", [*DECIDES, *DOES_NOT])
def test_an_option_that_decides_the_tokens_is_in_the_key(file, bpe_tokenizer, encoded, name):
    before = {"truncate": "split"} if name == "overlap" else {}
    source = [SourceConfig(path=str(file)), SourceConfig(path=str(file), name="again")]
    load_dataset(source, None, bpe_tokenizer, DataConfig(max_length=64, **before))
    encoded.clear()
    changed = DataConfig(**{"max_length": 64, **before, name: {**DECIDES, **DOES_NOT}[name]})
    load_dataset(source, None, bpe_tokenizer, changed)
    assert bool(encoded) == (name in DECIDES)
    encoded.clear()
    load_dataset(source, None, bpe_tokenizer, changed)
    assert not encoded


def test_the_seed_matters_only_where_rows_are_held_out(file, bpe_tokenizer, encoded):
    for seed in (0, 1):
        load_dataset(file, None, bpe_tokenizer, CONFIG.model_copy(update={"seed": seed, "holdout": 0.0}))
    assert len(encoded) == 20


def test_concat_has_tokens_of_its_own(tmp_path, bpe_tokenizer, encoded):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "a long story of many words and more"}\n' * 3)
    config = DataConfig(max_length=8, holdout=0)
    assert load_dataset(path, None, bpe_tokenizer, config).train.lengths.max() == 8
    assert (
        load_dataset(path, None, bpe_tokenizer, config.model_copy(update={"packing": "concat"})).train.lengths.min() > 8
    )


def test_other_bytes_or_another_tokenizer_are_another_key(file, bpe_tokenizer, encoded):
    def misses(tokenizer=bpe_tokenizer, source=file):
        encoded.clear()
        load_dataset(source, None, tokenizer, CONFIG)
        return bool(encoded)

    assert misses() and not misses()
    text = file.read_text()
    file.write_text(text.replace("answer 7", "answer 8"))  # of the same size
    assert misses()
    file.write_text(text)
    assert not misses()
    assert misses(bpe_tokenizer.with_chat_template("{% for m in messages %}{{ m.content }}\n{% endfor %}"))
    assert misses(source=[SourceConfig(path=str(file), columns={"prompt": "completion", "completion": "prompt"})])


def test_a_new_version_of_the_program_can_forget(monkeypatch):
    cached({"a": 1}, lambda: some(0))
    assert_same(cached({"a": 1}, lambda: some(1))["train"], some(0)["train"])
    monkeypatch.setattr(cache, "VERSION", cache.VERSION + 1)
    assert_same(cached({"a": 1}, lambda: some(1))["train"], some(1)["train"])


# What goes wrong


def damages():
    arrays = [f"{side}-{name}.npy" for side in ("train", "held_out") for name in cache._ARRAYS]
    for name in ["examples.json", *arrays]:
        for how in ("removed", "emptied", "halved", "garbage", "folder"):
            yield name, how
    for name in arrays[:5]:
        yield name, "last byte"
    for text in ("{}", "[]", "1", '{"train": 1}', '{"train": [{"no_such": 1}, []]}'):
        yield "examples.json", text


@pytest.mark.parametrize(("name", "how"), [*damages()])
def test_damaged_files_are_made_again(folder, name, how):
    cached({"a": 1}, lambda: some(0))
    (whole,) = folder.iterdir()
    path = whole / name
    data = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how != "removed":
        changed = {
            "emptied": b"",
            "halved": data[: len(data) // 2],
            "garbage": b"PK\x03\x04" + data[4:],
            "last byte": data[:-1] + bytes([data[-1] ^ 1]),
        }
        path.write_bytes(changed.get(how, how.encode()))
    for _ in range(2):
        for side, expected in some(0).items():
            assert_same(cached({"a": 1}, lambda: some(0))[side], expected)
    assert list(folder.iterdir()) == [whole]

    def never():
        raise AssertionError("made once more")

    cached({"a": 1}, never)


def test_two_at_once_leave_one_whole_folder(folder):
    barrier, found = threading.Barrier(4), []

    def make():
        barrier.wait(timeout=20)
        return some(0)

    threads = [threading.Thread(target=lambda: found.append(cached({"a": 1}, make))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for each in found:
        assert_same(each["train"], some(0)["train"])
    (whole,) = folder.iterdir()
    assert not whole.name.startswith(".")
    assert isinstance(cached({"a": 1}, lambda: some(1))["train"].tokens, np.memmap)


def test_one_that_fails_midway_leaves_nothing(folder, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "save", full)
    assert_same(cached({"a": 1}, lambda: some(0))["train"], some(0)["train"])
    assert not list(folder.iterdir())


@pytest.mark.parametrize("kind", ["read-only", "no folder"])
def test_where_nothing_can_be_written_the_run_goes_on(tmp_path, monkeypatch, kind):
    place = tmp_path / "place"
    if kind == "read-only":
        place.mkdir()
        place.chmod(0o500)
        if os.access(place, os.W_OK):
            pytest.skip("root may write anywhere")
    else:
        place.write_text("a file")
    monkeypatch.setenv("BURNISH_CACHE", str(place))
    for _ in range(2):
        assert_same(cached({"a": 1}, lambda: some(0))["train"], some(0)["train"])
