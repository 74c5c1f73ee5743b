"""What a run says: its plan before it starts, its progress, and how it ended. Readable on a terminal and in a file."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from burnish.cli.marking import marked, pieces_of
from burnish.data.examples import EncodeCounts
from burnish.train.callbacks import Callback, RunPlan

if TYPE_CHECKING:
    from burnish.data.tokenizer import Tokenizer
    from burnish.train.trainer import TrainResult

LINE_SECONDS = 20.0  # in a file, a progress line at most so often


def make_console(*, stderr: bool = False) -> Console:
    """Standard output (or error); in a file, lines are not wrapped and carry no colour."""
    console = Console(highlight=False, markup=False, stderr=stderr)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, soft_wrap=True, width=10_000, stderr=stderr)
    return console


def count(number: float) -> str:
    """4884480 -> "4.88 M"."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"


def _section(section: Any) -> str:
    """A section on one line: `rank=16 alpha=32.0`; what is null or empty is left to `config.yaml`."""
    if isinstance(section, list) and section and isinstance(section[0], dict):
        return "[" + ", ".join(f"({_section(each)})" for each in section) + "]"
    if not isinstance(section, dict):
        return str(section)
    said = {key: value for key, value in section.items() if value not in (None, {}, [], "")}
    return " ".join(
        f"{key}=({_section(value)})" if isinstance(value, dict) else f"{key}={_section(value)}"
        for key, value in said.items()
    )


def data_line(name: str, counts: EncodeCounts) -> str:
    """One line on a data set; what was dropped or cut is said, never hidden."""
    sizes = f"{count(counts.tokens)} tokens, {count(counts.trained_tokens)} trained"
    line = f"{name}: {counts.kept} of {counts.rows} rows, {sizes}"
    notes = {
        "cut": counts.truncated,
        "split in pieces": counts.split,
        "split turn by turn": counts.split_turns,
        "with special tokens in their text": counts.special_in_text,
        "dropped as too long": counts.dropped_too_long,
        "dropped with nothing left to learn": counts.dropped_no_target,
        "dropped with too few tokens to learn": counts.dropped_few_trained,
        "dropped as chosen and rejected are the same": counts.dropped_identical,
        "dropped as unreadable": counts.dropped_unreadable,
        "pieces dropped": counts.dropped_pieces,
    }
    said = [f"{number} {what}" for what, number in notes.items() if number]
    line += f" ({', '.join(said)})" if said else ""
    return line + "".join(f"\n    {note}" for note in counts.notes)


@contextmanager
def progress_line(console: Console, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told how many of `total` are done; in a file, one line says it has begun."""
    if not console.is_terminal:
        console.print(f"{what} ({total})")
        yield lambda done: None
        return
    with Progress(TextColumn(what), MofNCompleteColumn(), BarColumn(), console=console, transient=True) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda done: progress.update(bar, completed=done)


class Narrator(Callback):
    """Tells the person at the terminal, or the reader of the file, what the run does."""

    def __init__(self, console: Console, tokenizer: "Tokenizer") -> None:
        self._console, self._tokenizer = console, tokenizer
        self._progress: Progress | None = None
        self._bar: Any = None
        self._said = 0.0
        self._total = 0
        self._streaming = False

    def on_start(self, plan: RunPlan) -> None:
        say = self._console.print
        self._total = plan.total
        say("Recipe", style="bold")
        for name, section in plan.recipe.items():
            unused = not section or not _section(section) or (name == "task" and section["name"] is None)
            if unused:
                continue
            say(f"  {name:<13}", Text(_section(section)))
        say("Plan", style="bold")
        say(f"  parameters {count(plan.parameters)}, trained {count(plan.trainable)}", end="")
        say(f" ({plan.trainable / plan.parameters:.2%})")
        self._streaming = plan.train_counts is None
        said = "training: read as it goes" if plan.train_counts is None else data_line("training", plan.train_counts)
        say(f"  {said}")
        for name, counts in plan.source_counts.items():
            say(f"    {data_line(name, counts)}")
        say(f"  {data_line('held out', plan.eval_counts)}")
        full = "" if plan.efficiency is None else f", rows {plan.efficiency:.0%} full"
        say(
            f"  steps {plan.done} to {plan.total}, each {plan.rows} rows of {plan.length} tokens "
            f"in {plan.micro_batches} micro-batches{full}"
        )
        say(f"  memory of a step {plan.memory.total / 2**30:.2f} GiB, compiled in {plan.compile_seconds:.0f} s")
        if plan.remat.policy is not None:
            say(f"  remat {plan.remat.policy}: {plan.remat.reason}")
        for lack in plan.lacks:
            say(f"  note: {lack}")
        if plan.example is not None:
            say("First example, trained tokens " + ("green" if self._console.is_terminal else "in ⟦ ⟧"), style="bold")
            pieces = pieces_of(plan.example.tokens, self._tokenizer)
            say(marked(pieces, plan.example.weights, plain=not self._console.is_terminal))
            say()
        if self._console.is_terminal:
            columns = [TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[said]}")]
            self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console)
            self._bar = self._progress.add_task("training", total=plan.total, completed=plan.done, said="")
            self._progress.start()
        self._started, self._done_before = time.monotonic(), plan.done

    def on_step(self, entry: Mapping[str, float]) -> None:
        said = f"loss {entry['loss']:.4f}  {entry['tokens_per_second']:.0f} tokens/s"
        step = int(entry["step"])
        if self._progress:
            self._progress.update(self._bar, completed=step, said=said)
        elif step in (1, self._total) or time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            rate = (self._said - self._started) / (step - self._done_before)
            self._console.print(f"step {step}/{self._total}  {said}  {rate * (self._total - step):.0f} s left")

    def on_evaluation(self, entry: Mapping[str, float]) -> None:
        self._console.print(f"step {int(entry['step'])}: held-out loss {entry['eval_loss']:.4f}")

    def close(self) -> None:
        """Takes the progress bar off the screen; also after a failure."""
        if self._progress:
            self._progress.stop()
            self._progress = None

    def on_end(self, result: "TrainResult") -> None:
        self.close()
        if result.data_ended:
            self._console.print(f"the data ended at step {result.steps} of {self._total}")
        if self._streaming:
            self._console.print(data_line("read, each time counted", result.rows))
            for name, counts in result.source_rows.items():
                self._console.print(f"  {data_line(name, counts)}")
        self._console.print(
            f"{result.steps} steps, {result.seconds:.0f} s with loading and compiling; saved in {result.out}"
        )
