"""Optimizers against NumPy in float64, stacked against single; what decay, groups and clipping touch."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from burnish.errors import InputError
from burnish.models.paths import Leaf
from burnish.train.optimizer import Optimizer, clip_by_global_norm, make_optimizer
from burnish.train.optimizer_config import OptimizerConfig

LAYERS, STEPS, LR = 3, 5, 0.01
OPTIMIZERS = ["adamw", "lion", "adafactor", "muon", "sgd"]
FLAT = {"name": "constant", "warmup_steps": 0}

# What one layer holds, and what stands outside the blocks. Adafactor factors the kernel, which is large.
BLOCK = {
    "attn.q_proj.kernel": ((160, 130), ("embed", "heads")),
    "attn.q_proj.bias": ((130,), ("heads",)),
    "attn.q_proj.adapters.0.a": ((160, 4), ("embed", "rank")),
    "attn_norm.scale": ((160,), ("norm",)),
}
REST = {"embed.weight": ((50, 16), ("vocab", "embed")), "norm.scale": ((16,), ("norm",))}

Arrays = dict[str, np.ndarray]


def stacked_leaves() -> dict[str, Leaf]:
    leaves = {name: Leaf(name, (name,), axes, stacked=False) for name, (_, axes) in REST.items()}
    for rest, (_, axes) in BLOCK.items():
        key, names = f"runs.0.blocks.0.{rest}", tuple(f"layers.{i}.{rest}" for i in range(LAYERS))
        leaves[key] = Leaf(key, names, ("layers", *axes), stacked=True)
    return leaves


def single_leaves() -> dict[str, Leaf]:
    parts = {f"layers.{i}.{rest}": axes for i in range(LAYERS) for rest, (_, axes) in BLOCK.items()}
    parts |= {name: axes for name, (_, axes) in REST.items()}
    return {name: Leaf(name, (name,), axes, stacked=False) for name, axes in parts.items()}


def draw(seed: int, growth: float = 1.0) -> Arrays:
    """One array for each of the single leaves; a layer is `growth` times as large as the one below."""
    rng = np.random.default_rng(seed)
    shapes = {f"layers.{i}.{rest}": shape for i in range(LAYERS) for rest, (shape, _) in BLOCK.items()}
    arrays = {name: growth ** int(name.split(".")[1]) * rng.normal(size=shape) for name, shape in shapes.items()}
    return arrays | {name: rng.normal(size=shape) for name, (shape, _) in REST.items()}


def stack(single: Mapping[str, np.ndarray]) -> Arrays:
    return {
        key: np.stack([single[name] for name in leaf.names]) if leaf.stacked else single[key]
        for key, leaf in stacked_leaves().items()
    }


def to_jax(arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    return {key: jnp.asarray(array, jnp.float32) for key, array in arrays.items()}


def build(leaves: dict[str, Leaf], params: Mapping[str, np.ndarray], **options: object) -> Optimizer:
    config = OptimizerConfig(**({"lr": LR, "schedule": FLAT} | options))
    return make_optimizer(config, leaves, {key: params[key].shape for key in leaves}, total_steps=STEPS)


def run(optimizer: Optimizer, params: Mapping[str, np.ndarray], grads: list[Arrays]) -> dict[str, jax.Array]:
    """The parameters after one jitted update a list entry."""
    values = to_jax(params)
    state = jax.jit(optimizer.init)(values)
    update = jax.jit(optimizer.update)
    for grad in grads:
        updates, state, _ = update(to_jax(grad), state, values)
        values = {key: values[key] + updates[key] for key in values}
    assert int(state.step) == len(grads)
    return values


def run_one(
    shape: tuple[int, ...],
    leaf_name: str = "layers.0.mlp.up_proj.kernel",
    axes: tuple = (),
    **options: object,
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """A single parameter trained for STEPS steps: (before, after, gradients), float64."""
    rng = np.random.default_rng(0)
    before, grads = rng.normal(size=shape), [rng.normal(size=shape) for _ in range(STEPS)]
    leaf = Leaf("w", (leaf_name,), axes or (None,) * len(shape), stacked=False)
    optimizer = build({"w": leaf}, {"w": before}, clip_norm=None, **options)
    after = run(optimizer, {"w": before}, [{"w": grad} for grad in grads])["w"]
    return before, np.asarray(after, np.float64), grads


# Stacking


@pytest.mark.parametrize(
    "options",
    [
        {"name": "adamw"},
        {"name": "lion"},
        {"name": "adafactor", "parameter_scale": True},
        {"name": "muon"},
        {"name": "sgd", "momentum": 0.9, "nesterov": True},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_stacked_and_single_layers_get_the_same_update(options: dict):
    options = options | {
        "clip_norm": 500.0,  # about a third of what the gradients have
        "weight_decay": 0.1,
        "schedule": {"name": "cosine", "warmup_steps": 2},
        "groups": [
            {"selectors": ["layers.0", "layers.2.attn_norm"], "lr_scale": 0.5, "weight_decay": 0.3},
            {"selectors": ["layers.1.*.q_proj", "embed"], "lr_scale": 3.0},
        ],
    }
    params, grads = draw(1), [draw(10 + step, growth=3) for step in range(STEPS)]
    single = run(build(single_leaves(), params, **options), params, grads)
    stacked = run(build(stacked_leaves(), stack(params), **options), stack(params), [stack(g) for g in grads])
    for key, expected in stack({name: np.asarray(value) for name, value in single.items()}).items():
        np.testing.assert_allclose(np.asarray(stacked[key]), expected, rtol=1e-6, atol=1e-6)
        assert np.abs(expected - stack(params)[key]).max() > 1e-3


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_a_layer_with_small_gradients_is_not_dwarfed_by_its_stack(name: str):
    """Adafactor's clipping and Muon's normalisation act on each layer alone."""
    leaves = {key: leaf for key, leaf in stacked_leaves().items() if key.endswith("kernel")}
    grads = {key: stack(draw(2, growth=10))[key] for key in leaves}
    zeros = {key: np.zeros_like(grad) for key, grad in grads.items()}
    (after,) = run(build(leaves, zeros, name=name), zeros, [grads]).values()
    sizes = np.sqrt(np.mean(np.square(after), axis=(1, 2)))
    np.testing.assert_allclose(sizes, sizes[0], rtol=0.05)


# Each optimizer against NumPy in float64


def adamw_steps(p: np.ndarray, grads: list[np.ndarray], b1: float, b2: float, eps: float, wd: float) -> np.ndarray:
    m = v = np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        p = p - LR * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + wd * p)
    return p


def test_adamw_is_the_papers():
    before, after, grads = run_one((6, 5), b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.2)
    np.testing.assert_allclose(after, adamw_steps(before, grads, 0.8, 0.9, 1e-3, 0.2), rtol=0, atol=1e-6)


def test_adamw_defaults():
    before, after, grads = run_one((6, 5))
    np.testing.assert_allclose(after, adamw_steps(before, grads, 0.9, 0.999, 1e-8, 0.01), rtol=0, atol=1e-6)


def test_lion_is_the_papers():
    p, after, grads = run_one((6, 5), name="lion", b1=0.7, b2=0.9, weight_decay=0.2)
    m = np.zeros_like(p)
    for g in grads:
        p = p - LR * (np.sign(0.7 * m + 0.3 * g) + 0.2 * p)
        m = 0.9 * m + 0.1 * g
    np.testing.assert_allclose(after, p, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_decays_weights_beside_the_momentum(momentum: float, nesterov: bool):
    p, after, grads = run_one((6, 5), name="sgd", momentum=momentum, nesterov=nesterov, weight_decay=0.2)
    trace = np.zeros_like(p)
    for g in grads:
        trace = momentum * trace + g
        p = p - LR * ((g + momentum * trace if nesterov else trace) + 0.2 * p)
    np.testing.assert_allclose(after, p, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(160, 130), (160, 8), (160,)], ids=str)
@pytest.mark.parametrize("parameter_scale", [False, True])
def test_adafactor_is_the_papers(shape: tuple[int, ...], parameter_scale: bool):
    p, after, grads = run_one(shape, name="adafactor", parameter_scale=parameter_scale, weight_decay=0.2)
    v, row, column = 0.0, 0.0, 0.0
    for t, g in enumerate(grads, start=1):
        b2, square = 1 - t**-0.8, g * g + 1e-30
        if len(shape) == 2 and min(shape) >= 128:  # factored only where it saves something
            row = b2 * row + (1 - b2) * square.mean(axis=1, keepdims=True)
            column = b2 * column + (1 - b2) * square.mean(axis=0, keepdims=True)
            d = g / np.sqrt(row * column / row.mean())
        else:
            v = b2 * v + (1 - b2) * square
            d = g / np.sqrt(v)
        d = d / max(1.0, np.sqrt(np.mean(d * d)))
        p = p - LR * (d * (np.sqrt(np.mean(p * p)) if parameter_scale else 1.0) + 0.2 * p)
    np.testing.assert_allclose(after, p, rtol=0, atol=2e-6)


def newton_schulz(g: np.ndarray) -> np.ndarray:
    """Five quintic steps with Jordan's coefficients."""
    x = g / np.linalg.norm(g)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


