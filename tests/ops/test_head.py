"""The head mapper against plain logits in float64, and what it promises not to compute, hold or move."""

import itertools
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.errors import InputError
from burnish.ops.compaction import compact
from burnish.ops.head import head_map, token_logprobs

BATCH, LENGTH, DIM, VOCAB, LISTED = 3, 7, 5, 11, 2
NAMES = ("log_probs", "logsumexp", "entropy", "mean_logit")
ALL = (*NAMES, "token_id_log_probs")

RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(BATCH, LENGTH, DIM))
UNEMBED = RNG.normal(size=(VOCAB, DIM)) * 1.5
TARGETS = RNG.integers(0, VOCAB, (BATCH, LENGTH))
TOKEN_IDS = RNG.integers(0, VOCAB, (BATCH, LENGTH, LISTED))
TOKEN_IDS[0, 0] = TARGETS[0, 0]  # an id listed twice, and the target among the listed
MASK = RNG.random((BATCH, LENGTH)) < 0.6
PULL = {name: RNG.normal(size=(BATCH, LENGTH)) for name in NAMES}  # cotangents
PULL["token_id_log_probs"] = RNG.normal(size=(BATCH, LENGTH, LISTED))


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def plain(hidden: jax.Array, unembed: jax.Array, temperature: float, softcap: float | None) -> dict[str, jax.Array]:
    """Every quantity from the whole logits, by its definition."""
    logits = hidden @ unembed.T
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = logits / temperature
    log_p = jax.nn.log_softmax(logits)
    return {
        "log_probs": jnp.take_along_axis(log_p, TARGETS[..., None], -1)[..., 0],
        "logsumexp": jax.nn.logsumexp(logits, axis=-1),
        "entropy": -(jnp.exp(log_p) * log_p).sum(-1),
        "mean_logit": logits.mean(-1),
        "token_id_log_probs": jnp.take_along_axis(log_p, TOKEN_IDS, -1),
    }


def pulled(found: dict[str, jax.Array], names: tuple[str, ...]) -> jax.Array:
    """A scalar whose gradient pulls on every number differently; masked tokens left out."""
    return sum(
        (PULL[name] * found[name] * MASK.reshape(MASK.shape + (1,) * (PULL[name].ndim - 2))).sum() for name in names
    )


def ours(hidden: jax.Array, unembed: jax.Array, names: tuple[str, ...], **settings: Any) -> dict[str, jax.Array]:
    token_ids = TOKEN_IDS if "token_id_log_probs" in names else None
    outputs = tuple(name for name in names if name in NAMES)
    settings = {"mask": MASK, "chunk_rows": 4, **settings}
    found = head_map(hidden, unembed, TARGETS, outputs=outputs, token_ids=token_ids, **settings)
    return {name: array for name, array in found._asdict().items() if array is not None}


def both(
    names: tuple[str, ...], wrt: Any, layout: str, dtype: Any, temperature: float, softcap: float | None
) -> tuple[Any, Any]:
    """Value and gradients: ours on `dtype` inputs, and plain float64 on the same (rounded) numbers."""
    hidden, unembed = jnp.asarray(HIDDEN, dtype), jnp.asarray(UNEMBED, dtype)
    settings = {"temperature": temperature, "softcap": softcap}

    def our_loss(hidden: jax.Array, stored: jax.Array) -> jax.Array:
        return pulled(ours(hidden, stored, names, unembed_layout=layout, **settings), names)

    def plain_loss(hidden: jax.Array, unembed: jax.Array) -> jax.Array:
        return pulled(plain(hidden, unembed, **settings), names)

    stored = unembed if layout == "vocab_dim" else unembed.T
    value, gradients = jax.jit(jax.value_and_grad(our_loss, wrt))(hidden, stored)
    if wrt == (0, 1) and layout == "dim_vocab":
        gradients = (gradients[0], gradients[1].T)
    wide = (hidden.astype(jnp.float64), unembed.astype(jnp.float64))
    return (value, gradients), jax.jit(jax.value_and_grad(plain_loss, wrt))(*wide)


