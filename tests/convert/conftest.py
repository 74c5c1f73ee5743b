"""Tiny models for the tests of this folder: fixtures from transformers, and random ones with a tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from burnish.data.tokenizer import Tokenizer
from burnish.models.config import ModelConfig, RopeConfig
from burnish.models.decoder import Decoder
from burnish.models.layers import random_params
from burnish.models.paths import leaves
from burnish.wrapper import ModelWrapper, Origin

LLAMA = Path(__file__).parent.parent / "fixtures" / "llama"
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <end> ' }}{% endfor %}"


@pytest.fixture(scope="session")
def llama_cases() -> dict[str, Any]:
    """By case: {"weights": folder name, "config": config.json}."""
    return json.loads((LLAMA / "cases.json").read_text())["cases"]


@pytest.fixture(scope="session")
def llama_expected() -> dict[str, np.ndarray]:
    """tokens [length], and by case logits [length, vocab] as transformers computed them."""
    with np.load(LLAMA / "expected.npz") as arrays:
        return dict(arrays)


@pytest.fixture
def llama_folder(tmp_path: Path) -> Callable[[str, dict[str, Any]], Path]:
    """Makes a folder of a fixture's weights with a config.json of one's own."""

    def make(weights: str, config: dict[str, Any]) -> Path:
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for file in (LLAMA / weights).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture
def tiny_tokenizer() -> Tokenizer:
    """Sixty-four words, an eos, and a chat template whose turns end with another token."""
    words = ["<s>", "</s>", "<end>", "user", "assistant", *(f"w{i}" for i in range(59))]
    backend = tokenizers.Tokenizer(WordLevel({word: id for id, word in enumerate(words)}, unk_token="w58"))
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>", "<end>"])
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return Tokenizer(backend, named, {"default": TEMPLATE})


@pytest.fixture
def tiny_model(tiny_tokenizer: Tokenizer) -> Callable[..., ModelWrapper]:
    """Makes a random model of three layers whose every number matters; options go to `ModelConfig`."""

    def make(*, dtype: Any = jnp.float32, seed: int = 0, source: str = "tiny", **options: Any) -> ModelWrapper:
        sizes: dict[str, Any] = {
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_layers": 3,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 6,
            "max_length": 64,
            "rope": RopeConfig(theta=321.0),
        }
        config = ModelConfig(**{**sizes, **options})
        decoder = Decoder(config, random_params(seed, dtype), dtype=dtype)
        fill(decoder, seed)
        return ModelWrapper(decoder, tiny_tokenizer, Origin(source, family="llama"))

    return make


@pytest.fixture
def fill_adapters() -> Callable[[Decoder, int], None]:
    """Gives every adapter's B numbers, which fresh ones lack."""

    def fill_b(decoder: Decoder, seed: int) -> None:
        generator = np.random.default_rng(seed)
        for _, (_, variable) in leaves(decoder).items():
            if isinstance(variable, nnx.LoRAParam) and not np.asarray(variable[...]).any():
                variable.set_value(jnp.asarray(generator.normal(0, 0.3, variable.shape), jnp.float32))

    return fill_b


@pytest.fixture
def forward() -> Callable[[ModelWrapper, jax.Array], np.ndarray]:
    """Logits [batch, length, vocab], op by op: so many small models would each compile for longer than they run."""

    def run(model: ModelWrapper, tokens: jax.Array) -> np.ndarray:
        with jax.disable_jit():
            return np.asarray(model(tokens))

    return run


def fill(decoder: Decoder, seed: int) -> None:
    """Numbers large enough that a wrong one shows."""
    generator = np.random.default_rng(seed)
    for key, (_, variable) in leaves(decoder).items():
        draw = generator.normal(0, 1, variable.shape)
        scaled = 1 + 0.3 * draw if key.endswith("scale") else 0.4 * draw
        variable.set_value(jnp.asarray(scaled, variable.dtype))
