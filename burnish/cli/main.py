"""The `burnish` command. Each command's work is imported when it is called: `--help` answers at once."""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from burnish.cli.huge_pages import with_huge_pages
from burnish.errors import InputError

# What a wrong command line raises. Typer brings a click of its own or uses the installed one, by version; either way
# this is the parent of the one such error that it exports.
USAGE_ERROR: Any = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="burnish",
    help="Post-train language models: load, adapt, train, evaluate, talk to them, and hand them back.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Built-in name, Hugging Face or PEFT folder, .gguf, run directory, or Hub id."),
]
Data = Annotated[str | None, typer.Option("--data", "-d", help="Records: a file, folder or glob, or hf:ORG/NAME.")]
TaskName = Annotated[str | None, typer.Option("--task", "-t", help="Problems that are scored: reasoning_gym:TASK.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write; it must be new or empty.")]
AsJson = Annotated[bool, typer.Option("--json", help="Answer as one JSON object.")]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        help="A recipe.yaml, and options as key.path=value.", show_default=False, metavar="[RECIPE] [KEY=VALUE]..."
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Longest reply.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens that make up this probability.")]
MinP = Annotated[
    float | None, typer.Option("--min-p", help="Keep tokens of at least this share of the likeliest one's probability.")
]
Rows = Annotated[int, typer.Option("--rows", min=0, help="How many rows to show.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End a reply at this text; may be given again.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable; drawn when left out.")]


@app.command(rich_help_panel="Models")
def fetch(name: Annotated[str, typer.Argument(help="A built-in model.")]) -> None:
    """Download a built-in model into the cache.

    `burnish fetch smollm2-135m`
    """
    from burnish.cli.models import fetch_model

    fetch_model(name)


@app.command(rich_help_panel="Models")
def inspect(
    words: Words = None,
    model: Model = None,
    data: Data = None,
    rows: Rows = 3,
    ids: Annotated[bool, typer.Option("--ids", help="Show each token of the rows, with its id.")] = False,
    worst: Annotated[int, typer.Option("--worst", min=0, help="Most rows to show of each kind that looks wrong.")] = 3,
    as_json: AsJson = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report to this new file, too.")] = None,
) -> None:
    """Show a model's tree; with --data, its rows as they are trained, their lengths, and those that look wrong.

    `burnish inspect --model smollm2-135m`

    `burnish inspect --model smollm2-135m --data train.jsonl data.max_length=512`

    `burnish inspect --model smollm2-135m --data train.jsonl --rows 10 --ids --html report.html`
    """
    from burnish.cli.inspection import inspect_model

    inspect_model(words or [], {"model": model, "data.path": data}, rows, ids, worst, as_json, html)


@app.command(rich_help_panel="Training")
def sft(
    out: Out,
    words: Words = None,
    model: Model = None,
    data: Data = None,
    eval_data: Annotated[
        str | None, typer.Option("--eval-data", help="Records to evaluate on; else some of --data is held out.")
    ] = None,
    task: TaskName = None,
) -> None:
    """Fine-tune on demonstrations (LoRA by default; adapter.kind=none trains everything).

    `burnish sft --model smollm2-135m --data train.jsonl --out runs/a adapter.rank=16 train.steps=200`

    `burnish sft recipes/demo.yaml --out runs/demo`
    """
    from burnish.cli.training import run_sft

    run_sft(words or [], {"model": model, "data.path": data, "data.eval_path": eval_data, "task.name": task}, out)


@app.command(rich_help_panel="Training")
def resume(run: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Go on with a run from its last checkpoint, exactly as if it had never stopped.

    `burnish resume runs/a`
    """
    from burnish.cli.training import resume_run

    resume_run(run)


@app.command("import-recipe", rich_help_panel="Training")
def import_recipe(
    file: Annotated[Path, typer.Argument(help="A configuration of Axolotl or LLaMA-Factory.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Recipe to write; it must not exist.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a recipe of another tool's configuration, and list what was not understood.

    `burnish import-recipe axolotl.yaml --out recipe.yaml`
    """
    from burnish.cli.import_recipe import run_import

    run_import(file, out, as_json)


@app.command(rich_help_panel="Using a model")
def eval(
    words: Words = None, model: Model = None, data: Data = None, task: TaskName = None, as_json: AsJson = False
) -> None:
    """Perplexity on records (--data), or accuracy on problems (--task).

    `burnish eval --model runs/a --data heldout.jsonl --json`

    `burnish eval --model runs/a --task reasoning_gym:chain_sum task.heldout_size=300`
    """
    from burnish.cli.evaluation import evaluate_model

    evaluate_model(words or [], {"model": model, "data.path": data, "task.name": task}, as_json)


@app.command(rich_help_panel="Using a model")
def generate(
    prompt: Annotated[list[str], typer.Argument(help="One or more prompts.")],
    model: Annotated[str, typer.Option("--model", "-m", help="As for the other commands.")],
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    stop: Stop = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Answer prompts.

    `burnish generate --model smollm2-135m "What is the capital of France?"`
    """
    from burnish.cli.talking import answer

    sampling = _sampling(max_tokens, temperature, top_k, top_p, min_p, stop, seed)
    answer(model, prompt, raw, system, sampling, as_json)


@app.command(rich_help_panel="Using a model")
def chat(
    model: Annotated[str, typer.Option("--model", "-m", help="As for the other commands.")],
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
) -> None:
    """Talk to a model; an empty line or Ctrl-D ends it.

    `burnish chat --model runs/a`
    """
    from burnish.cli.talking import converse

    converse(model, system, _sampling(max_tokens, temperature, top_k, top_p, min_p, None, seed))


@app.command(rich_help_panel="Models")
def export(
    source: Annotated[str, typer.Argument(metavar="MODEL", help="What --model takes elsewhere.")],
    out: Out,
    format: Annotated[str, typer.Option("--format", "-f", help="hf (whole model) or peft (adapters alone).")] = "hf",
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16; by default as loaded.")] = None,
) -> None:
    """Write a model for other tools.

    `burnish export runs/a --format hf --out out/`
    """
    from burnish.cli.models import export_model

    export_model(source, out, format, dtype)


def _sampling(*values: Any) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "stop", "seed")
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


def main() -> None:
    """Runs the command line; bad input is one line on standard error and exit status 2."""
    if sys.argv[1:2] in (["sft"], ["resume"]):
        with_huge_pages()
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax's own remarks on a checkpoint that we refuse in words
    try:
        status = app(standalone_mode=False)
    except InputError as error:
        _refuse(str(error))
    except USAGE_ERROR as error:
        command = error.ctx.command_path if error.ctx else "burnish"
        _refuse(f"{error.format_message()} (see `{command} --help`)")
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (OSError, MemoryError, RecursionError, UnicodeError) as error:
        # A MemoryError mostly says nothing itself.
        _refuse(f"{type(error).__name__}: {str(error) or 'no more is to be had; free some, or ask for less'}")
    except RuntimeError as error:  # JAX's own error is one; the name is not imported for its sake
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        mend = "lower train.batch_size or data.max_length, raise train.accumulation, or set train.remat=block"
        _refuse(f"out of memory ({str(error).removeprefix('RESOURCE_EXHAUSTED: ')}); {mend}")
    sys.exit(status or 0)


def _refuse(reason: str) -> NoReturn:
    print("burnish: " + " ".join(reason.split()), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