def assert_close(got: Any, expected: Any, rtol: float) -> None:
    """Relative to each array's largest number."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


def grid() -> Iterator[Any]:
    """Every combination; quick are those where most acts at once, and one plain one."""
    names = [*((name,) for name in ALL), ALL]
    axes = (names, (0, (0, 1)), ("vocab_dim", "dim_vocab"), (1.0, 0.7), (None, 5.0))
    for which, wrt, layout, temperature, softcap in itertools.product(*axes):
        hardest = (layout, temperature, softcap) == ("dim_vocab", 0.7, 5.0)
        plainest = (layout, temperature, softcap) == ("vocab_dim", 1.0, None)
        quick = hardest or (plainest and which in (ALL, ("log_probs",)))
        words = ("all" if which == ALL else which[0], "trained" if wrt else "frozen", layout, temperature, softcap)
        marks = () if quick else pytest.mark.slow
        yield pytest.param(which, wrt, layout, temperature, softcap, id="-".join(map(str, words)), marks=marks)


@pytest.mark.parametrize(("names", "wrt", "layout", "temperature", "softcap"), list(grid()))
def test_equals_plain_logits(
    names: tuple[str, ...], wrt: Any, layout: str, temperature: float, softcap: float | None, float64: None
) -> None:
    got, expected = both(names, wrt, layout, jnp.float32, temperature, softcap)
    assert_close(got, expected, rtol=1e-5)
    assert {leaf.dtype for leaf in jax.tree.leaves(got[1])} == {jnp.dtype("float32")}


@pytest.mark.parametrize("wrt", [0, (0, 1)], ids=["frozen", "trained"])
def test_exact_in_float64(wrt: Any, float64: None) -> None:
    got, expected = both(ALL, wrt, "vocab_dim", jnp.float64, 0.7, 5.0)
    assert_close(got, expected, rtol=1e-11)


@pytest.mark.parametrize("wrt", [0, (0, 1)], ids=["frozen", "trained"])
def test_bfloat16_inputs(wrt: Any, float64: None) -> None:
    """Products round, sums do not: values hold to float32, gradients to bfloat16."""
    hidden, unembed = jnp.asarray(HIDDEN, jnp.bfloat16), jnp.asarray(UNEMBED, jnp.bfloat16)
    expected = plain(hidden.astype(jnp.float64), unembed.astype(jnp.float64), 0.7, None)
    for name, array in jax.jit(lambda h, e: ours(h, e, ALL, temperature=0.7))(hidden, unembed).items():
        assert array.dtype == jnp.float32
        on = MASK if array.ndim == 2 else MASK[..., None]
        assert_close(array, jnp.where(on, expected[name], 0), rtol=1e-5)
    got, expected = both(ALL, wrt, "vocab_dim", jnp.bfloat16, 0.7, None)
    assert {leaf.dtype for leaf in jax.tree.leaves(got[1])} == {jnp.dtype("bfloat16")}
    assert_close(got[1], expected[1], rtol=2e-2)


def test_confident_tokens_keep_their_gradient_in_bfloat16() -> None:
    """At p = 0.997 the gradient is a small difference of large numbers, lost where p is rounded first."""
    unembed = jnp.eye(4, dtype=jnp.bfloat16)
    hidden = jnp.array([[7.0, 0.0, 0.5, -1.0]], jnp.bfloat16)
    got = jax.grad(lambda h: token_logprobs(h, unembed, jnp.array([0])).sum())(hidden)
    p = np.exp(np.asarray(hidden, np.float64)) / np.exp(np.asarray(hidden, np.float64)).sum()
    np.testing.assert_allclose(np.asarray(got, np.float64), [[1, 0, 0, 0]] - p, rtol=1e-2)


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (4, 1), (100, 1), (4, 3), (7, 3)])
def test_any_chunk_and_any_number_of_tokens(rows: int, groups: int) -> None:
    hidden, unembed = jnp.asarray(HIDDEN, jnp.float32), jnp.asarray(UNEMBED, jnp.float32)

    @jax.jit
    def got(mask: jax.Array) -> Any:
        def loss(hidden: jax.Array, unembed: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = head_map(hidden, unembed, TARGETS, mask, groups=groups, chunk_rows=rows)
            return (mask * found.log_probs).sum(), found.log_probs

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, unembed)

    @jax.jit
    def wanted(mask: jax.Array) -> Any:
        def loss(hidden: jax.Array, unembed: jax.Array) -> jax.Array:
            return (mask * plain(hidden, unembed, 1.0, None)["log_probs"]).sum()

        return jax.value_and_grad(loss, (0, 1))(hidden, unembed)

    for count in (0, 1, 4, 13, 21):
        mask = np.zeros(BATCH * LENGTH, np.float32)
        mask[np.random.default_rng(count).permutation(mask.size)[:count]] = 0.5
        mask = mask.reshape(BATCH, LENGTH)
        (total, log_probs), gradients = got(mask)
        np.testing.assert_array_equal(np.asarray(log_probs)[mask == 0], 0)
        for a, b in zip(jax.tree.leaves((total, gradients)), jax.tree.leaves(wanted(mask)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrt", [0, (0, 1)], ids=["frozen", "trained"])
def test_masked_tokens_reach_nothing(wrt: Any) -> None:
    """NaN in a masked token's hidden state or cotangent, or nonsense in its target, changes no bit."""
    unembed = jnp.asarray(UNEMBED, jnp.float32)

    def loss(hidden: jax.Array, unembed: jax.Array, targets: np.ndarray, pull: jax.Array) -> jax.Array:
        found = head_map(hidden, unembed, targets, MASK, outputs=NAMES, chunk_rows=4)
        return sum((pull * array).sum() for array in found if array is not None)

    gradient = jax.jit(jax.grad(loss, wrt))
    hidden = jnp.asarray(HIDDEN, jnp.float32)
    clean = gradient(hidden, unembed, TARGETS, jnp.where(MASK, 1.0, 0.0))
    dirty_hidden = jnp.where(MASK[..., None], hidden, jnp.nan)
    dirty_targets = np.where(MASK, TARGETS, -100)
    dirty = gradient(dirty_hidden, unembed, dirty_targets, jnp.where(MASK, 1.0, jnp.nan))
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(a, b)
    first = clean if wrt == 0 else clean[0]
    np.testing.assert_array_equal(np.asarray(first)[~MASK], 0)


