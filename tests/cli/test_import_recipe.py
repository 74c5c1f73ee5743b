"""Configurations of other tools, as people have them -> recipes, and nothing of them lost."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.cli.import_recipe import Imported, import_recipe, notes, run_import
from burnish.cli.recipe import Recipe
from burnish.config import build_config
from burnish.data.config import RowFormat
from burnish.data.formats import check_format, read_row
from burnish.errors import InputError

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
trust_remote_code: false
load_in_8bit: false
load_in_4bit: true
strict: false

chat_template: chatml
default_system_message: You are terse.
datasets:
  - path: chats.jsonl
    ds_type: json
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles: {user: [human, user], assistant: [gpt, assistant], system: [system]}
    roles_to_train: [assistant]
    train_on_eos: turn
    message_field_training: train
  - path: tatsu-lab/alpaca
    type: alpaca
    split: train
    shards: 10
  - path: HuggingFaceH4/ultrachat_200k
    name: default
    split: train_sft
    type: chat_template
  - path: essays.parquet
    type: completion
    field: body
  - path: s3://bucket/rows.jsonl
    type: chat_template
    made_up: 7
test_datasets:
  - path: held.jsonl
    type: chat_template
dataset_prepared_path: last_run_prepared
val_set_size: 0.0
output_dir: ./out
shuffle_merged_datasets: true
train_on_inputs: false
sequence_len: 4096
sample_packing: true
eval_sample_packing: false
pad_to_sequence_len: true
excess_length_strategy: truncate
min_sample_len: 10

adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_modules_to_save: [embed_tokens, lm_head]

wandb_project:
wandb_entity: somebody
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
max_steps:
optimizer: paged_adamw_8bit
adam_beta2: 0.95
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: 2e-4
weight_decay: 0.01
max_grad_norm: 0.3
warmup_steps: 10
bf16: true
fp16:
tf32: true
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: false}
logging_steps: 1
flash_attention: true
evals_per_epoch: 4
eval_steps: 0.1
save_steps: 200
save_total_limit: 3
neftune_noise_alpha: 5
deepspeed: zero2.json
seed: 7
special_tokens:
  pad_token: <|pad|>
  eos_token: <|im_end|>
  additional_special_tokens: [<tool>]
tokens: [<call>, </call>]
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rms_norm: true
an_option_of_tomorrow: {deep: {deeper: 1}}
"""

LLAMA_FACTORY = """
### model
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
trust_remote_code: true
quantization_bit: 4
add_tokens: <a>,<b>
add_special_tokens: "<c>"
resize_vocab: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj
use_rslora: true
use_dora: false
### dataset
dataset: chats, elsewhere, alpaca_en, ratings
dataset_dir: data
template: qwen3
enable_thinking: false
cutoff_len: 3000
train_on_prompt: false
mask_history: true
packing: true
neat_packing: true
mix_strategy: interleave_over
interleave_probs: 0.4,0.1,0.3,0.2
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
val_size: 0.05
default_system: Be brief.
buffer_size: 500
### output
output_dir: saves/out
logging_steps: 10
save_steps: 500
plot_loss: true
report_to: none
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 2.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
neftune_noise_alpha: 5
label_smoothing_factor: 0.1
flash_attn: fa2
pref_beta: 0.1
a_key_of_tomorrow: 1
"""
DATASET_INFO = {
    "chats": {
        "file_name": "chats.json",
        "formatting": "sharegpt",
        "columns": {"messages": "dialog", "system": "persona", "tools": "tools", "images": "pictures"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
            "system_tag": "boss",
        },
    },
    "alpaca_en": {"hf_hub_url": "org/alpaca-en", "ms_hub_url": "other/alpaca", "num_samples": 50, "subset": "clean"},
    "ratings": {
        "file_name": "ratings.jsonl",
        "ranking": True,
        "columns": {"prompt": "q", "response": "a", "chosen": "good", "rejected": "bad"},
        "some_new_key": {"x": 1},
    },
    "not_named": {"file_name": "other.json", "strange": 1},
}