@pytest.mark.parametrize(("scale", "factor"), [("shape", np.sqrt(24 / 16)), ("rms", 0.2 * np.sqrt(24))])
def test_muon_orthogonalizes_the_momentum(scale: str, factor: float):
    p, after, grads = run_one((16, 24), name="muon", momentum=0.9, muon_scale=scale, weight_decay=0.2)
    m = np.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        m = 0.9 * m + 0.1 * g
        ahead = 0.9 * m / (1 - 0.9 ** (t + 1)) + 0.1 * g / (1 - 0.9**t)
        p = p - LR * (factor * newton_schulz(ahead) + 0.2 * p)
    np.testing.assert_allclose(after, p, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 8)], ids=str)
def test_muon_steps_have_singular_values_near_one(shape: tuple[int, int]):
    leaf = Leaf("w", ("layers.0.w",), (None, None), stacked=False)
    u, _, vt = np.linalg.svd(np.random.default_rng(0).normal(size=shape), full_matrices=False)
    grad, zeros = (u * np.linspace(0.1, 3, min(shape))) @ vt, np.zeros(shape)
    optimizer = build({"w": leaf}, {"w": zeros}, name="muon", muon_scale="shape", weight_decay=0.0)
    step = -np.asarray(run(optimizer, {"w": zeros}, [{"w": grad}])["w"]) / LR
    inner = u.T @ step @ vt.T / np.sqrt(max(1, shape[1] / shape[0]))  # diagonal: the gradient's own directions
    assert np.diag(inner).min() > 0.65 and np.diag(inner).max() < 1.25
    np.testing.assert_allclose(inner, np.diag(np.diag(inner)), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "axes", "matrix"),
    [
        ("layers.0.attn.q_proj.kernel", (6, 5), ("embed", "heads"), True),
        ("layers.0.attn.q_proj.adapters.0.b", (4, 5), ("rank", "heads"), True),
        ("head.adapters.0.b", (4, 5), ("rank", "vocab"), True),
        ("embed.weight", (6, 5), ("vocab", "embed"), False),
        ("head.kernel", (6, 5), ("embed", "vocab"), False),
        ("embed.embedding", (6, 5), (None, None), False),
        ("norm.scale", (5,), ("norm",), False),
    ],
)
def test_muon_takes_matrices_and_leaves_the_rest_to_adamw(name: str, shape: tuple, axes: tuple, matrix: bool):
    options = {"name": "muon", "b2": 0.999, "weight_decay": 0.0, "muon_scale": "shape"}
    before, after, grads = run_one(shape, name, axes, **options)
    gap = np.abs(after - adamw_steps(before, grads, 0.9, 0.999, 1e-8, 0.0)).max()
    assert gap > 1e-3 if matrix else gap < 1e-6


