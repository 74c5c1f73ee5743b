"""Attention alone, forward and backward: blockwise against dense, at SmolLM2's heads (9 of 64 over 3 key heads).

    python -m benchmarks.attention [--json FILE] [--length 8192] [--repeats 3]

One row that is a single text, float32, huge pages as `burnish sft` has them. For each back end: temporaries of the
compiled program in GiB, and seconds (median). The two are timed in turn, as a shared machine's speed drifts.
"""

import argparse
import functools
import json
import statistics
import time

from benchmarks.command import count, new_file, run
from burnish.cli.huge_pages import with_huge_pages

if __name__ == "__main__":
    with_huge_pages()  # before JAX is imported: the process starts again

import jax
import jax.numpy as jnp
import numpy as np

from burnish.ops.attention import attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=new_file, help="write the figures here, too")
    parser.add_argument("--length", type=count, default=8192)
    parser.add_argument("--repeats", type=count, default=3)
    arguments = parser.parse_args()

    figures = compare(arguments.length, arguments.repeats)
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def compare(length: int, repeats: int) -> dict[str, float]:
    """Temporaries and seconds of both back ends, and blockwise over dense."""
    draw = np.random.default_rng(0).standard_normal
    q, d_out = (jnp.asarray(draw((1, 9, length, 64), np.float32)) for _ in range(2))
    k, v = (jnp.asarray(draw((1, 3, length, 64), np.float32)) for _ in range(2))
    ids = {
        "q_positions": jnp.arange(length, dtype=jnp.int32)[None],
        "q_segment_ids": jnp.ones((1, length), jnp.int32),
    }

    def gradients(backend, q, k, v, d_out):
        out, pull = jax.vjp(functools.partial(attention, **ids, backend=backend), q, k, v)
        return out, pull(d_out)

    names = ("dense", "blockwise")
    programs = {name: jax.jit(functools.partial(gradients, name)).lower(q, k, v, d_out).compile() for name in names}
    spent: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(1 + repeats):  # the first of each is a warm-up
        for name in names:
            began = time.perf_counter()
            jax.block_until_ready(programs[name](q, k, v, d_out))
            spent[name].append(time.perf_counter() - began)
    seconds = {name: statistics.median(spent[name][1:]) for name in names}
    gib = {name: programs[name].memory_analysis().temp_size_in_bytes / 2**30 for name in names}
    return {
        "length": length,
        **{f"{name}_s": round(seconds[name], 3) for name in names},
        **{f"{name}_temporaries_gib": round(gib[name], 3) for name in names},
        "time_ratio": round(seconds["blockwise"] / seconds["dense"], 3),
        "temporaries_ratio": round(gib["blockwise"] / gib["dense"], 4),
    }


if __name__ == "__main__":
    run(main)
