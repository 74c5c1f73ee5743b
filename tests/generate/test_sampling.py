"""The sampler's distribution: kept sets against NumPy, draws against softmax, log-probs against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.config import build_config
from burnish.errors import InputError
from burnish.generate.config import SamplingConfig
from burnish.generate.sampling import Rules, draw, kept, key_data, rules_of, seeds_of

RULES = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "top_k and top_p": {"top_k": 8, "top_p": 0.9},
    "all": {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    "hot": {"temperature": 3.0, "top_p": 0.8},
}


def logits_of(rows: int, vocab: int, seed: int = 0, spread: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, (rows, vocab)).astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def expected_kept(logits: np.ndarray, config: SamplingConfig) -> np.ndarray:
    """The definition, one row, with a sort."""
    z = logits.astype(np.float64) / config.temperature
    keep = np.ones(z.shape, bool)
    order = np.argsort(-z)
    if config.top_k is not None:
        keep[order[config.top_k :]] = False
    p = softmax(np.where(keep, z, -np.inf))
    before = np.cumsum(p[order]) - p[order]
    keep[order[before >= config.top_p]] = False
    p = softmax(np.where(keep, z, -np.inf))
    return keep & (p >= config.min_p * p.max())


def scaled(logits: np.ndarray, rules: Rules) -> jax.Array:
    temperature = 1.0 if rules.temperature is None else rules.temperature
    return jnp.asarray(logits - logits.max(-1, keepdims=True)) / temperature


def draws(logits: np.ndarray, config: SamplingConfig, count: int, seed: int = 0) -> np.ndarray:
    """Many draws of one row of logits, each by a request of its own."""
    keys = key_data(seeds_of(seed, count))
    tiled = jnp.broadcast_to(jnp.asarray(logits), (count, logits.shape[-1]))
    return np.asarray(draw(tiled, jnp.asarray(keys), jnp.int32(3), rules_of(config))[0])


@pytest.mark.parametrize("name", RULES)
def test_kept_sets_are_those_of_the_definition(name):
    config = SamplingConfig(**RULES[name])
    logits = logits_of(50, 300)
    found = np.asarray(kept(scaled(logits, rules_of(config)), rules_of(config)))
    expected = np.stack([expected_kept(row, config) for row in logits])
    np.testing.assert_array_equal(found, expected)
    assert expected.sum(-1).min() >= 1
    assert expected.sum(-1).max() < 300


def test_ties_with_the_last_one_kept_are_kept():
    row = np.log(np.array([[0.4, 0.2, 0.2, 0.2]], np.float32))
    for rules in (Rules(top_k=jnp.float32(2)), Rules(top_p=jnp.float32(0.5))):
        assert np.asarray(kept(scaled(row, rules), rules)).all()


@pytest.mark.parametrize("top_k", [1, 7, 8, 1000])
def test_top_k_counts(top_k):
    config = SamplingConfig(top_k=top_k)
    rules = rules_of(config)
    assert np.asarray(kept(scaled(logits_of(4, 8), rules), rules)).sum(-1).tolist() == [min(top_k, 8)] * 4


@pytest.mark.parametrize("name", ["plain", *RULES])
def test_draws_follow_the_distribution(name):
    config = SamplingConfig(**RULES.get(name, {"temperature": 0.8}))
    logits, count = logits_of(1, 300, seed=4)[0], 20_000
    p = softmax(np.where(expected_kept(logits, config), logits.astype(np.float64) / config.temperature, -np.inf))
    seen = np.bincount(draws(logits, config, count), minlength=300)
    assert seen[p == 0].sum() == 0
    # Rare tokens are counted together, so that each cell of the chi-square expects 10 or more.
    common = p * count >= 10
    expected = np.append(p[common], p[~common].sum()) * count
    observed = np.append(seen[common], seen[~common].sum())
    cells = expected > 0
    chi2 = ((observed - expected)[cells] ** 2 / expected[cells]).sum()
    degrees = cells.sum() - 1
    # Mean degrees, variance 2 degrees: five standard deviations.
    assert chi2 < degrees + 5 * np.sqrt(2 * degrees) + 5


def test_a_filtered_token_is_never_drawn_from_a_large_vocabulary():
    config = SamplingConfig(temperature=2.0, top_p=0.5)
    logits = logits_of(1, 5000, seed=1)[0]
    allowed = expected_kept(logits, config)
    assert allowed[draws(logits, config, 4000)].all()


def test_the_last_token_of_a_row_can_be_drawn():
    logits = np.full(129, -50.0, np.float32)
    logits[-1] = 0
    assert (draws(logits, SamplingConfig(), 50) == 128).all()


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, RULES["all"], {"temperature": 0}])
def test_log_probs_are_those_of_the_distribution_drawn_from(settings):
    config = SamplingConfig(**settings)
    logits = logits_of(40, 300)
    keys = jnp.asarray(key_data(seeds_of(1, 40)))
    tokens, log_probs = map(np.asarray, draw(jnp.asarray(logits), keys, jnp.int32(0), rules_of(config)))
    wide = logits.astype(np.float64)
    if config.temperature > 0:
        kept_rows = np.stack([expected_kept(row, config) for row in logits])
        wide = np.where(kept_rows, wide / config.temperature, -np.inf)
    else:
        np.testing.assert_array_equal(tokens, logits.argmax(-1))
    np.testing.assert_allclose(log_probs, np.log(softmax(wide)[np.arange(40), tokens]), atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-3])
def test_low_temperatures_take_the_likeliest_and_are_finite(temperature):
    logits = logits_of(10, 300, spread=30)
    keys = jnp.asarray(key_data(seeds_of(0, 10)))
    rules = rules_of(SamplingConfig(temperature=temperature, top_p=0.9))
    tokens, log_probs = draw(jnp.asarray(logits), keys, jnp.int32(0), rules)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    assert np.isfinite(log_probs).all()


def test_noise_belongs_to_seed_and_step_not_to_the_place():
    row = logits_of(1, 300)
    rules = rules_of(SamplingConfig())

    def drawn(seeds: list[int], step: int) -> list[int]:
        tiled = jnp.asarray(np.repeat(row, len(seeds), 0))
        return np.asarray(draw(tiled, jnp.asarray(key_data(seeds)), jnp.int32(step), rules)[0]).tolist()

    seeds = [3, 2**40 + 3, 2**62, 0]
    together = [drawn(seeds, step) for step in range(20)]
    for i, seed in enumerate(seeds):
        assert [tokens[i] for tokens in together] == [drawn([seed], step)[0] for step in range(20)]
    streams = {tuple(tokens[i] for tokens in together) for i in range(len(seeds))}
    assert len(streams) == len(seeds)
    assert len({tuple(tokens) for tokens in together}) > 15


def test_seeds_of_a_call():
    assert seeds_of(7, 1) == [7]
    assert seeds_of(7, 3)[0] == 7
    assert seeds_of(7, 3) == seeds_of(7, 5)[:3]
    many = [seed for base in range(20) for seed in seeds_of(base, 50)]
    assert len(set(many)) == len(many)
    assert all(SamplingConfig(seed=seed).seed == seed for seed in many)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"temperature": -0.1}, "sampling.temperature"),
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"temperature": float("inf")}, "sampling.temperature"),
        ({"top_k": 0}, "sampling.top_k"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": 1.5}, "sampling.top_p"),
        ({"min_p": -1}, "sampling.min_p"),
        ({"max_tokens": 0}, "sampling.max_tokens"),
        ({"stop": [""]}, "sampling.stop"),
        ({"seed": -1}, "sampling.seed"),
        ({"temprature": 1}, "did you mean .?temperature"),
    ],
)
def test_what_is_out_of_range_is_named_in_one_line(values, key):
    with pytest.raises(InputError, match=key) as error:
        build_config(SamplingConfig, values, place="sampling")
    assert "\n" not in str(error.value)


def test_one_stop_string_is_a_list_of_one():
    assert SamplingConfig(stop="###").stop == ("###",)
