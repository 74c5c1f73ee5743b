"""An Axolotl configuration (https://docs.axolotl.ai/docs/config-reference.html) -> a recipe."""

from collections.abc import Sequence
from pathlib import Path

from burnish.cli.importing.adapters import read_lora, refuse_lora
from burnish.cli.importing.axolotl_datasets import ELSEWHERE, Dataset, read_dataset, read_raw_text
from burnish.cli.importing.keys import Draft, Keys
from burnish.cli.importing.sources import STREAM_HOLDOUT, put_sources, streamed
from burnish.cli.importing.templates import put_shared_template
from burnish.cli.importing.training import (
    LOADING,
    OUTPUT,
    RESUME,
    SPEED,
    TRACKING,
    WEIGHTS,
    Names,
    read_training,
)

_NAMES = Names(
    tool="Axolotl",
    micro_batch="micro_batch_size",
    micro_batch_size=1,
    epochs="num_epochs",
    num_epochs=1.0,
    optimizer="optimizer",
    scheduler="lr_scheduler",
    schedule="cosine",
    warmup_ratio=0.03,
    lr=None,
)
_PACKING = {True: "best_fit", False: "none", None: None}
_TRUNCATE = {"drop": "drop", "truncate": "keep_start"}
_PREFERENCE = "an objective other than supervised fine-tuning: the recipe is one for `burnish sft`"
_HOW_TO_SPLIT = "data.holdout is a share of the rows; a file of its own goes in data.eval_path"

_REASONS = {
    **dict.fromkeys(("output_dir", "hub_*", "save_safetensors", "save_only_model", "merge_lora"), OUTPUT),
    **dict.fromkeys(
        ("wandb_*", "mlflow_*", "comet_*", "use_wandb", "use_mlflow", "use_comet", "use_trackio"), TRACKING
    ),
    **dict.fromkeys(("use_tensorboard", "trackio_*", "gradio_*", "include_tokens_per_second"), TRACKING),
    **dict.fromkeys(
        ("trust_remote_code", "model_type", "tokenizer_*", "is_*_derived_model", "cls_model_config"), LOADING
    ),
    **dict.fromkeys(("base_model_config", "processor_type", "hf_use_auth_token", "revision_of_model"), LOADING),
    **dict.fromkeys(("resume_from_checkpoint", "auto_resume_from_checkpoints"), RESUME),
    **dict.fromkeys(
        ("load_in_8bit", "load_in_4bit", "gptq*", "bnb_config_kwargs", "qlora_sharded_model_loading"), WEIGHTS
    ),
    **dict.fromkeys(("flash_*", "flex_*", "xformers_attention", "sdp_attention", "eager_attention", "sage_*"), SPEED),
    **dict.fromkeys(("attn_implementation", "unsloth_*", "lora_*_kernel", "liger_*", "cut_cross_entropy"), SPEED),
    **dict.fromkeys(("deepspeed", "fsdp*", "ddp*", "device*", "local_rank", "world_size", "max_memory"), SPEED),
    **dict.fromkeys(
        ("torch_compile*", "tf32", "gradient_checkpointing_kwargs", "low_cpu_mem_usage", "gc_steps"), SPEED
    ),
    **dict.fromkeys(("dataset_processes", "dataset_num_proc", "dataset_keep_in_memory", "dataloader_*"), SPEED),
    **dict.fromkeys(("pad_to_sequence_len", "sample_packing_*", "eval_sample_packing", "eval_batch_size"), SPEED),
    **dict.fromkeys(("batch_flattening", "multipack_real_batches", "group_by_length", "lora_on_cpu"), SPEED),
    **dict.fromkeys(("sequence_parallel_degree", "context_parallel_size", "heads_k_stride", "ring_attn_func"), SPEED),
    **dict.fromkeys(("gpu_memory_limit", "auto_find_batch_size", "profiler_steps", "skip_prepare_dataset"), SPEED),
    **dict.fromkeys(
        ("rl", "trl", "vllm", "dpo_*", "rl_*", "kto_*", "orpo_alpha", "simpo_gamma", "cpo_alpha"), _PREFERENCE
    ),
    **dict.fromkeys(("rpo_alpha", "reward_model", "process_reward_model", "max_prompt_len"), _PREFERENCE),
    "dataset_prepared_path": "tokenised rows are kept by themselves: data.cache",
    "push_dataset_to_hub": "tokenised rows stay on this machine: data.cache",
    "dataset_exact_deduplication": "rows are taken as they are; take repeated ones out of the file",
    "dataset_shard_*": "all rows are read; cut the file",
    "eot_tokens": "the end of a turn is what the chat template writes behind it, and it is learned",
    "added_tokens_overrides": "tokens are added, not renamed: vocabulary.add_tokens",
    "min_sample_len": "rows are dropped by what there is to learn in them: data.min_trained_tokens",
    "strict": "every key of a recipe is checked",
    "debug": "rows can be looked at: burnish inspect RECIPE",
    "evals_per_epoch": "counted in steps: train.eval_every",
    "saves_per_epoch": "counted in steps: train.save_every",
    "early_stopping_patience": "a run goes its whole length; the last step is kept",
    "load_best_model_at_end": "the last step is the result; checkpoints stay beside it",
    "loss_watchdog_*": "a step that is not finite is an error of its own",
    "unfrozen_parameters": "what is trained is said by selectors: train.trainable",
    "plugins": "code of another tool",
    "shards*": "all rows are read; cut the file",
    "preprocess_shards": SPEED,
    "lora_modules_to_save": "what is trained beside adapters is said by selectors: train.trainable",
    "lora_model_dir": "a PEFT folder is a model: put it in `model` to train on top of it",
    "s2_attention": "attention is always whole",
    "use_pose": "positions are always those of the tokens",
    "xformers*": SPEED,
    "bench_*": "see `burnish eval`",
    "do_*eval": "see `burnish eval`",
    "eval_*": "see `burnish eval`",
}


