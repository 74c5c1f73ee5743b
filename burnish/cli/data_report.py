"""A report on a data set, for a terminal, a file, and as JSON: what is trained on, and what looks wrong with it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.columns import Columns
from rich.console import Console
from rich.text import Text

from burnish.cli.marking import marked, pieces_of, weighted
from burnish.cli.report import data_line
from burnish.data.characters import visible
from burnish.data.config import DataConfig
from burnish.data.examples import EncodeCounts, Encoded
from burnish.data.findings import Finding, findings
from burnish.data.parts import Part
from burnish.data.survey import SeenRow, Survey, histogram, quantiles, survey
from burnish.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from burnish.data.survey import Bin

STREAM_ROWS = 1000  # of a stream, looked at
_BAR = 40  # characters of the longest bar


@dataclass(frozen=True)
class Shown:
    """An example that is shown: its row, and which of the row's examples it is, from 1."""

    row: SeenRow
    number: int
    example: Encoded
    pieces: list[str]

    @property
    def tokens(self) -> list[tuple[int, float]]:
        """Each token's id and loss weight."""
        return list(zip(self.example.tokens.tolist(), self.example.weights.tolist(), strict=True))


@dataclass(frozen=True)
class Report:
    """All that is said of a data set. `notes` are lines that come before anything else."""

    model: str
    data: list[str]
    config: DataConfig
    batch_size: int
    tokenizer: Tokenizer
    notes: list[str]
    survey: Survey
    findings: list[Finding]
    shown: list[Shown]

    @property
    def unreadable(self) -> list[Finding]:
        """The finding of rows that cannot be read, if there are any: it goes before all others."""
        return [found for found in self.findings if found.kind == "unreadable"]

    @property
    def suspicious(self) -> list[Finding]:
        """The other findings."""
        return [found for found in self.findings if found.kind != "unreadable"]

    @property
    def bins(self) -> "list[Bin]":
        """Tokens an example, counted."""
        return histogram(self.survey.examples.lengths)


def make_report(
    model: str,
    parts: Sequence[Part],
    tokenizer: Tokenizer,
    config: DataConfig,
    batch_size: int,
    rows: int,
    worst: int,
    notes: list[str],
) -> Report:
    """Reads the sources; shows the first `rows` examples of each, and at most `worst` rows of each finding."""
    seen = survey(parts, tokenizer, config, batch_size, STREAM_ROWS if config.streaming else None)
    if seen.limited is not None:
        notes = [*notes, f"data.streaming: the first {seen.limited} rows{' of each source' * (len(parts) > 1)} alone"]
    if seen.total.dropped_unreadable and config.bad_rows == "refuse":
        notes = ["training stops at rows that cannot be read: mend them, or set data.bad_rows=drop", *notes]
    notes += [f"the rest is not read: {problem}" for problem in seen.unfinished]
    found, shown = findings(seen, tokenizer, worst), _shown(seen, tokenizer, rows)
    return Report(model, [part.place for part in parts], config, batch_size, tokenizer, notes, seen, found, shown)


def _shown(seen: Survey, tokenizer: Tokenizer, most: int) -> list[Shown]:
    shown: list[Shown] = []
    for _, rows in groupby(seen.rows, key=lambda row: row.source):
        examples = ((row, n, example) for row in rows for n, example in enumerate(row.examples, start=1))
        shown += [
            Shown(row, number, example, pieces_of(example.tokens, tokenizer))
            for (row, number, example), _ in zip(examples, range(most), strict=False)
        ]
    return shown


def token_name(shown: Shown, at: int, tokenizer: Tokenizer) -> str:
    """A token's text in quotes; as the vocabulary spells it where its text is part of a character."""
    piece = shown.pieces[at]
    return visible(repr(piece)) if piece else str(tokenizer.backend.id_to_token(int(shown.example.tokens[at])))


def heading(shown: Shown, report: Report) -> str:
    """What an example is and where it comes from, on one line."""
    names, total = report.survey.names, len(shown.row.examples)
    said = [shown.row.place]
    said += [f"source {names[shown.row.source]}"] if len(names) > 1 else []
    said += [f"example {shown.number} of {total}"] if total > 1 else []
    trained = int(np.count_nonzero(shown.example.weights))
    return ", ".join([*said, f"{len(shown.example.tokens)} tokens, {trained} trained"])


def count_lines(report: Report) -> list[str]:
    """What became of the rows: of each source, and of all."""
    seen = report.survey
    if len(seen.names) == 1:
        return [_counted(report.data[0], seen.total)]
    each = [_counted(name, counts) for name, counts in zip(seen.names, seen.counts, strict=True)]
    return [*each, _counted("all", seen.total)]


def _counted(name: str, counts: EncodeCounts) -> str:
    """Without the reasons why rows cannot be read: a finding has those."""
    return data_line(name, replace(counts, notes=[]))