def test_muon_orthogonalizes_each_expert_alone():
    experts = np.random.default_rng(0).normal(size=(3, 8, 6)) * np.array([1, 10, 100])[:, None, None]
    name, options = "layers.0.experts.kernel", {"name": "muon", "weight_decay": 0.0}
    together = Leaf(name, (name,), ("expert", "embed", "mlp"), stacked=False)
    zeros = np.zeros_like(experts)
    got = run(build({name: together}, {name: zeros}, **options), {name: zeros}, [{name: experts}])[name]
    for index, grad in enumerate(experts):
        alone = Leaf(name, (name,), ("embed", "mlp"), stacked=False)
        one = run(build({name: alone}, {name: zeros[0]}, **options), {name: zeros[0]}, [{name: grad}])[name]
        np.testing.assert_allclose(got[index], one, atol=1e-6)


# Decay, groups


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decay_leaves_norms_and_biases_alone_and_takes_the_rest(name: str):
    """Without gradients, decay is all there is: p (1 - lr wd) at each step."""
    params = stack(draw(1))
    zero = {key: np.zeros_like(value) for key, value in params.items()}
    after = run(build(stacked_leaves(), params, name=name, weight_decay=0.5), params, [zero, zero])
    for key, value in params.items():
        factor = 1.0 if key.endswith(("scale", "bias")) else (1 - LR * 0.5) ** 2
        np.testing.assert_allclose(after[key], factor * value, rtol=1e-6, err_msg=key)


