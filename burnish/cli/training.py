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
from burnish.data.dataset import Dataset, load_dataset
from burnish.data.fit import fit_data, fit_tokenizer, with_day
from burnish.data.parts import Source, sources_of
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
    recipe = recipe.model_copy(update={"data": recipe.data.absolute()})
    _train(recipe, out.expanduser(), resume=False)


def resume_run(run: Path) -> None:
    """Goes on with a run from its last checkpoint."""
    recipe = recipe_of_run(run)
    if recipe.data.source is None and recipe.task.name is None:
        raise InputError(
            f"{run / CONFIG}: names neither data nor task.name, as for a run made in Python; go on with it there: "
            "Trainer(..., out=...).train(dataset, resume=True)"
        )
    _train(recipe, run, resume=True)


@dataclass(frozen=True)
class Look:
    """How a model does at one moment: its reply to the first held-out prompt, and its accuracy on a task."""

    prompt: str
    reply: str
    accuracy: Accuracy | None


@dataclass(frozen=True)
class Scored:
    """A task and the held-out problems that are scored before and after."""

    task: Task
    problems: Sequence[Problem]


def _train(recipe: Recipe, out: Path, *, resume: bool) -> None:
    name = recipe.model
    if name is None:
        raise InputError("model: not given; add --model, or model: to the recipe")
    source, eval_source, scored = _material(recipe)
    console = make_console()
    recipe = recipe.model_copy(update={"train": recipe.train.with_seed()})
    model = load(name, dtype=recipe.dtype, compute_dtype=recipe.compute_dtype)
    model.add_tokens(recipe.vocabulary.add_tokens, pad_to_multiple_of=recipe.vocabulary.pad_to_multiple_of)
    data_config = fit_data(recipe.data, context=model.context, packing=model.features.packing)
    data_config = with_day(data_config, fit_tokenizer(model.require_tokenizer(), data_config))
    recipe = recipe.model_copy(update={"data": data_config})
    model.tokenizer = fit_tokenizer(model.require_tokenizer(), data_config)
    data = load_dataset(source, eval_source, model.tokenizer, data_config)
    before = None if resume else _look(model, data, scored, recipe, console)
    model.prepare(recipe.adapter, seed=recipe.train.seed or 0)
    narrator = Narrator(console, model.tokenizer)
    trainer = Trainer(model, SFT(**recipe.sft.model_dump()), recipe, out=out, callbacks=[narrator])
    try:
        with _stopped_by_signals(trainer, console):
            result = trainer.train(data, resume=resume)
    finally:
        narrator.close()
    if trainer.stopping:
        console.print(f"stopped after step {result.steps}; go on with: burnish resume {out}")
        raise typer.Exit(130)
    _compare(console, before, _look(model, data, scored, recipe, console))
    console.print(f"next: burnish chat --model {out}", style="bold")


def _material(recipe: Recipe) -> tuple[Source, Source | None, Scored | None]:
    """What to train on and to evaluate on, and the task it came from, if one did; found before a model is loaded."""
    data, source, name = recipe.data, recipe.data.source, recipe.task.name
    if (source is None) == (name is None):
        raise InputError("give either records (--data FILE) or a task (--task reasoning_gym:TASK) to train on")
    if name is not None:
        if data.streaming:
            raise InputError("data.streaming: a task's problems are made, not read; set it to false")
        task = Task(name, recipe.task)
        train, held_out = task.train_and_heldout()
        scored = Scored(task, held_out) if recipe.task.score else None
        return task.records(train), task.records(held_out), scored
    assert source is not None
    for each in (source, data.eval_path):
        if each is not None:
            sources_of(each, data)  # says now what is not there
    return source, data.eval_path, None


def _look(model: ModelWrapper, data: Dataset, scored: Scored | None, recipe: Recipe, console: Console) -> Look | None:
    if scored is not None:
        with progress_line(console, "scoring held-out problems", len(scored.problems)) as advance:
            accuracy = task_accuracy(
                model,
                scored.task,
                scored.problems,
                system=recipe.data.system,
                max_tokens=recipe.task.max_tokens,
                on_progress=advance,
            )
        first = accuracy.answered[0]
        return Look(scored.task.prompt(first.problem), first.reply, accuracy)
    if not len(data.held_out):
        return None
    prompt = data.held_out[0].prompt.tolist()
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
