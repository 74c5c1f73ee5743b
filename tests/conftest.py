"""Options and fixtures of the whole suite. Options live here, so that every way of calling pytest knows them."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from burnish.convert.builtin import BUILT_IN
from burnish.convert.gguf_tokenizer import tokenizer_from_gguf
from burnish.data.tokenizer import Tokenizer
from burnish.files import cache_folder
from burnish.models.config import ModelConfig
from burnish.models.decoder import Decoder
from burnish.models.layers import random_params
from burnish.wrapper import ModelWrapper, Origin

# Tiny models compile for longer than they run: half of that time is saved. Before JAX's first use, so at import.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

FIXTURES = Path(__file__).parent / "fixtures"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reference",
        metavar="FILE",
        help="hand values for tests/objectives, in the form of tests/objectives/reference.json",
    )


@pytest.fixture(scope="session", autouse=True)
def _cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tokenised data goes to a cache of the suite's own, in which models that were fetched are found as before."""
    fetched, own = cache_folder(), tmp_path_factory.mktemp("cache")
    for model in BUILT_IN:
        (own / model).symlink_to(fetched / model)
    os.environ["BURNISH_CACHE"] = str(own)


@pytest.fixture(scope="session")
def bpe_tokenizer() -> Tokenizer:
    """A byte-level tokenizer of about a thousand tokens, with SmolLM2's special tokens and a ChatML template."""
    return tokenizer_from_gguf(GGUFReader(FIXTURES / "tokenizers" / "bpe.gguf")).with_chat_template(CHATML)


@pytest.fixture
def tiny_config(bpe_tokenizer: Tokenizer) -> ModelConfig:
    """Two layers, grouped heads, a tied head, and the vocabulary of `bpe_tokenizer`."""
    return ModelConfig(
        vocab_size=bpe_tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_length=256,
        tie_embeddings=True,
    )


@pytest.fixture
def make_tiny(bpe_tokenizer: Tokenizer, tiny_config: ModelConfig) -> Callable[..., ModelWrapper]:
    """Makes a tiny model with large random weights: `make_tiny()`, or with config fields changed."""

    def make(seed: int = 0, **changes: Any) -> ModelWrapper:
        config = dataclasses.replace(tiny_config, **changes)
        return ModelWrapper(Decoder(config, random_params(seed, stddev=0.2)), bpe_tokenizer, Origin("tiny"))

    return make
