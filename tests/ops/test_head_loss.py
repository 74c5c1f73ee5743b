"""The loss taken in one visit against plain logits in float64, and what it promises not to compute or hold."""

import os
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from burnish.errors import InputError
from burnish.ops.head import HeadOutputs, head_map
from burnish.ops.head_loss import head_loss

BATCH, LENGTH, DIM, VOCAB = 4, 6, 5, 11

RNG = np.random.default_rng(0)
HIDDEN = RNG.normal(size=(BATCH, LENGTH, DIM))
UNEMBED = RNG.normal(size=(VOCAB, DIM)) * 1.5
TARGETS = RNG.integers(0, VOCAB, (BATCH, LENGTH))
WEIGHTS = RNG.random((BATCH, LENGTH)) * (RNG.random((BATCH, LENGTH)) < 0.6)

Loss = Callable[[HeadOutputs, jax.Array], jax.Array]


def cross_entropy(found: HeadOutputs, weights: jax.Array) -> jax.Array:
    return -(weights * found.log_probs).sum()


def dft(found: HeadOutputs, weights: jax.Array) -> jax.Array:
    return -(weights * jax.lax.stop_gradient(jnp.exp(found.log_probs)) * found.log_probs).sum()


def focal(found: HeadOutputs, weights: jax.Array) -> jax.Array:
    """Bent in the quantities and in the weights."""
    return -(weights**2 * (1 - jnp.exp(found.log_probs)) ** 2 * found.log_probs).sum()


def with_z_loss(found: HeadOutputs, weights: jax.Array) -> jax.Array:
    return cross_entropy(found, weights) + 0.1 * (weights * found.logsumexp**2).sum()


def smoothed(found: HeadOutputs, weights: jax.Array) -> jax.Array:
    return 0.8 * cross_entropy(found, weights) + 0.2 * (weights * (found.logsumexp - found.mean_logit)).sum()


def with_entropy(found: HeadOutputs, weights: jax.Array) -> jax.Array:
    return cross_entropy(found, weights) - 0.5 * (weights * found.entropy).sum()


def of_everything(found: HeadOutputs, weights: jax.Array) -> jax.Array:
    """Each quantity's pull depends on another one."""
    bent = jnp.sin(found.entropy) * found.log_probs + jnp.cos(found.mean_logit) * found.logsumexp
    return (weights * bent).sum()


LOSSES: dict[Loss, Any] = {
    cross_entropy: ("log_probs",),
    dft: ("log_probs",),
    focal: ("log_probs",),
    with_z_loss: ("log_probs", "logsumexp"),
    smoothed: ("log_probs", "logsumexp", "mean_logit"),
    with_entropy: ("entropy", "log_probs"),
    of_everything: ("log_probs", "logsumexp", "entropy", "mean_logit"),
}


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def plain(
    hidden: jax.Array, unembed: jax.Array, targets: Any, temperature: float = 1.0, softcap: float | None = None
) -> HeadOutputs:
    """Every quantity from the whole logits, by its definition."""
    logits = hidden @ unembed.T
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    logits = logits / temperature
    log_p = jax.nn.log_softmax(logits)
    return HeadOutputs(
        log_probs=jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0],
        logsumexp=jax.nn.logsumexp(logits, axis=-1),
        entropy=-(jnp.exp(log_p) * log_p).sum(-1),
        mean_logit=logits.mean(-1),
    )


