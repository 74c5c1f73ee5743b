"""What the compiled step holds: no logits, and little beside the adapters. Shapes alone are compiled: no weights
exist."""

import functools

import jax
import jax.numpy as jnp
import pytest

from burnish.adapt.config import LoraConfig
from burnish.adapt.lora import add_lora
from burnish.models.config import ModelConfig, RopeConfig
from burnish.models.decoder import Decoder
from burnish.models.layers import random_params
from burnish.models.parts import choose_trained, take_apart
from burnish.objectives.sft import SFT
from burnish.train.optimizer import make_optimizer
from burnish.train.optimizer_config import OptimizerConfig
from burnish.train.step import StepState, train_step

SMOLLM2 = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, rope=RopeConfig(theta=1e5), tie_embeddings=True)


def compile_step(config: ModelConfig, rank: int | None, rows: int, length: int):
    """The compiled step's memory statistics, and the bytes of one set of gradients."""

    kept = []

    def build():
        decoder = Decoder(config, random_params(0))
        if rank:
            add_lora(decoder, LoraConfig(rank=rank))
        parts, params, frozen = take_apart(decoder, choose_trained(decoder, []))
        kept.append(parts)
        return params, frozen

    params, frozen = jax.eval_shape(build)
    [parts] = kept
    shapes = {key: array.shape for key, array in params.items()}
    optimizer = make_optimizer(OptimizerConfig(lr=1e-4), parts.trained, shapes, 10)
    state = StepState(params, jax.eval_shape(optimizer.init, params))
    integers = jax.ShapeDtypeStruct((1, rows, length), jnp.int32)
    names = ("tokens", "targets", "segment_ids", "positions", "example_ids")
    batch = dict.fromkeys(names, integers) | {"weights": jax.ShapeDtypeStruct((1, rows, length), jnp.float32)}
    step = jax.jit(functools.partial(train_step, parts, SFT(), optimizer, 1), donate_argnums=0)
    compiled = step.lower(state, frozen, batch, jax.eval_shape(lambda: jax.random.key(0))).compile()
    gradients = sum(array.size * 4 for array in params.values())
    return compiled.memory_analysis(), gradients


@pytest.mark.parametrize("rank", [None, 4])
def test_the_step_never_holds_the_logits(rank: int | None) -> None:
    config = ModelConfig(50_000, 32, 64, 2, 4, 2, 8, 1024, tie_embeddings=True)
    memory, _ = compile_step(config, rank, rows=8, length=512)
    assert memory.temp_size_in_bytes < 8 * 512 * config.vocab_size * 4


@pytest.mark.slow
def test_adapters_need_a_tenth_of_the_trainable_state() -> None:
    """Trainable state: what the step updates in place (parameters, optimizer), and one set of gradients."""
    adapters, adapter_gradients = compile_step(SMOLLM2, 16, rows=1, length=64)
    full, full_gradients = compile_step(SMOLLM2, None, rows=1, length=64)
    state = adapters.alias_size_in_bytes + adapter_gradients
    assert state > 3 * adapter_gradients  # parameters and two moments are updated in place
    assert state <= 0.1 * (full.alias_size_in_bytes + full_gradients)