def test_no_decay_may_name_single_layers_of_a_stack():
    key = "runs.0.blocks.0.attn.q_proj.kernel"
    params = stack(draw(1))
    zero = {name: np.zeros_like(value) for name, value in params.items()}
    no_decay = ["*norm*", "scale", "bias", "layers.1", "embed"]
    after = run(build(stacked_leaves(), params, weight_decay=0.5, no_decay=no_decay), params, [zero])
    kept = np.array([1 - LR * 0.5, 1.0, 1 - LR * 0.5])[:, None, None]
    np.testing.assert_allclose(after[key], kept * params[key], rtol=1e-6)
    np.testing.assert_allclose(after["embed.weight"], params["embed.weight"].astype(np.float32), rtol=0)


def test_groups_scale_rate_and_decay_of_single_layers():
    key, norm = "runs.0.blocks.0.attn.q_proj.kernel", "runs.0.blocks.0.attn_norm.scale"
    params, grads = stack(draw(1)), stack(draw(2))
    groups = [
        {"selectors": ["layers.0.*"], "lr_scale": 0.5, "weight_decay": 2.0},
        {"selectors": ["layers.2"], "lr_scale": 0.0},
    ]
    options = {"name": "sgd", "weight_decay": 1.0, "clip_norm": None, "groups": groups}
    after = run(build(stacked_leaves(), params, **options), params, [grads])
    scale, decay = np.array([0.5, 1.0, 0.0]), np.array([2.0, 1.0, 1.0])
    expected = params[key] - LR * scale[:, None, None] * (grads[key] + decay[:, None, None] * params[key])
    np.testing.assert_allclose(after[key], expected, rtol=0, atol=1e-6)
    # no_decay stands above a group's weight_decay
    np.testing.assert_allclose(after[norm], params[norm] - LR * scale[:, None] * grads[norm], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"groups": [{"selectors": ["q_porj"]}]}, r"groups\.0\.selectors: 'q_porj' .* q_proj"),
        ({"groups": [{"selectors": ["layers.7.*"]}]}, r"groups\.0\.selectors: 'layers\.7\.\*'"),
        ({"groups": [{"selectors": ["q_proj"]}, {"selectors": ["layers.0"]}]}, "is in groups 0 and 1"),
        ({"no_decay": ["*norm*", "embd"]}, r"no_decay: 'embd' .* embed"),
        ({"lr": None}, "optimizer.lr: not set"),
    ],
)
def test_selectors_that_cannot_be_meant_are_refused(options: dict, said: str):
    with pytest.raises(InputError, match=said) as caught:
        build(stacked_leaves(), stack(draw(1)), **options)
    assert "\n" not in str(caught.value)


def test_default_no_decay_need_not_match():
    """An adapter-only run trains no norm and no bias."""
    leaf = Leaf("a", ("layers.0.attn.q_proj.adapters.0.a",), (None, "rank"), stacked=False)
    build({"a": leaf}, {"a": np.zeros((4, 2))})


# Clipping, dtype, learning rate


@pytest.mark.parametrize("max_norm", [0.5, 1e6, None])
def test_clip_by_global_norm(max_norm: float | None):
    grads = draw(3)
    true_norm = np.sqrt(sum(np.sum(grad**2) for grad in grads.values()))
    factor = 1.0 if max_norm is None else min(1.0, max_norm / true_norm)
    for given in (grads, stack(grads)):
        clipped, norm = jax.jit(lambda g: clip_by_global_norm(g, max_norm))(to_jax(given))
        assert float(norm) == pytest.approx(true_norm, rel=1e-5)
        for key, grad in given.items():
            np.testing.assert_allclose(clipped[key], factor * grad, rtol=2e-6)


