"""Reading Hugging Face folders: bad input gets one line that names the place, and a model is never held twice."""

import json
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from burnish.convert.hf import load_hf_decoder
from burnish.convert.hf_out import save_hf
from burnish.errors import InputError
from burnish.loading import load
from burnish.models.paths import read


@pytest.fixture
def folder(llama_folder, llama_cases):
    """One file of weights."""
    return llama_folder("untied", llama_cases["default"]["config"])


@pytest.fixture
def sharded(llama_folder, llama_cases):
    """Three shards and their index."""
    return llama_folder("biased", llama_cases["biased"]["config"])


def refused(folder, *said):
    """The message with which a folder is refused: one line that holds all of `said`."""
    with pytest.raises(InputError) as error:
        load_hf_decoder(folder, jnp.float32)
    message = str(error.value)
    assert "\n" not in message
    assert str(folder) in message
    for part in said:
        assert part in message, message
    return message


def edit_tensors(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_missing_shard(sharded, number):
    shard = sharded / f"model-0000{number}-of-00003.safetensors"
    shard.unlink()
    refused(sharded, shard.name, "missing", "copy it again")


@pytest.mark.parametrize("keep", [0, 3, 8, 9, 200, 0.3, 0.9, -1])
@pytest.mark.parametrize("layout", ["one", "shards"])
def test_cut_file(folder, sharded, layout, keep):
    path = folder / "model.safetensors" if layout == "one" else sharded / "model-00002-of-00003.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    refused(path.parent, path.name, "not a whole safetensors file", "copy it again")


def test_cut_index(sharded):
    index = sharded / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text[: len(text) // 2])
    refused(sharded, index.name, "broken JSON at line")
    for content in ("{}", '{"weight_map": {}}', '{"weight_map": [1]}', '{"weight_map": {"a": 3}}', "[]"):
        index.write_text(content)
        refused(sharded, index.name)


def test_index_that_points_out_of_the_folder(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    refused(sharded, index.name, "weight_map must give a file of this folder")


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_missing_tensor(folder, name):
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.pop(name))
    refused(folder, f"tensor {name} is missing")


@pytest.mark.parametrize(
    "name, shape, wanted",
    [
        ("model.layers.1.mlp.up_proj.weight", (32, 48), "[48, 32]"),
        ("model.layers.0.self_attn.k_proj.weight", (48, 32), "[24, 32]"),
        ("model.norm.weight", (31,), "[32]"),
        ("model.embed_tokens.weight", (65, 32), "[64, 32]"),
        ("lm_head.weight", (32,), "[64, 32]"),
    ],
)
def test_wrong_shape(folder, name, shape, wanted):
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.update({name: np.zeros(shape, np.float32)}))
    refused(folder, name, str(list(shape)), wanted)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "bool"])
def test_tensor_of_integers(folder, dtype):
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.update({name: np.zeros((48, 32), dtype)}))
    refused(folder, name, dtype, "only float weights")


def test_tensor_of_eight_bit_floats(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    path = folder / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    start, end = header[name]["data_offsets"]
    quarter = (end - start) // 4
    header[name] |= {"dtype": "F8_E4M3", "data_offsets": [start, start + quarter]}
    for key, entry in header.items():
        if key not in (name, "__metadata__") and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset - 3 * quarter for offset in entry["data_offsets"]]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = content[8 + size :]
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[: start + quarter] + data[end:])
    refused(folder, name)


def test_broken_config_names_the_line(folder):
    (folder / "config.json").write_text('{\n "model_type": "llama",\n "hidden_size": 32\n "vocab_size": 64\n}')
    refused(folder, "config.json", "line 4")
    (folder / "config.json").write_text("[1]")
    refused(folder, "config.json", "object is expected")
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    refused(folder, "config.json")


def test_unknown_family_lists_the_known(folder):
    for change in ({"model_type": "mamba"}, {"model_type": None}, {"model_type": ["llama"]}):
        config = json.loads((folder / "config.json").read_text()) | change
        (folder / "config.json").write_text(json.dumps(config))
        message = refused(folder, "config.json", "model_type")
        assert change["model_type"] is None or "llama" in message


CONFIG_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "hidden_act", "rope_theta"),
    *("rope_parameters", "rope_scaling", "partial_rotary_factor"),
)


@pytest.mark.parametrize("key", CONFIG_KEYS)
def test_config_values_of_the_wrong_kind(folder, key):
    original = json.loads((folder / "config.json").read_text())
    del original["rope_parameters"]
    for value in ("many", -3, [4], {"a": {"b": 1}}, {"rope_type": ["x"], "factor": "y"}, 1e400):
        (folder / "config.json").write_text(json.dumps(original | {key: value}))
        refused(folder, "config.json", key.removeprefix("partial_") if isinstance(value, dict) else key)


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings", "low_freq_factor", "rope_theta"])
def test_rope_values_of_the_wrong_kind(folder, key):
    original = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 16}
    for value in ("many", -3, [4]):
        (folder / "config.json").write_text(json.dumps(original | {"rope_parameters": rope | {key: value}}))
        refused(folder, "config.json", key)


def test_missing_config_value(folder):
    original = json.loads((folder / "config.json").read_text())
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        (folder / "config.json").write_text(json.dumps({k: v for k, v in original.items() if k != key}))
        refused(folder, "config.json", f"{key} is missing")


def test_quantized_weights_are_refused(folder):
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "config.json", "quantized", "unquantized")


def test_empty_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: not a model; give a folder with config"):
        load(tmp_path / "empty")


def test_folder_with_pickled_weights_only(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, "model.safetensors", "copy the weights")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    refused(folder, "only safetensors are read", "save_pretrained")


def test_rotary_buffers_of_old_files_are_passed_over(folder):
    before = read(load_hf_decoder(folder, jnp.float32))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder / "model.safetensors", lambda tensors: tensors.update({name: np.zeros(6, np.float32)}))
    after = read(load_hf_decoder(folder, jnp.float32))
    assert all(np.array_equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("on_disk", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_float_type_is_read(folder, on_disk, dtype):
    tensors = {name: array.astype(on_disk) for name, array in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    decoder = load_hf_decoder(folder, dtype)
    expected = tensors["model.layers.1.mlp.up_proj.weight"].T.astype(jnp.dtype(dtype))
    found = np.asarray(decoder.runs[0].blocks[0].mlp.up_proj.kernel[...][1])
    assert found.dtype == expected.dtype and np.array_equal(found, expected)


# ---- memory

_MEASURE = """
import sys
from pathlib import Path
import jax.numpy as jnp
from burnish.convert.hf import load_hf_decoder

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024

load_hf_decoder(Path(sys.argv[2]), jnp.dtype(sys.argv[3]))  # a tiny one: what any load costs
before = status("VmRSS")
decoder = load_hf_decoder(Path(sys.argv[1]), jnp.dtype(sys.argv[3]))
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("on_disk, dtype", [("float32", "float32"), ("bfloat16", "bfloat16")])
def test_a_model_is_never_held_twice(tiny_model, folder, tmp_path, on_disk, dtype):
    sizes = {"vocab_size": 8000, "hidden_size": 640, "intermediate_size": 2000, "num_layers": 12}
    model = tiny_model(**sizes, num_heads=10, num_kv_heads=5, head_dim=64)
    count = model.parameters
    save_hf(model, tmp_path / "big", dtype=on_disk, shard_bytes=60_000_000)
    del model
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "big"), str(folder), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    in_memory = count * jnp.dtype(dtype).itemsize
    assert in_memory > 100_000_000
    assert int(done.stdout) <= 1.5 * in_memory
