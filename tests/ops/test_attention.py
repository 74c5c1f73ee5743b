"""Attention: both back ends against a loop in NumPy float64, and the properties that training rests on."""

import functools
import itertools
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.errors import InputError
from burnish.ops.attention import attention, choose_backend, dense_attention
from burnish.ops.blockwise import _Config, _cut_all, _default_rows, blockwise_attention
from burnish.ops.visibility import TokenIds, visible, visible_blocks

HEADS, KV_HEADS, HEAD_DIM, LENGTH = 4, 2, 8, 40
OPTIONS = [(None, None), (7, None), (None, 1.5), (7, 1.5)]  # window, softcap
BACKENDS = ["dense", "blockwise"]


def attend(q, k, v, q_ids, kv_ids, backend, window=None, softcap=None):
    """Either back end, blockwise with blocks so small that a row of 40 has three."""
    options = {"scale": 0.5, "window": window, "softcap": softcap}
    if backend == "blockwise":
        return blockwise_attention(q, k, v, q_ids, kv_ids, **options, q_block=16, kv_block=16)
    return dense_attention(q, k, v, q_ids, kv_ids, **options)


attend_alone = jax.jit(attend, static_argnums=5)


def attend_and_return(q, k, v, q_ids, kv_ids, d_out, backend, window=None, softcap=None):
    """The output, and the gradients in q, k, v."""
    return _compiled(backend, window, softcap)(q, k, v, q_ids, kv_ids, d_out)


@functools.cache
def _compiled(backend, window, softcap):
    """Compiling is what these tests cost, so they share shapes and this."""

    @jax.jit
    def run(q, k, v, q_ids, kv_ids, d_out):
        def forward(q, k, v):
            return attend(q, k, v, q_ids, kv_ids, backend, window, softcap)

        out, pull_back = jax.vjp(forward, q, k, v)
        return out, pull_back(d_out)

    return run