def assert_close(got: Any, expected: Any, rtol: float) -> None:
    """Relative to each array's largest number."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


PLAINEST = {"unembed_layout": "vocab_dim", "temperature": 1.0, "softcap": None, "groups": 1, "chunk_rows": 4}
HARDEST = {"unembed_layout": "dim_vocab", "temperature": 0.7, "softcap": 5.0, "groups": 2, "chunk_rows": 5}


CASES = [(loss, HARDEST) for loss in LOSSES] + [(cross_entropy, PLAINEST), (of_everything, PLAINEST)]


@pytest.mark.parametrize(
    ("loss", "settings"), CASES, ids=[f"{loss.__name__}-{case['unembed_layout']}" for loss, case in CASES]
)
def test_equals_plain_logits(loss: Loss, settings: dict[str, Any], float64: None) -> None:
    """The value, its gradients, and those of what came before and comes after it; and the quantities."""
    turned = settings["unembed_layout"] == "dim_vocab"

    def ours(hidden: jax.Array, unembed: jax.Array, scale: jax.Array) -> tuple[jax.Array, HeadOutputs]:
        stored = unembed.T if turned else unembed
        value, found = head_loss(loss, jnp.sin(hidden), stored, TARGETS, WEIGHTS, outputs=LOSSES[loss], **settings)
        return scale**2 * value, found

    def by_definition(hidden: jax.Array, unembed: jax.Array, scale: jax.Array) -> tuple[jax.Array, HeadOutputs]:
        found = plain(jnp.sin(hidden), unembed, TARGETS, settings["temperature"], settings["softcap"])
        return scale**2 * loss(found, WEIGHTS), found

    arguments = jnp.asarray(HIDDEN), jnp.asarray(UNEMBED), jnp.float64(-3.0)
    (value, found), gradients = jax.jit(jax.value_and_grad(ours, (0, 1, 2), has_aux=True))(*arguments)
    (want, quantities), slopes = jax.value_and_grad(by_definition, (0, 1, 2), has_aux=True)(*arguments)
    assert_close((value, gradients), (want, slopes), rtol=1e-11)
    assert {name for name, array in found._asdict().items() if array is not None} == set(LOSSES[loss])
    for name in LOSSES[loss]:
        assert_close(getattr(found, name), jnp.where(WEIGHTS != 0, getattr(quantities, name), 0), rtol=1e-11)


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (100, 1), (None, 1), (4, 4), (2, 3)])
def test_any_chunk_and_any_number_of_tokens(rows: int | None, groups: int, float64: None) -> None:
    hidden, unembed = jnp.asarray(HIDDEN), jnp.asarray(UNEMBED)

    def ours(hidden: jax.Array, unembed: jax.Array, weights: jax.Array) -> jax.Array:
        return head_loss(focal, hidden, unembed, TARGETS, weights, groups=groups, chunk_rows=rows)[0]

    def by_definition(hidden: jax.Array, unembed: jax.Array, weights: jax.Array) -> jax.Array:
        return focal(plain(hidden, unembed, TARGETS), weights)

    got, wanted = jax.jit(jax.value_and_grad(ours, (0, 1))), jax.value_and_grad(by_definition, (0, 1))
    for count in (0, 1, 4, 13, 24):
        weights = np.zeros(BATCH * LENGTH)
        weights[np.random.default_rng(count).permutation(weights.size)[:count]] = 1 + np.arange(count)
        weights = jnp.asarray(weights.reshape(BATCH, LENGTH))
        assert_close(got(hidden, unembed, weights), wanted(hidden, unembed, weights), rtol=1e-11)


@pytest.mark.parametrize("wrt", [0, 1, (0, 1)], ids=["head frozen", "hidden frozen", "both trained"])
def test_equals_the_loss_of_mapped_quantities(wrt: Any) -> None:
    hidden, unembed = jnp.asarray(HIDDEN, jnp.float32), jnp.asarray(UNEMBED, jnp.float32)
    weights = jnp.asarray(WEIGHTS, jnp.float32)
    settings = {"outputs": LOSSES[of_everything], "temperature": 0.7, "chunk_rows": 4}

    def at_once(hidden: jax.Array, unembed: jax.Array) -> jax.Array:
        return head_loss(of_everything, hidden, unembed, TARGETS, weights, **settings)[0]

    def mapped(hidden: jax.Array, unembed: jax.Array) -> jax.Array:
        return of_everything(head_map(hidden, unembed, TARGETS, weights, **settings), weights)

    got, expected = (jax.jit(jax.value_and_grad(loss, wrt))(hidden, unembed) for loss in (at_once, mapped))
    assert_close(got, expected, rtol=1e-5)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {jnp.dtype("float32")}


def test_tokens_of_weight_0_reach_nothing() -> None:
    """NaN in such a token's hidden state, or nonsense in its target, changes no bit."""
    unembed, weights = jnp.asarray(UNEMBED, jnp.float32), jnp.asarray(WEIGHTS, jnp.float32)
    off = WEIGHTS == 0

    @jax.jit
    def everything(hidden: jax.Array, targets: jax.Array) -> Any:
        def loss(hidden: jax.Array, unembed: jax.Array) -> tuple[jax.Array, HeadOutputs]:
            outputs = LOSSES[of_everything]
            return head_loss(of_everything, hidden, unembed, targets, weights, outputs=outputs, chunk_rows=4)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, unembed)

    hidden = jnp.asarray(HIDDEN, jnp.float32)
    clean = everything(hidden, jnp.asarray(TARGETS))
    dirty = everything(jnp.where(off[..., None], jnp.nan, hidden), jnp.where(off, -100, TARGETS))
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
        np.testing.assert_array_equal(a, b)
    (_, found), (d_hidden, _) = clean
    assert np.asarray(d_hidden)[~off].all()
    for array in (d_hidden, *(array for array in found if array is not None)):
        np.testing.assert_array_equal(np.asarray(array)[off], 0)


