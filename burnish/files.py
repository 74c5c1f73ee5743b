"""Folders that appear whole or not at all, and that never cost anybody a file.

    with whole_folder("out/") as folder:          # a hidden folder beside out/, or within it where out/ exists
        (folder / "config.json").write_text("{}")
    # now out/ holds config.json; had anything failed, out/ would be as it was

A folder made here holds a list of its files (`MARKER`). By it a later call knows what it may replace: a folder that
is empty, or that holds exactly what was written, unchanged. Anything else is refused before a byte is written.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from burnish.errors import InputError

MARKER = ".burnish.json"
_STAGING = ".burnish-partial-"
_HASHED_BYTES = 64_000_000  # larger files are told apart by their size


@contextmanager
def whole_folder(target: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a folder to write into, and moves its content to `target` when the block ends well.

    On an exception, Ctrl-C included, `target` is what it was before. Raises InputError, naming the folder and the
    mend, when `target` holds anything but an earlier, unchanged result of this function, or cannot be written.
    """
    try:
        final = Path(target).expanduser().resolve()
        replaced = _replaceable(final)
        with _staging(final) as staging:
            yield staging
            _write_marker(staging)
            _sync(staging)
            if final.exists():
                _swap(staging, final, replaced if replaced == _replaceable(final) else _replaceable(final))
            else:
                staging.rename(final)
                _sync_directory(final.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{target}: cannot be written ({reason}); give another folder or make room") from error


@contextmanager
def _staging(final: Path) -> Iterator[Path]:
    """A new hidden folder on the file system of `final`; it, and parents made for it, are gone at the end."""
    missing = [folder for folder in (final.parent, *final.parent.parents) if not folder.exists()]
    final.parent.mkdir(parents=True, exist_ok=True)
    # Within an existing folder, as that may be a mount or somebody's working directory: neither can be renamed.
    staging = (final if final.exists() else final.parent) / f"{_STAGING}{uuid.uuid4().hex}"
    try:
        staging.mkdir()
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if not final.exists():
            for folder in missing:
                if folder.exists() and not any(folder.iterdir()):
                    folder.rmdir()


def _replaceable(folder: Path) -> list[str]:
    """The files of an earlier result that a new one takes the place of; InputError when there is anything else."""
    if not os.path.lexists(folder):
        return []
    if not folder.is_dir():
        raise InputError(f"{folder}: is a file; give a folder")
    present = _files(folder)
    if not present:
        return []
    listed = _read_marker(folder)
    for name in present:
        if name != MARKER and name not in listed:
            raise InputError(f"{folder}: holds {name}, which was not written here; give a new or an empty folder")
        if name != MARKER and listed[name] != _fingerprint(folder / name):
            raise InputError(f"{folder}: {name} was changed after it was written; give a new or an empty folder")
    return present


def _files(folder: Path) -> list[str]:
    """Every file (and link) under a folder by relative name, leftovers of killed calls aside."""
    found = []
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(_STAGING))
        links = [name for name in folders if (Path(at) / name).is_symlink()]
        found += [(Path(at) / name).relative_to(folder).as_posix() for name in sorted(names) + links]
    return found


def _fingerprint(path: Path) -> list[int | str]:
    if path.is_symlink() or not path.is_file():
        return ["not a file"]
    size = path.stat().st_size
    return [size, hashlib.sha256(path.read_bytes()).hexdigest() if size <= _HASHED_BYTES else ""]


def _write_marker(folder: Path) -> None:
    listed = {name: _fingerprint(folder / name) for name in _files(folder)}
    content = {"note": "Written by Burnish, which replaces these files and no others.", "files": listed}
    (folder / MARKER).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _read_marker(folder: Path) -> dict[str, list[int | str]]:
    try:
        content = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        return dict(content["files"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}  # no list, or a broken one: nothing counts as ours


def _swap(staging: Path, final: Path, old: list[str]) -> None:
    """Moves old files out and new ones in; on an exception, moves all back."""
    attic = final / f"{_STAGING}{uuid.uuid4().hex}"
    attic.mkdir()
    new = _files(staging)
    try:
        for name in old:
            _move(final / name, attic / name)
        for name in new:
            _move(staging / name, final / name)
    except BaseException:
        for name in new:
            if not (staging / name).exists():
                _move(final / name, staging / name)
        for name in old:
            if (attic / name).exists():
                _move(attic / name, final / name)
        _remove_empty_folders(attic)
        raise
    shutil.rmtree(attic)
    _remove_empty_folders(final, keep=True)
    _sync_directory(final)


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)


def _remove_empty_folders(folder: Path, *, keep: bool = False) -> None:
    """Removes folders that hold nothing, deepest first; `keep` spares the outermost one."""
    for at, folders, names in os.walk(folder, topdown=False):
        path = Path(at)
        if not names and all(not (path / name).exists() for name in folders) and not (keep and path == folder):
            path.rmdir()


def _sync(folder: Path) -> None:
    """Waits until the disk has the files, so that the move never outruns the content."""
    for name in _files(folder):
        descriptor = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    _sync_directory(folder)


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Where fetched models and tokenised data are kept: `$BURNISH_CACHE`, or `~/.cache/burnish`."""
    return Path(os.environ.get("BURNISH_CACHE") or Path.home() / ".cache" / "burnish")