def leaves(tree, place=""):
    """Every key of a tree that holds no further keys: an independent walk, to compare lists of keys with."""
    if isinstance(tree, dict) and tree:
        return [leaf for key, value in tree.items() for leaf in leaves(value, f"{place}.{key}" if place else str(key))]
    if isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        return [leaf for number, item in enumerate(tree) for leaf in leaves(item, f"{place}[{number}]")]
    return [place]


def assert_partition(imported: Imported, expected: list[str]) -> None:
    """Each key is accounted for once: as translated or as unknown, by itself or by a key that it is under."""
    listed = imported.translated + [key for key, _ in imported.unknown]
    for leaf in expected:
        over = [key for key in listed if leaf == key or leaf.startswith((f"{key}.", f"{key}["))]
        assert len(over) == 1, (leaf, over)
    assert all(any(leaf.startswith(key) for leaf in expected) for key in listed)
    assert all(reason for _, reason in imported.unknown)


def checked(tree: dict, folder: Path) -> Imported:
    """The import, whose recipe has to be one, with columns that make a form."""
    imported = import_recipe(tree, folder)
    data = build_config(Recipe, yaml.safe_load(yaml.safe_dump(imported.recipe))).data
    for form in (data, *(data.sources or [])):
        columns = data.columns if form.columns is None else form.columns
        check_format(RowFormat(format=form.format or data.format, columns=columns))
    return imported


def axolotl(folder: Path, **keys) -> Imported:
    return checked({"base_model": "m", **keys}, folder)


def llama_factory(folder: Path, info: dict | None = None, **keys) -> Imported:
    if info is not None:
        (folder / "data").mkdir(exist_ok=True)
        (folder / "data" / "dataset_info.json").write_text(json.dumps(info))
    return checked({"model_name_or_path": "m", **keys}, folder)


def test_axolotl_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "essays.parquet").touch()  # beside the file; the others are found from here
    imported = checked(yaml.safe_load(AXOLOTL), tmp_path / "configs")
    assert imported.kind == "axolotl"
    assert imported.recipe == {
        "model": "NousResearch/Llama-3.2-1B",
        "dtype": "bfloat16",
        "data": {
            "sources": [
                {"path": "chats.jsonl", "format": "conversations", "columns": {}},
                {"path": "hf:tatsu-lab/alpaca", "format": "alpaca", "columns": {}},
                {
                    "path": "hf:HuggingFaceH4/ultrachat_200k",
                    "subset": "default",
                    "split": "train_sft",
                    "format": "messages",
                    "columns": {},
                },
                {"path": str(tmp_path / "configs" / "essays.parquet"), "format": "text", "columns": {"text": "body"}},
            ],
            "eval_path": "held.jsonl",
            "format": "messages",
            "chat_template": "chatml",
            "train_on": "assistant",
            "max_length": 4096,
            "packing": "best_fit",
            "truncate": "keep_start",
            "system": "You are terse.",
            "seed": 7,
        },
        "vocabulary": {"add_tokens": ["<call>", "</call>", "<tool>"]},
        "train": {
            "batch_size": 8,
            "accumulation": 4,
            "epochs": 3,
            "remat": "block",
            "save_every": 200,
            "log_every": 1,
            "keep": 3,
            "neftune_alpha": 5,
            "seed": 7,
        },
        "optimizer": {
            "name": "adamw",
            "lr": 2e-4,
            "weight_decay": 0.01,
            "clip_norm": 0.3,
            "b2": 0.95,
            "schedule": {"name": "cosine", "end_lr": pytest.approx(2e-5), "warmup_steps": 10},
        },
        "adapter": {"kind": "lora", "rank": 32, "alpha": 16, "dropout": 0.05},
    }


def test_axolotl_loses_no_key(tmp_path):
    tree = yaml.safe_load(AXOLOTL)
    imported = checked(tree, tmp_path)
    assert_partition(imported, leaves(tree))
    assert any(line.startswith("data.truncate is for all rows") for line in imported.assumed)
    unknown = {key for key, _ in imported.unknown}
    assert unknown >= {
        *("load_in_4bit", "adapter", "optimizer", "lora_modules_to_save", "min_sample_len", "eval_steps"),
        *("datasets[1].type", "datasets[1].shards", "datasets[4].path", "datasets[4].made_up"),
        *("special_tokens.eos_token", "plugins", "an_option_of_tomorrow", "wandb_entity"),
    }
    # switched off, or not set
    assert unknown.isdisjoint({"trust_remote_code", "load_in_8bit", "wandb_project", "eval_sample_packing", "fp16"})


