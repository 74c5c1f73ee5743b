"""The training step of SmolLM2-135M on this machine, against the speed of its matrix products.

    python -m benchmarks.sft [--json FILE] [--data FILE] [--only CASE ...] [--steps 10] [--peers DIR]

One process, float32 unless the case says otherwise, huge pages as `burnish sft` has them. Before and after each step
the roofline is measured: a product of 2048 x 576 by 576 x 1536 as JAX runs it (a shared machine's speed drifts, so a
step is held against its own neighbours). Then, for each case, every token trained:

    step_s          seconds a step: median of --steps after 3
    roofline_share  useful FLOP/s over the roofline's; useful are 4 P a token for LoRA and 6 P for full fine-tuning
    cold_s, warm_s  first step (tracing and compiling included) minus the median, with an empty cache of compiled
                    programs and with one that holds the step (median of 3); steps of a drifting machine differ by
                    seconds, so also cold_compile_s and warm_compile_s, the tracing and compiling alone
    resident_gib    peak resident memory minus the memory before the model was loaded
    temporaries_gib temporaries of the compiled step

Cases are KIND-ROWSxLENGTH, with -block for recomputed blocks and -bf16 for bfloat16 products. Rows hold one text each;
a single row is packed with documents, unless -whole is added. `depth` compares the compile time of 30 layers with that
of 2. --data takes records (docs/data.md) in place of generated tokens. --peers DIR runs DIR/tunix_sft.py and
DIR/trl_sft.py, which time the same work, in the environments DIR/tunix and DIR/trl, and adds what they leave in
DIR/results.json.
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from burnish.cli.huge_pages import with_huge_pages

if __name__ == "__main__":
    with_huge_pages()  # before JAX is imported: the process starts again

import jax
import numpy as np

import burnish as bn
from benchmarks.command import count, new_file, peers_folder, run
from benchmarks.machine import Roofline, forget, reset_peak, resident, resident_peak
from burnish.data.config import DataConfig
from burnish.data.dataset import load_examples
from burnish.models.config import ModelConfig, RopeConfig
from burnish.models.decoder import Decoder
from burnish.models.layers import random_params
from burnish.models.parts import choose_trained, take_apart
from burnish.models.remat import RematPolicy
from burnish.objectives.sft import SFT
from burnish.train.optimizer import make_optimizer
from burnish.train.optimizer_config import OptimizerConfig
from burnish.train.programs import Programs
from burnish.train.step import StepState, train_step
from burnish.wrapper import ModelWrapper

WARM_UP = 3
CASES = [
    "depth",
    "lora-8x256",
    "full-8x256",
    "lora-1x2048",
    "full-1x2048",
    "lora-8x256-block",
    "lora-8x256-bf16",
    "lora-1x8192",
    "lora-1x8192-block",
]
SMOLLM2 = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, rope=RopeConfig(theta=1e5), tie_embeddings=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """LoRA of rank 16 on all linear layers or all parameters, and the batch."""

    kind: str
    rows: int
    length: int
    remat: RematPolicy
    dtype: str
    packed: bool

    @classmethod
    def parse(cls, name: str) -> "Case":
        """>>> Case.parse("lora-8x256-block")
        Case(kind='lora', rows=8, length=256, remat='block', dtype='float32', packed=False)
        """
        if not re.fullmatch(r"(lora|full)-[1-9]\d*x[1-9]\d*(-block|-bf16|-whole)*", name):
            raise argparse.ArgumentTypeError(f"{name} is no case: lora-8x256, full-1x2048-block-bf16 and depth are")
        kind, shape, *options = name.split("-")
        rows, length = map(int, shape.split("x"))
        dtype = "bfloat16" if "bf16" in options else "float32"
        remat: RematPolicy = "block" if "block" in options else "selective"
        return cls(kind, rows, length, remat, dtype, packed=rows == 1 and "whole" not in options)


def asked(name: str) -> tuple[str, Case | None]:
    """A word of --only and its case; None for `depth`."""
    return name, None if name == "depth" else Case.parse(name)


class Step:
    """A compiled step, its state, and one batch to repeat."""

    def __init__(self, model: ModelWrapper, case: Case, batch: dict[str, np.ndarray]) -> None:
        if case.kind == "lora":
            model.add_lora(rank=16)
        parts, params, frozen = take_apart(model.module, choose_trained(model.module, []))
        shapes = {key: array.shape for key, array in params.items()}
        optimizer = make_optimizer(OptimizerConfig(lr=1e-5), parts.trained, shapes, 1000)
        # On a device by name, as a trainer puts them: the step would be compiled anew for what it returns.
        device = jax.devices()[0]
        self._state = jax.device_put(StepState(params, optimizer.init(params)), device)
        self._function = functools.partial(train_step, parts, SFT(), optimizer, 1, remat=case.remat)
        self._frozen, self._batch = jax.device_put(frozen, device), batch

    def compile(self) -> None:
        """Traces and compiles, whatever was compiled before."""
        self.programs = Programs(
            self._function,
            self._state,
            self._frozen,
            jax.random.key(0),
            lambda batch: {name: jax.device_put(array[None]) for name, array in batch.items()},
        )
        self.programs.compile(self._state, self._batch)

    def __call__(self) -> float:
        """Makes a step; the loss is read, as a trainer would."""
        self._state, metrics = self.programs(self._state, self._batch)
        return float(metrics["loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=new_file, help="write the figures here, too")
    parser.add_argument("--data", help="records to train on; generated tokens without")
    parser.add_argument("--only", nargs="+", type=asked, default=[*map(asked, CASES)], metavar="CASE")
    parser.add_argument("--steps", type=count, default=10)
    parser.add_argument("--peers", type=peers_folder)
    arguments = parser.parse_args()

    roofline = Roofline()
    figures: dict[str, Any] = {"huge_pages": "hugetlb=1" in os.environ.get("GLIBC_TUNABLES", "")}
    for name, case in arguments.only:
        if case is None:
            figures[name] = depth()
        else:
            figures[name] = measure(case, arguments.data, roofline, arguments.steps)
        print(name, json.dumps(figures[name]), flush=True)
    if arguments.peers:
        figures["peers"] = run_peers(arguments.peers, WARM_UP + arguments.steps)
        print("peers", json.dumps(figures["peers"]))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(case: Case, data: str | None, roofline: Roofline, steps: int) -> dict[str, float]:
    """The figures of one case."""
    forget()
    before = resident()
    reset_peak()
    model = bn.load("smollm2-135m", dtype=case.dtype)
    useful = (4 if case.kind == "lora" else 6) * model.parameters * case.rows * case.length
    step = Step(model, case, make_batch(case, documents(model, data)))
    with tempfile.TemporaryDirectory() as cache:
        use_cache(cache)
        cold_compile, cold = first_step(step)
        spent, shares = [], []
        for number in range(WARM_UP + steps - 1):
            speed = roofline.gflops()
            took = seconds(step)
            speed = (speed + roofline.gflops()) / 2
            if number >= WARM_UP - 1:
                spent.append(took)
                shares.append(useful / took / speed / 1e9)
        peak = resident_peak() - before
        again = [first_step(step) for _ in range(3)]
    use_cache(None)
    median = statistics.median(spent)
    return {
        "step_s": round(median, 3),
        "tokens_per_s": round(case.rows * case.length / median, 1),
        "useful_gflops": round(useful / median / 1e9, 1),
        "roofline_share": round(statistics.median(shares), 3),
        "cold_s": round(cold - median, 2),
        "warm_s": round(statistics.median(whole for _, whole in again) - median, 2),
        "cold_compile_s": round(cold_compile, 2),
        "warm_compile_s": round(statistics.median(compiling for compiling, _ in again), 2),
        "resident_gib": round(peak / 2**30, 2),
        "temporaries_gib": round(step.programs.memory.extra / 2**30, 2),
    }


def first_step(step: Step) -> tuple[float, float]:
    """Seconds from nothing in this process's memory to a compiled step, and to its first loss."""
    jax.clear_caches()
    compiling = seconds(step.compile)
    return compiling, compiling + seconds(step)


