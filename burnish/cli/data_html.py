"""The report on a data set as one HTML file: nothing is fetched, every text is escaped, light and dark alike."""

from collections.abc import Iterable
from html import escape
from pathlib import Path

from burnish.cli.data_report import Report, Shown, count_lines, heading, length_line, packing_line, token_name
from burnish.data.characters import visible
from burnish.data.findings import Finding
from burnish.errors import InputError

_STYLE = """
:root { color-scheme: light dark; --soft: #8888; --mark: #b7f0c1; --alarm: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --mark: #14532d; --alarm: #ff8a80; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } h3 { font-size: 1rem; margin-bottom: .2rem; }
pre { font: 13px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0;
  border: 1px solid var(--soft); border-radius: 6px; padding: .6rem; }
mark { background: var(--mark); color: inherit; } pre span:hover, mark:hover { outline: 1px solid; }
.alarm { color: var(--alarm); } .soft { opacity: .7; } small { opacity: .7; }
.bars { display: grid; grid-template-columns: max-content 1fr max-content; gap: 2px 8px; font-size: 13px; }
.bars div { background: var(--mark); height: 100%; min-width: 1px; }
"""


def check_absent(path: Path) -> None:
    """Raises InputError where a new file cannot be written: it is there, or its folder is not."""
    if path.exists() or path.is_symlink():
        raise InputError(f"{path}: is there already; move it away, or give --html another name")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}; make it first")


def write_html(report: Report, path: Path) -> None:
    """Writes the report to a new file.

    Raises:
        InputError: the file is there already, or cannot be written; then none is left.
    """
    check_absent(path)
    text = page(report)
    try:
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                path.unlink()
                raise
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); give --html another name") from error


def page(report: Report) -> str:
    """The whole HTML text."""
    title = _text(f"{', '.join(report.data)}, as {report.model} is trained on it")
    body = [
        f"<h1>{title}</h1>",
        *(_finding(found, alarm=True) for found in report.unreadable),
        *(f'<p class="alarm">{_text(note)}</p>' for note in report.notes),
        "<h2>Rows</h2>",
        "<p>Trained tokens are <mark>marked</mark>; the pointer on a token shows its id and its loss weight.</p>",
        *(_example(shown, report) for shown in report.shown),
        "<h2>Counters</h2>",
        *(f"<p>{_text(line)}</p>" for line in count_lines(report)),
        *_lengths(report),
        "<h2>Rows that look wrong</h2>",
        *(_finding(found) for found in report.suspicious),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    """A text that is safe in HTML, whatever is in it."""
    return escape(visible(text))


def _example(shown: Shown, report: Report) -> str:
    tokens = []
    for at, (token, weight) in enumerate(shown.tokens):
        tag = "mark" if weight else "span"
        hint = _text(f"{token_name(shown, at, report.tokenizer)}  id {token}  weight {weight:g}")
        tokens.append(f'<{tag} title="{hint}">{_text(shown.pieces[at])}</{tag}>')
    return f"<h3>{_text(heading(shown, report))}</h3>\n<pre>{''.join(tokens)}</pre>"


def _lengths(report: Report) -> Iterable[str]:
    if not report.bins:
        return
    most = max(each.count for each in report.bins)
    bars = "".join(
        f'<span>{each.first}-{each.last}</span><div style="width:{100 * each.count / most:.1f}%"></div>'
        f"<span>{each.count}</span>"
        for each in report.bins
    )
    yield "<h2>Lengths and packing</h2>"
    yield f"<p>{_text(length_line(report))}</p>"
    yield f'<div class="bars">{bars}</div>'
    if report.survey.packed is not None:
        yield f"<p>{_text(packing_line(report))}</p>"


def _finding(found: Finding, alarm: bool = False) -> str:
    cases = "".join(
        f"<li>{_text(case.what) if alarm else f'{_text(case.place)}: {_text(case.what)}'}"
        + (f'<br><span class="soft">{_text(case.excerpt)}</span>' if case.excerpt else "")
        + "</li>"
        for case in found.cases
    )
    return f"<h3{' class=alarm' * alarm}>{_text(found.title)}: {found.count}</h3>\n<ul>{cases}</ul>"