def test_llama_factory_recipe(tmp_path):
    imported = llama_factory(tmp_path, DATASET_INFO, **yaml.safe_load(LLAMA_FACTORY))
    assert imported.kind == "llama-factory"
    assert imported.recipe["model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert imported.recipe["data"] == {
        "sources": [
            {
                "path": str(tmp_path / "data" / "chats.json"),
                "weight": 0.4,
                "format": "messages",
                "columns": {"messages": "dialog", "system": "persona"},
            },
            {"path": "hf:org/alpaca-en", "weight": 0.3, "subset": "clean", "format": "alpaca"},
            {
                "path": str(tmp_path / "data" / "ratings.jsonl"),
                "weight": 0.2,
                "format": "prompt_completion",
                "columns": {"prompt": "q", "completion": "a"},
            },
        ],
        "repeat": True,
        "holdout": 0.05,
        "shuffle_buffer": 500,
        "chat_template": "qwen3",
        "system": "Be brief.",
        "template_variables": {"enable_thinking": False},
        "max_length": 3000,
        "train_on": "last_turn",
        "packing": "best_fit",
        "truncate": "keep_end",
    }
    assert imported.recipe["vocabulary"] == {"add_tokens": ["<a>", "<b>", "<c>"]}
    assert imported.recipe["adapter"] == {"kind": "lora", "rank": 16, "rslora": True, "targets": ["q_proj", "v_proj"]}
    assert imported.recipe["sft"] == {"label_smoothing": 0.1}
    assert imported.recipe["train"]["batch_size"] == 8
    schedule = {"name": "cosine", "end_lr": 0.0, "warmup_ratio": 0.1}
    assert imported.recipe["optimizer"] == {
        "name": "adamw",
        "lr": 1e-4,
        "weight_decay": 0.0,
        "schedule": schedule,
    }


def test_llama_factory_loses_no_key(tmp_path):
    tree = yaml.safe_load(LLAMA_FACTORY)
    imported = llama_factory(tmp_path, DATASET_INFO, **tree)
    named = {name: entry for name, entry in DATASET_INFO.items() if name != "not_named"}
    assert_partition(imported, leaves(tree) + leaves(named, "dataset_info"))
    unknown = {key for key, _ in imported.unknown}
    assert unknown >= {
        *("dataset", "max_samples", "quantization_bit", "add_tokens", "pref_beta", "a_key_of_tomorrow"),
        *("dataset_info.chats.tags.system_tag", "dataset_info.chats.columns.images", "dataset_info.ratings.ranking"),
        *(
            "dataset_info.alpaca_en.num_samples",
            "dataset_info.alpaca_en.ms_hub_url",
            "dataset_info.ratings.some_new_key",
        ),
    }
    assert "elsewhere" in dict(imported.unknown)["dataset"]


WORDS = st.one_of(
    *(st.none(), st.booleans(), st.integers(-2, 9), st.floats(0, 1), st.just([]), st.just({})),
    *(st.sampled_from(["", "x", "auto", "chatml", "2e-4"]), st.lists(st.sampled_from(["a", 1]), max_size=2)),
    st.dictionaries(st.sampled_from(["path", "type", "x"]), st.sampled_from(["x", 1, None]), max_size=2),
    st.lists(st.dictionaries(st.sampled_from(["path", "type", "x"]), st.just("x"), max_size=2), max_size=2),
)
KEYS = {
    "axolotl": [*sorted(yaml.safe_load(AXOLOTL)), "pretraining_dataset", "streaming", "chat_template_jinja"],
    "llama-factory": [*sorted(yaml.safe_load(LLAMA_FACTORY)), "eval_dataset", "lr_scheduler_kwargs", "optim"],
}


