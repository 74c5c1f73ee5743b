"""What a caller names, as sources of numbered rows: files, rows in memory, records, or several that are mixed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.data.config import DataConfig, RowFormat, SourceConfig
from burnish.data.records import Record
from burnish.data.rows import NumberedRow
from burnish.data.sources import RowSource
from burnish.errors import InputError

Source = str | Path | Iterable[Mapping[str, Any]] | Sequence[Record] | Sequence[SourceConfig]
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
        files = self.file.files if self.file else ()
        sizes = [[path.name, path.stat().st_size] for path in files]
        return [self.name, self.form.model_dump(include={"format", "columns"}), sizes or len(self.given)]

    def rows(self, start: int = 0) -> Iterator[NumberedRow]:
        """Its rows from number `start` on; errors call rows in memory `data[0]` and so on."""
        if self.file is not None:
            yield from self.file.rows(start)
            return
        for number in range(start, len(self.given)):
            row = self.given[number]
            place = f"data[{number}]"
            bad = InputError(f"{place}: expected a mapping, found {type(row).__name__}; give messages or prompts")
            yield number, place, row if isinstance(row, Mapping) else bad


def sources_of(source: Source, config: DataConfig) -> list[Part]:
    """The sources that are meant, in order."""
    form = RowFormat(format=config.format, columns=config.columns)
    if isinstance(source, str | Path):
        file = RowSource(source)
        return [Part(file.name, form, file=file)]
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
    said = source.model_dump(include={"format", "columns"}, exclude_unset=True)
    return Part(source.name or file.name, form.model_copy(update=said), source.weight, file=file)


def absolute(spec: str | Path) -> str:
    """A source's name that means the same from any folder."""
    text = str(spec)
    return text if text.startswith("hf:") else str(Path(spec).expanduser().absolute())


def recorded(source: Source | None) -> str | list[dict[str, Any]] | None:
    """A source as a recipe names it; None where it has no name, as rows in memory."""
    if isinstance(source, str | Path):
        return absolute(source)
    configs = [each for each in source if isinstance(each, SourceConfig)] if isinstance(source, Sequence) else []
    return [{**each.model_dump(mode="json"), "path": absolute(each.path)} for each in configs] or None


def unique_names(names: Sequence[str]) -> tuple[str, ...]:
    """Names told apart by a number where two are the same."""
    return tuple(f"{name}-{at + 1}" if names.index(name) != at else name for at, name in enumerate(names))
