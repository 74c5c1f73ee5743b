"""NEFTune noise: its size, what it is drawn from, and when there is none."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from burnish.errors import InputError
from burnish.models.config import ModelConfig
from burnish.models.decoder import Decoder
from burnish.models.language_model import token_outputs
from burnish.models.layers import DropoutKeys, random_params
from burnish.models.neftune import segment_lengths
from burnish.models.parts import choose_trained, take_apart

WIDTH, ALPHA = 32, 5.0
CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=WIDTH,
    intermediate_size=24,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_length=64,
)
KEY = jax.random.key(7)
DOCUMENTS = {11: [3, 1, 4, 1, 5, 9, 2], 12: [6, 5, 3], 13: [5]}


@pytest.fixture(scope="module")
def decoder():
    return Decoder(CONFIG, random_params(0, stddev=0.3))


def rows(*layout, length=16):
    """A batch of rows; each is a list of example ids, with 0 for one slot of padding."""
    names = ("tokens", "segment_ids", "positions", "example_ids", "targets", "weights")
    batch = {name: np.zeros((len(layout), length), np.int32) for name in names}
    for row, entries in enumerate(layout):
        at = 0
        for segment, example in enumerate(entries, start=1):
            text = DOCUMENTS.get(example, [0])
            span = slice(at, at := at + len(text))
            if example:
                batch["tokens"][row, span] = batch["targets"][row, span] = text
                batch["segment_ids"][row, span] = segment
                batch["positions"][row, span] = np.arange(len(text))
                batch["example_ids"][row, span] = example
                batch["weights"][row, span] = 1
    return {name: jnp.asarray(array) for name, array in batch.items()}


def noise(decoder, batch, alpha=ALPHA, key=KEY):
    """What is added to the embedded tokens: the hidden states of a decoder that has nothing after them."""
    graph, state = nnx.split(decoder)
    bare = nnx.merge(graph, state)
    bare.runs, bare.norm = nnx.List([]), nnx.data(lambda x: x)
    keys = DropoutKeys(key, batch["example_ids"], batch["positions"])
    known = {name: batch[name] for name in ("positions", "segment_ids")}
    noisy = bare.hidden(batch["tokens"], **known, dropout=keys, neftune_alpha=alpha)
    return np.asarray(noisy - bare.hidden(batch["tokens"], **known), np.float64)


def log_probs(decoder, batch, alpha=None, key=None):
    """Of the batch's targets; alpha None calls as one does who knows of no noise."""
    graph, state = nnx.split(decoder)
    options = {} if alpha is None else {"neftune_alpha": alpha}
    return np.asarray(_log_probs(graph, state, batch, key, **options))


@functools.partial(jax.jit, static_argnames=("graph", "neftune_alpha"))
def _log_probs(graph, state, batch, key, **options):
    return token_outputs(nnx.merge(graph, state), batch, ["log_probs"], dropout_key=key, **options).log_probs


def by_example(batch, values):
    """{example: [its tokens, ...]} of [rows, length, ...]."""
    ids = np.asarray(batch["example_ids"])
    return {example: values[ids == example] for example in DOCUMENTS if (ids == example).any()}


def test_bound_and_spread_follow_the_document_s_own_length(decoder):
    found = by_example(batch := rows([11, 12, 13]), noise(decoder, batch))
    for example, text in DOCUMENTS.items():
        bound = ALPHA / np.sqrt(len(text) * WIDTH)
        assert np.abs(found[example]).max() <= bound * 1.0001
        assert np.abs(found[example]).max() > 0.85 * bound
    drawn = np.concatenate([found[example].ravel() * np.sqrt(len(DOCUMENTS[example]) * WIDTH) for example in found])
    # uniform(-a, a) has variance a²/3, and kurtosis 9/5; 352 numbers.
    assert np.var(drawn) == pytest.approx(ALPHA**2 / 3, rel=0.15)
    assert abs(drawn.mean()) < 0.1 * ALPHA
    assert np.mean(drawn**4) / np.var(drawn) ** 2 == pytest.approx(1.8, rel=0.15)


def test_padding_has_none(decoder):
    batch = rows([0, 0, 12, 0, 13])
    assert not noise(decoder, batch)[np.asarray(batch["segment_ids"]) == 0].any()