ENTRY_KEYS = [
    *("type", "ds_type", "data_files", "name", "split", "conversation", "field_messages", "message_property_mappings"),
    *("message_field_role", "roles", "roles_to_train", "train_on_eos", "message_field_training", "chat_template"),
    *("field_system", "shards", "field"),
]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(["axolotl", "llama-factory"]))
def test_whatever_a_key_holds_it_is_accounted_for(data, kind):
    first = {"axolotl": {"base_model": "m"}, "llama-factory": {"model_name_or_path": "m"}}[kind]
    if kind == "axolotl":
        entry = {"path": "rows.jsonl", "type": data.draw(st.sampled_from(["chat_template", "alpaca", "completion"]))}
        first["datasets"] = [entry | data.draw(st.dictionaries(st.sampled_from(ENTRY_KEYS), WORDS, max_size=4))]
    tree = first | data.draw(st.dictionaries(st.sampled_from(KEYS[kind]), WORDS, max_size=6))
    try:
        imported = import_recipe(tree, Path("nowhere"))
    except InputError as error:
        assert "the recipe that comes of it" in str(error)  # a number out of range
        return
    build_config(Recipe, imported.recipe)
    assert_partition(imported, leaves(tree))


@pytest.mark.parametrize(
    ("entry", "row", "prompt", "answer"),
    [
        (
            {
                "format": "Q: {instruction}\nC: {input}\nA:",
                "field_instruction": "q",
                "field_input": "c",
                "field_output": "a",
            },
            {"q": "1+1?", "c": "sums", "a": " 2"},
            "Q: 1+1?\nC: sums\nA:",
            " 2",
        ),
        (
            {"format": "[INST] {instruction} [/INST]", "system_prompt": "Be {kind}.", "system_format": "<<{system}>> "},
            {"instruction": "Hi", "output": "Ho"},
            "<<Be {kind}.>> [INST] Hi [/INST]",
            "Ho",
        ),
        (
            {"format": "{{x}} {instruction}", "field_system": "who", "system_format": "{system}: "},
            {"instruction": "Hi", "output": "Ho", "who": "Bob"},
            "Bob: {x} Hi",
            "Ho",
        ),
    ],
)
def test_axolotl_wording_of_its_own_is_read_as_written(tmp_path, entry, row, prompt, answer):
    data = axolotl(tmp_path, datasets=[{"path": "rows.jsonl", "type": entry}]).recipe["data"]
    record = read_row(row, 0, "row", RowFormat(format=data["format"], columns=data["columns"]))
    assert (record.prompt, record.completion) == (prompt, answer)


def test_axolotl_text_for_rows_without_input_is_reported(tmp_path):
    entry = {"format": "{instruction}|{input}", "no_input_format": "{instruction}!"}
    imported = axolotl(tmp_path, datasets=[{"path": "rows.jsonl", "type": entry}])
    assert "no_input_format" in " ".join(key for key, _ in imported.unknown)
    assert imported.recipe["data"]["columns"]["prompt"] == "{instruction}|{input}"


