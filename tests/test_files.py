"""Folders appear whole or not at all, and nobody's file is lost."""

import os

import pytest

from burnish.errors import InputError
from burnish.files import MARKER, whole_folder


def write(target, **files):
    with whole_folder(target) as folder:
        for name, text in files.items():
            path = folder / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


def content(folder):
    """Every file but the marker, by relative name."""
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MARKER
    }


def test_new_folder_with_new_parents(tmp_path):
    write(tmp_path / "a" / "b", x_txt="1", sub__y_txt="2")
    assert content(tmp_path / "a" / "b") == {"x.txt": "1", "sub/y.txt": "2"}
    assert os.listdir(tmp_path / "a") == ["b"]


@pytest.mark.parametrize("state", ["absent", "absent parents", "empty", "earlier"])
@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, InputError])
def test_nothing_changes_on_failure(tmp_path, state, failure):
    target = tmp_path / "p" / "out" if state == "absent parents" else tmp_path / "out"
    if state == "empty":
        target.mkdir()
    if state == "earlier":
        write(target, x_txt="old", sub__z_txt="older")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(failure), whole_folder(target) as folder:
        (folder / "x.txt").write_text("half")
        raise failure
    assert sorted(tmp_path.rglob("*")) == before
    if state == "earlier":
        assert content(target) == {"x.txt": "old", "sub/z.txt": "older"}


def test_replaces_what_it_wrote_and_keeps_the_folder_itself(tmp_path):
    write(tmp_path / "out", x_txt="old", sub__z_txt="older")
    inode = (tmp_path / "out").stat().st_ino
    write(tmp_path / "out", x_txt="new", y_txt="newer")
    assert content(tmp_path / "out") == {"x.txt": "new", "y.txt": "newer"}
    assert sorted(os.listdir(tmp_path / "out")) == sorted([MARKER, "x.txt", "y.txt"])
    assert (tmp_path / "out").stat().st_ino == inode
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("step", range(1, 8))
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_move_is_undone(tmp_path, monkeypatch, step, failure):
    from burnish import files

    write(tmp_path / "out", x_txt="old", sub__z_txt="older")
    before = sorted(tmp_path.rglob("*"))
    moves, real = [], files._move

    def failing(source, target):
        moves.append(source)
        if len(moves) == step:
            raise failure
        real(source, target)

    monkeypatch.setattr(files, "_move", failing)
    if step > 6:  # three files out, three in: this one does not come to pass
        write(tmp_path / "out", x_txt="new", y_txt="newer")
        assert content(tmp_path / "out") == {"x.txt": "new", "y.txt": "newer"}
        return
    with pytest.raises(InputError if isinstance(failure, OSError) else KeyboardInterrupt):
        write(tmp_path / "out", x_txt="new", y_txt="newer")
    assert content(tmp_path / "out") == {"x.txt": "old", "sub/z.txt": "older"}
    assert sorted(tmp_path.rglob("*")) == before


def test_somebody_elses_file_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    entered = []
    said = r"out: holds config\.json, which was not written here; give a new"
    with pytest.raises(InputError, match=said), whole_folder(tmp_path / "out"):
        entered.append(True)
    assert not entered
    assert content(tmp_path / "out") == {"config.json": "mine"}


@pytest.mark.parametrize("name", ["notes.txt", "sub/notes.txt", ".hidden"])
def test_a_file_beside_an_earlier_result_is_refused(tmp_path, name):
    write(tmp_path / "out", x_txt="old", sub__z_txt="older")
    (tmp_path / "out" / name).write_text("mine")
    with pytest.raises(InputError, match=f"holds {name}"):
        write(tmp_path / "out", x_txt="new")
    assert content(tmp_path / "out")["x.txt"] == "old"


def test_an_edited_file_is_refused(tmp_path):
    write(tmp_path / "out", x_txt="old")
    (tmp_path / "out" / "x.txt").write_text("edited by hand")
    with pytest.raises(InputError, match=r"x\.txt was changed after it was written"):
        write(tmp_path / "out", x_txt="new")
    assert content(tmp_path / "out") == {"x.txt": "edited by hand"}


def test_a_file_that_came_while_writing_is_kept(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match=r"holds x\.txt"), whole_folder(tmp_path / "out") as folder:
        (folder / "x.txt").write_text("new")
        (tmp_path / "out" / "x.txt").write_text("mine")
    assert content(tmp_path / "out") == {"x.txt": "mine"}


def test_a_link_in_the_way_is_somebody_elses(tmp_path):
    write(tmp_path / "out", x_txt="old")
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "out" / "x.txt").unlink()
    (tmp_path / "out" / "x.txt").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError):
        write(tmp_path / "out", x_txt="new")
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_linked_folder_is_written_through(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    write(tmp_path / "out", x_txt="1")
    assert content(tmp_path / "disk") == {"x.txt": "1"}
    assert (tmp_path / "out").is_symlink()


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "out").write_text("mine")
    for target in (tmp_path / "out", tmp_path / "out" / "below"):
        with pytest.raises(InputError, match="out"):
            write(target, x_txt="new")
    assert (tmp_path / "out").read_text() == "mine"
