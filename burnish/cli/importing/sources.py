"""Where another tool's rows are, and how a recipe names one data set or several."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from burnish.cli.importing.keys import Draft

_DATA = ("jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow", "feather", "txt")
_SUFFIX = re.compile(rf"\.({'|'.join(_DATA)})(\.(gz|bz2|xz|zst))?$", re.IGNORECASE)
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_READ_ANYWAY = (("system", "system"), ("tools", "tools"))


@dataclass(frozen=True)
class Rows:
    """One data set: the keys of `burnish.data.config.SourceConfig`."""

    path: str
    format: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    weight: float | None = None
    subset: str | None = None
    split: str | None = None


def locate(path: str, folder: Path) -> str | None:
    """A path as a recipe has it: a file's, as it is found from here, or `hf:ORG/NAME`. None: another kind of address.

    folder: of the file that names the path; files are looked for there, too.
    """
    if path.startswith("hf:"):
        return path
    if "://" in path:
        return None
    expanded = os.path.expanduser(path)
    if Path(expanded).exists():
        return expanded
    if (folder / expanded).exists():
        return str(folder / expanded)
    is_hub_id = _HUB_ID.fullmatch(path) and not _SUFFIX.search(path)
    return f"hf:{path}" if is_hub_id else expanded


def put_sources(draft: Draft, train: Sequence[Rows], held: Rows | None) -> None:
    """Writes `data.path` or `data.sources`, and `data.eval_path`.

    `data.format` and `data.columns` say how the evaluation set is read; the one training set shares them, where it can.
    """
    alone = train[0] if len(train) == 1 else None
    shares = held is None or alone is None or (held.format, held.columns) == (alone.format, alone.columns)
    if alone and shares and (alone.subset, alone.split or "train") == (None, "train"):
        draft.put("data.path", alone.path)
    elif train:
        draft.put("data.sources", [_source(rows, form_of_its_own=held is not None) for rows in train])
    draft.put("data.eval_path", held.path if held else None)
    shown = held or (alone if "path" in draft.recipe.get("data", {}) else None)
    if shown:
        draft.put("data.format", None if shown.format == "auto" else shown.format)
        draft.put("data.columns", shown.columns or None)


def _source(rows: Rows, form_of_its_own: bool) -> dict[str, object]:
    """One of `data.sources`. What it does not say of its form is said for all by `data`."""
    named = {"path": rows.path, "weight": rows.weight, "subset": rows.subset, "split": rows.split}
    form: dict[str, object] = {"format": rows.format, "columns": rows.columns}
    said = form if form_of_its_own else {key: value for key, value in form.items() if value not in ("auto", {})}
    return {key: value for key, value in named.items() if value is not None} | said


def suffix_of(path: str) -> str | None:
    """The kind of a data file by its name, compression aside: "json", "csv", ..."""
    found = _SUFFIX.search(path)
    return {"jsonl": "json", "ndjson": "json", "feather": "arrow"}.get(found[1], found[1]) if found else None


def renamed(**theirs: str | None) -> dict[str, str]:
    """`columns` of our names -> theirs; none where all are called the same.

    Where columns are given they are all that is read, with the rows' own `system` and `tools`: so every one is named.
    """
    named = {ours: name for ours, name in theirs.items() if name and (ours, name) not in _READ_ANYWAY}
    return {} if all(ours == name for ours, name in named.items()) else named


def message_form(role: str, content: str) -> str | None:
    """The format of conversations whose messages have these two keys; None: there is none."""
    return {("role", "content"): "messages", ("from", "value"): "conversations"}.get((role, content))


STREAM_HOLDOUT = "a stream is read once, and nothing of it held out; rows to evaluate on go in data.eval_path"


def streamed(draft: Draft) -> bool:
    """Whether rows are read as they are needed."""
    return bool(draft.recipe.get("data", {}).get("streaming"))


def weigh_streams(draft: Draft) -> None:
    """Gives streamed sources even shares where none has one: their sizes are not known."""
    sources = draft.recipe.get("data", {}).get("sources") or []
    if streamed(draft) and len(sources) > 1 and not any("weight" in source for source in sources):
        for source in sources:
            source["weight"] = 1.0
        draft.assume("data.sources are streamed in even shares, as their sizes are not known")