@pytest.mark.parametrize(
    ("entry", "form", "columns", "unknown"),
    [
        ({"type": "sharegpt"}, "conversations", None, set()),
        ({"type": "chat_template"}, "messages", None, set()),
        ({"type": "chat_template", "field_messages": "chat"}, "messages", {"messages": "chat"}, set()),
        (
            {"type": "chat_template", "roles": {"user": ["human"]}},
            "conversations",
            {"conversations": "messages"},
            set(),
        ),
        ({"type": "chat_template", "roles": {"user": ["alice"]}}, "messages", None, {"roles"}),
        ({"type": "chat_template", "message_field_role": "speaker"}, "messages", None, {"message_field_role"}),
        ({"type": "chat_template", "field_tools": "t"}, "messages", {"messages": "messages", "tools": "t"}, set()),
        ({"type": "chat_template", "roles_to_train": ["user", "assistant"]}, "messages", None, {"roles_to_train"}),
        ({"type": "chat_template", "roles_to_train": []}, "messages", None, {"roles_to_train"}),
        ({"type": "chat_template", "train_on_eos": "last"}, "messages", None, {"train_on_eos"}),
        ({"type": "chat_template", "message_field_training": "learn"}, "messages", None, {"message_field_training"}),
        ({"type": "chat_template", "drop_system_message": True}, "messages", None, {"drop_system_message"}),
        ({"type": "completion"}, "text", None, set()),
        ({"type": "input_output"}, None, None, {"type"}),
        ({"type": "alpaca_chat.load_qa"}, "question_answer", None, {"type"}),
        (
            {"type": "gpteacher"},
            "alpaca",
            {"instruction": "instruction", "input": "input", "output": "response"},
            {"type"},
        ),
        ({"type": None}, "tokens", None, set()),
        ({"type": "chat_template", "ds_type": "csv"}, "messages", None, {"ds_type"}),
        ({"type": "chat_template", "split": "test"}, "messages", None, {"split"}),
        ({"type": "chat_template", "name": "clean"}, "messages", None, {"name"}),
    ],
)
def test_axolotl_types_of_rows(tmp_path, entry, form, columns, unknown):
    imported = axolotl(tmp_path, datasets=[{"path": "rows.jsonl", **entry}])
    data = imported.recipe["data"]
    assert (data["path"], data.get("format"), data.get("columns")) == ("rows.jsonl", form, columns)
    assert {key for key, _ in imported.unknown} == {f"datasets[0].{key}" for key in unknown}


@pytest.mark.parametrize(
    ("entry", "paths"),
    [
        ({"path": "org/name"}, ["hf:org/name"]),
        ({"path": "there"}, ["there"]),
        ({"path": "near"}, ["{folder}/near"]),
        ({"path": "gone.jsonl.gz"}, ["gone.jsonl.gz"]),
        ({"path": "../up/rows"}, ["../up/rows"]),
        ({"path": "json", "data_files": ["a.jsonl", "b.jsonl"]}, ["a.jsonl", "b.jsonl"]),
        ({"path": "there", "data_files": "a.jsonl"}, ["there/a.jsonl"]),
        ({"path": "gs://bucket/rows"}, []),
    ],
)
def test_file_or_hub(tmp_path, monkeypatch, entry, paths):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "configs"
    for name in (tmp_path / "there", folder / "near"):
        name.mkdir(parents=True)
    data = axolotl(folder, datasets=[{"type": "completion", **entry}]).recipe["data"]
    found = [data["path"]] if "path" in data else [source["path"] for source in data.get("sources", [])]
    assert found == [path.format(folder=folder) for path in paths]


def test_axolotl_template_of_the_data_sets_wins_where_they_agree(tmp_path):
    entry = {"path": "rows.jsonl", "type": "chat_template"}
    agreed = axolotl(tmp_path, datasets=[{**entry, "chat_template": "llama3"}])
    assert agreed.recipe["data"]["chat_template"] == "llama3" and not agreed.unknown
    others = axolotl(tmp_path, chat_template="chatml", datasets=[{**entry, "chat_template": "llama3"}, entry])
    assert others.recipe["data"]["chat_template"] == "chatml"
    assert [key for key, _ in others.unknown] == ["datasets[0].chat_template"]
    own = axolotl(tmp_path, chat_template="jinja", chat_template_jinja="my/own.jinja", datasets=[entry])
    assert own.recipe["data"]["chat_template"] == "my/own.jinja" and not own.unknown
    inline = axolotl(tmp_path, chat_template_jinja="{{ bos_token }}", datasets=[entry])
    assert "chat_template" not in inline.recipe["data"]
    assert [key for key, _ in inline.unknown] == ["chat_template_jinja"]


@pytest.mark.parametrize("name", ["mistral_v1", "alpaca", "qwen_25", "tokenizer_default_fallback_chatml"])
def test_a_template_that_writes_another_text_is_not_taken(tmp_path, name):
    imported = axolotl(tmp_path, chat_template=name)
    assert [key for key, _ in imported.unknown] == ["chat_template"]
    assert "chat_template" not in imported.recipe["data"]