def length_line(report: Report) -> str:
    """Quantiles of the examples' lengths, and how much of them is trained."""
    said = ", ".join(f"{name} {value}" for name, value in quantiles(report.survey.examples.lengths).items())
    return f"tokens an example: {said}; {report.survey.trained_share:.1%} of them trained"


def packing_line(report: Report) -> str:
    """How full the rows of batches are, beside padding."""
    packed, config = report.survey.packed, report.config
    assert packed is not None
    return (
        f"data.packing={config.packing}, data.max_length={config.max_length}: {packed.rows} rows, "
        f"{packed.steps} batches of {report.batch_size}, {packed.efficiency:.1%} full; "
        f"padded to the longest of each batch they would be {packed.padded:.1%} full"
    )


# Terminal


def show(report: Report, console: Console, ids: bool) -> None:
    """Prints the report: bad rows, examples with what is trained marked, counters, lengths, rows that look wrong."""
    for finding in report.unreadable:
        _show_finding(finding, report, console)
    for note in report.notes:
        console.print(f"note: {note}")
    for each in report.shown:
        console.print(Text(heading(each, report), style="bold"))
        console.print(_token_table(each, report.tokenizer, console) if ids else _text(each, console))
        console.print()
    if report.shown:
        mark = "green" if console.is_terminal else "marked ●" if ids else "in ⟦ ⟧"
        said = ", × their loss weight" if any(weighted(each.example.weights) for each in report.shown) else ""
        console.print(f"trained tokens are {mark}{said}", style="bold")
    for line in count_lines(report):
        console.print(Text(line))
    if report.bins:
        console.print(length_line(report))
        _show_bins(report.bins, console)
    if report.survey.packed is not None:
        console.print(packing_line(report))
    for finding in report.suspicious:
        _show_finding(finding, report, console)


def _text(shown: Shown, console: Console) -> Text:
    return marked(shown.pieces, shown.example.weights, plain=not console.is_terminal)


def _token_table(shown: Shown, tokenizer: Tokenizer, console: Console) -> Columns | Text:
    """Each token's id and text: in columns on a terminal, else one a line."""
    cells = []
    for at, (token, weight) in enumerate(shown.tokens):
        said = f" ×{weight:g}" if weight and weighted(shown.example.weights) else ""
        line = f"{'●' if weight else ' '} {token:>7} {token_name(shown, at, tokenizer)}{said}"
        cells.append(Text(line, style="bold green" if weight else "dim"))
    return Columns(cells, equal=True, column_first=True) if console.is_terminal else Text("\n").join(cells)


def _show_bins(bins: "Sequence[Bin]", console: Console) -> None:
    most = max(each.count for each in bins)
    wide = len(str(bins[-1].last))
    for each in bins:
        bar = "█" * round(_BAR * each.count / most) or ("▏" if each.count else "")
        console.print(f"  {each.first:>{wide}}-{each.last:<{wide}} {bar} {each.count}")


def _show_finding(finding: Finding, report: Report, console: Console) -> None:
    console.print(Text(f"{finding.title}: {finding.count}", style="bold"))
    for case in finding.cases:
        if finding.kind == "unreadable":
            console.print(Text(f"  {case.what}"))
            continue
        console.print(Text(f"  {case.place}: {case.what}"))
        console.print(Text(f"      {case.excerpt}", style="dim"))
    if 0 < len(finding.cases) < finding.count and finding.kind not in ("longest", "least_trained"):
        console.print(f"  and {finding.count - len(finding.cases)} more")


# JSON


def as_json_object(report: Report) -> dict[str, Any]:
    """The report for a program: counters at the top level, everything else under a key of its own."""
    seen = report.survey
    return {
        "model": report.model,
        "data": report.data,
        "rows_looked_at": seen.limited,
        **vars(seen.total),
        "examples_made": seen.total.examples,
        "remarks": report.notes,
        "sources": [{"name": name, **vars(counts)} for name, counts in zip(seen.names, seen.counts, strict=True)],
        "trained_share": seen.trained_share,
        "lengths": quantiles(seen.examples.lengths),
        "histogram": [asdict(each) for each in report.bins],
        "max_length": report.config.max_length,
        "packing": seen.packed
        and {"kind": report.config.packing, "batch_size": report.batch_size, **asdict(seen.packed)},
        "findings": {
            found.kind: {
                "title": found.title,
                "count": found.count,
                "cases": [{**asdict(case), "source": seen.names[case.source]} for case in found.cases],
            }
            for found in report.findings
        },
        "examples": [_as_json(each, report) for each in report.shown],
    }


def _as_json(shown: Shown, report: Report) -> dict[str, Any]:
    return {
        "example": shown.example.example_id,
        "place": shown.row.place,
        "source": report.survey.names[shown.row.source],
        "tokens": shown.example.tokens.tolist(),
        "weights": shown.example.weights.tolist(),
        "trained": (shown.example.weights != 0).astype(int).tolist(),
        "pieces": shown.pieces,
        "text": "".join(shown.pieces),
    }
