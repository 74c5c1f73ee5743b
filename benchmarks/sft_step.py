"""Time and memory of a fine-tuning step on SmolLM2-135M's shapes, weights random, every row full.

    python benchmarks/sft_step.py --kind lora --rows 8 --length 256 --steps 10

Prints one JSON object: median seconds a step, tokens a second, the compiled step's memory, peak resident memory.
"""

import argparse
import functools
import json
import resource
import statistics
import time

import jax
import numpy as np

from burnish.models.config import ModelConfig, RopeConfig
from burnish.models.decoder import Decoder
from burnish.models.layers import random_params
from burnish.models.parts import choose_trained, take_apart
from burnish.objectives.sft import SFT
from burnish.train.optimizer import make_optimizer
from burnish.train.optimizer_config import OptimizerConfig
from burnish.train.step import StepState, train_step
from burnish.wrapper import ModelWrapper

SMOLLM2 = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, rope=RopeConfig(theta=1e5), tie_embeddings=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("lora", "full"), default="lora")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--remat", action="store_true")
    arguments = parser.parse_args()

    model = ModelWrapper(Decoder(SMOLLM2, random_params(0)))
    model.decoder.remat = arguments.remat
    if arguments.kind == "lora":
        model.add_lora(rank=16)
    parts, params, frozen = take_apart(model.module, choose_trained(model.module, []))
    shapes = {key: array.shape for key, array in params.items()}
    optimizer = make_optimizer(OptimizerConfig(lr=1e-5), parts.trained, shapes, arguments.steps)
    state = StepState(params, optimizer.init(params))

    shape = (1, arguments.rows, arguments.length)
    tokens = np.random.default_rng(0).integers(0, SMOLLM2.vocab_size, shape).astype(np.int32)
    ones = np.ones(shape, np.int32)
    batch = {
        "tokens": tokens,
        "targets": np.roll(tokens, -1, axis=-1),
        "weights": ones.astype(np.float32),
        "segment_ids": ones,
        "positions": np.broadcast_to(np.arange(arguments.length, dtype=np.int32), shape),
        "example_ids": ones,
    }
    began = time.perf_counter()
    step = jax.jit(functools.partial(train_step, parts, SFT(), optimizer, 1), donate_argnums=0)
    compiled = step.lower(state, frozen, batch, jax.random.key(0)).compile()
    compile_seconds = time.perf_counter() - began
    seconds = []
    for _ in range(arguments.steps):
        began = time.perf_counter()
        state, metrics = compiled(state, frozen, batch, jax.random.key(0))
        float(metrics["loss"])
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[1:] or seconds)
    sizes = compiled.memory_analysis()
    print(
        json.dumps(
            {
                **vars(arguments),
                "median_s": round(median, 3),
                "tokens_per_s": round(arguments.rows * arguments.length / median, 1),
                "compile_s": round(compile_seconds, 1),
                "temporaries_gib": round(sizes.temp_size_in_bytes / 2**30, 3),
                "peak_resident_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
