"""How fast rows become batches, and what packing saves.

    python -m benchmarks.data                          # rows/s and tokens/s: cold, and from the cache; one core
    python -m benchmarks.data --train                  # packed against padded steps, and how long a step waits for data
    python -m benchmarks.data --data gsm8k_train.jsonl --json out.json

Rows are generated (arithmetic word problems as long as GSM8K's) where no `--data` is given. The tokenizer and, for
`--train`, the model are SmolLM2-135M's (`burnish fetch smollm2-135m`). Prints one JSON object.
"""

import argparse
import functools
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import count, new_file, run
from burnish.data.batches import TrainBatches
from burnish.data.config import DataConfig
from burnish.data.dataset import load_dataset
from burnish.data.examples import Examples
from burnish.data.packing import Batch, Piece, batch_arrays
from burnish.data.tokenizer import Tokenizer
from burnish.loading import load, load_tokenizer
from burnish.wrapper import ModelWrapper

BATCH = 8
NAMES = ["Natalia", "Weng", "Betty", "Julie", "James", "Mark", "Albert", "Ken", "Alexis", "Tina"]
THINGS = ["clips", "books", "pages", "flowers", "slices", "letters", "apples", "candles", "tickets", "stickers"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", help="rows; generated when left out")
    parser.add_argument("--rows", type=count, default=7473, help="rows to generate")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--train", action="store_true", help="time training steps, too: some minutes")
    parser.add_argument("--steps", type=count, default=4, help="batches timed for --train")
    parser.add_argument("--json", type=new_file, help="write the answer to a file, too")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        data = arguments.data or generated(Path(scratch) / "generated.jsonl", arguments.rows)
        found: dict[str, Any] = {"data": arguments.data or "generated"}
        tokenizer, _ = load_tokenizer(arguments.model)
        model = load(arguments.model, dtype="float32") if arguments.train else None
        os.environ["BURNISH_CACHE"] = scratch  # an empty one
        found |= pipeline(tokenizer, str(data), arguments.max_length)
        if model is not None:
            found |= steps(model, str(data), arguments.steps)
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")


def generated(path: Path, rows: int) -> Path:
    """Word problems with step-by-step solutions: about 45 words of question and 55 of answer."""
    chance = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            name, thing, question, answer, total = chance.choice(NAMES), chance.choice(THINGS), [], [], 0
            for day in range(chance.randint(2, 7)):
                more, each = chance.randint(2, 48), chance.randint(2, 9)
                question.append(
                    f"On day {day + 1} {name} sold {more} boxes of {thing} with {each} {thing} in each box."
                )
                answer.append(
                    f"{name} sold {more}*{each} = <<{more}*{each}={more * each}>>{more * each} {thing} that day."
                )
                total += more * each
            row = {
                "question": " ".join([*question, f"How many {thing} did {name} sell altogether?"]),
                "answer": "\n".join([*answer, f"#### {total}"]),
            }
            file.write(json.dumps(row) + "\n")
    return path


def pipeline(tokenizer: Tokenizer, data: str, max_length: int) -> dict[str, Any]:
    """Rows a second from a file to packed batches, on one core: without a cache, and from it."""
    config = DataConfig(max_length=max_length, holdout=0)
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(all_cores)})
    tokenizer.fingerprint, tokenizer.encode_with_starts("")  # what a tokenizer costs once is not the rows'
    try:
        found: dict[str, Any] = {}
        for name in ("cold", "cached"):
            began = time.perf_counter()
            loaded = load_dataset(data, None, tokenizer, config)
            batches = loaded.batches(tokenizer, BATCH, config)
            assert isinstance(batches, TrainBatches) and loaded.train is not None
            made = sum(1 for _ in zip(range(batches.steps_per_epoch()), batches, strict=False))
            seconds = time.perf_counter() - began
            counts = loaded.train.counts
            found |= {
                f"{name}_rows_per_s": round(counts.rows / seconds),
                f"{name}_tokens_per_s": round(counts.tokens / seconds),
                f"{name}_seconds": round(seconds, 3),
            }
        found["speedup_of_cache"] = round(found["cold_seconds"] / found["cached_seconds"], 1)
        return {
            **found,
            "rows": counts.rows,
            "tokens": counts.tokens,
            "batches": made,
            "full": round(batches.efficiency, 4),
        }
    finally:
        os.sched_setaffinity(0, all_cores)


