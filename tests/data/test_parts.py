import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.data.config import DataConfig, SourceConfig
from burnish.data.parts import recorded, sources_of, unique_names
from burnish.errors import InputError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    return path


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b"], ("a", "b")),
        (["a", "a", "a"], ("a", "a-2", "a-3")),
        (["a", "b", "a"], ("a", "b", "a-2")),
        (["a", "a", "a-2"], ("a", "a-3", "a-2")),  # who is called so keeps the name
    ],
)
def test_names_by_hand(names, expected):
    assert unique_names(names) == expected


@given(st.lists(st.sampled_from(["a", "a-2", "a-3", "a-2-2", "b"]), max_size=8))
def test_no_two_names_are_the_same(names):
    unique = unique_names(names)
    assert len(set(unique)) == len(names) and set(names) <= set(unique)
    assert all(new.startswith(old) for new, old in zip(unique, names, strict=True))


def test_a_source_says_its_form_or_has_that_of_all(file):
    ours, theirs = ({"prompt": name, "completion": "a"} for name in ("q", "x"))
    config = DataConfig(format="prompt_completion", columns=ours)
    named = SourceConfig(path=str(file), name="mine", weight=2, columns=theirs)
    other = SourceConfig(path=str(file), format="text", columns={})
    parts = sources_of([SourceConfig(path=str(file)), named, other], config)
    assert [(part.name, part.weight) for part in parts] == [("train", None), ("mine", 2), ("train", None)]
    assert [part.form.format for part in parts] == ["prompt_completion", "prompt_completion", "text"]
    assert [part.form.columns for part in parts] == [ours, theirs, {}]
    (alone,) = sources_of(file, config)
    assert (alone.name, alone.place, alone.form.columns) == ("train", str(file), ours)


def test_rows_in_memory_are_numbered_from_any_start():
    (part,) = sources_of(iter([{"text": "a"}, 5, {"text": "c"}]), DataConfig())
    rows = list(part.rows())
    assert [(number, place) for number, place, _ in rows] == [(0, "data[0]"), (1, "data[1]"), (2, "data[2]")]
    assert rows[0][2] == {"text": "a"} and isinstance(rows[1][2], InputError)
    assert [number for number, _, _ in part.rows(2)] == [2] and not list(part.rows(3))
    with pytest.raises(InputError, match="data holds no records"):
        sources_of([], DataConfig())


def test_the_identity_changes_with_what_is_read(file):
    def identity(**options):
        (part,) = sources_of([SourceConfig(path=str(file), **options)], DataConfig())
        return json.dumps(part.identity())

    before = identity()
    assert before == identity()
    assert len({before, identity(name="x"), identity(format="text"), identity(columns={"text": "q"})}) == 4
    file.write_text(file.read_text() + "\n")
    assert identity() != before
    one, two = ([{"text": "a"}] * n for n in (1, 2))
    assert sources_of(one, DataConfig())[0].identity() != sources_of(two, DataConfig())[0].identity()


def test_a_hub_data_set_is_told_from_another_split(tmp_path):
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "hub"
    folder.mkdir()
    for split in ("train", "test"):
        datasets.Dataset.from_list([{"text": split}]).to_parquet(folder / f"{split}.parquet")

    def identity(split):
        (part,) = sources_of([SourceConfig(path=f"hf:{folder}", split=split)], DataConfig())
        return part.identity()

    assert identity("train") == identity("train") != identity("test")


def test_what_a_recipe_says_means_the_same_from_any_folder(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    assert recorded("train.jsonl") == recorded(file) == str(file)
    assert recorded("hf:ORG/NAME") == "hf:ORG/NAME"
    assert recorded([{"text": "a"}]) is None and recorded(None) is None
    assert recorded(SourceConfig(path="train.jsonl")) == recorded([SourceConfig(path="train.jsonl")])
    (source,) = recorded([SourceConfig(path="train.jsonl", weight=2)])
    assert SourceConfig(**source) == SourceConfig(path=str(file), weight=2)
