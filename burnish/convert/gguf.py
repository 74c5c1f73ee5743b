"""Reads a GGUF file: metadata to a `ModelConfig`, tensors dequantized by the `gguf` package.

Specification: github.com/ggml-org/ggml, docs/gguf.md. Two things are kept otherwise there than in Hugging Face files,
by architecture: the rows of Llama's query and key projections are in the order of an interleaved rope, and are put back
into the half-split order the decoder uses; norms of Gemma have their offset of 1 added, and it is taken off.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from burnish.convert.build import build_decoder
from burnish.convert.families import placed_config
from burnish.errors import InputError
from burnish.models.config import ModelConfig, RopeConfig
from burnish.models.decoder import Decoder
from burnish.models.rope import rope_frequencies

_OUTER = {"embed": "token_embd", "norm": "output_norm", "head": "output"}
_INNER = {
    "attn_norm": "attn_norm",
    "attn.q_proj": "attn_q",
    "attn.k_proj": "attn_k",
    "attn.v_proj": "attn_v",
    "attn.o_proj": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp_post_norm": "post_ffw_norm",
}
_ARCHITECTURES = ("llama", "gemma3")


def open_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader` over a file; InputError when it is missing, cut short, or no GGUF."""
    try:
        with path.open("rb") as file:
            magic = file.read(24)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if not magic.startswith(b"GGUF") or len(magic) < 24:
        raise InputError(f"{path}: not a GGUF file; give a .gguf, a Hugging Face folder or a built-in name")
    try:
        reader = _reader_class()(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the GGUF is cut short or damaged ({error}); copy it again") from None
    return reader


@functools.cache
def _reader_class() -> Any:
    """`gguf.GGUFReader`, three times as fast: it slices its file some 400,000 times, which is slow on a `np.memmap`."""
    import gguf

    class Reader(gguf.GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    return Reader


def gguf_metadata(reader: Any) -> dict[str, Any]:
    """The scalar metadata by key (arrays such as the vocabulary are left in the reader)."""
    return {key: field.contents() for key, field in reader.fields.items() if len(field.data) == 1}


def load_gguf_decoder(path: Path, reader: Any, dtype: Any) -> Decoder:
    """The decoder of a GGUF file, dequantized to `dtype`."""
    from gguf.quants import dequantize

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(gguf_metadata(reader), tensors, path)

    def read_tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
        file_name = _weight_name(name)
        if file_name not in tensors:
            raise InputError(f"{path}: tensor {file_name} is missing")
        tensor = tensors[file_name]
        try:
            array = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise InputError(
                f"{path}: tensor {file_name} is {tensor.tensor_type.name}, which cannot be dequantized; "
                "use a Q4_0 to Q8_0, K-quant, F16, BF16 or F32 file"
            ) from None
        wanted = shape[::-1] if name.endswith("kernel") else shape
        if array.shape != wanted:
            raise InputError(f"{path}: tensor {file_name} is {list(array.shape)}; {list(wanted)} is needed")
        if config.family == "llama" and ("attn.q_proj" in name or "attn.k_proj" in name):
            array = _half_split_rows(array, config.head_dim)
        if name.endswith("norm.scale"):
            array = array - config.norm_offset
        return array.T if name.endswith("kernel") else array

    return build_decoder(config, read_tensor, dtype)


def _weight_name(name: str) -> str:
    file_leaf = "bias" if name.endswith(".bias") else "weight"
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        return f"blk.{layer}.{_INNER[rest.rpartition('.')[0]]}.{file_leaf}"
    return f"{_OUTER[name.rpartition('.')[0]]}.{file_leaf}"


def _half_split_rows(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows (2 i, 2 i + 1) of each head become (i, i + head_dim / 2): of a matrix, or of a bias."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, Any], path: Path) -> ModelConfig:
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise InputError(f"{path}: architecture {architecture!r} is not known; known are {known}")

    def need(key: str) -> Any:
        if f"{architecture}.{key}" not in metadata:
            raise InputError(f"{path}: metadata {architecture}.{key} is missing; the file is incomplete")
        value = metadata[f"{architecture}.{key}"]
        if isinstance(value, str) or not value > 0:
            raise InputError(f"{path}: metadata {architecture}.{key} is {value!r}; it must be a number above 0")
        return value

    def maybe(key: str, default: Any) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    if "token_embd.weight" not in tensors:
        raise InputError(f"{path}: tensor token_embd.weight is missing; is this a vocabulary-only GGUF?")
    hidden, heads, length = need("embedding_length"), need("attention.head_count"), need("context_length")
    head_dim = maybe("attention.key_length", hidden // heads)
    if maybe("attention.value_length", head_dim) != head_dim:
        raise InputError(f"{path}: attention.value_length unlike key_length {head_dim} is not supported")
    rope_dim = maybe("rope.dimension_count", head_dim)
    if rope_dim != head_dim:
        raise InputError(f"{path}: rope over {rope_dim} of {head_dim} features of a head is not supported")
    if maybe("expert_count", 0):
        raise InputError(f"{path}: mixture-of-experts files are not supported")
    common = {
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_layers": need("block_count"),
        "num_heads": heads,
        "num_kv_heads": maybe("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_length": length,
        # The file holds a float32; the decimal it was made from is the shortest one that gives it back.
        "norm_eps": float(np.format_float_scientific(np.float32(need("attention.layer_norm_rms_epsilon")))),
        "rope": _rope(maybe, tensors, head_dim, length, path),
        "tie_embeddings": "output.weight" not in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }
    own = _gemma3(common, need("attention.sliding_window")) if architecture == "gemma3" else {}
    return placed_config(str(path), **common | own)


def _gemma3(common: Mapping[str, Any], window: int) -> dict[str, Any]:
    """What Gemma 3's files leave to the reader: five layers with a window and a rope of their own to one without; and
    scores scaled by the head's size, but in the 27B model by the width a head has of the whole."""
    layers, rope = common["num_layers"], common["rope"]
    windows = tuple(None if (layer + 1) % 6 == 0 else window for layer in range(layers))
    largest = (layers, common["hidden_size"]) == (62, 5376)
    return {
        "family": "gemma3_text",
        "norms": "both",
        "norm_offset": 1.0,
        "qk_norm": "head",
        "activation": "gelu_tanh",
        "embedding_scale": common["hidden_size"] ** 0.5,
        "attention_scale": (common["hidden_size"] / common["num_heads"] if largest else common["head_dim"]) ** -0.5,
        "windows": windows,
        "ropes": tuple(rope if each is None else RopeConfig(theta=10000.0) for each in windows),
    }


def _rope(maybe: Any, tensors: Mapping[str, Any], head_dim: int, length: int, path: Path) -> RopeConfig:
    theta = float(maybe("rope.freq_base", 10000.0))
    if "rope_freqs.weight" in tensors:
        return _llama3_rope(theta, np.asarray(tensors["rope_freqs.weight"].data), head_dim, path)
    kind = maybe("rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "yarn"):
        raise InputError(f"{path}: rope scaling {kind!r} is not known; known are none, linear, yarn, llama3")
    factor = float(maybe("rope.scaling.factor", 1.0))
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"):
        if maybe(key, 1.0) != 1.0:
            raise InputError(f"{path}: {key} is {maybe(key, 1.0)}; only 1 is supported")
    return RopeConfig(
        theta,
        kind,
        factor,
        int(maybe("rope.scaling.original_context_length", length)),
        beta_fast=float(maybe("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(maybe("rope.scaling.yarn_beta_slow", 1.0)),
    )


def _llama3_rope(theta: float, divisors: np.ndarray, head_dim: int, path: Path) -> RopeConfig:
    """A GGUF holds Llama 3.1's scaling as one divisor a frequency; finds the published parameters that give it."""
    plain, _ = rope_frequencies(RopeConfig(theta=theta), head_dim)
    for factor in (8.0, 32.0):
        candidate = RopeConfig(theta, "llama3", factor, 8192, 1.0, 4.0)
        scaled, _ = rope_frequencies(candidate, head_dim)
        if divisors.shape == plain.shape and np.allclose(plain / scaled, divisors, rtol=1e-4):
            return candidate
    raise InputError(f"{path}: rope_freqs.weight is not one of Llama 3.1's or 3.2's scalings")
