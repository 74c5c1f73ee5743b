"""PEFT folders: key and shape layout, exact round trips, chains joined, peft's own folders read."""

import json
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from burnish.adapt.lora import LoRA
from burnish.convert.hf_out import save_hf
from burnish.convert.peft import save_peft
from burnish.errors import InputError
from burnish.loading import load
from burnish.models.paths import linears

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 11)))
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def adapted(tiny_model, fill_adapters, tmp_path):
    """Makes a model loaded from a folder `base`, with one adapter an entry of `layers`."""

    def make(*layers, dtype="float32", **options):
        save_hf(tiny_model(**options), tmp_path / "base")
        model = load(tmp_path / "base", dtype=dtype)
        for number, adapter in enumerate(layers, start=1):
            model.add_lora(**adapter, seed=number)
            fill_adapters(model.decoder, number)
        return model

    return make


def edit(folder, **changes):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


def edit_tensors(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def deltas(model):
    """scale A B of every adapted layer, in float64, by layer name."""
    found = {}
    for linear, names in linears(model.decoder).values():
        for index, name in enumerate(names if len(linear.adapters) else ()):
            parts = [
                part.scale * np.asarray(part.a[...][index], np.float64) @ np.asarray(part.b[...][index], np.float64)
                for part in linear.adapters
            ]
            found[name] = sum(parts)
    return found


SINGLE = {
    "all": {"rank": 3, "alpha": 7.0},
    "rslora": {"rank": 5, "alpha": 6.0, "rslora": True},
    "two projections": {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "v_proj"]},
    "one layer": {"rank": 2, "targets": ["layers.1.mlp"]},
    "odd layers": {"rank": 4, "alpha": 1.0, "targets": ["layers.0.attn.k_proj", "layers.2.attn.k_proj"]},
    "dropout": {"rank": 2, "dropout": 0.1},
}


@pytest.mark.parametrize("case, dtype", [*((case, "float32") for case in SINGLE), ("odd layers", "bfloat16")])
def test_exact_round_trip(adapted, forward, tmp_path, case, dtype):
    model = adapted(SINGLE[case], dtype=dtype)
    save_peft(model, tmp_path / "out")
    again = load(tmp_path / "out", dtype=dtype)
    logits = forward(model, TOKENS)
    assert np.array_equal(forward(again, TOKENS), logits)
    assert np.abs(forward(load(tmp_path / "base", dtype=dtype), TOKENS) - logits).max() > 0.05
    dropouts = {part.dropout for linear, _ in linears(again.decoder).values() for part in linear.adapters}
    assert dropouts == {SINGLE[case].get("dropout", 0.0)}
    # Saved again, it is the same adapter of the same base.
    save_peft(again, tmp_path / "again")
    for name in (CONFIG, WEIGHTS):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_keys_shapes_and_config(adapted, tmp_path):
    model = adapted({"rank": 3, "alpha": 7.5, "targets": ["q_proj", "down_proj"]})
    save_peft(model, tmp_path / "out")
    shapes = {name: array.shape for name, array in load_file(tmp_path / "out" / WEIGHTS).items()}
    expected = {}
    for layer in range(3):
        for module, n_in, n_out in (("self_attn.q_proj", 16, 24), ("mlp.down_proj", 24, 16)):
            key = f"base_model.model.model.layers.{layer}.{module}"
            expected |= {f"{key}.lora_A.weight": (3, n_in), f"{key}.lora_B.weight": (n_out, 3)}
    assert shapes == expected
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    wanted = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(tmp_path / "base"),
        "r": 3,
        "lora_alpha": 7.5,
        "target_modules": ["down_proj", "q_proj"],
        "bias": "none",
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
    }
    assert {key: config[key] for key in wanted} == wanted
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert "library_name: peft" in (tmp_path / "out" / "README.md").read_text()


CHAINS = {
    "same scale": ({"rank": 3}, {"rank": 2}),
    "other scale": ({"rank": 3, "alpha": 7.0}, {"rank": 2, "alpha": 1.0}, {"rank": 4, "alpha": 9.0, "rslora": True}),
    "partly": (
        {"rank": 3, "alpha": 5.0},
        {"rank": 2, "targets": ["layers.1.attn"]},
        {"rank": 1, "targets": ["up_proj"]},
    ),
}


