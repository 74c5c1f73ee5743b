"""What a user names -> a stream of raw rows.

    train.jsonl             .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow, .feather; also in .gz, .bz2, .xz, .zst
    data/                   every such file in a folder and its subfolders, sorted by path
    data/*.jsonl.gz, **     a glob, sorted by path
    hf:ORG/NAME             a Hub data set; also hf:FOLDER, a data set repository on disk

Rows are read as they are asked for; only a .json list, and Parquet and Arrow that are compressed from outside, have
all of a file's bytes in memory.
"""

import bz2
import codecs
import glob
import gzip
import hashlib
import io
import lzma
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any

from burnish.data.readers import Chunk, Row, csv_rows, json_file, json_lines
from burnish.data.tables import arrow_parts, parquet_parts
from burnish.errors import InputError


class RowSource:
    """Rows of a file, a folder, a glob, or a Hub data set.

    Attributes:
        spec: what the user named.
        name: a short name for metrics: "train" for data/train.jsonl.gz, "data" for data/ and data/*.jsonl,
            "NAME" for hf:ORG/NAME.
        files: the files, in the order in which they are read; empty for a Hub data set.
    """

    def __init__(self, spec: str | Path, *, subset: str | None = None, split: str = "train") -> None:
        """Finds the files; a Hub data set is loaded when it is first read.

        Raises:
            InputError: nothing that can be read is there; or a subset or split of plain files is asked for.
        """
        self.spec, self.subset, self.split = str(spec), subset, split
        self.files: tuple[Path, ...] = ()
        self._hub_name = _hub_name(self.spec) if self.spec.startswith("hf:") else None
        if self._hub_name:
            self.name = Path(self._hub_name).resolve().name
            return
        if subset is not None or split != "train":
            raise InputError(f"{spec}: subset and split are for Hub data sets (hf:ORG/NAME); name the files themselves")
        self.name, self.files = _find(os.path.expanduser(self.spec))

    def rows(self, start: int = 0) -> Iterator[tuple[int, str, Row]]:
        """Rows from number `start` on, those before it unparsed: (number from 0 over all files, place, row).

        A row that cannot be parsed is an InputError in the row's place. It has a number; a blank line has none.

        Raises:
            InputError: a file, or the rest of it, cannot be read.
        """
        if self._hub_name:
            size = len(self._dataset)
            rest = self._dataset.select(range(start, size)) if start < size else ()
            for number, row in enumerate(rest, start):
                yield number, f"{self.spec}, row {number + 1}", row
            return
        number = 0
        for path in self.files:
            with _one_line_errors(path):
                for part in _chunks(path):
                    if number + part.size > start:
                        for at, (place, row) in enumerate(part.read(), number):
                            if at >= start:
                                yield at, place, row
                    number += part.size

    def fingerprint(self) -> str:
        """Hash of all that rows() gives but the places: the files' bytes, formats and order, not their names.

        Raises:
            InputError: a file cannot be read.
        """
        if self._hub_name:
            return str(self._dataset._fingerprint)
        whole = hashlib.blake2b(digest_size=20)
        for path in self.files:
            with _one_line_errors(path), path.open("rb") as file:
                whole.update(repr(_kind(path)).encode() + hashlib.file_digest(file, "blake2b").digest())
        return whole.hexdigest()

    @cached_property
    def _dataset(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise InputError(f"{self.spec}: a Hub data set needs datasets: pip install 'burnish[hub]'") from error
        saved = [name for name in ("state.json", "dataset_dict.json") if (Path(self._hub_name or "") / name).is_file()]
        if saved:
            raise InputError(f"{self.spec}: was saved by save_to_disk; name the folder of a split, without hf:")
        try:
            return datasets.load_dataset(self._hub_name, self.subset, split=self.split, streaming=False)
        except Exception as error:  # a dozen kinds: of the network, the Hub, the builders, the file formats
            said = " ".join(str(error).split("Example of usage")[0].split())
            mend = "check the name, the subset, the split, and the network"
            raise InputError(f"{self.spec}: cannot be loaded ({said[:400]}); {mend}") from error


# What a name stands for


def _hub_name(spec: str) -> str:
    name = os.path.expanduser(spec.removeprefix("hf:"))
    if not (os.path.isdir(name) or re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)):
        raise InputError(f"{spec!r}: no name of a Hub data set, and no folder; write hf:ORG/NAME")
    return name


def _find(spec: str) -> tuple[str, tuple[Path, ...]]:
    """The short name and the files of a path or a glob."""
    try:
        mode = os.stat(spec).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return _in_glob(spec)
    except (OSError, ValueError) as error:  # a path with a NUL in it is a ValueError
        raise InputError(f"{spec!r}: cannot be read ({_reason(error)}); give a file, a folder or a glob") from error
    path = Path(spec)
    if stat.S_ISDIR(mode):
        return path.resolve().name, _in_folder(path)
    if not stat.S_ISREG(mode):
        raise InputError(f"{path}: no file that can be read twice; write the rows to a plain file")
    if not _kind(path):
        raise InputError(f"{path}: cannot tell its format by its name; {_SUPPORTED}")
    return _stem(path), (path,)