def oracle(q, k, v, q_ids, kv_ids, window=None, softcap=None):
    """The definition, one query at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    group = q.shape[1] // k.shape[1]
    for b, h, i in np.ndindex(q.shape[:3]):
        weights, values = [], []
        for j in range(k.shape[2]):
            segment, distance = kv_ids.segments[b, j], q_ids.positions[b, i] - kv_ids.positions[b, j]
            if segment == 0 or segment not in (q_ids.segments[b, i], q_ids.parents[b, i]):
                continue
            if distance < 0 or (window is not None and distance >= window):
                continue
            score = 0.5 * (q[b, h, i] @ k[b, h // group, j])
            weights.append(np.exp(score if softcap is None else softcap * np.tanh(score / softcap)))
            values.append(v[b, h // group, j])
        if weights:
            out[b, h, i] = np.array(weights) @ np.array(values) / sum(weights)
    return out


def ids_of(rows, length=LENGTH):
    """Rows of (segment, first position, tokens, parent), in the order they lie; the rest is padding."""
    positions, segments, parents = (np.zeros((len(rows), length), np.int32) for _ in range(3))
    for b, row in enumerate(rows):
        at = 0
        for segment, first, tokens, parent in row:
            here = slice(at, at + tokens)
            if segment:
                positions[b, here] = first + np.arange(tokens)
                segments[b, here], parents[b, here] = segment, parent
            at += tokens
    return TokenIds(positions, segments, parents)


PACKED = ids_of([[(1, 0, 9, 0), (2, 0, 14, 0), (3, 0, 11, 0)], [(1, 0, 25, 0), (2, 0, 15, 0)], [(5, 0, 40, 0)]])
PADDED = ids_of([[(1, 0, 23, 0)], [(0, 0, 17, 0), (1, 0, 23, 0)], []])  # right, left, nothing but padding
# Completions 2 and 3 of prompt 1 go on from position 8. In row 1 others lie between prompt 4 and its second.
FAMILY = ids_of(
    [
        [(1, 0, 8, 0), (2, 8, 9, 1), (3, 8, 6, 1), (4, 0, 5, 0), (5, 5, 7, 4)],
        [(4, 0, 6, 0), (7, 6, 4, 4), (2, 0, 12, 0), (9, 6, 11, 4)],
        [(2, 0, 20, 0), (3, 20, 20, 2)],
    ]
)
_ORDER = np.random.default_rng(3).permutation(LENGTH)
SHUFFLED = TokenIds(*(x[:, _ORDER] for x in FAMILY))
# A cache with 29 and 12 tokens in its 40 slots, the last five of which are the queries.
CACHE = ids_of([[(1, 0, 20, 0), (2, 20, 9, 1)], [(3, 0, 12, 0)]])
CACHE_QUERIES = ids_of([[(2, 24, 5, 1)], [(3, 7, 5, 0)]], length=5)
LAYOUTS = {
    "packed": (PACKED, PACKED),
    "padded": (PADDED, PADDED),
    "family": (FAMILY, FAMILY),
    "shuffled": (SHUFFLED, SHUFFLED),
    "cache": (CACHE_QUERIES, CACHE),
    "decode": (TokenIds(*(x[:, -1:] for x in CACHE_QUERIES)), CACHE),
}


def keys_only(ids):
    return TokenIds(ids.positions, ids.segments)


def operands(q_ids, kv_ids, seed=0, heads=HEADS, kv_heads=KV_HEADS):
    rng = np.random.default_rng(seed)
    batch = q_ids.positions.shape[0]

    def normal(heads, length):
        return 1.5 * rng.standard_normal((batch, heads, length, HEAD_DIM)).astype(np.float32)

    q_length, kv_length = q_ids.positions.shape[1], kv_ids.positions.shape[1]
    return normal(heads, q_length), normal(kv_heads, kv_length), normal(kv_heads, kv_length)


def close(got, want, tolerance=1e-5):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


CASES = [(layout, *options) for layout in ("packed", "padded", "family", "shuffled") for options in OPTIONS]
CASES += [("cache", 7, 1.5), ("decode", 7, 1.5)]


@pytest.mark.parametrize(("layout", "window", "softcap"), CASES)
def test_both_back_ends_equal_the_definition_and_each_others_gradients(layout, window, softcap):
    q_ids, kv_ids = LAYOUTS[layout]
    q, k, v = operands(q_ids, kv_ids)
    d_out = operands(q_ids, kv_ids, seed=1)[0]
    want = oracle(q, k, v, q_ids, kv_ids, window, softcap)
    assert np.abs(want).max() > 0.5
    dense, blockwise = (
        attend_and_return(q, k, v, q_ids, keys_only(kv_ids), d_out, backend, window, softcap) for backend in BACKENDS
    )
    close(dense[0], want)
    close(blockwise[0], want)
    for got, other in zip(blockwise[1], dense[1], strict=True):
        close(got, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_equal_finite_differences_of_the_definition(backend):
    q_ids, window, softcap, step = FAMILY, 7, 1.5, 1e-5
    inputs = operands(q_ids, q_ids)
    d_out, *_ = operands(q_ids, q_ids, seed=1)
    _, got = attend_and_return(*inputs, q_ids, keys_only(q_ids), d_out, backend, window, softcap)
    for which, direction in enumerate(operands(q_ids, q_ids, seed=2)):
        ends = []
        for sign in (1, -1):
            moved = [np.asarray(x, np.float64) for x in inputs]
            moved[which] = moved[which] + sign * step * direction
            ends.append(np.vdot(oracle(*moved, q_ids, q_ids, window, softcap), d_out))
        slope = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(np.vdot(got[which], direction), slope, rtol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_key_head_serves_its_group(backend, heads, kv_heads):
    q, k, v = operands(PACKED, PACKED, heads=heads, kv_heads=kv_heads)
    got = attend_alone(q, k, v, PACKED, keys_only(PACKED), backend)
    close(got, oracle(q, k, v, PACKED, PACKED))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_is_a_distance_in_the_text_not_in_the_row(backend):
    """In FAMILY, completion 3 lies nine columns further from its prompt than 2 does, at equal positions."""
    q, k, v = operands(FAMILY, FAMILY)
    for x in (q, k, v):  # completion 3 is made the twin of the first six tokens of completion 2
        x[0, :, 17:23] = x[0, :, 8:14]
    attend_7 = functools.partial(attend_and_return, d_out=q, backend=backend, window=7)
    out = np.asarray(attend_7(q, k, v, FAMILY, keys_only(FAMILY))[0])
    np.testing.assert_allclose(out[0, :, 17:23], out[0, :, 8:14], atol=1e-6)
    # The first token of a completion, at position 8, sees itself and positions 2 to 7 of the prompt.
    k[0, :, :2], v[0, :, :2] = 9, 9
    again = np.asarray(attend_7(q, k, v, FAMILY, keys_only(FAMILY))[0])
    np.testing.assert_array_equal(again[0, :, 8:], out[0, :, 8:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_bit_of_one_document_reaches_another(backend):
    inputs, changed = operands(PACKED, PACKED), operands(PACKED, PACKED)
    other = np.arange(9, 23)  # document 2 of row 0
    rest = np.setdiff1d(np.arange(LENGTH), other)
    for x, y in zip(changed, operands(PACKED, PACKED, seed=5), strict=True):
        x[0, :, other] = 100 * y[0, :, other]
    d_out = operands(PACKED, PACKED, seed=1)[0]
    d_out[0][:, other] = 0
    (before, gradients), (after, _) = (
        attend_and_return(*x, PACKED, keys_only(PACKED), d_out, backend) for x in (inputs, changed)
    )
    before, after = np.asarray(before), np.asarray(after)
    np.testing.assert_array_equal(before[0][:, rest], after[0][:, rest])
    np.testing.assert_array_equal(before[1:], after[1:])
    assert np.abs(before[0][:, other] - after[0][:, other]).max() > 1
    for gradient in gradients:
        assert not np.asarray(gradient)[0][:, other].any()
        assert np.asarray(gradient)[0][:, rest].any()


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_gives_zeros_and_zero_gradients(backend, softcap):
    q, k, v = operands(PADDED, PADDED)
    d_out = operands(PADDED, PADDED, seed=1)[0]
    out, gradients = attend_and_return(q, k, v, PADDED, keys_only(PADDED), d_out, backend, softcap=softcap)
    for x in (out, *gradients):
        x = np.asarray(x).transpose(0, 2, 1, 3)
        assert np.isfinite(x).all()
        assert not x[PADDED.segments == 0].any()
        assert x[PADDED.segments == 1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_left_padding_right_padding_and_none_agree(backend):
    q, k, v = operands(PADDED, PADDED)
    for x in (q, k, v):
        x[1, :, 17:] = x[0, :, :23]
    out = np.asarray(attend_alone(q, k, v, PADDED, keys_only(PADDED), backend))
    short = TokenIds(*(x[:1, :23] for x in PADDED))
    alone = attend_alone(*(x[:1, :, :23] for x in (q, k, v)), short, keys_only(short), backend)
    close(out[1, :, 17:], out[0, :, :23], 1e-6)
    close(alone[0], out[0, :, :23], 1e-6)


@st.composite
def any_ids(draw):
    """Ids in no order at all, parents of no sense, empty rows and repeated positions included."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    segments = draw(st.integers(1, 6))
    furthest = draw(st.sampled_from([1, 5, 40]))
    runs = draw(st.booleans())

    def ids(highest):
        x = rng.integers(0, highest + 1, (3, LENGTH))
        return np.sort(x, axis=1).astype(np.int32) if runs else x.astype(np.int32)

    positions = rng.integers(0, furthest + 1, (3, LENGTH)).astype(np.int32)
    return TokenIds(positions, ids(segments), ids(segments) * rng.integers(0, 2, (3, LENGTH), np.int32))