def test_target_outside_the_vocabulary_is_nan_not_a_neighbour() -> None:
    hidden, unembed = jnp.ones((3, DIM)), jnp.asarray(UNEMBED, jnp.float32)
    found = token_logprobs(hidden, unembed, jnp.array([VOCAB, -1, 0]))
    np.testing.assert_array_equal(np.isnan(found), [True, True, False])


def test_tied_embedding_gets_both_gradients(float64: None) -> None:
    """The table serves as input embedding and as head; its gradient is the sum of the two uses."""
    tokens = RNG.integers(0, VOCAB, (BATCH, LENGTH))

    def gradient(head: Callable[..., dict[str, jax.Array]]) -> jax.Array:
        def loss(table: jax.Array) -> jax.Array:
            return pulled(head(jnp.sin(table[tokens]), table), ("log_probs",))

        return jax.jit(jax.grad(loss))(jnp.asarray(UNEMBED))

    got = gradient(lambda hidden, table: ours(hidden, table, ("log_probs",)))
    assert_close(got, gradient(lambda hidden, table: plain(hidden, table, 1.0, None)), rtol=1e-11)


# What is not computed, and not held: shapes that no other array has, so that dots can be told by them.

BIG_VOCAB, BIG_TOKENS = 4096, 512


def big_loss(scale: jax.Array, unembed: jax.Array) -> jax.Array:
    hidden = scale * jnp.ones((BIG_TOKENS, 16))
    return token_logprobs(hidden, unembed, jnp.zeros(BIG_TOKENS, jnp.int32), jnp.ones(BIG_TOKENS)).sum()