def read_axolotl(keys: Keys, folder: Path, draft: Draft) -> None:
    """Fills the draft with what the file says; keys that nothing here reads are listed by `keys.close`."""
    draft.put("model", keys.text("base_model"))
    datasets = _read_datasets(keys, folder, draft)
    _read_lengths(keys, draft, datasets)
    draft.put("data.system", keys.text("default_system_message"))
    variables = keys.get("chat_template_kwargs") or None
    if variables is not None and not isinstance(variables, dict):
        keys.refuse("chat_template_kwargs", "a mapping is expected")
        variables = None
    draft.put("data.template_variables", variables)
    _read_vocabulary(keys, draft)
    read_training(keys, draft, _NAMES)
    _read_batch_size(keys, draft)
    _read_adapter(keys, draft)
    keys.close(_REASONS)


def _read_datasets(keys: Keys, folder: Path, draft: Draft) -> Sequence[Dataset]:
    """The training sets; and all that a recipe says once for all of them."""
    train = [found for part in keys.sections("datasets") for found in read_dataset(part, folder, draft)]
    if train and keys.has("pretraining_dataset"):
        keys.refuse("pretraining_dataset", "beside datasets; add it to data.sources with format: text")
    elif keys.has("pretraining_dataset"):
        path = keys.get("pretraining_dataset")
        parts = [Keys({"path": path}, draft)] if isinstance(path, str) else keys.sections("pretraining_dataset")
        train = [found for part in parts for found in read_raw_text(part, folder, draft)]
        if isinstance(path, str) and not train:
            keys.refuse("pretraining_dataset", ELSEWHERE)
        draft.put("data.streaming", True)
    elif "streaming" in keys.tree:
        draft.put("data.streaming", keys.flag("streaming"))
    held = [found for part in keys.sections("test_datasets") for found in read_dataset(part, folder, draft)]
    if len(held) > 1 or (held and (held[0].rows.subset or held[0].rows.split)):
        keys.refuse("test_datasets", "data.eval_path is one file, or the train split of a Hub data set; make it that")
        held = []
    put_sources(draft, [dataset.rows for dataset in train], held[0].rows if held else None)
    _read_holdout(keys, draft, bool(held))
    put_shared_template([keys, *(dataset.keys for dataset in train)], draft)
    _read_train_on(keys, draft)
    if keys.flag("shuffle_merged_datasets") is False:
        keys.refuse("shuffle_merged_datasets", "rows are always shuffled, by data.seed")
    return train