def steps(model: ModelWrapper, data: str, count: int) -> dict[str, Any]:
    """LoRA steps on packed rows, and on the same rows padded to the longest of each batch of eight."""
    model.add_lora(rank=16)
    config = DataConfig(max_length=512, holdout=0)
    loaded = load_dataset(data, None, model.require_tokenizer(), config)
    assert loaded.train is not None
    batches = TrainBatches(loaded.train, BATCH, config)
    packed = [next(batches) for _ in range(count)]
    padded = padded_batches(loaded.train, config.seed, count)
    run = functools.partial(time_steps, model)
    (fast, seconds), (slow, _) = run(packed), run(padded)
    waits = time_data(batches)
    slots = {
        name: sum(b["tokens"].size for b in made) / sum(np.count_nonzero(b["weights"]) for b in made)
        for name, made in (("packed", packed), ("padded", padded))
    }
    return {
        "packed_trained_tokens_per_s": round(fast, 1),
        "padded_trained_tokens_per_s": round(slow, 1),
        "packed_over_padded": round(fast / slow, 3),
        "token_ratio": round(slots["padded"] / slots["packed"], 3),
        "data_ms_per_step": round(1000 * waits, 2),
        "device_busy": round(1 - waits / seconds, 5),
    }


def padded_batches(examples: Examples, seed: int, count: int) -> list[Batch]:
    """Batches of eight rows, one example a row, as long as the longest (to a multiple of 8)."""
    order = np.random.default_rng(seed).permutation(len(examples))
    made = []
    for step in range(count):
        rows = [[Piece(int(i), 0, int(examples.lengths[i]))] for i in order[step * BATCH : (step + 1) * BATCH]]
        made.append(batch_arrays(examples, rows, -(-max(row[0].end for row in rows) // 8) * 8))
    return made


def time_steps(model: ModelWrapper, made: list[Batch]) -> tuple[float, float]:
    """Trained tokens a second, and seconds a step, over some batches, each of which is compiled and run once before."""
    import jax

    from burnish.models.parts import choose_trained, take_apart
    from burnish.objectives.sft import SFT
    from burnish.train.optimizer import make_optimizer
    from burnish.train.optimizer_config import OptimizerConfig
    from burnish.train.programs import Programs
    from burnish.train.step import StepState, train_step

    parts, params, frozen = take_apart(model.module, choose_trained(model.module, []))
    shapes = {key: array.shape for key, array in params.items()}
    optimizer = make_optimizer(OptimizerConfig(lr=1e-5), parts.trained, shapes, 100)
    state = StepState(jax.tree.map(lambda array: array.copy(), params), optimizer.init(params))
    step = functools.partial(train_step, parts, SFT(), optimizer, 1)
    put = functools.partial(jax.tree.map, lambda array: array.reshape(1, *array.shape))
    programs = Programs(step, state, frozen, jax.random.key(0), put)
    seconds, trained = 0.0, 0
    for batch in made:
        state, metrics = programs(state, batch)
        float(metrics["loss"])
        began = time.perf_counter()
        state, metrics = programs(state, batch)
        float(metrics["loss"])
        seconds += time.perf_counter() - began
        trained += np.count_nonzero(batch["weights"])
    return trained / seconds, seconds / len(made)


def time_data(batches: TrainBatches) -> float:
    """Seconds to make one batch."""
    began = time.perf_counter()
    for _ in range(50):
        next(batches)
    return (time.perf_counter() - began) / 50


if __name__ == "__main__":
    run(main)
