"""Rotary embeddings: rotations by position, from formulas written out in NumPy float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from burnish.models.config import RopeConfig
from burnish.models.rope import apply_rope, rope_angles, rope_frequencies

DIM = 12


def rotated(x, positions, rope):
    cos, sin = rope_angles(rope, DIM, jnp.asarray(positions))
    return np.asarray(apply_rope(jnp.asarray(x, jnp.float32), cos, sin), np.float64)


def test_pairs_turn_by_position_times_frequency():
    rope = RopeConfig(theta=77.0)
    x = np.random.default_rng(0).normal(size=(1, 2, 5, DIM))
    positions = np.array([[0, 1, 2, 7, 40]])
    half = DIM // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    angle = positions[0][:, None] * 77.0 ** (-2 * np.arange(half) / DIM)
    turned = pairs * np.exp(1j * angle)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rotated(x, positions, rope), expected, atol=1e-5)


def test_scores_depend_on_distance_only():
    q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 1, DIM))
    rope = RopeConfig(theta=500.0)
    scores = [np.sum(rotated(q, [[at + 5]], rope) * rotated(k, [[at]], rope)) for at in (0, 3, 50)]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-4)


def test_linear_is_a_stretched_position():
    x = np.random.default_rng(2).normal(size=(1, 1, 1, DIM))
    stretched = rotated(x, [[12]], RopeConfig(theta=500.0, kind="linear", factor=4.0))
    np.testing.assert_allclose(stretched, rotated(x, [[3]], RopeConfig(theta=500.0)), atol=1e-5)


def test_llama3_by_wavelength():
    rope = RopeConfig(500000.0, "llama3", 8.0, 8192, 1.0, 4.0)
    found, scale = rope_frequencies(rope, 64)
    assert scale == 1.0
    for index, plain in enumerate(500000.0 ** (-np.arange(0, 64, 2) / 64)):
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4.0:
            expected = plain
        elif wavelength > 8192 / 1.0:
            expected = plain / 8.0
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * plain / 8.0 + smooth * plain
        assert found[index] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("factor, expected", [(1.0, 1.0), (4.0, 0.1 * math.log(4) + 1)])
def test_yarn_temperature_multiplies_queries_and_keys(factor, expected):
    rope = RopeConfig(500.0, "yarn", factor, 16)
    assert rope_frequencies(rope, DIM)[1] == pytest.approx(expected)
    cos, _ = rope_angles(rope, DIM, jnp.zeros((1, 1), jnp.int32))
    np.testing.assert_allclose(cos, expected, rtol=1e-6)


def test_yarn_keeps_fast_dimensions_and_slows_slow_ones():
    plain, _ = rope_frequencies(RopeConfig(10000.0), 128)
    found, _ = rope_frequencies(RopeConfig(10000.0, "yarn", 4.0, 4096), 128)
    ratio = plain / found
    turns = 4096 * plain / (2 * math.pi)
    np.testing.assert_allclose(ratio[turns > 40], 1.0)
    np.testing.assert_allclose(ratio[turns < 0.8], 4.0)
    assert (np.diff(ratio) >= -1e-9).all()