@pytest.mark.parametrize("case", CHAINS)
def test_a_chain_joins_its_ranks_relative_to_the_base(adapted, forward, tmp_path, case):
    model = adapted(*CHAINS[case])
    expected = deltas(model)
    save_peft(model, tmp_path / "out")
    again = load(tmp_path / "out")
    assert all(len(linear.adapters) <= 1 for linear, _ in linears(again.decoder).values())
    found = deltas(again)
    assert found.keys() == expected.keys()
    for name, delta in expected.items():
        np.testing.assert_allclose(found[name], delta, rtol=0, atol=1e-6 * np.abs(delta).max())
    logits = forward(model, TOKENS)
    assert np.abs(forward(again, TOKENS) - logits).max() <= 1e-5 * np.abs(logits).max()


def test_layers_that_differ_are_told_apart_by_patterns(adapted, tmp_path):
    model = adapted(*CHAINS["partly"])
    save_peft(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    ranks = {name: array.shape[0] for name, array in load_file(tmp_path / "out" / WEIGHTS).items() if "lora_A" in name}
    for name, rank in ranks.items():
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert config["rank_pattern"].get(module, config["r"]) == rank
    assert sorted(set(ranks.values())) == [3, 4, 5]


@pytest.mark.parametrize("case", SINGLE)
def test_targets_are_exact(adapted, tmp_path, case):
    """As peft matches them: a whole path, or the end of one after a dot."""
    model = adapted(SINGLE[case])
    save_peft(model, tmp_path / "out")
    targets = json.loads((tmp_path / "out" / CONFIG).read_text())["target_modules"]
    inner = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    inner += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    modules = ["lm_head", *(f"model.layers.{layer}.{name}" for layer in range(3) for name in inner)]
    selected = {each for each in modules if any(each == name or each.endswith(f".{name}") for name in targets)}
    keys = load_file(tmp_path / "out" / WEIGHTS)
    assert selected == {re.fullmatch(r"base_model\.model\.(.+)\.lora_[AB]\.weight", key)[1] for key in keys}


def test_an_adapter_on_the_head(adapted, forward, tmp_path):
    model = adapted({"rank": 2, "targets": ["head", "q_proj"]})
    save_peft(model, tmp_path / "out")
    assert "base_model.model.lm_head.lora_A.weight" in load_file(tmp_path / "out" / WEIGHTS)
    assert np.array_equal(forward(load(tmp_path / "out"), TOKENS), forward(model, TOKENS))
    with pytest.raises(InputError, match="lm_head needs a float32 model"):
        load(tmp_path / "out", dtype="bfloat16")


def test_on_a_tied_model_merged_equals_unmerged_after_reload(adapted, forward, tmp_path):
    model = adapted({"rank": 3}, tie_embeddings=True)
    save_peft(model, tmp_path / "peft")
    save_hf(model, tmp_path / "merged")
    unmerged, merged = forward(load(tmp_path / "peft"), TOKENS), forward(load(tmp_path / "merged"), TOKENS)
    assert np.abs(unmerged - merged).max() <= 1e-5 * np.abs(unmerged).max()


def test_no_adapters_is_said(adapted, tmp_path):
    with pytest.raises(InputError, match="no adapters to export; export the whole model"):
        save_peft(adapted(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_card_of_a_gguf_base_says_how_to_write_the_base(tiny_model, fill_adapters, tmp_path):
    from burnish.wrapper import ModelWrapper, Origin

    model = tiny_model()
    model.add_lora(rank=2)
    fill_adapters(model.decoder, 1)
    origin = Origin("smollm2-135m", path=tmp_path / "model.gguf", family="llama")
    save_peft(ModelWrapper(model.module, model.tokenizer, origin), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "burnish export smollm2-135m --format hf --out base/" in card
    assert "license: apache-2.0" in card and "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in card
    config = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert config["base_model_name_or_path"] == "smollm2-135m"


# ---- reading what others write


def test_target_modules_as_a_regular_expression(adapted, forward, tmp_path):
    model = adapted({"rank": 2, "targets": ["layers.1.attn.q_proj", "layers.2.attn.q_proj"]})
    save_peft(model, tmp_path / "out")
    edit(tmp_path / "out", target_modules=r"model\.layers\.[12]\.self_attn\.q_proj")
    assert np.array_equal(forward(load(tmp_path / "out"), TOKENS), forward(model, TOKENS))


def test_layers_to_transform(adapted, forward, tmp_path):
    model = adapted({"rank": 2, "targets": ["layers.1.attn.q_proj"]})
    save_peft(model, tmp_path / "out")
    edit(tmp_path / "out", target_modules=["q_proj"], layers_to_transform=[1])
    assert np.array_equal(forward(load(tmp_path / "out"), TOKENS), forward(model, TOKENS))


def test_rank_and_alpha_patterns(adapted, tmp_path):
    model = adapted({"rank": 2, "alpha": 4.0})
    save_peft(model, tmp_path / "out")
    edit(
        tmp_path / "out",
        r=64,
        rank_pattern={"q_proj": 2, ".*mlp.*": 2, "[kvo]_proj": 2},
        alpha_pattern={"layers.1.self_attn.q_proj": 10, "q_proj": 6, "layers.0.*": 3},
        lora_alpha=4,
        use_rslora=True,
    )
    scales = {}
    for linear, names in linears(load(tmp_path / "out").decoder).values():
        scales |= {
            name: linear.adapters[0].scale for name in names if name.startswith("layers.") and len(linear.adapters)
        }
    alphas = {name: scale * math.sqrt(2) for name, scale in scales.items()}
    assert alphas["layers.1.attn.q_proj"] == pytest.approx(10)
    assert alphas["layers.0.attn.q_proj"] == alphas["layers.2.attn.q_proj"] == pytest.approx(6)
    assert alphas["layers.0.mlp.up_proj"] == pytest.approx(3)
    assert alphas["layers.2.mlp.up_proj"] == pytest.approx(4)


UNSUPPORTED = {
    "peft_type": "LOHA",
    "bias": "all",
    "use_dora": True,
    "fan_in_fan_out": True,
    "modules_to_save": ["lm_head"],
    "layer_replication": [[0, 2], [1, 3]],
    "trainable_token_indices": [3],
    "target_parameters": ["mlp.w"],
    "lora_bias": True,
    "use_qalora": True,
    "some_option_of_tomorrow": 3,
    "init_lora_weights": "pissa_niter_4",
    "revision": "v2",
}


@pytest.mark.parametrize("option", UNSUPPORTED)
def test_an_option_that_changes_the_mathematics_is_named(adapted, tmp_path, option):
    save_peft(adapted({"rank": 2}), tmp_path / "out")
    edit(tmp_path / "out", **{option: UNSUPPORTED[option]})
    with pytest.raises(InputError, match=rf"^{re.escape(str(tmp_path / 'out' / CONFIG))}: {option} ") as error:
        load(tmp_path / "out")
    assert "\n" not in str(error.value)


def drop(key):
    return lambda tensors: tensors.pop(next(name for name in tensors if key in name))


BROKEN_TENSORS = {
    "A missing": (drop("1.self_attn.q_proj.lora_A"), r"layers\.1\.self_attn\.q_proj\.lora_A\.weight is missing"),
    "layer missing": (
        lambda tensors: [drop("2.self_attn.q_proj")(tensors) for _ in range(2)],
        r"layers\.2\.self_attn\.q_proj is named by target_modules, but has no adapter",
    ),
    "unknown": (
        lambda tensors: tensors.update({"base_model.model.model.norm.weight": np.zeros(16)}),
        r"norm\.weight belongs to no linear layer",
    ),
    "trained embedding": (
        lambda tensors: tensors.update({"base_model.model.model.embed_tokens.weight": np.zeros((64, 16))}),
        r"embed_tokens\.weight is not the base's; merge it with peft first",
    ),
    "layer too high": (
        lambda tensors: tensors.update(
            {"base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": np.zeros((2, 16))}
        ),
        r"layers\.9.*belongs to no linear layer",
    ),
    "shape": (
        lambda tensors: tensors.update(
            {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.zeros((3, 16))}
        ),
        r"lora_A\.weight is \[3, 16\]; \[2, 16\] is needed",
    ),
}


@pytest.mark.parametrize("case", BROKEN_TENSORS)
def test_broken_tensors(adapted, tmp_path, case):
    change, message = BROKEN_TENSORS[case]
    save_peft(adapted({"rank": 2, "targets": ["q_proj"]}), tmp_path / "out")
    edit_tensors(tmp_path / "out", change)
    with pytest.raises(InputError, match=message) as error:
        load(tmp_path / "out")
    assert str(tmp_path / "out" / WEIGHTS) in str(error.value) and "\n" not in str(error.value)


BROKEN_CONFIGS = {
    "r": ({"r": "two"}, "rank_pattern .*'two'"),
    "r zero": ({"r": 0}, "is 0"),
    "alpha": ({"lora_alpha": None, "alpha_pattern": {}}, "None"),
    "pattern": ({"rank_pattern": {"q_proj(": 2}}, "rank_pattern must map"),
    "no pattern": ({"alpha_pattern": ["q_proj"]}, "alpha_pattern must map"),
    "targets": ({"target_modules": None}, "target_modules is None"),
    "regular expression": ({"target_modules": "q_proj("}, "no regular expression"),
    "narrower targets": ({"target_modules": ["v_proj"]}, "has an adapter, but target_modules does not name it"),
    "no base": ({"base_model_name_or_path": None}, "base_model_name_or_path is missing"),
    "lost base": ({"base_model_name_or_path": "/nowhere/at/all"}, "base_model_name_or_path: /nowhere/at/all: no such"),
}


@pytest.mark.parametrize("case", BROKEN_CONFIGS)
def test_broken_config(adapted, tmp_path, case):
    change, message = BROKEN_CONFIGS[case]
    save_peft(adapted({"rank": 2, "targets": ["q_proj"]}), tmp_path / "out")
    edit(tmp_path / "out", **change)
    with pytest.raises(InputError, match=message) as error:
        load(tmp_path / "out")
    assert "adapter_" in str(error.value) and "\n" not in str(error.value)


def test_cut_weights(adapted, tmp_path):
    save_peft(adapted({"rank": 2, "targets": ["q_proj"]}), tmp_path / "out")
    whole = (tmp_path / "out" / WEIGHTS).read_bytes()
    for size in (0, 4, 8, 100, len(whole) - 1):
        (tmp_path / "out" / WEIGHTS).write_bytes(whole[:size])
        with pytest.raises(InputError, match="not a whole safetensors file"):
            load(tmp_path / "out")
    (tmp_path / "out" / WEIGHTS).unlink()
    with pytest.raises(InputError, match="no such file"):
        load(tmp_path / "out")


# ---- the library itself


@pytest.mark.parity
@pytest.mark.parametrize("case", [*SINGLE, *CHAINS, "head"])
def test_peft_reads_ours(adapted, forward, tmp_path, case):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    chain = CHAINS.get(case) or (SINGLE.get(case) or {"rank": 2, "targets": ["head", "layers.0"]},)
    model = adapted(*chain)
    save_peft(model, tmp_path / "out")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
    ours = set(load_file(tmp_path / "out" / WEIGHTS))
    live = {name.replace(".default", "") for name, _ in theirs.named_parameters() if "lora_" in name}
    assert live == ours
    with torch.no_grad():
        logits = theirs(torch.tensor(np.asarray(TOKENS))).logits.numpy()
    assert np.abs(logits - forward(model, TOKENS)).max() <= 1e-4 * np.abs(logits).max()


@pytest.mark.parity
@pytest.mark.parametrize(
    "options",
    [
        {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"]},
        {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "use_rslora": True},
        {"r": 4, "target_modules": r".*\.[02]\.self_attn\.(k|v)_proj"},
        {
            "r": 4,
            "target_modules": ["q_proj", "lm_head"],
            "rank_pattern": {"lm_head": 2, "layers.1.self_attn.q_proj": 3},
        },
        {
            "r": 4,
            "target_modules": ["q_proj", "v_proj"],
            "alpha_pattern": {"v_proj": 20},
            "layers_to_transform": [0, 2],
        },
        {"r": 4, "target_modules": ["q_proj", "v_proj"], "exclude_modules": [r"model.layers.0.self_attn.q_proj"]},
    ],
)
def test_reads_what_peft_writes(adapted, forward, tmp_path, options):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    adapted()
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    theirs = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if "lora_" in name:
                value.copy_(torch.randn_like(value) * 0.3)
        logits = theirs(torch.tensor(np.asarray(TOKENS))).logits.numpy()
    theirs.save_pretrained(tmp_path / "out")
    found = forward(load(tmp_path / "out"), TOKENS)
    assert np.abs(found - logits).max() <= 1e-4 * np.abs(logits).max()
    assert np.abs(forward(load(tmp_path / "base"), TOKENS) - logits).max() > 0.05


def test_lora_has_what_is_saved():
    """A field of LoRA that save_peft does not know of would be lost."""
    import inspect

    assert set(inspect.signature(LoRA.__init__).parameters) == {"self", "a", "b", "scale", "dropout", "tag"}
