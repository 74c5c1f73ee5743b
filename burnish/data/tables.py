"""The rows of Parquet and Arrow files, a few hundred at a time.

A source is a path, or the bytes of a file that was compressed from outside. Values are what Arrow gives: a struct has
every key of its schema, None where a row has none. Columns of Arrow's JSON type, in which `datasets` keeps values of
mixed types, become the values that their text says.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from burnish.data.readers import Chunk, Row
from burnish.data.values import shown
from burnish.errors import InputError

_ROWS_AT_ONCE = 256


def parquet_parts(source: str | bytes, name: str) -> Iterator[Chunk]:
    """A part for each row group."""
    from pyarrow import parquet

    with _opened(source) as opened, parquet.ParquetFile(opened) as file:
        decode = _decoder(file.schema_arrow, name)
        first = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            batches = partial(file.iter_batches, batch_size=_ROWS_AT_ONCE, row_groups=[group])
            yield Chunk(count, partial(_rows, batches, decode, name, first))
            first += count


def arrow_parts(source: str | bytes, name: str) -> Iterator[Chunk]:
    """A part for each record batch, of the file format (which Feather is) or the stream format."""
    from pyarrow import ipc

    with _opened(source) as opened:
        is_file = opened.read(6) == b"ARROW1"
        opened.seek(0)
        with (ipc.open_file if is_file else ipc.open_stream)(opened) as reader:
            decode = _decoder(reader.schema, name)
            first = 0
            for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
                yield Chunk(batch.num_rows, partial(_rows, partial(_pieces, batch), decode, name, first))
                first += batch.num_rows


def _opened(source: str | bytes) -> Any:
    import pyarrow

    return pyarrow.BufferReader(source) if isinstance(source, bytes) else pyarrow.memory_map(source)


def _pieces(batch: Any) -> Iterator[Any]:
    """A record batch, which may be a whole file, in pieces."""
    batch.validate(full=True)  # Arrow trusts the offsets of a damaged file, and reads outside its memory
    for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
        yield batch.slice(start, _ROWS_AT_ONCE)


def _rows(
    batches: Callable[[], Iterable[Any]], decode: Callable[[Any], Any] | None, name: str, first: int
) -> Iterator[tuple[str, Row]]:
    number = first
    for batch in batches():
        for row in batch.to_pylist(maps_as_pydicts="strict"):
            number += 1
            yield f"{name}, row {number}", decode(row) if decode else row


def _decoder(schema: Any, name: str) -> Callable[[Any], Any] | None:
    """What a row still needs once it is Python values: None, nothing.

    Raises:
        InputError: two columns have one name, of which a mapping would keep one.
    """
    import pyarrow

    twice = next((column for column in schema.names if schema.names.count(column) > 1), None)
    if twice is not None:
        raise InputError(f"{name}: two columns are called {shown(twice)}; rename or remove one")
    return _json_reader(pyarrow.struct(list(schema)))


def _json_reader(kind: Any) -> Callable[[Any], Any] | None:
    """Reads the JSON texts in values of an Arrow type, however deep; None where it holds none."""
    from pyarrow import types

    if getattr(kind, "extension_name", None) == "arrow.json":
        return lambda value: None if value is None else json.loads(value)
    if types.is_struct(kind):
        readers = {field.name: read for field in kind if (read := _json_reader(field.type))}
        if readers:
            return lambda value: value and {**value, **{key: read(value[key]) for key, read in readers.items()}}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        read = _json_reader(kind.value_type)
        if read:
            return lambda value: value and [read(item) for item in value]
    return None
