"""Every family equals transformers on committed logits: whole rows, packed rows, through the cache, out and in."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from burnish.convert.families import FAMILIES, family_of
from burnish.convert.hf import load_hf_decoder
from burnish.convert.hf_out import save_hf
from burnish.errors import InputError
from burnish.generate.unrolled import CachedModel
from burnish.models.decoder import Decoder
from burnish.wrapper import ModelWrapper, Origin

FIXTURES = Path(__file__).parent.parent / "fixtures" / "families"
NAMES = sorted(folder.name for folder in FIXTURES.iterdir())
CASES = [
    (family, case) for family in NAMES for case in json.loads((FIXTURES / family / "cases.json").read_text())["cases"]
]


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[[str, str], Path]:
    """Makes a folder of a family's weights with the configuration of a case."""

    def make(family: str, case: str = "base") -> Path:
        folder = tmp_path / f"{family}-{case}"
        shutil.copytree(FIXTURES / family, folder, ignore=shutil.ignore_patterns("cases.json", "expected.npz"))
        (folder / "config.json").write_text(json.dumps(config_of(family, case)))
        return folder

    return make


def config_of(family: str, case: str) -> dict[str, Any]:
    return json.loads((FIXTURES / family / "cases.json").read_text())["cases"][case]


def expected_of(family: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / family / "expected.npz") as arrays:
        return dict(arrays)


def eager(decoder: Decoder, tokens: np.ndarray, **options: Any) -> np.ndarray:
    """Logits of rows, op by op: the many models here would each compile for longer than they run."""
    with jax.disable_jit():
        return np.asarray(decoder(jnp.asarray(tokens), **options))


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def test_every_family_has_a_fixture() -> None:
    assert set(FAMILIES) == {*NAMES, "llama"}


@pytest.mark.parametrize(("family", "case"), CASES, ids=map("-".join, CASES))
def test_equals_transformers(family: str, case: str, model_folder: Callable[..., Path]) -> None:
    """Each case changes a field of the base configuration, and with it the logits."""
    expected = expected_of(family)
    assert expected[case].std() >= 1, "the fixture is too tame"
    if case != "base":
        assert np.abs(expected[case] - expected["base"]).max() >= 1e-2, "the case changes nothing"
    decoder = load_hf_decoder(model_folder(family, case), jnp.float32)
    assert_close(eager(decoder, expected["tokens"][None])[0], expected[case])


@pytest.mark.parametrize(("family", "case"), CASES, ids=map("-".join, CASES))
def test_the_written_config_says_the_same(family: str, case: str) -> None:
    """In both spellings: with rope_parameters alone, and with what older readers know alone."""
    hf = config_of(family, case)
    kind = family_of(hf, "config.json")
    config = kind.from_hf(hf, "config.json")
    written = json.loads(json.dumps(kind.to_hf(config)))
    assert kind.from_hf(written, "written") == config
    newer = {key: value for key, value in written.items() if key not in ("rope_scaling", "rope_theta")}
    assert kind.from_hf(newer, "newer") == config
    if case not in ("short", "long"):  # Phi-3's older keys have no share that is rotated within rope_scaling
        older = {key: value for key, value in written.items() if key != "rope_parameters"}
        assert kind.from_hf(older, "older") == config