def test_axolotl_evaluation_split_of_the_hub_is_not_taken_for_another(tmp_path):
    entry = {"path": "org/chats", "type": "chat_template"}
    imported = axolotl(tmp_path, datasets=[entry], test_datasets=[{**entry, "split": "test"}])
    assert imported.recipe["data"]["path"] == "hf:org/chats" and "eval_path" not in imported.recipe["data"]
    assert [key for key, _ in imported.unknown] == ["test_datasets"]


def test_axolotl_raw_text(tmp_path):
    whole = axolotl(tmp_path, datasets=[{"path": "a.jsonl", "type": "completion"}], sequence_len=64).recipe["data"]
    assert (whole["format"], whole["truncate"], whole["packing"]) == ("text", "split", "none")
    entry = {"path": "org/web", "name": "en", "text_column": "body", "skip": 5}
    streamed = axolotl(tmp_path, pretraining_dataset=[entry], max_steps=10)
    assert streamed.recipe["data"]["sources"][0] == {
        "path": "hf:org/web",
        "subset": "en",
        "format": "text",
        "columns": {"text": "body"},
    }
    assert (streamed.recipe["data"]["streaming"], streamed.recipe["data"]["packing"]) == (True, "concat")
    assert [key for key, _ in streamed.unknown] == ["pretraining_dataset[0].skip"]
    assert axolotl(tmp_path, pretraining_dataset="org/web").recipe["data"]["path"] == "hf:org/web"


def test_what_axolotl_does_unasked_is_written_out(tmp_path):
    """Its defaults where ours differ: nothing held out or packed, all parameters trained, a rate that falls to zero."""
    imported = axolotl(tmp_path, learning_rate="1e-5")
    recipe = imported.recipe
    assert recipe["data"] == {
        "holdout": 0.0,
        "train_on": "assistant",
        "max_length": 512,
        "packing": "none",
        "truncate": "drop",
    }
    assert recipe["adapter"] == {"kind": "none"}
    assert (recipe["train"]["batch_size"], recipe["train"]["epochs"]) == (1, 1.0)
    assert recipe["optimizer"]["lr"] == 1e-5 and recipe["optimizer"]["schedule"]["end_lr"] == 0.0
    assert "data.holdout=0.0 (Axolotl's default)" in imported.assumed


def test_what_llama_factory_does_unasked_is_written_out(tmp_path):
    recipe = llama_factory(tmp_path).recipe
    assert recipe["data"] == {
        "holdout": 0.0,
        "train_on": "assistant",
        "max_length": 2048,
        "packing": "none",
        "truncate": "keep_start",
    }
    assert recipe["adapter"] == {"kind": "lora", "rank": 8}
    assert (recipe["train"]["batch_size"], recipe["train"]["epochs"]) == (8, 3.0)
    assert recipe["optimizer"]["lr"] == 5e-5
    assert recipe["optimizer"]["schedule"] == {"name": "linear", "end_lr": 0.0, "warmup_ratio": 0.0}


@pytest.mark.parametrize(
    ("entry", "form", "columns", "unknown"),
    [
        ({}, "alpaca", None, set()),
        ({"columns": {"prompt": "instruction", "response": "output"}}, "prompt_completion", "q", set()),
        (
            {"columns": {"prompt": "q", "query": "c", "response": "a", "history": "h"}},
            "alpaca",
            "all",
            {"columns.query"},
        ),
        ({"formatting": "sharegpt"}, "conversations", None, set()),
        ({"formatting": "sharegpt", "tags": {"user_tag": "USER"}}, "conversations", None, {"tags.user_tag"}),
        ({"formatting": "sharegpt", "tags": {"role_tag": "who"}}, "conversations", None, {"tags.role_tag"}),
    ],
)
def test_llama_factory_rows(tmp_path, entry, form, columns, unknown):
    """`columns` name all that is read: rows without a query are a prompt and a completion, whatever else they hold."""
    columns = {
        "q": {"prompt": "instruction", "completion": "output"},
        "all": {"instruction": "q", "input": "c", "output": "a", "history": "h"},
    }.get(columns)
    imported = llama_factory(tmp_path, {"x": {"file_name": "x.json", **entry}}, dataset="x")
    data = imported.recipe["data"]
    if form == "conversations" and "tags.role_tag" in unknown:
        form = data["format"]  # there is none that reads such messages
    assert (data["format"], data.get("columns")) == (form, columns)
    assert data["path"] == str(tmp_path / "data" / "x.json")
    assert {key for key, _ in imported.unknown} == {f"dataset_info.x.{key}" for key in unknown}