def test_target_outside_the_vocabulary_is_nan_not_a_neighbour() -> None:
    hidden, unembed = jnp.ones((3, DIM)), jnp.asarray(UNEMBED, jnp.float32)
    value, found = head_loss(cross_entropy, hidden, unembed, jnp.array([VOCAB, -1, 0]), jnp.ones(3))
    np.testing.assert_array_equal(np.isnan(found.log_probs), [True, True, False])
    assert np.isnan(value)


def test_quantities_carry_no_gradient() -> None:
    """As they are handed back; the loss beside them keeps its own."""
    unembed, weights = jnp.asarray(UNEMBED, jnp.float32), jnp.asarray(WEIGHTS, jnp.float32)

    @jax.jit
    def gradients(hidden: jax.Array) -> Any:
        def loss(share: float) -> Callable[..., jax.Array]:
            def of(hidden: jax.Array, unembed: jax.Array) -> jax.Array:
                value, found = head_loss(with_z_loss, hidden, unembed, TARGETS, weights, outputs=LOSSES[with_z_loss])
                return share * value + (found.log_probs**2).sum() + found.logsumexp.sum()

            return of

        return [jax.grad(loss(share), (0, 1))(hidden, unembed) for share in (0.0, 1.0)]

    without, beside = gradients(jnp.asarray(HIDDEN, jnp.float32))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(without))
    alone = jax.grad(
        lambda h, e: head_loss(with_z_loss, h, e, TARGETS, weights, outputs=LOSSES[with_z_loss])[0], (0, 1)
    )(jnp.asarray(HIDDEN, jnp.float32), unembed)
    assert_close(beside, alone, rtol=1e-6)


def test_weights_wider_than_the_hidden_states(float64: None) -> None:
    hidden, unembed = jnp.asarray(HIDDEN, jnp.float32), jnp.asarray(UNEMBED, jnp.float32)
    value, found = head_loss(cross_entropy, hidden, unembed, TARGETS, jnp.asarray(WEIGHTS, jnp.float64))
    assert value.dtype == found.log_probs.dtype == jnp.float32
    assert_close(value, cross_entropy(plain(HIDDEN, jnp.asarray(UNEMBED), TARGETS), WEIGHTS), rtol=1e-5)


def test_bfloat16_hidden(float64: None) -> None:
    """Over a float32 head: products round, sums do not, and each gradient comes in its own dtype."""
    hidden, unembed = jnp.asarray(HIDDEN, jnp.bfloat16), jnp.asarray(UNEMBED, jnp.float32)

    def ours(hidden: jax.Array, unembed: jax.Array) -> jax.Array:
        weights = jnp.asarray(WEIGHTS, jnp.float32)
        return head_loss(with_z_loss, hidden, unembed, TARGETS, weights, outputs=LOSSES[with_z_loss])[0]

    def by_definition(hidden: jax.Array, unembed: jax.Array) -> jax.Array:
        return with_z_loss(plain(hidden, unembed, TARGETS), WEIGHTS)

    value, gradients = jax.jit(jax.value_and_grad(ours, (0, 1)))(hidden, unembed)
    assert [array.dtype for array in (value, *gradients)] == [jnp.float32, jnp.bfloat16, jnp.float32]
    rounded = hidden.astype(jnp.float64), unembed.astype(jnp.bfloat16).astype(jnp.float64)
    want, slopes = jax.value_and_grad(by_definition, (0, 1))(*rounded)
    assert_close(value, want, rtol=1e-5)
    assert_close(gradients, slopes, rtol=1e-2)
    assert (gradients[1].astype(jnp.bfloat16) != gradients[1]).mean() > 0.9  # nor was it narrow on the way


