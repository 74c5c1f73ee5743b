"""PEFT folders of a family whose files hold several layers as one module (Phi-3)."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file
from tokenizers.models import WordLevel

from burnish.convert.peft import save_peft
from burnish.data.tokenizer import Tokenizer
from burnish.loading import load
from burnish.models.decoder import Decoder
from burnish.wrapper import ModelWrapper

PHI3 = Path(__file__).parent.parent / "fixtures" / "families" / "phi3"
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 48, (2, 11)))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    shutil.copytree(PHI3, folder, ignore=shutil.ignore_patterns("cases.json", "expected.npz"))
    (folder / "config.json").write_text(json.dumps(json.loads((PHI3 / "cases.json").read_text())["cases"]["base"]))
    words = tokenizers.Tokenizer(WordLevel({f"w{id}": id for id in range(48)}, unk_token="w0"))
    Tokenizer(words, {"eos_token": "w1"}, {}).save(folder)
    return folder


def logits(model: ModelWrapper) -> np.ndarray:
    with jax.disable_jit():
        return np.asarray(model(TOKENS))


@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj", "up_proj"], ["o_proj", "k_proj"]])
def test_layers_of_one_module_become_one_adapter(
    base: Path, fill_adapters: Callable[[Decoder, int], None], tmp_path: Path, targets: list[str]
) -> None:
    """Their ranks joined; read again, the model is the same, and so is what is written of it."""
    model = load(base)
    plain = logits(model)
    model.add_lora(rank=3, alpha=5.0, targets=targets)
    fill_adapters(model.decoder, 1)
    expected = logits(model)
    assert np.abs(expected - plain).max() > 0.05
    save_peft(model, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    parts = sum(name in (targets or ["q_proj", "k_proj", "v_proj"]) for name in ("q_proj", "k_proj", "v_proj"))
    rows = tensors["base_model.model.model.layers.0.self_attn.qkv_proj.lora_A.weight"]
    assert rows.shape == (3 * parts, 40)
    again = load(tmp_path / "out")
    np.testing.assert_allclose(logits(again), expected, atol=1e-5 * np.abs(expected).max())
    # Now the layers share A: nothing is joined a second time.
    save_peft(again, tmp_path / "twice")
    for name, array in load_file(tmp_path / "twice" / "adapter_model.safetensors").items():
        np.testing.assert_array_equal(array, tensors[name])


@pytest.mark.parity
@pytest.mark.parametrize("targets", ["all-linear", ["qkv_proj"]])
def test_equals_peft(base: Path, tmp_path: Path, targets: str | list[str]) -> None:
    """Both ways: what peft writes is read, and what is written peft reads."""
    torch, transformers, peft = (pytest.importorskip(name) for name in ("torch", "transformers", "peft"))
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets))
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if "lora_B" in name:
                value.copy_(torch.randn_like(value) * 0.3)
        expected = theirs.eval()(torch.tensor(np.asarray(TOKENS))).logits.numpy()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load(tmp_path / "theirs")
    np.testing.assert_allclose(logits(ours), expected, atol=1e-4 * np.abs(expected).max())
    save_peft(ours, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(again, tmp_path / "ours").eval()
    with torch.no_grad():
        found = again(torch.tensor(np.asarray(TOKENS))).logits.numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