def _in_folder(folder: Path) -> tuple[Path, ...]:
    """Data files of a folder and its subfolders; links to folders are not followed, they could go in circles."""

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename}: cannot be read ({_reason(error)}); mend or remove it") from error

    found: list[Path] = []
    for parent, subfolders, names in os.walk(folder, onerror=refuse):
        if "dataset_dict.json" in names:  # train and test, which nobody wants mixed
            splits = ", ".join(sorted(subfolders))
            raise InputError(f"{parent} holds splits ({splits}); name the folder of one")
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        caches = "cache-" if "state.json" in names else None  # results of `map`, beside a saved data set
        found += [Path(parent, name) for name in names if _is_data(name) and not (caches and name.startswith(caches))]
    if not found:
        raise InputError(f"{folder}: no data file is in it; {_SUPPORTED}")
    return tuple(sorted(found, key=lambda path: path.relative_to(folder).as_posix()))


def _in_glob(spec: str) -> tuple[str, tuple[Path, ...]]:
    magic = re.search(r"[*?[]", spec)
    if not magic:
        if re.fullmatch(r"[\w.-]+/[\w.-]+", spec) and not _kind(Path(spec)):
            raise InputError(f"{spec}: no such file; for a Hub data set write hf:{spec}")
        raise InputError(f"{spec!r}: no such file or folder; give a file, a folder, a glob, or hf:ORG/NAME")
    matches = [path for path in glob.glob(spec, recursive=True) if os.path.isfile(path)]
    files = tuple(Path(path) for path in sorted(set(matches)) if _is_data(os.path.basename(path)))
    if not files:
        found = f"none of the {len(matches)} files it matches is a data file" if matches else "matches no file"
        raise InputError(f"{spec}: {found}; {_SUPPORTED}")
    if len(files) == 1:
        return _stem(files[0]), files
    folder, prefix = os.path.split(spec[: magic.start()])
    return prefix.rstrip("-_.") or Path(folder).resolve().name, files


# What a file's name says


def _zstd(path: Path) -> IO[bytes]:
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))


_OPEN: dict[str, Callable[[Path], Any]] = {
    "": lambda path: path.open("rb"),
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zstd,
}
_TEXTS: dict[str, Callable[[IO[bytes], str], Iterator[Chunk]]] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_file,
    ".csv": partial(csv_rows, delimiter=","),
    ".tsv": partial(csv_rows, delimiter="\t"),
}
_TABLES: dict[str, Callable[[str | bytes, str], Iterator[Chunk]]] = {
    ".parquet": parquet_parts,
    ".arrow": arrow_parts,
    ".feather": arrow_parts,
}
_SUPPORTED = f"give {', '.join((*_TEXTS, *_TABLES))}, each also with {', '.join(filter(None, _OPEN))}"
_ABOUT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")


def _kind(path: Path) -> tuple[str, str] | None:
    """The suffixes of format and compression; None where the format is not known."""
    name = Path(path.name.lower())
    compression = name.suffix if name.suffix in _OPEN else ""
    form = Path(name.stem).suffix if compression else name.suffix
    return (form, compression) if form in _TEXTS or form in _TABLES else None


def _stem(path: Path) -> str:
    return path.name[: -len("".join(_kind(path) or ()))]


def _is_data(name: str) -> bool:
    return bool(_kind(Path(name))) and not name.startswith(".") and name not in _ABOUT_DATA


# Opening

_READ_ERRORS = (
    *(OSError, EOFError, zlib.error, lzma.LZMAError),
    *(ValueError, NotImplementedError),  # Arrow: a damaged file; one that uses what Arrow cannot read
    *(OverflowError, KeyError),  # Arrow: a date that Python has not; a map with a key twice
)


def _chunks(path: Path) -> Iterator[Chunk]:
    form, compression = _kind(path) or ("", "")
    if form in _TABLES and not compression:
        yield from _TABLES[form](str(path), str(path))
        return
    with _OPEN[compression](path) as stream:
        if form in _TABLES:
            yield from _TABLES[form](stream.read(), str(path))
            return
        head = stream.peek(3)[:3]
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise InputError(f"{path}, line 1: not UTF-8 text but UTF-16; save the file as UTF-8")
        if head == codecs.BOM_UTF8:
            stream.read(3)
        yield from _TEXTS[form](stream, str(path))


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    """What the readers of a broken or unreadable file raise, as an InputError."""
    try:
        yield
    except InputError:
        raise
    except _READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read ({_reason(error)}); copy it again or write it anew") from error


def _reason(error: Exception) -> str:
    """What went wrong, in one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split()).rstrip(".")