# A margin of 23 nats: the others have a probability of about 1e-9 together, which 1 - p in float32 calls 0.
CONFIDENT = np.float32(23 * np.eye(DIM)[:2])
NEARLY_ONE_HOT = np.float32(np.eye(VOCAB, DIM) + 0.02 * RNG.normal(size=(VOCAB, DIM)))


@pytest.mark.parametrize("loss", [cross_entropy, dft, with_entropy], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("wrt", [0, (0, 1)], ids=["frozen", "trained"])
def test_confident_tokens_keep_their_gradient(loss: Loss, wrt: Any, float64: None) -> None:
    """Here and in `head_map`: small differences of large numbers never arise."""
    targets, weights, outputs = np.array([0, 1]), jnp.ones(2, jnp.float32), LOSSES[loss]

    def by_definition(hidden: jax.Array, unembed: jax.Array) -> jax.Array:
        """Of probabilities beside the target's alone: log p = -log(1 + sum exp(z - z_target)) by its series."""
        logits = hidden @ unembed.T
        differences = logits - jnp.take_along_axis(logits, targets[:, None], -1)
        ratios = jnp.where(jnp.arange(VOCAB) == targets[:, None], 0, jnp.exp(differences))
        log_probs = -jnp.log1p(ratios.sum(-1))
        p = ratios * jnp.exp(log_probs)[:, None]
        entropy = -(p * differences).sum(-1) - log_probs
        return loss(HeadOutputs(log_probs=log_probs, entropy=entropy), np.ones(2))

    def at_once(hidden: jax.Array, unembed: jax.Array) -> jax.Array:
        return head_loss(loss, hidden, unembed, targets, weights, outputs=outputs)[0]

    def mapped(hidden: jax.Array, unembed: jax.Array) -> jax.Array:
        return loss(head_map(hidden, unembed, targets, outputs=outputs), weights)

    want = jax.grad(by_definition, wrt)(*(np.float64(x) for x in (CONFIDENT, NEARLY_ONE_HOT)))
    assert all(1e-10 < np.abs(leaf).max() < 1e-6 for leaf in jax.tree.leaves(want))
    for ours in (at_once, mapped):
        assert_close(jax.jit(jax.grad(ours, wrt))(CONFIDENT, NEARLY_ONE_HOT), want, rtol=1e-4)


# What is not computed, and not held: sizes that no other array has, so that products can be told by them.

BIG_VOCAB, BIG_TOKENS, BIG_DIM = 4096, 3000, 24
BIG = jnp.ones((BIG_TOKENS, BIG_DIM)), jnp.ones((BIG_VOCAB, BIG_DIM))


def big_loss(hidden: jax.Array, unembed: jax.Array) -> jax.Array:
    targets, weights = jnp.zeros(BIG_TOKENS, jnp.int32), jnp.ones(BIG_TOKENS)
    return head_loss(with_entropy, hidden, unembed, targets, weights, outputs=LOSSES[with_entropy], groups=2)[0]


def scanned(hidden: jax.Array, unembed: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, x: (carry + big_loss(x * hidden, unembed), None), 0.0, jnp.ones(3))[0]


def compiled(function: Callable[..., Any]) -> Any:
    return jax.jit(function).lower(*BIG).compile()


def products(function: Callable[..., Any]) -> Counter[str]:
    """Matrix products with the vocabulary among their axes, by what comes out; a loop's body counts once."""
    text = compiled(function).as_text()
    shapes = {name: set(dims.split(",")) for name, dims in re.findall(r"%(\S+) = [a-z0-9]+\[([\d,]*)\]", text)}
    vocab, dim = str(BIG_VOCAB), str(BIG_DIM)
    found: Counter[str] = Counter()
    for result, rest in re.findall(r"%(\S+) = \S+ (?:dot|custom-call)\((.*)", text):
        operands = [shapes.get(name, set()) for name in re.findall(r"%([\w.\-]+)", rest.split(")")[0])]
        made = shapes.get(result, set())
        if vocab in made:
            found["unembed" if dim in made else "logits"] += 1
        elif any(vocab in operand for operand in operands):
            found["hidden"] += 1
    return found


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (big_loss, ["logits"]),
        (jax.value_and_grad(big_loss), ["logits", "hidden"]),
        (jax.value_and_grad(lambda h, e: big_loss(h, jax.lax.stop_gradient(e))), ["logits", "hidden"]),
        (jax.value_and_grad(big_loss, 1), ["logits", "unembed"]),
        (jax.value_and_grad(big_loss, (0, 1)), ["logits", "hidden", "unembed"]),
        (jax.value_and_grad(scanned, (0, 1)), ["logits", "hidden", "unembed"]),
    ],
    ids=["not differentiated", "head frozen", "head stopped", "hidden frozen", "both trained", "scanned"],
)
def test_products_over_the_vocabulary(function: Callable[..., Any], expected: list[str]) -> None:
    """One for the logits and one for each gradient that is asked for, no more: as written, not only as compiled."""
    assert products(function) == Counter(expected)
    assert len(re.findall(r" dot_general\[", str(jax.make_jaxpr(function)(*BIG)))) == len(expected)


