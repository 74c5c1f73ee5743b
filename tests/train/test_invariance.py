"""Design: loss and gradient depend on the global batch alone, not on how it is cut, packed, padded or placed."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.data.config import DataConfig
from burnish.data.examples import Encoded, Examples
from burnish.data.packing import Row, batch_arrays, plan_rows
from burnish.models.parts import choose_trained, take_apart
from burnish.models.paths import leaves
from burnish.objectives.sft import SFT
from burnish.train.optimizer import make_optimizer
from burnish.train.optimizer_config import OptimizerConfig
from burnish.train.step import StepState, train_step

LENGTH = 48
LONG = 1e7


def examples(count: int, vocab: int, seed: int = 0) -> Examples:
    """Examples of very different lengths, and of very different shares of trained tokens."""
    random = np.random.default_rng(seed)
    made = []
    for index in range(count):
        length = int(random.integers(4, LENGTH // 2 if index % 3 else LENGTH))
        mask = (np.arange(length) >= random.integers(1, length)).astype(np.float32)
        made.append(Encoded(index, random.integers(3, vocab, length).astype(np.int32), mask))
    return Examples.of(made)


def rows_of(made: Examples, packed: bool) -> list[Row]:
    config = DataConfig(max_length=LENGTH, packing=packed)
    return plan_rows(range(len(made)), made.lengths, config)


def one_step(model, batch: dict[str, np.ndarray], cut: int, objective: SFT = SFT(), groups: int = 1):
    """Loss, gradient norm and gradient: that of a step of SGD so long that the parameters' own digits vanish."""
    module = model.module
    parts, params, frozen = take_apart(module, choose_trained(module, []))
    config = OptimizerConfig(name="sgd", lr=LONG, clip_norm=None, weight_decay=0.0, schedule="constant")
    optimizer = make_optimizer(config, parts.trained, {k: v.shape for k, v in params.items()}, 1)
    step = jax.jit(functools.partial(train_step, parts, objective, optimizer, groups))
    micro = {name: jnp.asarray(array).reshape(cut, -1, LENGTH) for name, array in batch.items()}
    state, metrics = step(StepState(params, optimizer.init(params)), frozen, micro, jax.random.key(3))
    gradient = {key: np.asarray(params[key] - state.params[key]) / LONG for key in params}
    return float(metrics["loss"]), float(metrics["grad_norm"]), gradient


def padded_to(rows: list[Row], count: int) -> list[Row]:
    return rows + [[]] * (count - len(rows))


def assert_same(first, second) -> None:
    np.testing.assert_allclose(first[0], second[0], rtol=1e-5)
    np.testing.assert_allclose(first[1], second[1], rtol=1e-5)
    for key, gradient in first[2].items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(gradient, second[2][key], atol=1e-5 * scale, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize(
    ("adapters", "objective"),
    [(False, SFT()), (True, SFT(label_smoothing=0.1, z_loss=1e-3)), (True, SFT(loss="dft"))],
)
def test_micro_batches_packing_and_padding_do_not_matter(make_tiny, adapters: bool, objective: SFT) -> None:
    model = make_tiny()
    if adapters:
        model.add_lora(rank=4)
        for key, (_, variable) in _adapters(model):
            if key.endswith(".b"):
                variable.set_value(jax.random.normal(jax.random.key(1), variable.shape) * 0.1)
    made = examples(11, model.module.config.vocab_size)
    padded = batch_arrays(made, padded_to(rows_of(made, packed=False), 12), LENGTH)
    packed_rows = rows_of(made, packed=True)
    packed = batch_arrays(made, padded_to(packed_rows, 8), LENGTH)
    assert len(packed_rows) < 8  # really packed, and one row is padding alone
    whole = one_step(model, padded, 1, objective)
    assert whole[1] > 1e-3
    for batch, cut in ((padded, 12), (packed, 1), (packed, 4)):
        assert_same(whole, one_step(model, batch, cut, objective))


def _adapters(model):
    return [(key, found) for key, found in leaves(model.module).items() if ".adapters." in key]


def test_the_mean_over_micro_batches_is_not_the_loss(make_tiny) -> None:
    """The examples are such that the fault (a mean of means) would be seen."""
    model = make_tiny()
    made = examples(11, model.module.config.vocab_size)
    padded = batch_arrays(made, padded_to(rows_of(made, packed=False), 12), LENGTH)
    whole = one_step(model, padded, 1)[0]
    means = [one_step(model, {k: v[i : i + 1] for k, v in padded.items()}, 1)[0] for i in range(11)]
    assert abs(np.mean(means) - whole) > 1e-4 * whole


def test_the_loss_is_that_of_each_example_alone(make_tiny) -> None:
    """Against float64 log-softmax of each example's own logits, tokens weighed alike."""
    model = make_tiny()
    made = examples(7, model.module.config.vocab_size)
    packed = batch_arrays(made, rows_of(made, packed=True), LENGTH)
    total, weight = 0.0, 0
    for example in made:
        logits = np.asarray(model(jnp.asarray(example.tokens)[None]))[0].astype(np.float64)
        log_probs = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        log_probs -= logits.max(-1, keepdims=True)
        for at in np.flatnonzero(example.weights):
            total -= log_probs[at - 1, example.tokens[at]]
            weight += 1
    np.testing.assert_allclose(one_step(model, packed, 1)[0], total / weight, rtol=1e-5)


def test_dropout_does_not_depend_on_the_cut(make_tiny) -> None:
    model = make_tiny()
    model.add_lora(rank=4, dropout=0.5)
    for key, (_, variable) in _adapters(model):
        if key.endswith(".b"):
            variable.set_value(jax.random.normal(jax.random.key(1), variable.shape) * 0.3)
    made = examples(11, model.module.config.vocab_size)
    padded = batch_arrays(made, padded_to(rows_of(made, packed=False), 12), LENGTH)
    packed = batch_arrays(made, padded_to(rows_of(made, packed=True), 8), LENGTH)
    whole = one_step(model, padded, 1)
    assert_same(whole, one_step(model, packed, 4))


def run_on(devices: int, lora: bool) -> list:
    """Losses and gradient norms of a tiny run under several meshes of so many devices (tests/train/mesh_run.py)."""
    script = Path(__file__).with_name("mesh_run.py")
    # Threads enough for every device to wait in a collective at once: XLA takes their number from NPROC.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "NPROC": "32"}
    done = subprocess.run(
        [sys.executable, str(script), str(devices), "lora" if lora else "full"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_meshes_of_eight_devices_agree_with_one(lora: bool) -> None:
    [one] = run_on(1, lora)
    several = run_on(8, lora)
    assert len(several) == 3
    for entries in several:
        np.testing.assert_allclose(entries, one, rtol=1e-5)