def seconds(act: Any) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def use_cache(folder: str | None) -> None:
    """Compiled programs go to and come from this folder from here on; None: nowhere."""
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def documents(model: ModelWrapper, data: str | None) -> list[np.ndarray]:
    """Token ids, a document each: those of the records, or 64 of 100 to 400 drawn tokens."""
    if data is not None:
        return [example.tokens for example in load_examples(data, model.require_tokenizer(), DataConfig())]
    draw = np.random.default_rng(0)
    return [draw.integers(17, 49152, length) for length in draw.integers(100, 400, 64)]


def make_batch(case: Case, texts: list[np.ndarray]) -> dict[str, np.ndarray]:
    """[rows, length] arrays with every token trained: rows of one document, or a single row packed with documents."""
    shape = (case.rows, case.length)
    stream = np.resize(np.concatenate(texts), case.rows * case.length + 1).astype(np.int32)
    segments, positions = np.ones(shape, np.int32), np.broadcast_to(np.arange(case.length, dtype=np.int32), shape)
    if case.packed:
        ends = np.cumsum([len(text) for text in texts] * (1 + case.length // sum(map(len, texts))))
        segments = 1 + np.searchsorted(ends, np.arange(case.length), side="right").astype(np.int32)[None]
        starts = np.concatenate([[0], ends])[segments - 1]
        positions = (np.arange(case.length) - starts).astype(np.int32)
    return {
        "tokens": stream[:-1].reshape(shape),
        "targets": stream[1:].reshape(shape),
        "weights": np.ones(shape, np.float32),
        "segment_ids": segments,
        "positions": positions,
        "example_ids": segments,
    }


def depth() -> dict[str, float]:
    """Seconds to trace and compile the LoRA step of 30 layers and of 2, without any cache."""
    use_cache(None)
    found = {}
    for layers in (30, 2, 30, 2):  # the first of each warms up what is not compilation
        model = ModelWrapper(Decoder(dataclasses.replace(SMOLLM2, num_layers=layers), random_params(0)))
        case = Case.parse("lora-8x256")
        step = Step(model, case, make_batch(case, documents(model, None)))
        jax.clear_caches()
        found[layers] = seconds(step.compile)
    return {
        "layers_30_s": round(found[30], 2),
        "layers_2_s": round(found[2], 2),
        "ratio": round(found[30] / found[2], 2),
    }


def run_peers(folder: Path, steps: int) -> dict[str, Any]:
    """What the peers' own scripts measured of the same work, one after the other."""
    for peer in ("tunix", "trl"):
        for kind in ("lora", "full"):
            command = [folder / peer / "bin" / "python", folder / f"{peer}_sft.py", kind, str(steps)]
            subprocess.run(command, check=True, env={**os.environ, "PEERS": str(folder)})
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


if __name__ == "__main__":
    run(main)
