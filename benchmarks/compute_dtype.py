"""bfloat16 products against float32 ones: does a run come to the same loss?

    python -m benchmarks.compute_dtype [--json FILE] [--data FILE] [--steps 50]

SmolLM2-135M, LoRA of rank 16, 4 rows of at most 128 tokens a step, weights and adapters in float32 either way. The
loss is that of the last 32 rows, which are not trained on, before and after. --data takes records (docs/data.md) in
place of generated products of two numbers. `relative` is the difference of the two losses over the float32 one.
"""

import argparse
import json
import math
import time
from typing import Any

import numpy as np

import burnish as bn
from benchmarks.command import count, new_file, run
from burnish.data.sources import RowSource
from burnish.errors import InputError
from burnish.evaluate.perplexity import perplexity

HELD_OUT = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=new_file, help="write the figures here, too")
    parser.add_argument("--data")
    parser.add_argument("--steps", type=count, default=50)
    arguments = parser.parse_args()

    rows = products()
    if arguments.data:
        rows = records(arguments.data)
    rows = rows[: 4 * arguments.steps + HELD_OUT]
    if len(rows) <= HELD_OUT:
        raise InputError(f"{arguments.data}: {len(rows)} rows; more than the {HELD_OUT} that are held out are needed")
    figures: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        figures[dtype] = train(dtype, rows, arguments.steps)
        print(dtype, json.dumps(figures[dtype]), flush=True)
    narrow, wide = (figures[dtype]["loss_after"] for dtype in ("bfloat16", "float32"))
    figures["relative"] = round(narrow / wide - 1, 5)
    print("relative", figures["relative"])
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def train(dtype: str, rows: list[dict[str, Any]], steps: int) -> dict[str, float]:
    """Loss on held-out rows before and after, and the seconds between."""
    model = bn.load("smollm2-135m", compute_dtype=dtype)
    model.add_lora(rank=16)
    recipe = {"batch_size": 4, "accumulation": 1, "max_length": 128, "steps": steps, "holdout": 0}
    before = math.log(perplexity(model, rows[-HELD_OUT:]).perplexity)
    began = time.perf_counter()
    bn.Trainer(model, bn.SFT(), recipe).train(rows[:-HELD_OUT])
    spent = time.perf_counter() - began
    after = math.log(perplexity(model, rows[-HELD_OUT:]).perplexity)
    return {"loss_before": round(before, 5), "loss_after": round(after, 5), "seconds": round(spent, 1)}


def records(spec: str) -> list[dict[str, Any]]:
    """The rows of files of records."""
    rows: list[dict[str, Any]] = []
    for _, _, row in RowSource(spec).rows():
        if isinstance(row, InputError):
            raise row
        rows.append(row)
    return rows


def products() -> list[dict[str, str]]:
    """Products of numbers below 1000, which a model of this size cannot know by heart."""
    pairs = np.random.default_rng(0).integers(2, 1000, (5000, 2)).tolist()
    return [{"prompt": f"What is {a} times {b}?", "completion": f"{a} times {b} is {a * b}."} for a, b in pairs]


if __name__ == "__main__":
    run(main)
