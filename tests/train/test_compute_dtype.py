"""bfloat16 products over float32 weights: what is narrow, what stays wide, and that training comes to the same."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import linen, nnx

import burnish as bn
from burnish.adapt.lora import LoRA
from burnish.errors import InputError
from burnish.models.paths import leaves
from burnish.wrapper import ModelWrapper

ROWS = [{"prompt": f"What is {i} and {i + 1}?", "completion": f"{i} and {i + 1} is {2 * i + 1}."} for i in range(64)]
FIFTY = {"batch_size": 4, "accumulation": 1, "max_length": 64, "steps": 50, "lr": 2e-3, "holdout": 0}


def losses(model: ModelWrapper, config: dict, out: Path) -> np.ndarray:
    bn.Trainer(model, bn.SFT(), config, out=out).train(ROWS)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return np.array([line["loss"] for line in lines if "loss" in line])


@pytest.mark.parametrize("rank", [None, 4])
def test_fifty_steps_come_to_the_same_loss(make_tiny, tmp_path: Path, rank: int | None) -> None:
    found = {}
    for dtype in ("float32", "bfloat16"):
        make_tiny().save(tmp_path / f"base-{dtype}")
        model = bn.load(tmp_path / f"base-{dtype}", compute_dtype=dtype)
        if rank:
            model.add_lora(rank=rank)
        found[dtype] = losses(model, FIFTY, tmp_path / dtype)
        # What is trained is kept wide: an update of 1e-3 would round away in bfloat16.
        assert {variable[...].dtype for _, variable in leaves(model.module).values()} == {jnp.dtype(jnp.float32)}
    assert found["bfloat16"][0] != found["float32"][0]  # it did compute in bfloat16
    assert found["float32"][-5:].mean() < 0.9 * found["float32"][0]
    np.testing.assert_allclose(found["bfloat16"][-5:].mean(), found["float32"][-5:].mean(), rtol=0.01)
    recipe = yaml.safe_load((tmp_path / "bfloat16" / "config.yaml").read_text())
    assert (recipe["dtype"], recipe["compute_dtype"]) == ("float32", "bfloat16")


def test_activations_are_narrow_and_gradients_wide(make_tiny) -> None:
    model = make_tiny()
    tokens = jnp.arange(12)[None]
    wide = model(tokens)
    model.compute_in("bfloat16")
    graph, params = nnx.split(model.module)

    def loss(params):
        hidden = nnx.merge(graph, params).hidden(tokens)
        assert hidden.dtype == jnp.bfloat16
        return jnp.sum(hidden.astype(jnp.float32) ** 2)

    assert {leaf.dtype for leaf in jax.tree.leaves(jax.grad(loss)(params))} == {jnp.dtype(jnp.float32)}
    narrow = model(tokens)
    assert narrow.dtype == jnp.float32
    error = float(jnp.abs(narrow - wide).max() / jnp.abs(wide).max())
    assert 1e-5 < error < 0.05


def test_a_small_adapter_acts_beside_a_float32_kernel() -> None:
    """In bfloat16 its output is what (x A) B says to three digits, however far below the kernel's own it lies.

    x meets a row of the kernel that is zero, so that y is the adapter's alone.
    """
    draw = np.random.default_rng(0)
    kernel = jnp.asarray(draw.normal(size=(16, 24)), jnp.float32).at[0].set(0)
    a, b = draw.normal(size=(16, 2)), 1e-6 * draw.normal(size=(2, 24))
    lora = LoRA(nnx.LoRAParam(jnp.asarray(a)), nnx.LoRAParam(jnp.asarray(b)), scale=2.0, dropout=0.0, tag=0)
    x = jnp.zeros((1, 1, 16), jnp.bfloat16).at[0, 0, 0].set(1)
    found = lora(x, kernel, [], None)
    assert found.dtype == jnp.bfloat16
    scale = np.abs(2 * a[0]) @ np.abs(b)
    np.testing.assert_array_less(np.abs(np.asarray(found[0, 0], np.float64) - 2 * a[0] @ b), 0.02 * scale)


def test_what_cannot_be_computed_in_is_refused(make_tiny) -> None:
    with pytest.raises(InputError, match="compute_dtype: 'int8' is none"):
        make_tiny().compute_in("int8")

    class Logits(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            return linen.Dense(8)(linen.Embed(8, 4)(tokens))

    with pytest.raises(InputError):
        ModelWrapper(Logits()).compute_in("bfloat16")
    untied = make_tiny(tie_embeddings=False)
    untied.add_lora(rank=2, targets=["head"])
    with pytest.raises(InputError, match="adapter on the head needs float32"):
        untied.compute_in("bfloat16")