REFUSED = [
    ("qwen2", {"use_sliding_window": True, "max_window_layers": "28"}, "max_window_layers is '28'"),
    ("qwen2", {"layer_types": ["full_attention"], "use_sliding_window": True}, "a list of 4 values"),
    (
        "qwen3",
        {"use_sliding_window": True, "layer_types": ["full_attention", "chunked", "full_attention"]},
        "'chunked'",
    ),
    ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers is 3"),
    ("qwen3_moe", {"mlp_only_layers": [9]}, r"layer numbers from 0 to 4"),
    ("mixtral", {"num_experts_per_tok": 6}, "6 experts a token, and only 5"),
    ("mistral", {"rope_parameters": {"rope_type": "mrope"}}, "'mrope' is not known; known are default, linear, dyn"),
    ("mistral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("phi3", {"rope_scaling": [1, 2]}, r"rope_scaling is \[1, 2\]"),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}}, "must be 5 numbers"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
    ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping is 5.0"),
    ("gemma3_text", {"rope_parameters": {"full_attention": 3}}, "one set of numbers for each"),
    ("olmoe", {"clip_qkv": "x"}, "clip_qkv is 'x'"),
]


@pytest.mark.parametrize(("family", "change", "said"), REFUSED)
def test_what_is_wrong_or_not_honoured_is_named(family: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=f"config.json.*{said}"):
        FAMILIES[family].from_hf(config_of(family, "base") | change, "config.json")


def test_a_fused_tensor_of_another_height_is_named(model_folder: Callable[..., Path]) -> None:
    """Its rows are cut out of it: more of them would be silently left over."""
    folder = model_folder("phi3")
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith("qkv_proj.weight"):
                tensors[name] = np.concatenate([tensors[name], tensors[name][:2]])
        save_file(tensors, path)
    with pytest.raises(InputError, match=r"qkv_proj\.weight is \[82, 40\]; config\.json asks for \[80, 40\]"):
        load_hf_decoder(folder, jnp.float32)


def test_biases_in_some_maps_of_the_attention_cannot_be_written() -> None:
    config = FAMILIES["qwen3"].from_hf(config_of("qwen3", "base"), "config.json")
    with pytest.raises(InputError, match="in all maps of the attention, or in none"):
        FAMILIES["qwen3"].to_hf(dataclasses.replace(config, qkv_bias=True))


@pytest.mark.parametrize("family", NAMES)
def test_a_packed_row_is_two_documents(family: str, model_folder: Callable[..., Path]) -> None:
    """And what one holds moves no bit of the other."""
    expected = expected_of(family)
    decoder = load_hf_decoder(model_folder(family), jnp.float32)
    tokens, other = expected["tokens"], np.array([9, 3, 3, 40, 1, 2])
    segments = jnp.asarray([[1] * 6 + [2] * len(tokens)])
    packed = eager(decoder, np.concatenate([other, tokens])[None], segment_ids=segments)[0]
    assert_close(packed[6:], expected["base"])
    assert_close(packed[:6], eager(decoder, other[None])[0])
    changed = eager(decoder, np.concatenate([other[::-1], tokens])[None], segment_ids=segments)[0]
    assert np.array_equal(changed[6:], packed[6:])


@pytest.mark.parametrize("family", NAMES)
def test_prompt_and_then_token_by_token(family: str, model_folder: Callable[..., Path]) -> None:
    """Through the cache, a left-padded prompt of nine tokens and the others one at a time."""
    expected = expected_of(family)
    decoder = load_hf_decoder(model_folder(family), jnp.float32)
    tokens = expected["tokens"]

    @nnx.jit
    def extend(decoder: Decoder, tokens: jax.Array, positions: jax.Array, segments: jax.Array, cache: Any) -> Any:
        hidden, cache = decoder.extend(tokens, positions, segments, cache)
        return decoder.logits(hidden), cache

    pad = 3
    row = jnp.asarray(np.concatenate([[7] * pad, tokens[:9]])[None])
    segments = jnp.asarray([[0] * pad + [1] * 9])
    positions = jnp.asarray([[0] * pad + list(range(9))])
    logits, cache = extend(decoder, row, positions, segments, decoder.empty_cache(1, pad + len(tokens)))
    found = [np.asarray(logits)[0, pad:]]
    for at in range(9, len(tokens)):
        step = (jnp.asarray([[tokens[at]]]), jnp.asarray([[at]]), jnp.ones((1, 1), jnp.int32))
        logits, cache = extend(decoder, *step, cache)
        found.append(np.asarray(logits)[0])
    assert_close(np.concatenate(found), expected["base"])


@pytest.mark.parametrize("family", NAMES)
def test_the_decode_loop_sees_what_a_whole_row_sees(family: str, model_folder: Callable[..., Path]) -> None:
    """Layer by layer, as the sampler lays a decoder out."""
    expected = expected_of(family)
    tokens = expected["tokens"].tolist()
    cached = CachedModel(load_hf_decoder(model_folder(family), jnp.float32))
    module = nnx.merge(*cached.parts)
    memory = cached.read([tokens[:9]], 1, len(tokens))
    push = nnx.jit(lambda module, memory, token: module.push(memory, token))
    found = [np.asarray(module.logits(memory))]
    for token in tokens[9:]:
        memory = push(module, memory, jnp.asarray([token]))
        found.append(np.asarray(module.logits(memory)))
    assert_close(np.concatenate(found), expected["base"][8:])


@pytest.mark.parametrize("family", ["gemma3_text", "olmo2", "phi3", "qwen3_moe", "smollm3"])
def test_gradients_are_the_same_under_every_remat_policy(family: str, model_folder: Callable[..., Path]) -> None:
    """And every parameter has one."""
    graph, params = nnx.split(load_hf_decoder(model_folder(family), jnp.float32))
    tokens = jnp.asarray(expected_of(family)["tokens"][None])

    @functools.partial(jax.jit, static_argnames="remat")
    def gradients(params: Any, remat: str) -> Any:
        def loss(params: Any) -> jax.Array:
            module = nnx.merge(graph, params)
            return jnp.sum(jax.nn.log_softmax(module.logits(module.hidden(tokens, remat=remat)))[0, :, 3])

        return jax.grad(loss)(params)

    wanted = jax.tree.leaves(gradients(params, "none"))
    assert all(np.abs(leaf).max() > 0 for leaf in wanted)
    for policy in ("selective", "block"):
        for found, want in zip(jax.tree.leaves(gradients(params, policy)), wanted, strict=True):
            np.testing.assert_allclose(found, want, atol=1e-5 * float(np.abs(want).max()))


@pytest.mark.parametrize("shard_bytes", [None, 20_000], ids=["whole", "sharded"])
@pytest.mark.parametrize("family", NAMES)
def test_out_and_in_again(
    family: str, shard_bytes: int | None, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """The same parameters bit for bit, under the names that transformers writes."""
    folder = model_folder(family)
    decoder = load_hf_decoder(folder, jnp.float32)
    model = ModelWrapper(decoder, None, Origin(str(folder), family=family, hf_config=config_of(family, "base")))
    options = {} if shard_bytes is None else {"shard_bytes": shard_bytes}
    out = save_hf(model, tmp_path / "out", **options)
    assert len(list(out.glob("*.safetensors"))) == 1 if shard_bytes is None else (out / "model.safetensors.index.json")
    again = load_hf_decoder(out, jnp.float32)
    assert again.config == decoder.config
    for one, other in zip(jax.tree.leaves(nnx.state(decoder)), jax.tree.leaves(nnx.state(again)), strict=True):
        assert np.array_equal(one, other)
    assert tensor_shapes(out) == tensor_shapes(folder)


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parity
@pytest.mark.parametrize("family", NAMES)
def test_transformers_loads_what_is_written(family: str, model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Every tensor is known to it, none is missing, and the logits are the same."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    decoder = load_hf_decoder(model_folder(family), jnp.float32)
    origin = Origin("x", family=family, hf_config=config_of(family, "base"))
    out = save_hf(ModelWrapper(decoder, None, origin), tmp_path / "out")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    tokens = expected_of(family)["tokens"]
    with torch.no_grad():
        logits = theirs.eval()(torch.tensor(tokens[None])).logits[0].numpy()
    assert_close(logits, expected_of(family)["base"])
