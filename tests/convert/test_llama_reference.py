"""Llama equals transformers: on committed logits, always; on fresh models, where torch is installed."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from burnish.convert.families import family_of
from burnish.convert.hf import load_hf_decoder
from burnish.errors import InputError

CASES = tuple(json.loads((Path(__file__).parent.parent / "fixtures/llama/cases.json").read_text())["cases"])


def run(folder, tokens):
    """Logits [length, vocab]. Op by op: the many models here would each compile for longer than they run."""
    with jax.disable_jit():
        return np.asarray(load_hf_decoder(folder, jnp.float32)(jnp.asarray(tokens)[None])[0])


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(case, llama_cases, llama_expected, llama_folder):
    folder = llama_folder(llama_cases[case]["weights"], llama_cases[case]["config"])
    expected = llama_expected[case]
    assert expected.std() >= 1, "the fixture is too tame"
    assert close(run(folder, llama_expected["tokens"]), expected)


def _scaling(kind, **numbers):
    given = {"factor": 4.0, "original_max_position_embeddings": 16}
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1234.5, **given, **numbers}}


_EXACT = {"original_max_position_embeddings": 32, "beta_fast": 3.0, "beta_slow": 0.4, "truncate": False}

# By field: the case whose config is changed, and the change.
HONOURED = {
    "num_attention_heads": ("default", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}),
    "num_key_value_heads": ("default", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24}),
    "rms_norm_eps": ("default", {"rms_norm_eps": 0.05}),
    "rms_norm_eps, left out": ("large_eps", {"rms_norm_eps": None}),
    "hidden_act": ("default", {"hidden_act": "gelu"}),
    "hidden_act, left out": ("gelu", {"hidden_act": None}),
    "hidden_act, gelu_new": ("relu", {"hidden_act": "gelu_new"}),
    "head_dim": ("biased", {"head_dim": 4, "num_attention_heads": 8, "num_key_value_heads": 8}),
    "rope_theta": ("default", {"rope_parameters": {"rope_type": "default", "rope_theta": 2000.0}}),
    "rope_theta, left out": ("default", {"rope_parameters": None}),
    "rope_theta, old": ("old_default", {"rope_theta": 1000.0}),
    "rope_type": ("yarn", _scaling("linear")),
    "rope_scaling, left out": ("old_linear", {"rope_scaling": None}),
    "rope_scaling.type": ("old_linear", {"rope_scaling": {"type": "yarn", "factor": 3.0}}),
    "linear factor": ("linear", _scaling("linear", factor=3.0)),
    "llama3 factor": ("llama3", _scaling("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=3.0)),
    "llama3 low_freq_factor": ("llama3", _scaling("llama3", low_freq_factor=0.5, high_freq_factor=3.0)),
    "llama3 high_freq_factor": ("llama3", _scaling("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "llama3 original": ("old_llama3", {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}),
    "yarn factor": ("yarn", _scaling("yarn", factor=8.0)),
    "yarn original": ("yarn", _scaling("yarn", original_max_position_embeddings=32)),
    "yarn beta_fast": ("yarn_exact", _scaling("yarn", **_EXACT | {"beta_fast": 1.5})),
    "yarn beta_slow": ("yarn_exact", _scaling("yarn", **_EXACT | {"beta_slow": 0.2})),
    "yarn attention_factor": ("yarn", _scaling("yarn", attention_factor=1.0)),
    "yarn mscale": ("yarn_mscale", _scaling("yarn", mscale=1.0, mscale_all_dim=0.7)),
    "yarn mscale_all_dim": ("yarn_mscale", _scaling("yarn", mscale=2.0, mscale_all_dim=1.0)),
    "yarn truncate": ("yarn_exact", _scaling("yarn", **_EXACT | {"truncate": True})),
}


@pytest.mark.parametrize("field", HONOURED)
def test_every_honoured_field_moves_the_logits(field, llama_cases, llama_expected, llama_folder):
    case, change = HONOURED[field]
    folder = llama_folder(llama_cases[case]["weights"], llama_cases[case]["config"] | change)
    assert np.abs(run(folder, llama_expected["tokens"]) - llama_expected[case]).max() >= 1e-2


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias"])
def test_biases_that_the_config_denies_are_surplus(field, llama_cases, llama_folder):
    folder = llama_folder("biased", llama_cases["biased"]["config"] | {field: False})
    with pytest.raises(InputError, match=r"bias .* in the files, and config\.json describes a model without"):
        load_hf_decoder(folder, jnp.float32)


def test_a_tied_head_is_the_embedding(llama_cases, llama_folder):
    tied = load_hf_decoder(llama_folder("biased", llama_cases["biased"]["config"]), jnp.float32)
    assert tied.head is None
    said = load_hf_decoder(llama_folder("untied", llama_cases["said_to_be_tied"]["config"]), jnp.float32)
    assert said.head is not None
    missing = llama_folder("biased", llama_cases["biased"]["config"] | {"tie_word_embeddings": False})
    with pytest.raises(InputError, match=r"lm_head\.weight is missing"):
        load_hf_decoder(missing, jnp.float32)


@pytest.mark.parametrize("case", CASES)
def test_written_config_says_the_same(case, llama_cases):
    hf = llama_cases[case]["config"]
    family = family_of(hf, "config.json")
    config = family.from_hf(hf, "config.json")
    written = json.loads(json.dumps(family.to_hf(config)))
    assert family.from_hf(written, "written") == config
    older = {key: value for key, value in written.items() if key != "rope_parameters"}
    assert family.from_hf(older, "written, read by transformers 4") == config
    newer = {key: value for key, value in written.items() if key not in ("rope_scaling", "rope_theta")}
    assert family.from_hf(newer, "written, read by transformers 5") == config


@pytest.mark.parametrize("case", ["yarn", "biased"])
def test_padding_and_packing_change_nothing(case, llama_cases, llama_expected, llama_folder):
    decoder = load_hf_decoder(llama_folder(llama_cases[case]["weights"], llama_cases[case]["config"]), jnp.float32)
    tokens, expected = llama_expected["tokens"], llama_expected[case]
    pad = np.full(5, 7)
    segment = np.ones(len(tokens), int)
    nothing = np.zeros(5, int)
    other = np.array([9, 3, 3, 50, 1, 2])
    rows = {
        "right": (np.concatenate([tokens, pad]), np.concatenate([segment, nothing]), slice(0, len(tokens))),
        "left": (np.concatenate([pad, tokens]), np.concatenate([nothing, segment]), slice(5, 5 + len(tokens))),
        "packed": (np.concatenate([other, tokens]), np.concatenate([[1] * 6, segment + 1]), slice(6, None)),
    }
    forward = nnx.jit(lambda decoder, row, segments: decoder(row, segment_ids=segments))
    for name, (row, segments, where) in rows.items():
        row, segments = (np.pad(array, (0, 40 - len(array)))[None] for array in (row, segments))
        logits = forward(decoder, jnp.asarray(row), jnp.asarray(segments))[0][: len(tokens) + 6]
        assert close(np.asarray(logits)[where], expected), name


def test_another_document_in_the_row_leaves_no_trace(llama_cases, llama_expected, llama_folder):
    decoder = load_hf_decoder(llama_folder("untied", llama_cases["default"]["config"]), jnp.float32)
    tokens = llama_expected["tokens"]
    segments = jnp.asarray([1] * 6 + [2] * len(tokens))[None]
    rows = [np.concatenate([first, tokens]) for first in ([1] * 6, [9, 8, 7, 6, 5, 4])]
    one, two = (np.asarray(decoder(jnp.asarray(row)[None], segment_ids=segments))[0, 6:] for row in rows)
    assert np.array_equal(one, two)


@pytest.mark.parity
@pytest.mark.parametrize("case", ["default", "yarn_betas", "biased"])
def test_equals_transformers_on_fresh_weights(case, llama_cases, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama_cases[case]["config"])).float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.randn_like(value) * 0.35 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(tmp_path / "model")
    tokens = torch.randint(0, 64, (2, 40))
    with torch.no_grad():
        expected = model(tokens).logits.numpy()
    assert expected.std() >= 1
    assert close(np.asarray(load_hf_decoder(tmp_path / "model", jnp.float32)(jnp.asarray(tokens.numpy()))), expected)
