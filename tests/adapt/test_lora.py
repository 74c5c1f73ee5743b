"""LoRA: nothing at first, the right gradient, small adapters that act, masks that do not depend on batching."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from burnish.adapt.config import LoraConfig, default_rank
from burnish.adapt.lora import LoRA, add_lora, merge_lora, merged_matmul, unmerge_lora
from burnish.errors import InputError
from burnish.models.config import ModelConfig
from burnish.models.decoder import Decoder, split_run
from burnish.models.layers import DropoutKeys, random_params
from burnish.models.paths import leaves, linears, read
from burnish.wrapper import ModelWrapper

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 7)))


def make(dtype=jnp.float32, **options):
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_layers": 4}
    sizes |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "max_length": 64}
    return Decoder(ModelConfig(**sizes | options), random_params(0, dtype, stddev=0.3), dtype=dtype)


def fill(decoder, seed=0, size=0.3):
    """Numbers for every adapter's B."""
    generator = np.random.default_rng(seed)
    for _, variable in leaves(decoder).values():
        if isinstance(variable, nnx.LoRAParam) and not np.asarray(variable[...]).any():
            variable.set_value(jnp.asarray(generator.normal(0, size, variable.shape), jnp.float32))


def forward(decoder, **options):
    with jax.disable_jit():
        return np.asarray(decoder.logits(decoder.hidden(TOKENS, **options)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("targets", [[], ["layers.2.attn"]])
def test_a_fresh_adapter_changes_nothing(dtype, targets):
    decoder = make(dtype)
    before = forward(decoder)
    add_lora(decoder, LoraConfig(rank=3, targets=targets))
    assert np.array_equal(forward(decoder), before)
    assert any(np.asarray(v[...]).any() for leaf, v in leaves(decoder).values() if leaf.key.endswith(".a"))


def test_every_layer_starts_from_its_own_numbers_whatever_the_runs():
    one, two = make(), make()
    add_lora(one, LoraConfig(rank=3), seed=5)
    add_lora(two, LoraConfig(rank=3, targets=["layers.1", "layers.2"]), seed=5)

    def starts(decoder):
        found = {}
        for leaf, variable in leaves(decoder).values():
            if leaf.key.endswith(".a"):
                found |= {name: np.asarray(variable[...][i]) for i, name in enumerate(leaf.names)}
        return found

    first, second = starts(one), starts(two)
    assert len(first) == 28 and len(second) == 14
    assert all(np.array_equal(first[name], second[name]) for name in second)
    assert len({array.tobytes() for array in first.values()}) == 28
    bound = 1 / math.sqrt(16)
    q = first["layers.0.attn.q_proj.adapters.0.a"]
    assert np.abs(q).max() <= bound and np.abs(q).std() > bound / 5


def test_gradient_of_the_merged_product_is_that_of_the_definition():
    with jax.enable_x64(True):
        generator = np.random.default_rng(0)
        x, w, a, b, g = (
            jnp.asarray(generator.normal(size=shape)) for shape in ((2, 5, 6), (6, 7), (6, 3), (3, 7), (2, 5, 7))
        )
        scale = 1.7

        def merged(x, w, a, b):
            return jnp.sum(g * merged_matmul(x, w, a, b, scale))

        def defined(x, w, a, b):
            return jnp.sum(g * (x @ w + scale * ((x @ a) @ b)))

        np.testing.assert_allclose(merged(x, w, a, b), defined(x, w, a, b), rtol=1e-12)
        found = jax.grad(merged, argnums=(0, 1, 2, 3))(x, w, a, b)
        expected = jax.grad(defined, argnums=(0, 1, 2, 3))(x, w, a, b)
        for one, two in zip(found, expected, strict=True):
            assert one.dtype == jnp.float64
            np.testing.assert_allclose(one, two, rtol=1e-10, atol=1e-12)


def test_a_small_adapter_acts_in_bfloat16():
    """Beside W it acts in full; added into W, most of it is rounded away. (Both end in rounding y to bfloat16.)"""
    generator = np.random.default_rng(0)
    n, rank = 256, 4
    w = jnp.asarray(generator.normal(0, 1 / math.sqrt(n), (n, n)), jnp.bfloat16)
    a = jnp.asarray(generator.uniform(-1, 1, (n, rank)) / math.sqrt(n), jnp.float32)
    b = jnp.asarray(generator.normal(size=(rank, n)), jnp.float32)
    b = b * 8e-4 * jnp.linalg.norm(w.astype(jnp.float32)) / jnp.linalg.norm(a @ b)  # ‖Δ‖ is 0.08 % of ‖W‖
    delta = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    lora = LoRA(nnx.LoRAParam(a), nnx.LoRAParam(b), scale=1.0, dropout=0.0, tag=0)

    def error(added):
        return np.linalg.norm(added - delta) / np.linalg.norm(delta)

    rows = jnp.eye(n, dtype=jnp.bfloat16)[None]
    beside = np.asarray(lora.beside(rows)[0], np.float64)
    assert error(beside) < 0.02
    merged = (w.astype(jnp.float32) + lora.delta()).astype(jnp.bfloat16)
    assert error(np.asarray(merged, np.float64) - np.asarray(w, np.float64)) > 0.5
    # The layer takes the first way: with W out of the way, all of the adapter is in its output.
    through = lora(rows, jnp.zeros_like(w), [], None)[0]
    assert np.array_equal(np.asarray(through, np.float64), beside)


def test_a_layer_in_bfloat16_runs_the_adapter_beside_its_kernel():
    """Changing B by what W + s A B cannot hold in bfloat16 still moves the output."""
    decoder = make(jnp.bfloat16, num_layers=1)
    add_lora(decoder, LoraConfig(rank=2, alpha=2.0, targets=["q_proj"]))
    linear = decoder.runs[0].blocks[0].attn.q_proj
    x = jnp.zeros((1, 1, 16), jnp.bfloat16).at[0, 0, 0].set(1)
    kernel = jnp.full((16, 24), 1.0, jnp.bfloat16).at[0].set(0)  # x sees a zero row: y is the adapter's alone
    last = linear.adapters[0]
    a, b = jnp.full((16, 2), 1.0), jnp.full((2, 24), 1e-4)
    lora = LoRA(nnx.LoRAParam(a), nnx.LoRAParam(b), scale=last.scale, dropout=0.0, tag=0)
    found = np.asarray(lora(x, kernel, [lora], None), np.float64)
    np.testing.assert_allclose(found, 2 * last.scale * 2e-4, rtol=0.02)


@pytest.mark.parametrize(
    "rank, alpha, rslora, scale", [(4, 6.0, False, 1.5), (4, 6.0, True, 3.0), (9, None, True, 6.0)]
)
def test_scale(rank, alpha, rslora, scale):
    decoder = make()
    config, _ = add_lora(decoder, LoraConfig(rank=rank, alpha=alpha, rslora=rslora, targets=["q_proj"]))
    adapter = decoder.runs[0].blocks[0].attn.q_proj.adapters[0]
    assert adapter.scale == pytest.approx(scale)
    assert config.alpha == (alpha or 2 * rank)
    adapter.b.set_value(jnp.ones_like(adapter.b[...]))
    a = np.asarray(adapter.a[...], np.float64)
    np.testing.assert_allclose(adapter.delta(), scale * a @ np.ones((rank, 24)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "targets, runs, count",
    [
        ([], [4], 28),
        (["q_proj", "v_proj"], [4], 8),
        (["layers.1"], [1, 1, 2], 7),
        (["layers.1.attn", "layers.2.attn"], [1, 2, 1], 8),
        (["layers.0.mlp", "layers.3.mlp.up_proj"], [1, 2, 1], 4),
    ],
)
def test_partial_targets_split_runs_and_leave_the_logits(targets, runs, count):
    decoder = make()
    before = forward(decoder)
    _, names = add_lora(decoder, LoraConfig(rank=2, targets=targets))
    assert len(names) == count
    assert [run.period * run.repeats for run in decoder.runs] == runs
    np.testing.assert_allclose(forward(decoder), before, rtol=1e-5, atol=1e-5)
    adapted = {name for linear, group in linears(decoder).values() if len(linear.adapters) for name in group}
    assert adapted == set(names)
    plain = make()
    fill(decoder)
    merge_lora(decoder)
    kernels = {
        name: np.asarray(linear.kernel[...][i])
        for linear, group in linears(decoder).values()
        if group != ("head",)
        for i, name in enumerate(group)
    }
    for linear, group in linears(plain).values():
        for i, name in enumerate(group if group != ("head",) else ()):
            assert np.array_equal(kernels[name], linear.kernel[...][i]) == (name not in adapted)


# ---- dropout


def masks(decoder, example_ids, positions, *, layer=0, part="q_proj", key=0):
    """Which features a layer's adapter drops: [batch, length, in]."""
    linear = getattr(decoder.runs[0].blocks[0].attn, part)
    keys = DropoutKeys(jax.random.key(key), jnp.asarray(example_ids), jnp.asarray(positions), layer)
    x = jnp.ones((*keys.example_ids.shape, 16))
    return np.asarray(linear.adapters[0]._dropped(x, keys)) == 0


def test_a_dropout_mask_belongs_to_a_token_not_to_its_place():
    decoder = make()
    add_lora(decoder, LoraConfig(rank=2, dropout=0.5))
    alone = masks(decoder, [[7, 7, 7]], [[0, 1, 2]])
    packed = masks(decoder, [[3, 3, 7, 7, 7], [9, 9, 9, -1, -1]], [[0, 1, 0, 1, 2], [0, 1, 2, 0, 0]])
    assert np.array_equal(packed[0, 2:], alone[0])
    assert not np.array_equal(packed[1, :3], alone[0]), "another example"
    assert not np.array_equal(alone[0, 0], alone[0, 1]), "another position"
    assert not np.array_equal(masks(decoder, [[7, 7, 7]], [[0, 1, 2]], layer=1), alone), "another layer"
    assert not np.array_equal(masks(decoder, [[7, 7, 7]], [[0, 1, 2]], part="k_proj"), alone), "another projection"
    assert not np.array_equal(masks(decoder, [[7, 7, 7]], [[0, 1, 2]], key=1), alone), "another step"
    many = masks(decoder, np.arange(200)[None], np.zeros((1, 200), int))
    assert 0.45 < many.mean() < 0.55


def test_dropout_in_the_model_depends_on_neither_packing_nor_stacking():
    """Each token's mask follows its example, position and layer number, not its place in a row or a run."""
    decoder = make(num_layers=2)
    add_lora(decoder, LoraConfig(rank=2, dropout=0.3))
    fill(decoder)
    row = jnp.concatenate([jnp.asarray([[5, 6, 7]]), TOKENS[:1]], axis=1)
    segments = jnp.asarray([[1] * 3 + [2] * 7])
    positions = jnp.asarray([[0, 1, 2, *range(7)]])
    forward = nnx.jit(lambda decoder, *args: decoder.hidden(*args[:3], dropout=args[3]))
    # The same document behind another one, and behind padding.
    packed, alone = (
        DropoutKeys(jax.random.key(3), jnp.asarray([[first] * 3 + [4] * 7]), positions) for first in (1, -1)
    )
    expected = np.asarray(forward(decoder, row, positions, segments * (segments == 2), alone))[0, 3:]
    found = np.asarray(forward(decoder, row, positions, segments, packed))[0, 3:]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    decoder.runs = nnx.List(split_run(decoder.runs[0], [0, 1]))
    found = np.asarray(forward(decoder, row, positions, segments, packed))[0, 3:]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert np.abs(np.asarray(decoder.hidden(TOKENS[:1]))[0] - expected).max() > 1e-2, "dropout does nothing"


# ---- merging


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_merge_and_unmerge_is_exact(dtype):
    decoder = make(dtype)
    add_lora(decoder, LoraConfig(rank=3, targets=["layers.1", "layers.2.attn"]))
    fill(decoder, 1)
    add_lora(decoder, LoraConfig(rank=2, alpha=1.0))
    fill(decoder, 2)
    before, logits = read(decoder), forward(decoder)
    merged = merge_lora(decoder)
    assert not jax.tree.leaves(nnx.state(decoder, nnx.LoRAParam))
    bound = (1e-5 if dtype == jnp.float32 else 0.1) * np.abs(logits).max()
    assert np.abs(forward(decoder) - logits).max() <= bound
    unmerge_lora(decoder, merged)
    after = read(decoder)
    assert before.keys() == after.keys()
    assert all(before[key].dtype == after[key].dtype and np.array_equal(before[key], after[key]) for key in before)
    assert np.array_equal(forward(decoder), logits)


def test_only_the_last_adapter_of_a_chain_is_trained_and_all_act():
    decoder = make()
    add_lora(decoder, LoraConfig(rank=3, targets=["q_proj"]))
    fill(decoder, 1)
    first = forward(decoder)
    add_lora(decoder, LoraConfig(rank=2, targets=["q_proj"]))
    np.testing.assert_allclose(forward(decoder), first, rtol=1e-4, atol=1e-5)
    fill(decoder, 2)
    assert np.abs(forward(decoder) - first).max() > 1e-2


# ---- bad input


@pytest.mark.parametrize(
    "options, said",
    [
        ({"rank": 13}, r"adapter\.rank: 13 is above the smallest side of layers\.0\.attn\.k_proj \[16, 12\]; use 12"),
        (
            {"rank": 14, "targets": ["layers.1.attn.q_proj", "layers.1.attn.v_proj"]},
            r"14 .* of layers\.1\.attn\.v_proj",
        ),
        ({"rank": -1}, r"adapter\.rank: .*-1"),
        ({"rank": 0}, r"adapter\.rank: .*0"),
        ({"rank": 2.5}, r"adapter\.rank: .*2\.5"),
        ({"alpha": 0.0}, r"adapter\.alpha"),
        ({"alpha": float("nan")}, r"adapter\.alpha"),
        ({"dropout": 1.0}, r"adapter\.dropout"),
        ({"targets": ["q_porj"]}, r"adapter\.targets: 'q_porj' matches nothing in this model; names look like"),
        ({"droput": 0.1}, r"adapter\.droput: unknown key; did you mean .?dropout"),
        ({"targets": ["head"], "dropout": 0.1}, r"adapter\.targets: an adapter on the head"),
    ],
)
def test_bad_options_are_one_line(options, said):
    model = ModelWrapper(make())
    before = read(model.module)
    with pytest.raises(InputError, match=said) as error:
        model.add_lora(**options)
    assert "\n" not in str(error.value)
    assert read(model.module).keys() == before.keys(), "a refused adapter leaves the model as it was"


def test_a_tied_head_is_no_linear_layer():
    with pytest.raises(InputError, match=r"adapter\.targets: 'head' matches nothing"):
        ModelWrapper(make(tie_embeddings=True)).add_lora(rank=2, targets=["head"])


@pytest.mark.parametrize("parameters, rank", [(135e6, 8), (299e6, 8), (300e6, 16), (8e9, 16), (8.1e9, 32), (70e9, 32)])
def test_default_rank(parameters, rank):
    assert default_rank(int(parameters)) == rank