@settings(max_examples=25, deadline=None)
@given(any_ids(), any_ids(), st.sampled_from([None, 7]))
def test_blockwise_equals_dense_whatever_the_ids(q_ids, kv_ids, window):
    kv_ids = keys_only(kv_ids)
    q, k, v = operands(q_ids, kv_ids)
    d_out = operands(q_ids, kv_ids, seed=1)[0]
    dense, blockwise = (
        jax.tree.leaves(attend_and_return(q, k, v, q_ids, kv_ids, d_out, backend, window)) for backend in BACKENDS
    )
    for got, want in zip(blockwise, dense, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * max(1, np.abs(want).max()))


def blocks_by_count(q_ids, kv_ids, window, block):
    """Which blocks hold a visible pair, by looking at every pair; and what `visible_blocks` says."""
    mask = np.asarray(visible(q_ids, kv_ids, window))
    batch, rows, columns = mask.shape
    exact = mask.reshape(batch, rows // block, block, columns // block, block).any((0, 2, 4))

    def cut(x):
        return x.reshape(batch, -1, block).swapaxes(0, 1)

    guess = visible_blocks(TokenIds(*map(cut, q_ids)), TokenIds(*map(cut, kv_ids[:2])), window)
    return exact, np.asarray(guess)


@settings(max_examples=100, deadline=None)
@given(any_ids(), any_ids(), st.sampled_from([None, 1, 7]))
def test_no_visible_block_is_skipped(q_ids, kv_ids, window):
    exact, guess = blocks_by_count(q_ids, keys_only(kv_ids), window, 4)
    assert not (exact & ~guess).any()


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("ids", [PACKED, PADDED], ids=["packed", "padded"])
def test_in_packed_rows_every_other_block_is_skipped(ids, row, window):
    one = TokenIds(*(x[row : row + 1] for x in ids))
    exact, guess = blocks_by_count(one, keys_only(one), window, 4)
    np.testing.assert_array_equal(guess, exact)


def test_skipped_blocks_are_not_computed():
    """A NaN in a block shows wherever that block enters the arithmetic, masked or not: 0 * NaN is NaN."""

    def spread(ids, poisoned, backend, window=None):
        """Which tokens of `out`, `dq` and `dk` are finite when block `poisoned` of the keys is NaN."""
        q, k, v = operands(ids, ids)
        k[:, :, poisoned], v[:, :, poisoned] = np.nan, np.nan
        out, (dq, dk, _) = attend_and_return(q, k, v, ids, keys_only(ids), q, backend, window)
        return [np.isfinite(x).all((0, 1, 3)) for x in (out, dq, dk)]

    first, middle, last = slice(0, 16), slice(16, 32), slice(32, 40)
    column = np.arange(LENGTH)
    two = ids_of([[(1, 0, 16, 0), (2, 0, 24, 0)]] * 3)
    out, dq, dk = spread(two, last, "blockwise")  # seen by its own queries alone, which also see the middle
    np.testing.assert_array_equal(out, column < 32)
    np.testing.assert_array_equal(dq, column < 32)
    np.testing.assert_array_equal(dk, column < 16)
    out, dq, dk = spread(two, first, "blockwise")  # another document
    np.testing.assert_array_equal(out, column >= 16)
    np.testing.assert_array_equal(dk, column >= 16)
    sparse = two._replace(positions=20 * column[None].repeat(3, 0).astype(np.int32), segments=two.segments**0)
    out, dq, dk = spread(sparse, middle, "blockwise", window=7)  # out of every other block's window
    np.testing.assert_array_equal(out, (column < 16) | (column >= 32))
    assert not spread(two, last, "dense")[0].any()  # the probe does show what is merely masked


def test_memory_grows_with_the_length_not_its_square():
    heads, kv_heads = 4, 2

    def temporaries(length):
        shapes = [jax.ShapeDtypeStruct((1, n, length, HEAD_DIM), jnp.float32) for n in (heads, kv_heads, kv_heads)]
        ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

        def loss(q, k, v, positions, segments):
            return attention(q, k, v, q_positions=positions, q_segment_ids=segments, backend="blockwise").sum()

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*shapes, ids, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2048) < 2.5 * temporaries(1024)
    assert temporaries(2048) < 0.1 * 4 * heads * 2048**2


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_in_and_out_with_the_softmax_in_float32(backend):
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in operands(FAMILY, FAMILY))
    ids = (FAMILY, keys_only(FAMILY))
    d_out, *_ = operands(FAMILY, FAMILY, seed=1)
    out, got = attend_and_return(q, k, v, *ids, jnp.asarray(d_out, jnp.bfloat16), backend)
    assert {x.dtype for x in (out, *got)} == {jnp.dtype(jnp.bfloat16)}
    close(out, oracle(q, k, v, FAMILY, FAMILY), 1e-2)
    _, want = attend_and_return(*(np.asarray(x, np.float32) for x in (q, k, v)), *ids, d_out, "dense")
    for x, y in zip(got, want, strict=True):
        close(x, y, 2e-2)
    # 300 equal weights: a bfloat16 sum of ones stops at 256.
    ids = TokenIds(np.arange(300, dtype=np.int32)[None], np.ones((1, 300), np.int32))
    ones = jnp.ones((1, 1, 300, HEAD_DIM), jnp.bfloat16)
    out = attend_alone(0 * ones, ones, ones, ids, ids, backend)
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_differentiates_inside_scan_and_checkpoint_and_maps(backend):
    q, k, v = operands(FAMILY, FAMILY)
    kv_ids = keys_only(FAMILY)

    def layer(x, gain):
        return x + attend(x * gain, k, v, FAMILY, kv_ids, backend), None

    def scanned(x, gains):
        return jax.lax.scan(jax.checkpoint(layer), x, gains)[0].sum()

    def unrolled(x, gains):
        for gain in gains:
            x = x + attend(x * gain, k, v, FAMILY, kv_ids, "dense")
        return x.sum()

    gains = jnp.array([0.5, 1.0, -0.7])
    for got, want in zip(
        jax.jit(jax.grad(scanned, (0, 1)))(q, gains),
        jax.jit(jax.grad(unrolled, (0, 1)))(q, gains),
        strict=True,
    ):
        close(got, want)
    many = np.stack([q, 2 * q])
    mapped = jax.jit(jax.vmap(lambda q: attend(q, k, v, FAMILY, kv_ids, backend)))(many)
    close(mapped[1], oracle(many[1], k, v, FAMILY, FAMILY))