def _read_holdout(keys: Keys, draft: Draft, has_eval: bool) -> None:
    size = keys.number("val_set_size")
    if size is not None and size >= 1:
        keys.refuse("val_set_size", f"{size:g} rows; {_HOW_TO_SPLIT}")
    elif size and streamed(draft):
        keys.refuse("val_set_size", STREAM_HOLDOUT)
    elif not has_eval and not streamed(draft):
        draft.put_or("data.holdout", size, 0.0, "Axolotl")
    elif size:
        keys.refuse("val_set_size", "test_datasets are evaluated on")


def _read_train_on(keys: Keys, draft: Draft) -> None:
    everything = keys.flag("train_on_inputs")
    draft.put("data.train_on", "all" if everything else "assistant")
    if everything:
        draft.assume("data.train_on=all learns what the template writes around turns, too (Axolotl: contents)")


def _read_lengths(keys: Keys, draft: Draft, train: Sequence[Dataset]) -> None:
    draft.put_or("data.max_length", keys.whole("sequence_len"), 512, "Axolotl")
    packs = keys.flag("sample_packing")
    raw = bool(train) and all(dataset.rows.format == "text" for dataset in train)
    joined = keys.flag("pretraining_sample_concatenation")
    if joined is False:
        keys.refuse("pretraining_sample_concatenation", "set data.packing: none")
    if keys.has("pretraining_dataset") and not packs:
        draft.put("data.packing", "concat")
    else:
        draft.put_or("data.packing", _PACKING[packs], "none", "Axolotl")
    if keys.flag("pretrain_multipack_attn") is False:
        keys.refuse("pretrain_multipack_attn", "examples that are packed never see each other")
    strategy = keys.text("excess_length_strategy")
    if strategy and strategy not in _TRUNCATE:
        keys.refuse("excess_length_strategy", "nothing stops at a long row; it is dropped and counted")
    if raw:
        draft.put("data.truncate", "split")
        draft.assume("data.truncate=split: Axolotl cuts raw text in pieces of sequence_len")
    else:
        draft.put_or("data.truncate", _TRUNCATE.get(strategy or "", "drop") if strategy else None, "drop", "Axolotl")
        if any(dataset.rows.format == "text" for dataset in train):
            draft.assume("data.truncate is for all rows: long raw text is cut, too, where Axolotl splits it in pieces")


def _read_vocabulary(keys: Keys, draft: Draft) -> None:
    tokens = keys.names("tokens") or []
    special = keys.section("special_tokens")
    if special:
        tokens = [*tokens, *(special.names("additional_special_tokens") or [])]
        for key in ("pad_token", "bos_token", "eos_token", "unk_token"):
            if key == "pad_token" and special.has(key):
                special.refuse(key, "padding is masked by place, never by a token; nothing to do")
            elif special.has(key):
                special.refuse(key, "the tokenizer's own is used; change it in the model's tokenizer_config.json")
    draft.put("vocabulary.add_tokens", list(dict.fromkeys(tokens)) or None)


def _read_batch_size(keys: Keys, draft: Draft) -> None:
    """`batch_size`, where it is given, is the whole step's and takes the place of the accumulation."""
    whole = keys.whole("batch_size")
    if whole and not keys.has("gradient_accumulation_steps"):
        draft.put("train.batch_size", whole)
        draft.put("train.accumulation", max(1, whole // (keys.whole("micro_batch_size") or 1)))
    elif whole and whole != draft.recipe["train"]["batch_size"]:
        keys.refuse("batch_size", "not micro_batch_size times gradient_accumulation_steps, which are taken")


def _read_adapter(keys: Keys, draft: Draft) -> None:
    kind = keys.text("adapter")
    if kind in ("lora", "qlora"):
        read_lora(keys, draft, rank="lora_r", targets="lora_target_modules", rslora="peft_use_rslora")
        linear = keys.flag("lora_target_linear")
        if not linear and not keys.has("lora_target_modules"):
            draft.assume("adapter.targets: all linear layers, as none are named (PEFT then goes by the model)")
        if linear and draft.recipe["adapter"].pop("targets", None):
            keys.refuse("lora_target_modules", "lora_target_linear takes all linear layers")
        if kind == "qlora":
            keys.refuse("adapter", f"lora it is: {WEIGHTS}")
        return
    draft.put("adapter.kind", "none")
    if kind:
        keys.refuse("adapter", "no counterpart, so everything is trained; adapter.kind is lora or none")
    refuse_lora(keys, "of adapters, which the file does not ask for")