def test_clipping_no_gradient_gives_no_gradient():
    clipped, norm = clip_by_global_norm({"w": jnp.zeros((2, 2))}, 1.0)
    assert float(norm) == 0.0
    np.testing.assert_array_equal(clipped["w"], np.zeros((2, 2)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("max_norm", [1.0, None])
def test_clipping_hides_nothing_that_is_not_finite(bad: float, max_norm: float | None):
    clipped, norm = clip_by_global_norm({"a": jnp.array([1.0, bad]), "b": jnp.array([2.0])}, max_norm)
    assert not np.isfinite(norm)
    np.testing.assert_array_equal(clipped["a"], [1.0, bad])
    np.testing.assert_array_equal(clipped["b"], [2.0])


def test_update_clips_once_over_everything_and_reports_norm_and_rate():
    params, grads = stack(draw(1)), stack(draw(2))
    options = {"name": "sgd", "weight_decay": 0.0, "clip_norm": 0.5}
    schedule = {"name": "linear", "warmup_steps": 2, "end_lr": 0.0}
    optimizer = build(stacked_leaves(), params, **options, schedule=schedule)
    state, update = optimizer.init(to_jax(params)), jax.jit(optimizer.update)
    norm = np.sqrt(sum(np.sum(grad**2) for grad in grads.values()))
    for lr in LR * np.array([0.5, 1.0, 2 / 3, 1 / 3, 0.0]):
        updates, state, metrics = update(to_jax(grads), state, to_jax(params))
        assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
        assert float(metrics["lr"]) == pytest.approx(lr, rel=1e-5, abs=1e-9)
        for key, grad in grads.items():
            np.testing.assert_allclose(updates[key], -lr * 0.5 / norm * grad, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_and_updates_are_float32_for_bfloat16_parameters(name: str):
    options = {"momentum": 0.9} if name == "sgd" else {}
    params = {key: value.astype(jnp.bfloat16) for key, value in to_jax(stack(draw(1))).items()}
    optimizer = build(stacked_leaves(), params, name=name, **options)
    state = jax.eval_shape(optimizer.init, params)
    updates, after, _ = jax.eval_shape(optimizer.update, params, state, params)
    floating = [x for x in jax.tree.leaves((updates, state, after)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert floating and all(x.dtype == jnp.float32 for x in floating)


def test_small_updates_add_up_in_a_float32_master():
    """200 steps of 1e-5 from 1.0: each is far below the spacing of bfloat16, which would never move."""
    leaf = Leaf("w", ("layers.0.w",), (None,), stacked=False)
    start = {"w": jnp.ones(4, jnp.bfloat16)}
    optimizer = build({"w": leaf}, start, name="lion", lr=1e-5, weight_decay=0.0)
    master, narrow, state = {"w": start["w"].astype(jnp.float32)}, start["w"], optimizer.init(start)
    update = jax.jit(optimizer.update)
    for _ in range(200):
        updates, state, _ = update({"w": master["w"].astype(jnp.bfloat16)}, state, start)
        master = {"w": master["w"] + updates["w"]}
        narrow = narrow + updates["w"].astype(jnp.bfloat16)
    np.testing.assert_allclose(master["w"], np.full(4, 1 - 200e-5), atol=1e-5)
    np.testing.assert_array_equal(narrow.astype(jnp.float32), np.ones(4))  # the fault, were it trained


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_may_be_donated(name: str):
    params = to_jax(stack(draw(1)))
    optimizer = build(stacked_leaves(), params, name=name)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update, donate_argnums=1)
    for _ in range(2):
        _, state, _ = update(params, state, params)
    assert int(state.step) == 2


# The config


@pytest.mark.parametrize(
    ("options", "key", "said"),
    [
        ({"name": "admw"}, "name", "'admw' is no optimizer; did you mean 'adamw'? known: adamw, lion"),
        ({"lr": float("nan")}, "lr", "finite"),
        ({"lr": -1e-4}, "lr", "greater than 0"),
        ({"lr": 0}, "lr", "greater than 0"),
        ({"weight_decay": -0.1}, "weight_decay", "greater than or equal to 0"),
        ({"clip_norm": 0.0}, "clip_norm", "greater than 0"),
        ({"b1": 1.0}, "b1", "less than 1"),
        ({"name": "sgd", "b1": 0.9}, "b1", "sgd does not take it"),
        ({"name": "adamw", "momentum": 0.9}, "momentum", "adamw does not take it"),
        ({"name": "sgd", "nesterov": True}, "nesterov", "needs momentum"),
        ({"beta1": 0.9}, "beta1", "not permitted"),
    ],
)
def test_bad_options_are_refused_where_they_stand(options: dict, key: str, said: str):
    with pytest.raises(ValidationError) as caught:
        OptimizerConfig(**options)
    (error,) = caught.value.errors()
    assert error["loc"] == (key,)
    assert said in error["msg"] and "\n" not in error["msg"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resolved_config_reads_back_as_itself(name: str):
    config = OptimizerConfig.model_validate({"name": name, "lr": 1e-4, "schedule": "wsd"})
    assert OptimizerConfig.model_validate(config.model_dump()) == config
    assert config.schedule.decay_ratio == 0.1


def test_a_bare_word_is_a_name():
    assert OptimizerConfig.model_validate("lion") == OptimizerConfig(name="lion", b1=0.9, b2=0.99)
