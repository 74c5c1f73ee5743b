"""Rotary embeddings: rotations by position, from formulas written out in NumPy float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from burnish.models.config import RopeConfig
from burnish.models.rope import apply_rope, document_lengths, rope_angles, rope_frequencies
from burnish.ops.visibility import TokenIds

DIM = 12


def tokens(positions, segments=None):
    positions = jnp.asarray(positions)
    return TokenIds(positions, jnp.ones_like(positions) if segments is None else jnp.asarray(segments))


def rotated(x, positions, rope):
    return np.asarray(apply_rope(jnp.asarray(x, jnp.float32), rope_angles(rope, DIM, tokens(positions))), np.float64)


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
    cos, _ = rope_angles(rope, DIM, tokens([[0]]))
    np.testing.assert_allclose(cos, expected, rtol=1e-6)


def test_yarn_keeps_fast_dimensions_and_slows_slow_ones():
    plain, _ = rope_frequencies(RopeConfig(10000.0), 128)
    found, _ = rope_frequencies(RopeConfig(10000.0, "yarn", 4.0, 4096), 128)
    ratio = plain / found
    turns = 4096 * plain / (2 * math.pi)
    np.testing.assert_allclose(ratio[turns > 40], 1.0)
    np.testing.assert_allclose(ratio[turns < 0.8], 4.0)
    assert (np.diff(ratio) >= -1e-9).all()


def test_the_features_after_the_rotated_ones_stay():
    rope = RopeConfig(theta=77.0, partial_rotary_factor=0.5)
    x = np.random.default_rng(3).normal(size=(1, 1, 1, DIM))
    found = rotated(x, [[5]], rope)
    np.testing.assert_allclose(found[..., 6:], x[..., 6:], atol=1e-6)
    turned = (x[0, 0, 0, :3] + 1j * x[0, 0, 0, 3:6]) * np.exp(5j * 77.0 ** (-2 * np.arange(3) / 6))
    np.testing.assert_allclose(found[0, 0, 0, :6], np.concatenate([turned.real, turned.imag]), atol=1e-5)


def test_each_document_of_a_row_has_its_own_length():
    """Wherever it stands, and whatever padding there is."""
    row = tokens([[0, 1, 2, 0, 1, 0, 0, 1, 2, 3]], [[1, 1, 1, 2, 2, 0, 900, 900, 900, 900]])
    assert np.asarray(document_lengths(row))[0].tolist() == [3, 3, 3, 2, 2, 1, 4, 4, 4, 4]


def test_dynamic_grows_theta_with_the_document():
    """theta' = theta (f L / L0 - (f - 1)) ** (d / (d - 2)) for a document of L > L0 tokens; theta up to L0."""
    rope = RopeConfig(100.0, "dynamic", 3.0, 4)
    cos, _ = rope_angles(rope, DIM, tokens([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]], [[1] * 4 + [2] * 6]))
    for at, length in ((3, 4), (9, 6)):
        theta = 100.0 * (3.0 * length / 4 - 2.0) ** (DIM / (DIM - 2))
        expected = np.cos((3 if at == 3 else 5) * theta ** (-2 * np.arange(DIM // 2) / DIM))
        np.testing.assert_allclose(np.asarray(cos)[0, 0, at], expected, atol=1e-5)


def test_longrope_has_factors_for_short_and_for_long_documents():
    short, long = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    rope = RopeConfig(100.0, "longrope", 8.0, 4, short_factors=tuple(short), long_factors=tuple(long))
    cos, sin = rope_angles(rope, DIM, tokens([[0, 1, 2, 3, 0, 1, 2, 3, 4]], [[1] * 4 + [2] * 5]))
    temperature = math.sqrt(1 + math.log(8) / math.log(4))
    for at, factors in ((3, short), (7, long)):
        angle = 3 * 100.0 ** (-2 * np.arange(6) / DIM) / np.array(factors)
        np.testing.assert_allclose(np.asarray(cos)[0, 0, at], temperature * np.cos(angle), atol=1e-5)
        np.testing.assert_allclose(np.asarray(sin)[0, 0, at], temperature * np.sin(angle), atol=1e-5)