@pytest.mark.parametrize("wrt", [0, (0, 1)], ids=["frozen", "trained"])
def test_what_is_held(wrt: Any) -> None:
    """An eighth of the logits at most, and the sums for the head (one a group) only where it is trained."""
    program = compiled(jax.value_and_grad(big_loss, wrt))
    arrays = [tuple(map(int, dims.split(","))) for dims in re.findall(r"[a-z]+\d+\[([\d,]+)\]", program.as_text())]
    widest = max(int(np.prod(dims)) for dims in arrays if BIG_VOCAB in dims)
    assert widest <= BIG_TOKENS * BIG_VOCAB // 8
    assert ((2, BIG_VOCAB, BIG_DIM) in arrays) == (wrt == (0, 1))
    assert program.memory_analysis().temp_size_in_bytes < 4 * BIG_TOKENS * BIG_VOCAB


SHARDED = """
    import re
    import jax, jax.numpy as jnp, numpy as np
    jax.config.update("jax_num_cpu_devices", 8)
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from burnish.ops.head_loss import head_loss

    rng = np.random.default_rng(0)
    B, L, D, V = 8, 32, 16, 64
    hidden = jnp.asarray(rng.normal(size=(B, L, D)), jnp.float32)
    unembed = jnp.asarray(rng.normal(size=(V, D)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, V, (B, L)), jnp.int32)
    weights = jnp.asarray(rng.random((B, L)) * (rng.random((B, L)) < rng.random((B, 1))), jnp.float32)

    def focal(found, weights):
        return -(weights * (1 - jnp.exp(found.log_probs)) ** 2 * found.log_probs).sum()

    def step(groups):
        def loss(hidden, unembed, targets, weights):
            return head_loss(focal, hidden, unembed, targets, weights, groups=groups, chunk_rows=8)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))

    alone = step(1)(hidden, unembed, targets, weights)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    put = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
    sharded = put(hidden, P("data")), put(unembed, P()), put(targets, P("data")), put(weights, P("data"))
    program = step(8).lower(*sharded).compile()
    got = program(*sharded)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max())
    text = program.as_text()
    assert not re.findall(r" (all-gather|all-to-all|collective-permute)", text)
    summed = re.findall(r"= (.*?) all-reduce", text)
    assert sum(f"[{V},{D}]" in shape for shape in summed) == 1, summed  # the head's gradient, once
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
        ({"unembed_layout": "dim_vocab"}, "hidden"),
        ({"targets": np.zeros(BATCH)}, "targets"),
        ({"weights": np.ones((BATCH, LENGTH, 1))}, "mask"),
        ({"temperature": 0.0}, "temperature"),
        ({"softcap": 0.0}, "softcap"),
        ({"groups": 5}, "groups"),
        ({"chunk_rows": 0}, "chunk_rows"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], named: str) -> None:
    arguments = {"hidden": HIDDEN, "unembed": UNEMBED, "targets": TARGETS, "weights": WEIGHTS}
    with pytest.raises(InputError, match=f"^{named}"):
        head_loss(cross_entropy, **{**arguments, **changes})