def test_rows_sharded_over_devices_stay_where_they_are():
    """Eight CPU devices, in a process of their own: same values, and nothing but a few flags crosses over."""
    script = """
        import re
        import jax
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        import jax.numpy as jnp, numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from burnish.ops import blockwise
        from burnish.ops.attention import attention

        blockwise._CACHE = 0  # so that of the two rows of a device one goes at a time
        rng = np.random.default_rng(0)
        q, d_out = rng.standard_normal((2, 16, 4, 300, 8), np.float32)
        k, v = rng.standard_normal((2, 16, 2, 300, 8), np.float32)
        segments = np.sort(rng.integers(0, 5, (16, 300)), axis=1).astype(np.int32)
        positions = np.arange(300, dtype=np.int32)[None].repeat(16, 0)

        def step(backend, groups=1):
            def loss(q, k, v, positions, segments, d_out):
                ids = {"q_positions": positions, "q_segment_ids": segments}
                return jnp.vdot(attention(q, k, v, **ids, backend=backend, groups=groups), d_out)

            return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

        inputs = (q, k, v, positions, segments, d_out)
        want = step("dense")(*inputs)
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        inputs = jax.device_put(inputs, NamedSharding(mesh, P("data")))
        compiled = step("blockwise", groups=8).lower(*inputs).compile()
        got = compiled(*inputs)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * float(np.abs(y).max()))
        assert not got[1][0].sharding.is_fully_replicated
        text = compiled.as_text()
        for kind in ("all-gather", "all-to-all", "collective-permute"):
            assert kind not in text, kind
        crossing = re.findall(r"= (.*?) all-reduce", text)
        arrays = set(re.findall(r"[a-z0-9]+[[].*?[]]", " ".join(crossing)))
        # For the first rows and for the second a flag a pair of blocks, three by three at this length; and the loss.
        assert arrays == {"pred[2,3,3]", "f32[]"}, crossing
    """
    # Threads enough for every device to wait in a collective at once: XLA takes their number from NPROC.
    environment = {**os.environ, "NPROC": "32"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


# Eight rows that differ: their documents end in different places, two are of a family, some have padding.
EIGHT = ids_of(
    [
        [(1, 0, 9, 0), (2, 0, 14, 0), (3, 0, 11, 0)],
        [(1, 0, 8, 0), (2, 8, 9, 1), (3, 8, 6, 1), (4, 0, 5, 0), (5, 5, 7, 4)],
        [(5, 0, 40, 0)],
        [(0, 0, 17, 0), (1, 0, 23, 0)],
        [(1, 0, 25, 0), (2, 0, 15, 0)],
        [(4, 0, 6, 0), (7, 6, 4, 4), (2, 0, 12, 0), (9, 6, 11, 4)],
        [],
        [(2, 0, 20, 0), (3, 20, 15, 2)],
    ]
)
# (rows, groups): every number of rows that cuts a group of the eight equally.
TOGETHER = [(rows, groups) for groups in (1, 2, 4) for rows in (1, 2, 4, 8) if 8 // groups % rows == 0]


@functools.cache
def _wanted(window, softcap):
    q, k, v = operands(EIGHT, EIGHT)
    d_out = operands(EIGHT, EIGHT, seed=1)[0]
    return attend_and_return(q, k, v, EIGHT, keys_only(EIGHT), d_out, "dense", window, softcap)


def _compare_together(rows, groups, window, softcap, **blocks):
    q, k, v = operands(EIGHT, EIGHT)
    d_out = operands(EIGHT, EIGHT, seed=1)[0]
    options = {"scale": 0.5, "window": window, "softcap": softcap, "rows": rows, "groups": groups, **blocks}

    @jax.jit
    def run(q, k, v, q_ids, kv_ids, d_out):
        out, pull_back = jax.vjp(lambda q, k, v: blockwise_attention(q, k, v, q_ids, kv_ids, **options), q, k, v)
        return out, pull_back(d_out)

    got, want = run(q, k, v, EIGHT, keys_only(EIGHT), d_out), _wanted(window, softcap)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        close(x, y)


@pytest.mark.parametrize(("rows", "groups"), TOGETHER)
def test_any_rows_may_go_together(rows, groups):
    """Blocks of queries and of keys differ, and neither divides the 40 tokens."""
    _compare_together(rows, groups, window=7, softcap=1.5, q_block=32, kv_block=16)


@pytest.mark.parametrize(("q_block", "kv_block"), [(16, 32), (128, 128)])
def test_any_blocks_go_with_any_rows(q_block, kv_block):
    _compare_together(2, 2, window=None, softcap=None, q_block=q_block, kv_block=kv_block)


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_change_no_number(backend):
    ids = {"q_positions": EIGHT.positions, "q_segment_ids": EIGHT.segments, "q_parent_ids": EIGHT.parents}

    @jax.jit
    def run(q, k, v):
        return attention(q, k, v, **ids, window=7, softcap=1.5, scale=0.5, backend=backend, groups=4)

    close(run(*operands(EIGHT, EIGHT)), _wanted(7, 1.5)[0])


def test_rows_that_go_together_divide_their_group(monkeypatch):
    """On a CPU as many as its cache has room for, and no fewer than one; elsewhere all."""
    for cpu in (True, False):
        monkeypatch.setattr("burnish.ops.blockwise.on_cpu", lambda cpu=cpu: cpu)
        for group, scores in itertools.product(range(1, 13), (1, 2**16, 2**17, 2**18, 2**20)):
            room = max(1, 3 * 2**20 // (4 * scores)) if cpu else group
            want = max(n for n in range(1, group + 1) if group % n == 0 and n <= room)
            assert _default_rows(group, scores) == want


def visited(ids, rows, groups=1, block=16):
    """How many blocks of keys each block of queries visits: `[rows that go together, blocks]`."""
    config = _Config(0.5, None, None, block, block, rows, groups)
    counts = jax.jit(lambda *args: _cut_all(*args, config).kv_count)(*operands(ids, ids), ids, keys_only(ids))
    return np.asarray(counts).reshape(ids.positions.shape[0] // (rows * groups), -1)


def test_rows_alone_visit_fewer_blocks_than_together():
    """Three blocks of 16 a row. Borders of documents save a visit only where every row that goes along has them."""
    ends = {"at 16": [(1, 0, 16, 0), (2, 0, 32, 0)], "at 32": [(1, 0, 32, 0), (2, 0, 16, 0)], "none": [(1, 0, 48, 0)]}
    ids = ids_of([ends[which] for which in ("at 16", "at 32", "at 16", "none")], length=48)
    alone = [[1, 1, 2], [1, 2, 1], [1, 1, 2], [1, 2, 3]]
    np.testing.assert_array_equal(visited(ids, rows=1), alone)
    # Every row counts its own blocks, so rows that go together cost as many visits as there are rows.
    np.testing.assert_array_equal(visited(ids, rows=2), [[1, 2, 2], [1, 2, 3]])
    np.testing.assert_array_equal(visited(ids, rows=4), [[1, 2, 3]])
    assert visited(ids, rows=1).sum() < 2 * visited(ids, rows=2).sum() < 4 * visited(ids, rows=4).sum()
    # Of each of two groups one row goes: the first with the third, the second with the fourth.
    np.testing.assert_array_equal(visited(ids, rows=1, groups=2), [[1, 1, 2], [1, 2, 3]])


def call(q, k, v, **kwargs):
    ids = {"q_positions": FAMILY.positions, "q_segment_ids": FAMILY.segments, "q_parent_ids": FAMILY.parents}
    return attention(q, k, v, **(ids | kwargs))


@pytest.mark.parametrize("backend", ["auto", "dense", "blockwise"])
def test_attention_passes_everything_on(backend):
    q, k, v = operands(FAMILY, FAMILY)
    got = call(q, k, v, window=7, softcap=1.5, scale=0.5, backend=backend)
    close(got, oracle(q, k, v, FAMILY, FAMILY, 7, 1.5))
    keys = {"kv_positions": FAMILY.positions, "kv_segment_ids": FAMILY.segments}
    np.testing.assert_array_equal(call(q, k, v, window=7, softcap=1.5, scale=0.5, backend=backend, **keys), got)
    # The oracle's scale is 0.5; the default is 8 ** -0.5, and no parents is parents of 0.
    lonely = FAMILY._replace(parents=0 * FAMILY.parents)
    want = oracle(q * (2 * HEAD_DIM**-0.5), k, v, lonely, lonely)
    close(call(q, k, v, q_parent_ids=None, backend=backend), want)


def test_auto_takes_dense_to_decode_and_blockwise_to_train():
    assert choose_backend(1, 10**6) == "dense"
    assert choose_backend(32, 32) == "dense"
    assert choose_backend(256, 256) == "blockwise"

    def loops(length):
        ids = np.ones((1, length), np.int32)
        x = np.ones((1, 1, length, HEAD_DIM), np.float32)
        program = jax.jit(lambda x: attention(x, x, x, q_positions=ids, q_segment_ids=ids)).lower(x)
        return "while" in program.as_text()

    assert (loops(1), loops(256)) == (False, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window"),
        ({"softcap": 0.0}, "softcap"),
        ({"backend": "flash"}, "unknown backend 'flash'"),
        ({"groups": 2}, "3 rows cannot be cut into 2 equal groups"),
        ({"groups": 2, "backend": "dense"}, "3 rows cannot be cut into 2 equal groups"),
        ({"groups": 0}, "3 rows cannot be cut into 0 equal groups"),
        ({"kv_positions": FAMILY.positions}, "kv_segment_ids"),
        ({"q_parent_ids": FAMILY.parents[:, :5]}, "q parents"),
        ({"kv_positions": FAMILY.positions[:, :5], "kv_segment_ids": FAMILY.segments}, "kv positions"),
        ({"k": np.zeros((3, 3, LENGTH, HEAD_DIM)), "v": np.zeros((3, 3, LENGTH, HEAD_DIM))}, "divide"),
        (
            {"k": np.zeros((1, 2, LENGTH, HEAD_DIM)), "v": np.zeros((1, 2, LENGTH, HEAD_DIM))},
            "agree in batch",
        ),
        ({"v": np.zeros((3, 2, 3, HEAD_DIM))}, "v like k"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    q, k, v = operands(FAMILY, FAMILY)
    with pytest.raises(InputError, match=message) as error:
        call(**({"q": q, "k": k, "v": v} | change))
    assert "\n" not in str(error.value)
