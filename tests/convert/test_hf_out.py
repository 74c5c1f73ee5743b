"""What save_hf writes: the layout by key and shape, and models that come back with the very same logits."""

import json
import weakref
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from burnish.convert.hf_out import save_hf
from burnish.convert.safetensors_out import TensorOut, write_safetensors
from burnish.errors import InputError
from burnish.loading import load
from burnish.models.config import RopeConfig
from burnish.models.paths import read
from burnish.wrapper import ModelWrapper, Origin

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 11)))
LINEARS = {
    "self_attn.q_proj": (24, 16),
    "self_attn.k_proj": (12, 16),
    "self_attn.v_proj": (12, 16),
    "self_attn.o_proj": (16, 24),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
}


def headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """(file, shape, dtype) of every tensor, read with the safetensors library."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as handle:
            assert handle.metadata() == {"format": "pt"}
            for name in handle.keys():  # noqa: SIM118
                assert name not in found
                part = handle.get_slice(name)
                found[name] = (file.name, tuple(part.get_shape()), part.get_dtype())
    return found


def expected_shapes(layers: int, tied: bool) -> dict[str, tuple[int, ...]]:
    shapes = {"model.embed_tokens.weight": (64, 16), "model.norm.weight": (16,)}
    if not tied:
        shapes["lm_head.weight"] = (64, 16)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in LINEARS.items()}
        shapes |= {f"{prefix}{name}.weight": (16,) for name in ("input_layernorm", "post_attention_layernorm")}
    return shapes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layout_and_exact_round_trip(tiny_model, forward, tmp_path, tied, dtype):
    model = tiny_model(tie_embeddings=tied, dtype=dtype)
    save_hf(model, tmp_path / "out")
    found = headers(tmp_path / "out")
    assert {name: shape for name, (_, shape, _) in found.items()} == expected_shapes(3, tied)
    assert {kind for _, _, kind in found.values()} == {"F32" if dtype == "float32" else "BF16"}
    assert {file for file, _, _ in found.values()} == {"model.safetensors"}
    again = load(tmp_path / "out", dtype=dtype)
    assert again.decoder.config == model.decoder.config
    assert np.array_equal(forward(again, TOKENS), forward(model, TOKENS))
    assert again.tokenizer.stop_ids == model.tokenizer.stop_ids
    assert again.tokenizer.chat_template == model.tokenizer.chat_template


@pytest.mark.parametrize(
    "options",
    [
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "activation": "gelu_tanh", "norm_eps": 3e-3},
        {"rope": RopeConfig(777.7, "linear", 2.5)},
        {"rope": RopeConfig(777.7, "llama3", 4.0, 16, 1.0, 3.0)},
        {"rope": RopeConfig(777.7, "yarn", 4.0, 16, attention_factor=1.2, truncate=False)},
    ],
)
def test_every_setting_survives(tiny_model, tmp_path, options):
    model = tiny_model(**options)
    save_hf(model, tmp_path / "out")
    again = load(tmp_path / "out")
    assert again.decoder.config == model.decoder.config
    arrays = read(model.module)
    assert all(np.array_equal(arrays[key], array) for key, array in read(again.module).items())


def test_shards(tiny_model, forward, tmp_path):
    model = tiny_model()
    save_hf(model, tmp_path / "whole")
    save_hf(model, tmp_path / "parts", shard_bytes=6000)
    whole, parts = headers(tmp_path / "whole"), headers(tmp_path / "parts")
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for name, (file, _, _) in parts.items()}
    assert {name: info[1:] for name, info in parts.items()} == {name: info[1:] for name, info in whole.items()}
    assert index["metadata"]["total_size"] == 4 * sum(int(np.prod(shape)) for _, shape, _ in whole.values())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert all((tmp_path / "parts" / file).stat().st_size <= 6000 + 2000 for file in files)
    assert np.array_equal(forward(load(tmp_path / "parts"), TOKENS), forward(model, TOKENS))


def test_dtype_of_the_file(tiny_model, tmp_path):
    model = tiny_model()
    save_hf(model, tmp_path / "out", dtype="bfloat16")
    assert {kind for _, _, kind in headers(tmp_path / "out").values()} == {"BF16"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as handle:
        written = handle.get_tensor("model.embed_tokens.weight")
    assert np.array_equal(written, np.asarray(model.decoder.embed.weight[...]).astype(ml_dtypes.bfloat16))


def test_numbers_too_large_for_float16_are_said(tiny_model, tmp_path):
    model = tiny_model()
    model.decoder.embed.weight.set_value(model.decoder.embed.weight[...].at[3, 2].set(1e5))
    with pytest.raises(InputError, match=r"float16: model\.embed_tokens\.weight holds numbers beyond 65504"):
        save_hf(model, tmp_path / "out", dtype="float16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["int8", "int4", "float7", "complex64"])
def test_a_dtype_that_is_no_weight_format(tiny_model, tmp_path, dtype):
    with pytest.raises(InputError, match=f"{dtype}.*known are float64, float32"):
        save_hf(tiny_model(), tmp_path / "out", dtype=dtype)


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_are_merged_in_the_file_and_untouched_in_memory(tiny_model, forward, fill_adapters, tmp_path, tied):
    model = tiny_model(tie_embeddings=tied)
    model.add_lora(rank=3, alpha=5.0, targets=["q_proj", "layers.1.mlp"])
    fill_adapters(model.decoder, 1)
    model.add_lora(rank=2)
    fill_adapters(model.decoder, 2)
    before, logits = read(model.module), forward(model, TOKENS)
    save_hf(model, tmp_path / "out")
    after = read(model.module)
    assert before.keys() == after.keys() and all(np.array_equal(before[key], after[key]) for key in before)
    found = headers(tmp_path / "out")
    assert {name: shape for name, (_, shape, _) in found.items()} == expected_shapes(3, tied)
    again = load(tmp_path / "out")
    assert not again.adapted
    np.testing.assert_allclose(forward(again, TOKENS), logits, atol=1e-5 * float(jnp.abs(logits).max()))
    plain = tiny_model(tie_embeddings=tied)
    assert np.abs(forward(plain, TOKENS) - logits).max() > 0.1, "the adapters do nothing, so this test shows nothing"


def test_a_small_adapter_on_bfloat16_is_merged_in_float32(tiny_model, fill_adapters, tmp_path):
    model = tiny_model(dtype="bfloat16")
    model.add_lora(rank=2, alpha=1e-3)
    fill_adapters(model.decoder, 1)
    save_hf(model, tmp_path / "out", dtype="float32")
    linear = model.decoder.runs[0].blocks[0].attn.q_proj
    adapter = linear.adapters[0]
    a, b = (np.asarray(part[...][1], np.float64) for part in (adapter.a, adapter.b))
    exact = np.asarray(linear.kernel[...][1], np.float64) + adapter.scale * a @ b
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as handle:
        written = handle.get_tensor("model.layers.1.self_attn.q_proj.weight")
    np.testing.assert_allclose(written, exact.T, rtol=1e-6, atol=1e-9)


def test_original_files_survive(tiny_model, tmp_path):
    model = tiny_model()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "initializer_range": 0.04,
        "house_key": {"a": "ü"},
        "hidden_size": 1,
    }
    config |= {
        "bos_token_id": 7,
        "eos_token_id": [1, 40],
        "auto_map": {"AutoModel": "code.Model"},
        "torch_dtype": "float16",
    }
    generation = {"temperature": 0.6, "do_sample": True, "eos_token_id": 40, "bos_token_id": 7}
    origin = Origin("org/name", family="llama", hf_config=config, generation_config=generation)
    save_hf(ModelWrapper(model.module, model.tokenizer, origin), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["initializer_range"] == 0.04 and written["house_key"] == {"a": "ü"}
    assert written["bos_token_id"] == 7 and written["eos_token_id"] == [1, 40]
    assert written["hidden_size"] == 16 and written["dtype"] == written["torch_dtype"] == "float32"
    assert "auto_map" not in written
    kept = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert kept["temperature"] == 0.6 and kept["do_sample"] is True and kept["bos_token_id"] == 7
    # Its own stop, the tokenizer's eos </s>, and <end>, with which the chat template ends a turn.
    assert kept["eos_token_id"] == [40, 1, 2]
    assert kept["pad_token_id"] == 1


def test_card_carries_the_licence_and_the_base(tiny_model, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\n---\n# A model\n")
    model = tiny_model()
    origin = Origin("org/name", path=tmp_path / "base", family="llama")
    save_hf(ModelWrapper(model.module, model.tokenizer, origin), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\nbase_model: org/name\nlibrary_name: transformers\n")
    local = Origin(str(tmp_path / "base"), path=tmp_path / "base", family="llama")
    save_hf(ModelWrapper(model.module, model.tokenizer, local), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model" not in card and str(tmp_path) not in card


def test_a_folder_of_somebody_elses_is_left_alone(tiny_model, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(InputError, match=r"holds model\.safetensors, which was not written here"):
        save_hf(tiny_model(), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_failure_half_way_leaves_nothing(tiny_model, tmp_path, monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(type(model.tokenizer), "save", lambda self, folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_hf(model, tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == []


def test_only_one_tensor_is_read_at_a_time(tmp_path):
    alive: list[np.ndarray] = []

    def tensor(number: int) -> TensorOut:
        def read() -> np.ndarray:
            assert all(reference() is None for reference in alive), "an earlier tensor is still held"
            array = np.full((50, 4), number, np.float32)
            alive.append(weakref.ref(array))
            return array

        return TensorOut(f"t{number}", (50, 4), np.dtype(np.float32), read)

    write_safetensors(tmp_path / "x.safetensors", [tensor(number) for number in range(4)])
    with safe_open(tmp_path / "x.safetensors", "np") as handle:
        assert [handle.get_tensor(f"t{number}")[7, 3] for number in range(4)] == [0, 1, 2, 3]


@pytest.mark.parity
@pytest.mark.parametrize(
    "options",
    [
        {"tie_embeddings": True},
        {
            "qkv_bias": True,
            "output_bias": True,
            "mlp_bias": True,
            "rope": RopeConfig(777.7, "llama3", 4.0, 16, 1.0, 3.0),
        },
        {"rope": RopeConfig(777.7, "yarn", 4.0, 16), "activation": "gelu_tanh", "norm_eps": 1e-2},
        {"rope": RopeConfig(777.7, "linear", 4.0)},
    ],
)
def test_transformers_reads_it(tiny_model, forward, fill_adapters, tmp_path, options):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = tiny_model(**options)
    model.add_lora(rank=3, targets=["layers.1.attn"])
    fill_adapters(model.decoder, 3)
    save_hf(model, tmp_path / "out", shard_bytes=8000)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.dtype == torch.float32
    assert theirs.generation_config.eos_token_id == [1, 2]
    with torch.no_grad():
        logits = theirs(torch.tensor(np.asarray(TOKENS))).logits.numpy()
    assert logits.std() >= 1
    assert np.abs(logits - forward(model, TOKENS)).max() <= 1e-4 * np.abs(logits).max()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("w1 w2 <end>", add_special_tokens=False).input_ids == model.tokenizer.encode("w1 w2 <end>")
    messages = [{"role": "user", "content": "w3"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == model.tokenizer.render(messages)