def scanned(loss: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def over(scale: jax.Array, unembed: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, x: (carry + loss(scale * x, unembed), None), 0.0, jnp.ones(3))[0]

    return over


def vocab_dots(function: Callable[..., Any], *args: jax.Array) -> int:
    """Matrix products with the vocabulary among their axes, in the compiled program; a loop's body counts once."""
    text = jax.jit(function).lower(*args).compile().as_text()
    dots = re.findall(r"= (\S+) (?:dot|custom-call)\((.*)", text)
    shapes = dict(re.findall(r"%(\S+) = (\S+) ", text))
    count = 0
    for result, rest in dots:
        operands = [shapes.get(name, "") for name in re.findall(r"%([\w.\-]+)", rest.split(")")[0])]
        count += any(str(BIG_VOCAB) in shape for shape in (result, *operands))
    return count


WRAPPINGS = {"alone": lambda f: f, "scan": scanned, "checkpoint": jax.checkpoint}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_products_over_the_vocabulary(wrapping: str) -> None:
    """One for an evaluation; two in training over a frozen head; four where the head is trained too."""
    loss = WRAPPINGS[wrapping](big_loss)
    args = jnp.float32(1.0), jnp.ones((BIG_VOCAB, 16))
    again = 1 if wrapping == "checkpoint" else 0  # which computes the forward half twice
    assert vocab_dots(loss, *args) == 1
    assert vocab_dots(jax.value_and_grad(loss), *args) == 2 + again
    assert vocab_dots(jax.value_and_grad(lambda h, e: loss(h, jax.lax.stop_gradient(e))), *args) == 2 + again
    assert vocab_dots(jax.value_and_grad(loss, (0, 1)), *args) == 4 + again


def test_frozen_backward_never_visits_the_vocabulary() -> None:
    unembed = jnp.ones((BIG_VOCAB, 16))
    _, backward = jax.vjp(lambda scale: big_loss(scale, unembed), jnp.float32(1.0))
    assert vocab_dots(backward, jnp.float32(1.0)) == 0


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_gradients_inside_transformations(wrapping: str) -> None:
    def expected(scale: jax.Array, unembed: jax.Array) -> jax.Array:
        return BIG_TOKENS * jax.nn.log_softmax(scale * unembed.sum(1))[0]

    args = jnp.float32(0.3), jnp.asarray(RNG.normal(size=(BIG_VOCAB, 16)), jnp.float32)
    times = 3 if wrapping == "scan" else 1
    for wrt in (0, (0, 1)):
        got = jax.jit(jax.grad(WRAPPINGS[wrapping](big_loss), wrt))(*args)
        want = jax.tree.map(lambda leaf: leaf * times, jax.grad(expected, wrt)(*args))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_mapped_over_a_batch() -> None:
    hidden, unembed = jnp.asarray(HIDDEN, jnp.float32), jnp.asarray(UNEMBED, jnp.float32)

    def loss(hidden: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        return token_logprobs(hidden, unembed, targets, mask).sum()

    args = hidden, jnp.asarray(TARGETS), jnp.asarray(MASK)
    got = jax.jit(jax.vmap(jax.grad(loss)))(*args)
    want = jax.jit(jax.grad(loss))(*args)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrt", [0, (0, 1)], ids=["frozen", "trained"])
def test_logits_are_never_held(wrt: Any) -> None:
    tokens, vocab, dim = 4096, 8192, 8
    args = jnp.ones((tokens, dim)), jnp.ones((vocab, dim))

    def loss(hidden: jax.Array, unembed: jax.Array) -> jax.Array:
        found = head_map(hidden, unembed, jnp.zeros(tokens, jnp.int32), outputs=NAMES, softcap=5.0)
        return sum(array.sum() for array in found if array is not None)

    memory = jax.jit(jax.value_and_grad(loss, wrt)).lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < tokens * vocab * 4


def test_loop_follows_the_mask() -> None:
    """The number of chunks visited is that of the group with most tokens that count, however many there are."""
    mask = jnp.zeros((2, 100), bool).at[0, 5::10].set(True).at[1, :23].set(True)
    places = compact(mask, 8)
    assert int(places.chunks) == 3  # ceil(23 / 8)
    np.testing.assert_array_equal(places.order[0, :10], range(5, 100, 10))
    assert int(compact(jnp.zeros((2, 100), bool), 8).chunks) == 0


SHARDED = """
    import re
    import jax, jax.numpy as jnp, numpy as np
    jax.config.update("jax_num_cpu_devices", 8)
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from burnish.ops.head import head_map

    rng = np.random.default_rng(0)
    B, L, D, V = 8, 32, 16, 64
    hidden = jnp.asarray(rng.normal(size=(B, L, D)), jnp.float32)
    unembed = jnp.asarray(rng.normal(size=(V, D)), jnp.float32)
    targets, ids = (jnp.asarray(rng.integers(0, V, shape), jnp.int32) for shape in ((B, L), (B, L, 3)))
    mask = jnp.asarray(rng.random((B, L)) < rng.random((B, 1)))  # groups of unequal fill

    def loss(groups, hidden, unembed, targets, mask, ids):
        found = head_map(hidden, unembed, targets, mask, outputs=("log_probs", "entropy"), token_ids=ids,
                         groups=groups, chunk_rows=8)
        return sum((a * jnp.cos(jnp.arange(a.size)).reshape(a.shape)).sum() for a in found if a is not None)

    steps = {wrt: jax.jit(jax.value_and_grad(loss, wrt), static_argnums=0) for wrt in (1, (1, 2))}
    alone = {wrt: step(1, hidden, unembed, targets, mask, ids) for wrt, step in steps.items()}
    for shape, axes, batch, table in (
        ((8,), ("data",), "data", P()),
        ((4, 2), ("data", "fsdp"), ("data", "fsdp"), P("fsdp")),
        ((4, 2), ("data", "tensor"), "data", P("tensor")),
    ):
        mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(shape))
        put = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
        groups = 4 if "tensor" in axes else 8
        cases = (1, (1, 2)) if axes == ("data",) else ((1, 2),)
        rest = [put(array, P(batch)) for array in (targets, mask, ids)]
        for wrt in cases:
            program = steps[wrt].lower(groups, put(hidden, P(batch)), put(unembed, table), *rest).compile()
            got = program(put(hidden, P(batch)), put(unembed, table), *rest)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(alone[wrt]), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
            moved = re.findall(r"= (\\S+?)\\[([\\d,]*)\\]\\S* (all-gather|all-to-all|collective-permute)\\(",
                               program.as_text())
            assert all(dims == f"{V},{D}" for _, dims, _ in moved), moved  # the sharded table, and no token
    print("equal")
"""


def test_sharded_batch() -> None:
    """Eight devices give what one gives, and no token's array is gathered on the way."""
    run = [sys.executable, "-c", textwrap.dedent(SHARDED)]
    # Threads enough for every device to wait in a collective at once: XLA takes their number from NPROC.
    done = subprocess.run(run, capture_output=True, text=True, env={**os.environ, "NPROC": "32"})
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"outputs": ("logits",)}, "outputs"),
        ({"outputs": ()}, "outputs"),
        ({"outputs": ("entropy", "entropy")}, "outputs"),
        ({"unembed_layout": "vd"}, "unembed_layout"),
        ({"unembed_layout": "dim_vocab"}, "hidden"),
        ({"targets": None}, "targets"),
        ({"targets": np.zeros(BATCH)}, "targets"),
        ({"mask": np.ones((BATCH, LENGTH, 1))}, "mask"),
        ({"token_ids": np.zeros((LENGTH, 2), int)}, "token_ids"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"softcap": 0.0}, "softcap"),
        ({"softcap": float("inf")}, "softcap"),
        ({"groups": 2}, "groups"),
        ({"groups": 0}, "groups"),
        ({"chunk_rows": 0}, "chunk_rows"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=f"^{named}"):
        head_map(**{"hidden": HIDDEN, "unembed": UNEMBED, "targets": TARGETS, **changes})
