"""What a caller names, as sources of numbered rows: files, rows in memory, records, or several that are mixed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from burnish.data.config import DataConfig, RowFormat, SourceConfig
from burnish.data.formats import check_format
from burnish.data.records import Record
from burnish.data.rows import NumberedRow
from burnish.data.sources import RowSource
from burnish.data.values import keys_found, kind
from burnish.errors import InputError

Source = str | Path | Iterable[Mapping[str, Any]] | Sequence[Record] | SourceConfig | Sequence[SourceConfig]
"""A file, folder, glob or hf:ORG/NAME; rows; records; or several sources that are mixed."""


@dataclass(frozen=True)
class Part:
    """One source: its rows, or records, what they are called, and their form."""

    name: str
    form: RowFormat
    weight: float | None = None
    file: RowSource | None = None
    given: Sequence[Any] = field(default_factory=list)

    @property
    def place(self) -> str:
        """What an error calls it."""
        return str(self.file.spec) if self.file else self.name

    def identity(self) -> list[Any]:
        """What tells its rows from others' without reading them: the names and sizes of its files."""
        rows: Any = len(self.given)
        if self.file is not None:
            sizes = [[path.name, path.stat().st_size] for path in self.file.files]
            rows = sizes or self.file.fingerprint()  # a Hub data set knows its own
        return [self.name, self.form.model_dump(include={"format", "columns"}), rows]

    def rows(self, start: int = 0) -> Iterator[NumberedRow]:
        """Its rows from number `start` on; errors call rows in memory `data[0]` and so on."""
        if self.file is not None:
            yield from self.file.rows(start)
            return
        for number in range(start, len(self.given)):
            row = self.given[number]
            place = f"data[{number}]"
            if isinstance(row, Record):
                yield number, row.place, row
            elif isinstance(row, Mapping):
                yield number, place, _without_numpy(row)
            else:
                mend = (
                    "files are given as [SourceConfig(path=...), ...]" if isinstance(row, str | Path) else "give rows"
                )
                yield number, place, InputError(f"{place}: expected a mapping, found {kind(row)}; {mend}")


def sources_of(source: Source, config: DataConfig) -> list[Part]:
    """The sources that are meant, in order."""
    form = RowFormat(format=config.format, columns=config.columns)
    check_format(form)
    if isinstance(source, str | Path):
        file = RowSource(source)
        return [Part(file.name, form, file=file)]
    if isinstance(source, SourceConfig):
        source = [source]
    if isinstance(source, Mapping):
        raise InputError(f"data: a mapping of {keys_found(source)}; give one of its splits, or a list of rows")
    if not isinstance(source, Iterable):
        raise InputError(f"data: found {kind(source)}; give a file, rows, or several SourceConfig")
    given = list(source)
    configs = [each for each in given if isinstance(each, SourceConfig)]
    if configs and len(configs) == len(given):
        return [_configured(each, form) for each in configs]
    if not given:
        raise InputError("data holds no records")
    return [Part("data", form, given=given)]


def _configured(source: SourceConfig, form: RowFormat) -> Part:
    """A source of a recipe; its own form where it says one, else the form of them all."""
    file = RowSource(source.path, subset=source.subset, split=source.split)
    said = source.model_dump(include={"format", "columns"}, exclude_none=True)
    own = form.model_copy(update=said)
    check_format(own)
    return Part(source.name or file.name, own, source.weight, file=file)


def _without_numpy(value: Any) -> Any:
    """A row as JSON has it: arrays as lists, scalars as numbers."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _without_numpy(item) for key, item in value.items()}
    return [_without_numpy(item) for item in value] if isinstance(value, list) else value


def absolute(spec: str | Path) -> str:
    """A source's name that means the same from any folder."""
    text = str(spec)
    if text.startswith("hf:"):  # a name on the Hub, or a folder
        folder = Path(text.removeprefix("hf:")).expanduser()
        return f"hf:{folder.absolute()}" if folder.is_dir() else text
    return str(Path(spec).expanduser().absolute())


def recorded(source: Source | None) -> str | list[dict[str, Any]] | None:
    """A source as a recipe names it; None where it has no name, as rows in memory."""
    if isinstance(source, str | Path):
        return absolute(source)
    given = [source] if isinstance(source, SourceConfig) else source if isinstance(source, Sequence) else []
    configs = [each for each in given if isinstance(each, SourceConfig)]
    return [{**each.model_dump(mode="json"), "path": absolute(each.path)} for each in configs] or None


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names told apart by a number where two are the same."""
    unique: list[str] = []
    for name in names:
        numbered = (f"{name}-{number}" for number in count(2))
        unique.append(name if name not in unique else next(each for each in numbered if each not in {*names, *unique}))
    return tuple(unique)
