"""GGUF files: every advertised quantization, rope's order of rows, and files that are cut or strange."""

from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from gguf.quants import dequantize, quantize

from burnish.convert.builtin import cached_model
from burnish.convert.gguf import load_gguf_decoder, open_gguf
from burnish.convert.hf import load_hf_decoder
from burnish.errors import InputError
from burnish.loading import load
from burnish.models.config import RopeConfig
from burnish.models.rope import rope_frequencies

FAMILIES = Path(__file__).parent.parent / "fixtures" / "families"
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
WIDE = {"hidden": 256, "mlp": 256, "vocab": 64, "layers": 1, "heads": 4, "kv_heads": 2}  # K-quants need 256 a row
SMALL = {"hidden": 32, "mlp": 64, "vocab": 64, "layers": 2, "heads": 4, "kv_heads": 2}


def shapes(hidden, mlp, vocab, layers, heads, kv_heads):
    """Shapes of every tensor as files hold them: [out, in]."""
    kv = hidden * kv_heads // heads
    found = {"token_embd": (vocab, hidden), "output": (vocab, hidden), "output_norm": (hidden,)}
    for layer in range(layers):
        block = {
            "attn_q": (hidden, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, hidden),
            "ffn_gate": (mlp, hidden),
            "ffn_up": (mlp, hidden),
            "ffn_down": (hidden, mlp),
            "attn_norm": (hidden,),
            "ffn_norm": (hidden,),
        }
        found |= {f"blk.{layer}.{name}": shape for name, shape in block.items()}
    return {f"{name}.weight": shape for name, shape in found.items()}


