"""Properties of the supervised losses that hand values do not show."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.errors import InputError
from burnish.objectives import pairs, sft
from burnish.objectives.sft import SFT
from burnish.ops.head import HeadOutputs

RNG = np.random.default_rng(0)
SHAPE = (4, 6)
VOCAB = 13
LOGITS = RNG.normal(size=(*SHAPE, VOCAB)).astype(np.float32) * 2
TARGETS = RNG.integers(0, VOCAB, SHAPE)
WEIGHTS = np.where(RNG.random(SHAPE) < 0.6, RNG.uniform(0.1, 2.0, SHAPE), 0).astype(np.float32)

OBJECTIVES = [
    SFT(),
    SFT(z_loss=1e-2),
    SFT(label_smoothing=0.1),
    SFT(z_loss=0.5, label_smoothing=0.3),
    SFT(loss="dft"),
    SFT(loss="dft", z_loss=1e-2),
]


def expected_loss(objective: SFT, weights: np.ndarray) -> float:
    """The weighted mean loss in NumPy float64."""
    logits = LOGITS.astype(np.float64)
    lse = np.log(np.exp(logits).sum(-1))
    log_p = logits - lse[..., None]
    target = np.take_along_axis(log_p, TARGETS[..., None], -1)[..., 0]
    loss = -np.exp(target) * target if objective.loss == "dft" else -target
    loss = (1 - objective.label_smoothing) * loss - objective.label_smoothing * log_p.mean(-1)
    loss = loss + objective.z_loss * lse**2
    return (weights * loss).sum() / weights.sum()


def mapped(objective: SFT, logits: jax.Array, rows: slice = slice(None)) -> HeadOutputs:
    """What the head mapper would return for these logits, no more than is asked for."""
    logits = logits[rows]
    log_p = jax.nn.log_softmax(logits)
    found = {
        "log_probs": jnp.take_along_axis(log_p, TARGETS[rows][..., None], -1)[..., 0],
        "logsumexp": jax.nn.logsumexp(logits, axis=-1),
        "mean_logit": logits.mean(-1),
    }
    return HeadOutputs(**{name: found[name] for name in objective.head_outputs})


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_loss_with_fractional_weights(objective: SFT) -> None:
    total, weight = objective(mapped(objective, LOGITS), WEIGHTS)["loss"]
    np.testing.assert_allclose(total / weight, expected_loss(objective, WEIGHTS.astype(np.float64)), rtol=2e-6)
    np.testing.assert_allclose(weight, WEIGHTS.astype(np.float64).sum(), rtol=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_split_into_uneven_micro_batches(objective: SFT) -> None:
    """Sums scaled by the global weight, one gradient a micro-batch, add up to the whole batch's."""
    scale = 1 / objective.denominators(WEIGHTS)["loss"]

    def part(logits: jax.Array, rows: slice) -> jax.Array:
        return scale * objective(mapped(objective, logits, rows), WEIGHTS[rows])["loss"][0]

    whole = jax.value_and_grad(part)(LOGITS, slice(None))
    parts = [jax.value_and_grad(part)(LOGITS, rows) for rows in (slice(0, 1), slice(1, 4))]
    np.testing.assert_allclose(sum(value for value, _ in parts), whole[0], rtol=1e-6)
    np.testing.assert_allclose(sum(gradient for _, gradient in parts), whole[1], rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(whole[0], expected_loss(objective, WEIGHTS.astype(np.float64)), rtol=2e-6)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_no_weight_gives_zero(objective: SFT) -> None:
    nothing = np.zeros_like(WEIGHTS)

    def loss(logits: jax.Array) -> jax.Array:
        return pairs.mean(*objective(mapped(objective, logits), nothing)["loss"])

    value, gradient = jax.value_and_grad(loss)(LOGITS)
    assert value == 0
    assert not np.any(gradient)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_nan_without_weight_is_not_read(objective: SFT) -> None:
    """Even from a head that computed every token, and in the gradient too."""
    weights = jnp.array([1.0, 0.0])
    values = HeadOutputs(*(jnp.array([-1.0, jnp.nan]),) * 4)

    def loss(found: HeadOutputs) -> jax.Array:
        return objective(found, weights)["loss"][0]

    value, gradient = jax.value_and_grad(loss)(values)
    assert np.isfinite(value)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_denominators_are_the_weights_of_the_pairs(objective: SFT) -> None:
    found = objective(mapped(objective, LOGITS), WEIGHTS)
    denominators = objective.denominators(WEIGHTS)
    assert denominators.keys() == found.keys()
    for name, (_, weight) in found.items():
        assert denominators[name] == weight


def test_metrics_beside_the_loss() -> None:
    """nll is plain whatever the loss; z_loss comes without its coefficient."""
    objective = SFT(z_loss=0.5, label_smoothing=0.3)
    found = objective(mapped(objective, LOGITS), WEIGHTS)
    weights = WEIGHTS.astype(np.float64)
    np.testing.assert_allclose(pairs.mean(*found["nll"]), expected_loss(SFT(), weights), rtol=2e-6)
    z_only = expected_loss(SFT(z_loss=1.0), weights) - expected_loss(SFT(), weights)
    np.testing.assert_allclose(pairs.mean(*found["z_loss"]), z_only, rtol=2e-6)


def test_only_what_is_needed_is_asked_of_the_head() -> None:
    assert SFT().head_outputs == SFT(loss="dft").head_outputs == ("log_probs",)
    assert SFT(z_loss=1e-4).head_outputs == ("log_probs", "logsumexp")
    assert SFT(label_smoothing=0.1).head_outputs == ("log_probs", "logsumexp", "mean_logit")


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"loss": "mse"}, "loss"),
        ({"z_loss": -1e-4}, "z_loss"),
        ({"z_loss": float("nan")}, "z_loss"),
        ({"z_loss": float("inf")}, "z_loss"),
        ({"z_loss": "1e-4"}, "z_loss"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"label_smoothing": float("nan")}, "label_smoothing"),
        ({"label_smoothing": True}, "label_smoothing"),
        ({"label_smoothing": 0.1, "loss": "dft"}, "label_smoothing"),
    ],
)
def test_bad_settings_are_refused(setting: dict, named: str) -> None:
    with pytest.raises(InputError, match=f"^{named}: "):
        SFT(**setting)


def test_missing_output_and_wrong_shape_are_refused() -> None:
    with pytest.raises(InputError, match="logsumexp"):
        SFT(z_loss=1e-4)(HeadOutputs(log_probs=jnp.zeros(3)), jnp.ones(3))
    with pytest.raises(InputError, match="weights"):
        sft.cross_entropy(jnp.zeros(3), jnp.ones(1))
