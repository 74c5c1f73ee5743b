"""Blocks in stacked runs compute what single blocks compute; a cache computes what a whole pass computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from burnish.models.config import ModelConfig
from burnish.models.decoder import Decoder, find_runs, split_run, stack_blocks, unstack_run
from burnish.models.layers import random_params
from burnish.models.paths import leaves, read

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "max_length": 64,
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 40, (2, 9)))


def make(layers=4, windows=(), **options):
    config = ModelConfig(**SIZES, num_layers=layers, windows=windows, **options)
    return Decoder(config, random_params(0, stddev=0.4))


def run_singly(decoder):
    """The same decoder with every layer a run of its own."""
    graph, state = nnx.split(decoder)
    other = nnx.merge(graph, jax.tree.map(jnp.copy, state))
    blocks = [block for run in decoder.runs for block in unstack_run(run)]
    other.runs = nnx.List(stack_blocks(blocks, keys=list(range(len(blocks)))))
    assert [run.repeats for run in other.runs] == [1] * len(blocks)
    return other


@pytest.mark.parametrize(
    "keys, runs",
    [
        ("", []),
        ("a", [(1, 1)]),
        ("aaaa", [(1, 4)]),
        ("ababab", [(2, 3)]),
        ("aab", [(1, 2), (1, 1)]),
        ("abcabcab", [(3, 2), (1, 1), (1, 1)]),
        ("lllllg" * 4 + "ll", [(6, 4), (1, 2)]),
        ("aabaab", [(3, 2)]),
        ("xaaaa", [(1, 1), (1, 4)]),
    ],
)
def test_find_runs(keys, runs):
    assert find_runs(keys) == runs


@given(st.text(alphabet="ab", max_size=24))
def test_runs_cover_the_sequence_in_order(keys):
    at, rebuilt = 0, ""
    for period, repeats in find_runs(keys):
        rebuilt += keys[at : at + period] * repeats
        at += period * repeats
    assert rebuilt == keys


@pytest.mark.parametrize(
    "layers, windows, runs",
    [
        (4, (), [(1, 4)]),
        (6, (3, None) * 3, [(2, 3)]),
        (5, (3, None, 3, None, 3), [(2, 2), (1, 1)]),
        (4, (3, 3, None, None), [(1, 2), (1, 2)]),
    ],
)
def test_stacked_equals_single_layers(layers, windows, runs):
    decoder = make(layers, windows)
    assert [(run.period, run.repeats) for run in decoder.runs] == runs
    with jax.disable_jit():  # layer by layer, where the run below is a compiled scan
        expected = run_singly(decoder)(TOKENS)
    np.testing.assert_allclose(decoder(TOKENS), expected, rtol=1e-5, atol=1e-5)
    if windows:
        with jax.disable_jit():
            assert np.abs(make(layers)(TOKENS) - expected).max() > 1e-2, "the windows do nothing"


def test_names_follow_the_layers_whatever_the_runs():
    decoder = make(6, (3, None) * 3)
    named = {}
    for leaf, variable in leaves(decoder).values():
        for index, name in enumerate(leaf.names):
            named[name] = np.asarray(variable[...][index] if leaf.stacked else variable[...])
    singly = {
        leaf.names[0]: np.asarray(v[...][0] if leaf.stacked else v[...])
        for leaf, v in leaves(run_singly(decoder)).values()
    }
    assert named.keys() == singly.keys() and len(named) == 6 * 9 + 3
    assert all(np.array_equal(named[name], singly[name]) for name in named)
    assert all(leaf.axes[0] == "layers" for leaf, _ in leaves(decoder).values() if leaf.stacked)


def test_splitting_and_joining_gives_back_the_run():
    decoder = make(4)
    before = read(decoder)
    parts = split_run(decoder.runs[0], [0, 0, 1, 1])
    assert [(run.start, run.repeats) for run in parts] == [(0, 2), (2, 2)]
    blocks = [block for run in parts for block in unstack_run(run)]
    decoder.runs = nnx.List(stack_blocks(blocks))
    after = read(decoder)
    assert before.keys() == after.keys() and all(np.array_equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("windows", [(), (3, None, 3, None)])
@pytest.mark.parametrize("steps", [[4, 5], [7, 1, 1]])
def test_the_cache_gives_what_a_whole_pass_gives(windows, steps):
    decoder = make(4, windows)
    extend = nnx.jit(lambda decoder, *args: decoder.extend(*args))
    expected = np.asarray(decoder(TOKENS))
    cache, at, found = decoder.empty_cache(2, 12), 0, []
    for count in steps:
        positions = jnp.broadcast_to(jnp.arange(at, at + count), (2, count))
        part = TOKENS[:, at : at + count]
        hidden, cache = extend(decoder, part, positions, jnp.ones_like(part), cache)
        found.append(np.asarray(decoder.logits(hidden)))
        at += count
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, rtol=1e-4, atol=1e-4)
    assert int(cache.next_slot) == 9


def test_the_cache_with_rows_of_different_length():
    """Left padding as a prefill has it: row 1 has three tokens less, and generates from its own positions."""
    decoder = make(2)
    extend = nnx.jit(lambda decoder, *args: decoder.extend(*args))
    expected = np.asarray(decoder(TOKENS[1:, :6]))
    rows = jnp.stack([TOKENS[0, :7], jnp.concatenate([jnp.zeros(3, TOKENS.dtype), TOKENS[1, :4]])])
    positions = jnp.stack([jnp.arange(7), jnp.maximum(jnp.arange(7) - 3, 0)])
    segments = jnp.stack([jnp.ones(7, jnp.int32), (jnp.arange(7) >= 3).astype(jnp.int32)])
    hidden, cache = extend(decoder, rows, positions, segments, decoder.empty_cache(2, 9))
    found = [np.asarray(decoder.logits(hidden))[1, 3:]]
    for step in range(2):
        token = jnp.stack([TOKENS[0, 7 + step], TOKENS[1, 4 + step]])[:, None]
        position = jnp.asarray([[7 + step], [4 + step]])
        hidden, cache = extend(decoder, token, position, jnp.ones_like(token), cache)
        found.append(np.asarray(decoder.logits(hidden))[1])
    np.testing.assert_allclose(np.concatenate(found), expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", ["selective", "offload", "block"])
def test_recomputing_blocks_changes_no_gradient(policy):
    decoder = make(3)
    graph, params = nnx.split(decoder)

    def gradient(remat):
        def loss(params):
            model = nnx.merge(graph, params)
            return jnp.sum(model.logits(model.hidden(TOKENS, remat=remat)) ** 2)

        return jax.tree.leaves(jax.jit(jax.grad(loss))(params))

    for one, two in zip(gradient("none"), gradient(policy), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4 * float(jnp.abs(one).max()))