def test_llama_factory_evaluation_set_is_read_in_its_own_form(tmp_path):
    info = {
        "a": {"file_name": "a.json", "formatting": "sharegpt"},
        "b": {"file_name": "b.json", "columns": {"prompt": "q", "response": "r"}},
    }
    data = llama_factory(tmp_path, info, dataset="a", eval_dataset="b").recipe["data"]
    assert data["sources"] == [{"path": str(tmp_path / "data/a.json"), "format": "conversations", "columns": {}}]
    assert data["eval_path"] == str(tmp_path / "data/b.json")
    assert (data["format"], data["columns"]) == ("prompt_completion", {"prompt": "q", "completion": "r"})
    assert "holdout" not in data


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ([None, None], None)),
        ({"mix_strategy": "interleave_under"}, ([1.0, 1.0], False)),
        ({"mix_strategy": "interleave_over", "interleave_probs": "0.8, 0.2"}, ([0.8, 0.2], True)),
        ({"mix_strategy": "interleave_over", "interleave_probs": "0.8"}, ([None, None], None)),
        ({"mix_strategy": "interleave_under", "interleave_probs": "a,b"}, ([None, None], None)),
    ],
)
def test_llama_factory_mixtures(tmp_path, keys, expected):
    info = {"a": {"file_name": "a.json"}, "b": {"file_name": "b.json"}}
    data = llama_factory(tmp_path, info, dataset=["a", "b"], **keys).recipe["data"]
    assert ([source.get("weight") for source in data["sources"]], data.get("repeat")) == expected


def test_llama_factory_raw_text_and_other_stages(tmp_path):
    info = {"docs": {"file_name": "docs.json", "columns": {"prompt": "content"}}}
    raw = llama_factory(tmp_path, info, dataset="docs", stage="pt").recipe["data"]
    assert (raw["format"], raw["columns"], raw["packing"]) == ("text", {"text": "content"}, "concat")
    dpo = llama_factory(tmp_path, info, dataset="docs", stage="dpo")
    assert [key for key, _ in dpo.unknown] == ["stage"]


def test_llama_factory_qwen_brings_its_system_message(tmp_path):
    data = llama_factory(tmp_path, template="qwen").recipe["data"]
    assert data["chat_template"] == "chatml" and data["system"].startswith("You are Qwen, created by Alibaba Cloud")
    assert llama_factory(tmp_path, template="qwen", default_system="Hi").recipe["data"]["system"] == "Hi"
    assert [key for key, _ in llama_factory(tmp_path, template="default").unknown] == ["template"]


@pytest.mark.parametrize(
    ("keys", "schedule", "unknown"),
    [
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 5},
            {"name": "constant", "warmup_ratio": 0.0},
            {"warmup_steps"},
        ),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5},
            {"name": "constant", "warmup_steps": 5},
            set(),
        ),
        ({"warmup_steps": 0.1}, {"name": "linear", "end_lr": 0.0, "warmup_ratio": 0.1}, set()),
        (
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr_rate": 0.5},
                "learning_rate": 1e-4,
            },
            {"name": "cosine", "end_lr": 5e-5, "warmup_ratio": 0.0},
            set(),
        ),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2}},
            {"name": "cosine", "end_lr": 0.0, "warmup_ratio": 0.0},
            {"lr_scheduler_type", "lr_scheduler_kwargs"},
        ),
    ],
)
def test_schedules(tmp_path, keys, schedule, unknown):
    imported = llama_factory(tmp_path, **keys)
    assert imported.recipe["optimizer"]["schedule"] == schedule
    assert {key for key, _ in imported.unknown} == unknown


