"""`burnish sft` and `burnish resume`."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from burnish.cli.recipe import Recipe, read_words, recipe_of_run
from burnish.cli.report import Narrator, make_console, progress_line
from burnish.data.encode import Encoder
from burnish.data.records import Record, read_records
from burnish.data.split import split_holdout
from burnish.data.tasks import Problem, Task
from burnish.errors import InputError
from burnish.evaluate.accuracy import Accuracy, task_accuracy
from burnish.generate.config import SamplingConfig
from burnish.generate.engine import generate
from burnish.loading import load
from burnish.objectives.sft import SFT
from burnish.train.run_folder import CONFIG, check_new
from burnish.train.trainer import Trainer
from burnish.wrapper import ModelWrapper


def run_sft(words: Sequence[str], options: dict[str, Any], out: Path) -> None:
    """Fine-tunes as the recipe says, into a new run directory."""
    recipe = read_words(words, options)
    check_new(out.expanduser())
    data = recipe.data
    paths = {name: str(Path(path).resolve()) for name in ("path", "eval_path") if (path := getattr(data, name))}
    recipe = recipe.model_copy(update={"data": data.model_copy(update=paths)})
    _train(recipe, out.expanduser(), resume=False)


def resume_run(run: Path) -> None:
    """Goes on with a run from its last checkpoint."""
    recipe = recipe_of_run(run)
    if recipe.data.path is None and recipe.task.name is None:
        raise InputError(
            f"{run / CONFIG}: names neither data.path nor task.name, as for a run made in Python; go on with it there: "
            "Trainer(..., out=...).train(dataset, resume=True)"
        )
    _train(recipe, run, resume=True)


@dataclass(frozen=True)
class Material:
    """What is trained on, what is held out, and the task both came from, if one did."""

    train: list[Record]
    held_out: list[Record]
    task: Task | None = None
    problems: Sequence[Problem] = ()


@dataclass(frozen=True)
class Look:
    """How a model does at one moment: its reply to the first held-out prompt, and its accuracy on a task."""

    prompt: str
    reply: str
    accuracy: Accuracy | None


def _train(recipe: Recipe, out: Path, *, resume: bool) -> None:
    name = recipe.model
    if name is None:
        raise InputError("model: not given; add --model, or model: to the recipe")
    console = make_console()
    recipe = recipe.model_copy(update={"train": recipe.train.with_seed()})
    material = _material(recipe)
    model = load(name, dtype=recipe.dtype)
    before = None if resume else _look(model, material, recipe, console)
    model.prepare(recipe.adapter, seed=recipe.train.seed or 0)
    narrator = Narrator(console, model.require_tokenizer())
    trainer = Trainer(model, SFT(**recipe.sft.model_dump()), recipe, out=out, callbacks=[narrator])
    try:
        with _stopped_by_signals(trainer, console):
            result = trainer.train(material.train, eval_dataset=material.held_out or None, resume=resume)
    finally:
        narrator.close()
    if trainer.stopping:
        console.print(f"stopped after step {result.steps}; go on with: burnish resume {out}")
        raise typer.Exit(130)
    _compare(console, before, _look(model, material, recipe, console))
    console.print(f"next: burnish chat --model {out}")


def _material(recipe: Recipe) -> Material:
    data, name = recipe.data, recipe.task.name
    if (data.path is None) == (name is None):
        raise InputError("give either records (--data FILE) or a task (--task reasoning_gym:TASK) to train on")
    if name is not None:
        task = Task(name, recipe.task)
        train, held_out = task.train_and_heldout()
        return Material(list(task.records(train)), list(task.records(held_out)), task, held_out)
    records = read_records(str(data.path))
    if data.eval_path is not None:
        return Material(records, read_records(data.eval_path))
    return Material(*split_holdout(records, data.holdout, data.seed))


def _look(model: ModelWrapper, material: Material, recipe: Recipe, console: Console) -> Look | None:
    if material.task is not None and recipe.task.score:
        with progress_line(console, "scoring held-out problems", len(material.problems)) as advance:
            accuracy = task_accuracy(
                model, material.task, material.problems, max_tokens=recipe.task.max_tokens, on_progress=advance
            )
        first = accuracy.answered[0]
        return Look(material.task.prompt(first.problem), first.reply, accuracy)
    if not material.held_out:
        return None
    record = material.held_out[0]
    prompt = Encoder(model.require_tokenizer(), recipe.data.system).prompt(record)
    [completion] = generate(model, [prompt], SamplingConfig(max_tokens=recipe.task.max_tokens, temperature=0.0))
    return Look(model.require_tokenizer().decode(prompt), completion.text, None)


def _compare(console: Console, before: Look | None, after: Look | None) -> None:
    if after is None:
        return
    console.print("A held-out prompt", style="bold")
    console.print(Text(after.prompt.strip(), style="dim"))
    for name, look in (("before", before), ("after", after)):
        if look is not None:
            console.print(f"{name}:", Text(look.reply.strip()))
    for name, look in (("before", before), ("after", after)):
        if look is not None and look.accuracy is not None:
            console.print(f"{name}: final answer right {look.accuracy.final}")
            console.print(f"        whole reply right {look.accuracy.strict}")


@contextmanager
def _stopped_by_signals(trainer: Trainer, console: Console) -> Iterator[None]:
    """SIGINT and SIGTERM end the run after the step it is in, with a checkpoint; a second one ends it at once."""

    def handle(number: int, frame: Any) -> None:
        del frame
        console.print(f"{signal.Signals(number).name}: finishing this step and saving; once more to stop at once")
        trainer.stop()
        signal.signal(number, previous[signal.Signals(number)])

    wanted = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, handle) for number in wanted}
    try:
        yield
    finally:
        for number in wanted:
            signal.signal(number, previous[number])
