"""Models with added tokens, written and read: PEFT folders with embedding and head, whole folders, GGUF bases."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from burnish.convert.hf_out import save_hf
from burnish.convert.peft import save_peft
from burnish.errors import InputError
from burnish.loading import load
from burnish.models.parts import choose_trained
from burnish.models.paths import leaves, write

NEW = ["<call>", "</call>", "<obs>"]
TOKENS = jnp.asarray([[5, 64, 7, 65, 8, 66, 9], [66, 65, 64, 1, 2, 3, 63]])
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EMBED, HEAD = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"

CASES = {
    "tied": {"tie_embeddings": True},
    "untied": {"tie_embeddings": False},
    "tied, padded": {"tie_embeddings": True, "multiple": 32},
    "untied, padded": {"tie_embeddings": False, "multiple": 32},
    "tied, spare rows": {"tie_embeddings": True, "vocab_size": 80},
    "untied, one spare row": {"tie_embeddings": False, "vocab_size": 65},
}


@pytest.fixture
def extended(tiny_model, tmp_path):
    """Makes a model loaded from a folder `base`, with added tokens and an adapter; all that is trained has moved."""

    def make(*, multiple=None, dtype="float32", targets=(), **options):
        save_hf(tiny_model(**options), tmp_path / "base")
        model = load(tmp_path / "base", dtype=dtype)
        model.add_tokens(NEW, pad_to_multiple_of=multiple)
        model.add_lora(rank=2, targets=list(targets))
        move(model)
        return model

    return make


def move(model):
    """Adds noise to everything that training would move."""
    generator = np.random.default_rng(1)
    found = leaves(model.module)
    trained = choose_trained(model.module, [])
    assert "embed.weight" in trained
    write(
        model.module,
        {
            key: found[key][1][...] + jnp.asarray(generator.normal(0, 0.3, found[key][1].shape), jnp.float32)
            for key in trained
        },
    )


def edit(folder, **changes):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


def close(found, expected, tolerance=1e-4):
    assert np.abs(expected).max() > 1
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


# ---- PEFT, ours


@pytest.mark.parametrize("case", CASES)
def test_peft_round_trip_is_exact(extended, forward, tmp_path, case):
    options = CASES[case]
    model = extended(**options)
    save_peft(model, tmp_path / "out")
    again = load(tmp_path / "out")
    rows = max(options.get("vocab_size", 64), 67)  # peft's own count: padding beyond is not written
    assert again.decoder.config.vocab_size == rows
    assert (again.decoder.head is None) == options["tie_embeddings"]
    close(forward(again, TOKENS), forward(model, TOKENS)[..., :rows], 1e-6 if "padded" in case else 0.0)
    assert [again.tokenizer.encode(token) for token in NEW] == [[64], [65], [66]]
    save_peft(again, tmp_path / "again")
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


@pytest.mark.parametrize("tied", [True, False])
def test_what_a_peft_folder_holds(extended, tmp_path, tied):
    save_peft(extended(tie_embeddings=tied, multiple=32), tmp_path / "out")
    tensors, config = load_file(tmp_path / "out" / WEIGHTS), json.loads((tmp_path / "out" / CONFIG).read_text())
    assert tensors[EMBED].shape == tensors[HEAD].shape == (67, 16)
    assert np.array_equal(tensors[EMBED], tensors[HEAD]) == tied
    assert config["modules_to_save"] == ["embed_tokens", "lm_head"] and config["ensure_weight_tying"] == tied
    assert not any("embed" in name or "head" in name for name in config["target_modules"])
    assert "base.resize_token_embeddings(67)" in (tmp_path / "out" / "README.md").read_text()


def test_the_next_adapter_takes_the_embedding_along(extended, forward, fill_adapters, tmp_path):
    model = extended(tie_embeddings=True)
    save_peft(model, tmp_path / "first")
    model = load(tmp_path / "first")
    model.add_lora(rank=3)
    assert all(".adapters.1." in key for key in choose_trained(model.module, []))
    fill_adapters(model.decoder, 5)
    save_peft(model, tmp_path / "second")
    assert json.loads((tmp_path / "second" / CONFIG).read_text())["base_model_name_or_path"] == str(tmp_path / "base")
    close(forward(load(tmp_path / "second"), TOKENS), forward(model, TOKENS), 1e-5)


def test_an_adapter_on_the_head_goes_into_the_head(extended, forward, tmp_path):
    model = extended(targets=["head", "q_proj"])
    save_peft(model, tmp_path / "out")
    assert not any("lm_head.lora" in name for name in load_file(tmp_path / "out" / WEIGHTS))
    close(forward(load(tmp_path / "out"), TOKENS), forward(model, TOKENS), 1e-5)


def test_padding_alone_leaves_an_adapter_of_the_base(tiny_model, fill_adapters, forward, tmp_path):
    save_hf(tiny_model(), tmp_path / "base")
    model = load(tmp_path / "base")
    model.add_tokens([], pad_to_multiple_of=48)
    model.add_lora(rank=2, targets=["head", "q_proj"])
    fill_adapters(model.decoder, 1)
    save_peft(model, tmp_path / "out")
    tokens = jnp.asarray([[1, 2, 3, 60]])
    close(forward(load(tmp_path / "out"), tokens), forward(model, tokens)[..., :64], 1e-5)


def test_bfloat16(extended, forward, tmp_path):
    model = extended(dtype="bfloat16", tie_embeddings=False)
    save_peft(model, tmp_path / "out")
    again = load(tmp_path / "out", dtype="bfloat16")
    assert again.decoder.embed.weight[...].dtype == jnp.bfloat16
    assert np.array_equal(forward(again, TOKENS), forward(model, TOKENS))


# ---- PEFT, theirs


@pytest.mark.parity
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_peft_reads_ours(extended, forward, tmp_path, case):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    model = extended(**CASES[case])
    save_peft(model, tmp_path / "out")
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = theirs(torch.tensor(np.asarray(TOKENS))).logits.numpy()
        close(forward(model, TOKENS)[..., : logits.shape[-1]], logits)
        assert logits.shape[-1] >= 67
        merged = theirs.merge_and_unload()
        close(merged(torch.tensor(np.asarray(TOKENS))).logits.numpy(), logits)
    one = merged.get_input_embeddings().weight.data_ptr() == merged.get_output_embeddings().weight.data_ptr()
    assert one == CASES[case]["tie_embeddings"], "the tie is lost in peft, or made"


THEIRS = {
    "untied": (False, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied": (True, {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
    "untied, resized alone": (False, {}),
    "tied, resized alone": (True, {}),
}


@pytest.mark.parity
@pytest.mark.parametrize("case", THEIRS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_reads_what_peft_writes(tiny_model, forward, tmp_path, case):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    tied, options = THEIRS[case]
    model = tiny_model(tie_embeddings=tied)
    save_hf(model, tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(67)
    wanted = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], **options)
    theirs = peft.get_peft_model(base, wanted).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for value in theirs.parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value) * 0.3)
        logits = theirs(torch.tensor(np.asarray(TOKENS))).logits.numpy()
    theirs.save_pretrained(tmp_path / "out")
    model.add_tokens(NEW)
    model.tokenizer.save(tmp_path / "out")
    found = load(tmp_path / "out")
    close(forward(found, TOKENS), logits)
    assert (found.decoder.head is None) == tied and found.origin.base_rows == 64


def without(*keys):
    return lambda tensors: [tensors.pop(key) for key in keys]


def changed(key, change):
    return lambda tensors: tensors.update({key: np.ascontiguousarray(change(tensors[key]))})


BROKEN = {
    "no head": (False, without(HEAD), {}, f"{CONFIG}: modules_to_save names lm_head, and {WEIGHTS} has no tensor"),
    "no embedding": (True, without(EMBED), {}, f"{CONFIG}: modules_to_save names model.embed_tokens, and"),
    "apart": (True, changed(HEAD, lambda array: array + 1), {}, f"{WEIGHTS}: the base has one matrix as embedding and"),
    "embedding alone": (
        True,
        without(HEAD),
        {"modules_to_save": ["embed_tokens"]},
        f"{WEIGHTS}: the base has one matrix as embedding and head",
    ),
    "other rows": (
        False,
        changed(HEAD, lambda array: array[:66]),
        {},
        f"{WEIGHTS}: the embedding has 67 rows, the head 66",
    ),
    "other width": (False, changed(EMBED, lambda array: array[:, :8]), {}, r"is \[67, 8\]; the base's is \[64, 16\]"),
    "too few": (
        True,
        lambda tensors: [changed(key, lambda array: array[:66])(tensors) for key in (EMBED, HEAD)],
        {},
        "its tokenizer has 67 ids, for 66 embeddings",
    ),
    "another module": (True, without(), {"modules_to_save": ["norm"]}, f"{CONFIG}: modules_to_save is .*norm.*; only"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders(extended, tmp_path, case):
    tied, change, config, message = BROKEN[case]
    save_peft(extended(tie_embeddings=tied), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    change(tensors)
    save_file(tensors, tmp_path / "out" / WEIGHTS)
    edit(tmp_path / "out", **config)
    with pytest.raises(InputError, match=message) as error:
        load(tmp_path / "out")
    assert "\n" not in str(error.value) and re.match(re.escape(str(tmp_path / "out")), str(error.value))


# ---- whole models


@pytest.mark.parametrize("case", CASES)
def test_hf_merged_equals_unmerged_after_reload(extended, forward, tmp_path, case):
    model = extended(**CASES[case])
    logits = forward(model, TOKENS)
    model.save(tmp_path / "out")
    again = load(tmp_path / "out")
    close(forward(again, TOKENS), logits, 1e-5)
    assert (again.decoder.head is None) == CASES[case]["tie_embeddings"]
    rows = logits.shape[-1]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == rows and config["tie_word_embeddings"] == CASES[case]["tie_embeddings"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape == (rows, 16)
    assert ("lm_head.weight" in tensors) != CASES[case]["tie_embeddings"]
    model.merge_lora()
    close(forward(model, TOKENS), logits, 1e-5)


@pytest.mark.parity
@pytest.mark.parametrize("case", ["tied", "untied, padded"])
def test_transformers_reads_the_whole_model(extended, forward, tmp_path, case):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = extended(**CASES[case])
    model.save(tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        close(forward(model, TOKENS), theirs(torch.tensor(np.asarray(TOKENS))).logits.numpy())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("w1 <call> w2", add_special_tokens=False) == model.tokenizer.encode("w1 <call> w2")


def test_a_gguf_base(forward, tmp_path):
    """A tied model of one layer: what `load` gives of it takes tokens, and its adapter is read back."""
    gguf = pytest.importorskip("gguf")
    path, width = tmp_path / "base.gguf", 16
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"block_count": 1, "embedding_length": width, "feed_forward_length": 24, "context_length": 64}
    for key, value in {**sizes, "attention.head_count": 4, "attention.head_count_kv": 2}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(61))])
    writer.add_token_scores([0.0] * 64)
    writer.add_token_types([2, 3, 3] + [1] * 61)
    writer.add_eos_token_id(2)
    shapes = {"attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16), "attn_output": (16, 16)}
    shapes |= {"ffn_gate": (24, 16), "ffn_up": (24, 16), "ffn_down": (16, 24), "attn_norm": (16,), "ffn_norm": (16,)}
    tensors = {f"blk.0.{name}": shape for name, shape in shapes.items()}
    generator = np.random.default_rng(0)
    for name, shape in {**tensors, "token_embd": (64, width), "output_norm": (width,)}.items():
        writer.add_tensor(f"{name}.weight", generator.normal(0, 0.5, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    model = load(path)
    assert model.add_tokens(NEW) == [64, 65, 66] and model.decoder.head is None
    model.add_lora(rank=2)
    move(model)
    save_peft(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["base_model_name_or_path"] == str(path)
    close(forward(load(tmp_path / "out"), TOKENS), forward(model, TOKENS), 0.0)
    model.save(tmp_path / "whole")
    again = load(tmp_path / "whole")
    close(forward(again, TOKENS), forward(model, TOKENS), 1e-5)
    assert again.decoder.head is None and again.tokenizer.encode("<obs>") == [66]


def test_what_was_merged_is_no_base_of_later_adapters(extended, tmp_path):
    model = extended()
    before = model.origin
    merged = model.merge_lora()
    model.add_lora(rank=2)
    with pytest.raises(InputError, match="no file holds them by themselves"):
        save_peft(model, tmp_path / "out")
    again = extended()
    merged = again.merge_lora()
    again.unmerge_lora(merged)
    assert again.origin.base == before.base


def test_a_run_that_trains_the_embedding_alone_is_a_base_of_its_own(extended):
    origin = extended().origin
    assert origin.after_run("run", trained=["embed.weight"], adapted=False).base == "run"
    assert origin.after_run("run", trained=["embed.weight", "x.adapters.0.a"], adapted=True).base == origin.base