def test_a_value_of_another_kind_is_reported_not_taken(tmp_path):
    imported = axolotl(
        tmp_path, sequence_len="long", sample_packing="perhaps", learning_rate=[1], datasets="rows.jsonl"
    )
    assert dict(imported.unknown) == {
        "sequence_len": "'long' is not a whole number",
        "sample_packing": "'perhaps' is not true or false",
        "learning_rate": "[1] is not a number",
        "datasets": "a list of mappings is expected",
    }


def test_command_prints_a_recipe_and_says_the_rest(tmp_path, capsys):
    config = tmp_path / "axolotl.yml"
    config.write_text(AXOLOTL)
    run_import(config, None, as_json=False)
    out, err = capsys.readouterr()
    build_config(Recipe, yaml.safe_load(out))
    assert "not understood: plugins (code of another tool)" in err
    assert any(
        line.startswith("not understood:") and "tf32" in line and "flash_attention" in line for line in err.splitlines()
    )
    assert "assumed: one device" in err
    run_import(config, None, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer["kind"] == "axolotl" and answer["recipe"] == yaml.safe_load(out)
    assert {"key": "plugins", "reason": "code of another tool"} in answer["unknown"]


def test_command_writes_a_new_file_and_never_over_one(tmp_path, capsys):
    config, out = tmp_path / "lf.json", tmp_path / "recipe.yaml"
    config.write_text(json.dumps({"model_name_or_path": "m", "stage": "sft"}))
    run_import(config, out, as_json=False)
    assert f"burnish inspect {out}" in capsys.readouterr().out
    assert build_config(Recipe, yaml.safe_load(out.read_text())).model == "m"
    before = out.read_bytes()
    with pytest.raises(InputError, match="is there already"):
        run_import(config, out, as_json=False)
    assert out.read_bytes() == before
    with pytest.raises(InputError, match=r"ends in \.yaml"):
        run_import(config, tmp_path / "recipe.json", as_json=False)
    with pytest.raises(InputError, match="cannot be written"):
        run_import(config, tmp_path / "no" / "recipe.yaml", as_json=False)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        ("", "is empty"),
        ("# nothing yet\n", "a mapping of keys is expected"),
        ("- a\n- b\n", "a mapping of keys is expected"),
        ("base_model: x\n  y: [1\n", "broken YAML at line 2"),
        (
            "model: x\ndata: {path: a}\n",
            "neither Axolotl's configuration nor LLaMA-Factory's: Axolotl's has base_model",
        ),
        ("base_model: x\nmodel_name_or_path: y\n", "keys of two tools are in it (base_model, model_name_or_path)"),
        ("base_model: x\nlearning_rate: -1\n", "optimizer.lr"),
    ],
)
def test_wrong_files_are_one_line(tmp_path, content, said):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError) as refused:
        run_import(path, None, as_json=False)
    message = str(refused.value)
    assert message.startswith(str(path)) and said in message and "\n" not in message


def test_broken_dataset_info_is_named(tmp_path):
    (tmp_path / "data").mkdir()
    info = tmp_path / "data" / "dataset_info.json"
    for text in ("{", "[]"):
        info.write_text(text)
        with pytest.raises(InputError, match=r"dataset_info\.json: "):
            import_recipe({"model_name_or_path": "m", "dataset": "a"}, tmp_path)


def test_notes_put_keys_of_one_reason_together():
    imported = Imported("axolotl", {}, [], [("a", "why"), ("b", "other"), ("c", "why")], ["this"])
    assert notes(imported) == ["not understood: a, c (why)", "not understood: b (other)", "assumed: this"]


def test_streams_are_recipes_that_run(tmp_path):
    found = checked({"base_model": "m", "pretraining_dataset": "org/web", "val_set_size": 0.05}, tmp_path)
    assert "holdout" not in found.recipe["data"] and found.recipe["data"]["streaming"] is True
    assert any(key == "val_set_size" and "stream" in reason for key, reason in found.unknown)
    info = {"a": {"file_name": "a.json"}, "b": {"file_name": "b.json"}}
    data = llama_factory(tmp_path, info, dataset="a,b", streaming=True, max_steps=5).recipe["data"]
    assert [source["weight"] for source in data["sources"]] == [1.0, 1.0]