def random_tensors(sizes, seed=0):
    generator = np.random.default_rng(seed)
    return {
        name: (generator.normal(0, 0.5, shape) + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes(**sizes).items()
    }


def random_blocks(kind, shape, seed):
    """Valid blocks of a quantization: any bytes, but small numbers for the half-precision scales among them."""
    generator = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape)) // block
    blocks = generator.integers(0, 256, (count, size), dtype=np.uint8)
    scales = {  # where the half-precision scales are
        Quant.Q2_K: (80, 82),
        Quant.Q3_K: (108,),
        Quant.Q4_K: (0, 2),
        Quant.Q5_K: (0, 2),
        Quant.Q6_K: (208,),
    }[kind]
    for at in scales:
        values = generator.uniform(0.001, 0.01, (count, 1)).astype(np.float16)
        blocks[:, at : at + 2] = values.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write_gguf(path, tensors, sizes, *, kinds=None, metadata=None, without=(), architecture="llama"):
    """A whole file with a small tokenizer. kinds: quantization by tensor name, for tensors given as raw bytes."""
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "context_length": 128,
        "embedding_length": sizes["hidden"],
        "block_count": sizes["layers"],
        "feed_forward_length": sizes["mlp"],
        "attention.head_count": sizes["heads"],
        "attention.head_count_kv": sizes["kv_heads"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 4321.0,
        **(metadata or {}),
    }
    for key, value in values.items():
        if key in without:
            continue
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(sizes["vocab"] - 3))])
    writer.add_token_scores([0.0] * sizes["vocab"])
    writer.add_token_types([2, 3, 3] + [1] * (sizes["vocab"] - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, array in tensors.items():
        if name not in without:
            writer.add_tensor(name, array, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def loaded(path, dtype=jnp.float32):
    return load_gguf_decoder(path, open_gguf(path), dtype)


def interleaved(rows, heads):
    """What llama.cpp's converter does to q and k: features i and i + half of each head become neighbours."""
    half = rows.shape[0] // heads // 2
    order = [head * 2 * half + i + side * half for head in range(heads) for i in range(half) for side in (0, 1)]
    return rows[order]


def half_split(rows, heads):
    """The way back: row 2 i + side of each head goes to i + side * half."""
    half = rows.shape[0] // heads // 2
    order = [head * 2 * half + 2 * i + side for head in range(heads) for side in (0, 1) for i in range(half)]
    return rows[order]


@pytest.mark.parametrize("kind", [*QUANTIZED, "F16", "BF16", "F32"])
def test_every_advertised_quantization(tmp_path, kind):
    sizes = WIDE if kind.endswith("_K") else SMALL
    quant = Quant[kind]
    tensors, kinds, expected = {}, {}, {}
    for seed, (name, array) in enumerate(random_tensors(sizes).items()):
        if array.ndim == 1 or kind == "F32":
            tensors[name] = expected[name] = array
            continue
        packed = random_blocks(quant, array.shape, seed) if kind.endswith("_K") else quantize(array, quant)
        tensors[name], kinds[name] = packed, quant
        expected[name] = dequantize(packed, quant).reshape(array.shape)
        assert np.isfinite(expected[name]).all() and expected[name].std() > 0.01
    decoder = loaded(write_gguf(tmp_path / "model.gguf", tensors, sizes, kinds=kinds))
    run = decoder.runs[0].blocks[0]
    assert np.array_equal(decoder.embed.weight[...], expected["token_embd.weight"])
    assert np.array_equal(decoder.head.kernel[...], expected["output.weight"].T)
    assert np.array_equal(decoder.norm.scale[...], expected["output_norm.weight"])
    found = {
        "attn_v": run.attn.v_proj.kernel,
        "attn_output": run.attn.o_proj.kernel,
        "ffn_gate": run.mlp.gate_proj.kernel,
        "ffn_up": run.mlp.up_proj.kernel,
        "ffn_down": run.mlp.down_proj.kernel,
        "attn_norm": run.attn_norm.scale,
        "ffn_norm": run.mlp_norm.scale,
    }
    for layer in range(sizes["layers"]):
        for name, variable in found.items():
            assert np.array_equal(np.asarray(variable[...][layer]).T, expected[f"blk.{layer}.{name}.weight"])
        for name, heads in (("attn_q", sizes["heads"]), ("attn_k", sizes["kv_heads"])):
            kernel = getattr(run.attn, f"{name[-1]}_proj").kernel[...][layer]
            assert np.array_equal(np.asarray(kernel).T, half_split(expected[f"blk.{layer}.{name}.weight"], heads))


def to_gguf(hf_tensors, heads, kv_heads):
    """A Llama's tensors from Hugging Face's names and row order to GGUF's."""
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    inner = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    found = {}
    for name, array in hf_tensors.items():
        module, _, leaf = name.rpartition(".")
        if "q_proj" in name or "k_proj" in name:
            array = interleaved(array, heads if "q_proj" in name else kv_heads)
        if module in outer:
            found[f"{outer[module]}.{leaf}"] = array
        else:
            _, _, layer, rest = module.split(".", 3)
            found[f"blk.{layer}.{inner[rest]}.{leaf}"] = np.ascontiguousarray(array)
    return found


@pytest.mark.parametrize("case", ["default", "linear", "yarn", "biased"])
def test_equals_the_hugging_face_form_of_the_same_weights(case, llama_cases, llama_expected, llama_folder, tmp_path):
    from safetensors.numpy import load_file

    config = llama_cases[case]["config"]
    folder = llama_folder(llama_cases[case]["weights"], config)
    tensors = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    rope = config["rope_parameters"]
    metadata = {"rope.freq_base": rope["rope_theta"], "attention.key_length": config["head_dim"] or 32 // heads}
    if rope["rope_type"] != "default":
        metadata |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        metadata["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    sizes = {"hidden": 32, "mlp": 48, "vocab": 64, "layers": 2, "heads": heads, "kv_heads": kv_heads}
    path = write_gguf(tmp_path / "model.gguf", to_gguf(tensors, heads, kv_heads), sizes, metadata=metadata)
    model = load(path)
    expected = llama_expected[case]
    logits = np.asarray(model(jnp.asarray(llama_expected["tokens"])[None]))[0]
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()
    ours, theirs = model.decoder.config, load_hf_decoder(folder, jnp.float32).config
    assert (ours.norm_eps, ours.tie_embeddings, ours.qkv_bias) == (
        theirs.norm_eps,
        theirs.tie_embeddings,
        theirs.qkv_bias,
    )
    assert model.tokenizer.eos_id == 2


GEMMA3 = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def test_gemma_3_equals_transformers(tmp_path):
    """Its norms hold one more in a GGUF, no rows are in another order, and much of what it is is left to the reader."""
    from safetensors.numpy import load_file

    tensors = {}
    for shard in (FAMILIES / "gemma3_text").glob("*.safetensors"):
        for name, array in load_file(shard).items():
            array = array.astype(np.float32) + ("norm" in name)
            if name.startswith("model.layers."):
                _, _, layer, module = name.removesuffix(".weight").split(".", 3)
                tensors[f"blk.{layer}.{GEMMA3[module]}.weight"] = array
            else:
                outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
                tensors[outer[name]] = array
    sizes = {"hidden": 24, "mlp": 36, "vocab": 48, "layers": 7, "heads": 4, "kv_heads": 2}
    metadata = {
        "rope.freq_base": 5000.0,
        "attention.key_length": 10,
        "attention.value_length": 10,
        "attention.sliding_window": 6,
        "attention.layer_norm_rms_epsilon": 3e-4,
    }
    path = write_gguf(tmp_path / "model.gguf", tensors, sizes, metadata=metadata, architecture="gemma3")
    with np.load(FAMILIES / "gemma3_text" / "expected.npz") as arrays:
        tokens, expected = arrays["tokens"], arrays["published"]
    logits = np.asarray(loaded(path)(jnp.asarray(tokens)[None]))[0]
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parity
def test_gemma3_270m_equals_transformers_on_the_same_file():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    path = cached_model("gemma3-270m")
    model = load("gemma3-270m")
    ids = [
        2,
        *model.require_tokenizer().encode("Natalia sold clips to 48 of her friends in April, and then half as many."),
    ]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    logits = np.asarray(model(jnp.asarray([ids])))[0]
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scaling_is_found_in_its_divisors(tmp_path, factor):
    rope = RopeConfig(500000.0, "llama3", factor, 8192, 1.0, 4.0)
    plain, _ = rope_frequencies(RopeConfig(500000.0), 8)
    scaled, _ = rope_frequencies(rope, 8)
    tensors = random_tensors(SMALL) | {"rope_freqs.weight": (plain / scaled).astype(np.float32)}
    path = write_gguf(tmp_path / "model.gguf", tensors, SMALL, metadata={"rope.freq_base": 500000.0})
    assert loaded(path).config.rope == rope
    tensors["rope_freqs.weight"] = np.linspace(1, 3, 4, dtype=np.float32)
    with pytest.raises(InputError, match="rope_freqs"):
        loaded(write_gguf(tmp_path / "odd.gguf", tensors, SMALL))


def test_a_file_cut_anywhere_is_refused_or_whole(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", random_tensors(SMALL), SMALL).read_bytes()
    logits = np.asarray(load(tmp_path / "whole.gguf").decoder.embed.weight[...])
    generator = np.random.default_rng(0)
    header = len(whole) - 4 * sum(int(np.prod(shape)) for shape in shapes(**SMALL).values())
    sizes = {0, 3, 4, 8, 23, 24, 25, len(whole) - 1, len(whole) - 4, header, header + 1}
    sizes |= {int(at) for at in generator.integers(24, header, 60)} | {
        int(at) for at in generator.integers(header, len(whole), 8)
    }
    for size in sorted(sizes):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        try:
            model = load(tmp_path / "cut.gguf")
        except InputError as error:
            assert "cut.gguf" in str(error) and "\n" not in str(error), (size, error)
        else:
            assert np.array_equal(model.decoder.embed.weight[...], logits), size
            assert size >= len(whole) - 32, "a file this short cannot be whole"


def test_not_a_gguf(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(InputError, match=r"model\.gguf: not a GGUF file"):
        load(tmp_path / "model.gguf")
    with pytest.raises(InputError, match=r"gone\.gguf: "):
        load(tmp_path / "gone.gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + (99).to_bytes(4, "little") + bytes(100))
    with pytest.raises(InputError, match=r"model\.gguf: .*version 99"):
        load(tmp_path / "model.gguf")


def test_vocabulary_only(tmp_path):
    path = write_gguf(tmp_path / "vocab.gguf", {}, SMALL)
    with pytest.raises(InputError, match=r"vocab\.gguf: .*vocabulary-only"):
        load(path)


def test_unknown_architecture_lists_the_known(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", random_tensors(SMALL), SMALL, architecture="mamba")
    with pytest.raises(InputError, match=r"model\.gguf: architecture 'mamba' is not known; known are llama"):
        load(path)


@pytest.mark.parametrize("key", ["embedding_length", "attention.head_count", "context_length", "block_count"])
def test_missing_metadata(tmp_path, key):
    path = write_gguf(tmp_path / "model.gguf", random_tensors(SMALL), SMALL, without=(key,))
    with pytest.raises(InputError, match=rf"metadata llama\.{key} is missing"):
        load(path)


def test_missing_and_misshapen_tensors(tmp_path):
    tensors = random_tensors(SMALL)
    path = write_gguf(tmp_path / "model.gguf", tensors, SMALL, without=("blk.1.ffn_up.weight",))
    with pytest.raises(InputError, match=r"tensor blk\.1\.ffn_up\.weight is missing"):
        load(path)
    for name, shape in (
        ("blk.1.ffn_up.weight", (63, 32)),
        ("blk.0.attn_q.weight", (30, 32)),
        ("output_norm.weight", (8,)),
    ):
        path = write_gguf(tmp_path / "model.gguf", tensors | {name: np.zeros(shape, np.float32)}, SMALL)
        with pytest.raises(InputError, match=rf"tensor {name} "):
            load(path)


@pytest.mark.parametrize(
    "metadata, said",
    [
        ({"rope.dimension_count": 4}, "rope over 4 of 8 features"),
        ({"expert_count": 8}, "mixture-of-experts"),
        ({"rope.scaling.type": "longrope"}, "'longrope' is not known"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 0.5},
            "attn_factor is 0.5",
        ),
        ({"attention.value_length": 16}, "value_length"),
        ({"attention.head_count": 0}, "head_count"),
        ({"attention.head_count": "four"}, "head_count"),
        ({"attention.head_count_kv": 3}, "num_kv_heads 3 does not divide"),
    ],
)
def test_what_is_not_supported_is_said(tmp_path, metadata, said):
    path = write_gguf(tmp_path / "model.gguf", random_tensors(SMALL), SMALL, metadata=metadata)
    with pytest.raises(InputError, match=said) as error:
        load(path)
    assert "model.gguf" in str(error.value) and "\n" not in str(error.value)


def test_a_quantization_without_a_reader_is_named(tmp_path):
    tensors = random_tensors(SMALL)
    tensors["blk.0.ffn_up.weight"] = np.zeros((64, 32), np.int8)
    path = write_gguf(tmp_path / "model.gguf", tensors, SMALL)
    with pytest.raises(InputError, match=r"blk\.0\.ffn_up\.weight is I8, which cannot be dequantized; use a Q4_0"):
        load(path)