def test_packed_padded_and_left_padded_are_the_same(decoder):
    # All of one shape, so that they share what is compiled.
    layouts = {
        "packed": rows([11, 12, 13], [], []),
        "packed otherwise": rows([13, 0, 11], [], [12]),
        "padded": rows([11], [12], [13]),
        "left": rows([0, 0, 11], [0, 0, 0, 0, 0, 12], [0, 0, 13]),
    }
    first = by_example(layouts["packed"], noise(decoder, layouts["packed"]))
    outputs = by_example(layouts["packed"], log_probs(decoder, layouts["packed"], ALPHA, KEY))
    for batch in layouts.values():
        again = by_example(batch, noise(decoder, batch))
        scored = by_example(batch, log_probs(decoder, batch, ALPHA, KEY))
        for example in DOCUMENTS:
            np.testing.assert_allclose(again[example], first[example], rtol=0, atol=1e-6)
            np.testing.assert_allclose(scored[example], outputs[example], rtol=1e-4, atol=1e-5)


def test_every_token_example_and_step_has_its_own(decoder):
    batch = rows([11, 12, 13])
    flat = noise(decoder, batch)[np.asarray(batch["segment_ids"]) != 0]
    correlation = np.corrcoef(flat) - np.eye(len(flat))
    assert np.abs(correlation).max() < 0.8
    other = noise(decoder, batch, key=jax.random.fold_in(KEY, 1))
    assert np.abs(other - noise(decoder, batch)).max() > 0.1


def test_it_moves_the_outputs_of_training_alone(decoder):
    batch = rows([11, 12], [13], [])
    plain = log_probs(decoder, batch)
    assert np.array_equal(log_probs(decoder, batch, 0.0, KEY), plain)
    assert np.array_equal(log_probs(decoder, batch, ALPHA), plain), "no key: evaluation"
    assert np.abs(log_probs(decoder, batch, ALPHA, KEY) - plain).max() > 0.05


def test_no_alpha_costs_nothing(decoder):
    batch = rows([11])
    parts, params, frozen = take_apart(decoder, choose_trained(decoder, []))

    def program(alpha):
        return str(
            jax.make_jaxpr(
                lambda params: (
                    token_outputs(
                        parts.merge(params, frozen), batch, ["log_probs"], dropout_key=KEY, neftune_alpha=alpha
                    ).log_probs
                )
            )(params)
        )

    assert "random_bits" not in program(0.0) and "threefry" not in program(0.0)
    assert "random_bits" in program(ALPHA) or "threefry" in program(ALPHA)


def test_gradients_reach_the_embedding_as_they_do_without(decoder):
    """After the embedding comes something linear here, so noise must not change the gradient at all."""
    batch = rows([11, 12])
    readout = jnp.asarray(np.random.default_rng(0).normal(size=(1, 16, WIDTH)), jnp.float32)
    graph, state = nnx.split(decoder)
    bare = nnx.merge(graph, state)
    bare.runs, bare.norm = nnx.List([]), nnx.data(lambda x: x)
    parts, params, frozen = take_apart(bare, choose_trained(bare, ["embed"]))
    keys = DropoutKeys(KEY, batch["example_ids"], batch["positions"])

    def loss(params, alpha):
        hidden = parts.merge(params, frozen).hidden(
            batch["tokens"], batch["positions"], batch["segment_ids"], dropout=keys, neftune_alpha=alpha
        )
        return jnp.sum(hidden * readout)

    [plain], [noisy] = (jax.grad(loss)(params, alpha).values() for alpha in (0.0, ALPHA))
    assert np.abs(plain).max() > 0.1 and np.array_equal(plain, noisy)


def test_bfloat16_stays_bfloat16():
    narrow = Decoder(CONFIG, random_params(0, jnp.bfloat16), dtype=jnp.bfloat16)
    batch = rows([12])
    keys = DropoutKeys(KEY, batch["example_ids"], batch["positions"])
    assert narrow.hidden(batch["tokens"], dropout=keys, neftune_alpha=ALPHA).dtype == jnp.bfloat16


def test_lengths_count_a_row_s_segment_whatever_its_number():
    ids = jnp.asarray([[7, 7, 2, 2, 2, 0], [0, 0, 1, 900, 1, 1]])
    assert segment_lengths(ids).tolist() == [[2, 2, 3, 3, 3, 1], [2, 2, 3, 1, 3, 3]]


def test_a_module_that_cannot_says_so():
    class Foreign(nnx.Module):
        def __init__(self):
            self.table = nnx.Param(jnp.ones((40, 40)))

        def __call__(self, tokens):
            return self.table[...][tokens]

    batch = rows([12])
    with pytest.raises(InputError, match="neftune_alpha: Foreign takes no noise"):
        token_outputs(Foreign(), batch, ["log_probs"], dropout_key=KEY, neftune_alpha=ALPHA)
    token_outputs(Foreign(), batch, ["log_probs"], dropout_key=KEY)
