"""A LLaMA-Factory configuration (https://llamafactory.readthedocs.io) and its dataset_info.json -> a recipe."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from burnish.cli.importing.adapters import read_lora, refuse_lora
from burnish.cli.importing.keys import Draft, Keys
from burnish.cli.importing.llama_factory_datasets import Catalogue
from burnish.cli.importing.sources import STREAM_HOLDOUT, Rows, put_sources, streamed
from burnish.cli.importing.templates import LLAMA_FACTORY as TEMPLATES
from burnish.cli.importing.templates import put_template
from burnish.cli.importing.training import LOADING, OUTPUT, RESUME, SPEED, TRACKING, WEIGHTS, Names, read_training

_NAMES = Names(
    tool="LLaMA-Factory",
    micro_batch="per_device_train_batch_size",
    micro_batch_size=8,
    epochs="num_train_epochs",
    num_epochs=3.0,
    optimizer="optim",
    scheduler="lr_scheduler_type",
    schedule="linear",
    warmup_ratio=0.0,
    lr=5e-5,
)
_PACKING = {True: "best_fit", False: "none", None: None}
_QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_PREFERENCE = "an objective other than supervised fine-tuning: the recipe is one for `burnish sft`"
_CACHE = "tokenised rows are kept by themselves: data.cache"
_MEDIA = "Burnish trains on text alone"
_OTHER_METHOD = "no counterpart; see docs/recipe.md under optimizer and adapter"

_REASONS = {
    **dict.fromkeys(
        ("output_dir", "overwrite_output_dir", "export_*", "hub_*", "push_to_hub", "save_only_model"), OUTPUT
    ),
    **dict.fromkeys(("report_to", "run_name", "plot_loss", "logging_dir", "use_swanlab", "swanlab_*"), TRACKING),
    **dict.fromkeys(("include_num_input_tokens_seen", "include_tokens_per_second", "print_param_status"), TRACKING),
    **dict.fromkeys(("trust_remote_code", "use_fast_tokenizer", "model_revision", "cache_dir", "*_hub_token"), LOADING),
    **dict.fromkeys(("resume_from_checkpoint", "ignore_data_skip"), RESUME),
    **dict.fromkeys(("quantization_*", "double_quantization", "fp8*", "upcast_*"), WEIGHTS),
    **dict.fromkeys(
        ("flash_attn", "use_unsloth*", "enable_liger_kernel", "use_reentrant_gc", "deepspeed", "fsdp*"), SPEED
    ),
    **dict.fromkeys(("ddp_*", "dataloader_*", "preprocessing_*", "tf32", "low_cpu_mem_usage", "use_cache"), SPEED),
    **dict.fromkeys(("torch_compile*", "gradient_checkpointing*", "data_shared_file_system", "use_v1_kernels"), SPEED),
    **dict.fromkeys(("per_device_eval_batch_size", "group_by_length", "disable_gradient_checkpointing"), SPEED),
    **dict.fromkeys(
        ("pref_*", "dpo_*", "kto_*", "simpo_*", "ppo_*", "ref_model*", "reward_model*", "ld_alpha"), _PREFERENCE
    ),
    **dict.fromkeys(("overwrite_cache", "tokenized_path"), _CACHE),
    **dict.fromkeys(("image_*", "video_*", "audio_*", "media_dir", "freeze_vision_tower", "freeze_*projector"), _MEDIA),
    **dict.fromkeys(("use_galore", "galore_*", "use_apollo", "apollo_*", "use_badam", "badam_*"), _OTHER_METHOD),
    **dict.fromkeys(("use_dora", "pissa_*", "loraplus_*", "use_llama_pro", "oft_*", "module_dropout"), _OTHER_METHOD),
    **dict.fromkeys(("use_muon", "use_adam_mini", "use_asft_loss"), _OTHER_METHOD),
    **dict.fromkeys(
        ("predict_with_generate", "do_predict", "eval_num_beams", "compute_accuracy"), "see `burnish eval`"
    ),
    **dict.fromkeys(("max_new_tokens", "top_p", "top_k", "temperature", "do_sample"), "see `burnish generate --help`"),
    "freeze_*": "what is trained is said by selectors: train.trainable",
    "additional_target": "what is trained beside adapters is said by selectors: train.trainable",
    "adapter_name_or_path": "a PEFT folder is a model: put it in `model` to train on top of it",
    "create_new_adapter": "an adapter that is loaded becomes part of the base, and a new one is trained",
    "tool_format": "the chat template writes tools",
    "efficient_eos": "the end of a turn is what the chat template writes, and it is learned",
    "eval_on_each_dataset": "data.eval_path is evaluated as one",
    "disable_shuffling": "rows are always shuffled, by data.seed",
    "data_seed": "data.seed is taken from seed",
    "split_special_tokens": "special tokens in a text are read as such",
    "resize_vocab": "the embedding grows with vocabulary.add_tokens by itself",
    "init_special_tokens": "new rows of the embedding are the mean of the known ones",
    "new_special_tokens_config": "name the tokens in vocabulary.add_tokens",
    "shift_attn": "attention is always whole",
    "rope_scaling": "positions are as the model's configuration has them",
    "mixture_of_depths": "no counterpart",
    "preserve_thinking": "the chat template decides",
}


def read_llama_factory(keys: Keys, folder: Path, draft: Draft) -> None:
    """Fills the draft with what the file says; keys that nothing here reads are listed by `keys.close`.

    Raises:
        InputError: its dataset_info.json is there but cannot be read.
    """
    draft.put("model", keys.text("model_name_or_path"))
    raw = _read_stage(keys)
    _read_datasets(keys, folder, draft, raw=raw)
    _read_template(keys, draft)
    _read_lengths(keys, draft, raw=raw)
    _read_vocabulary(keys, draft)
    read_training(keys, draft, _NAMES)
    _read_method(keys, draft)
    draft.put("sft.loss", "dft" if keys.flag("use_dft_loss") else None)
    keys.close(_REASONS)


def _read_stage(keys: Keys) -> bool:
    """Whether rows are raw text (stage: pt)."""
    stage = keys.text("stage")
    if stage not in (None, "sft", "pt"):
        keys.refuse("stage", _PREFERENCE)
    if keys.flag("do_train") is False:
        keys.refuse("do_train", "the recipe is one for training")
    for key in ("do_eval", "do_predict"):
        keys.flag(key)
    return stage == "pt"


def _read_datasets(keys: Keys, folder: Path, draft: Draft, *, raw: bool) -> None:
    catalogue = Catalogue.of(keys, folder, draft)
    train = catalogue.rows("dataset", raw=raw)
    held = [rows for rows in catalogue.rows("eval_dataset", raw=raw) if rows]
    if len(held) > 1 or (held and (held[0].subset or held[0].split)):
        keys.refuse("eval_dataset", "data.eval_path is one file, or the train split of a Hub data set; make it that")
        held = []
    put_sources(draft, _weighed(keys, draft, train), held[0] if held else None)
    draft.put("data.streaming", keys.flag("streaming"))
    size = keys.number("val_size")
    if size is not None and size >= 1:
        keys.refuse("val_size", f"{size:g} rows; data.holdout is a share, and a file of its own goes in data.eval_path")
    elif size and streamed(draft):
        keys.refuse("val_size", STREAM_HOLDOUT)
    elif not held and not streamed(draft):
        draft.put_or("data.holdout", size, 0.0, "LLaMA-Factory")
    elif size:
        keys.refuse("val_size", "eval_dataset is evaluated on")
    draft.put("data.shuffle_buffer", keys.whole("buffer_size"))
    if keys.whole("max_samples"):
        keys.refuse("max_samples", "all rows are read; cut the files")


def _weighed(keys: Keys, draft: Draft, train: Sequence[Rows | None]) -> list[Rows]:
    """The sources that there are, with their shares: by size, as the file says, or even."""
    known = [rows for rows in train if rows]
    strategy, said = keys.text("mix_strategy") or "concat", keys.get("interleave_probs")
    if strategy == "concat":
        if said is not None:
            keys.refuse("interleave_probs", "of interleaved mixing; data sets are put end to end")
        return known
    if strategy not in ("interleave_under", "interleave_over"):
        keys.refuse("mix_strategy", "not known; data sets are mixed by size. See data.repeat and the sources' weight")
        return known
    try:
        shares = [float(share) for share in (said.split(",") if isinstance(said, str) else said or [1.0] * len(train))]
    except (TypeError, ValueError):
        shares = []
    if len(shares) != len(train) or not all(share > 0 for share in shares):
        keys.refuse("interleave_probs", "a share above 0 for each data set is expected; they are mixed by size")
        return known
    draft.put("data.repeat", strategy == "interleave_over")
    return [replace(rows, weight=share) for rows, share in zip(train, shares, strict=True) if rows]


def _read_template(keys: Keys, draft: Draft) -> None:
    put_template(keys, draft, "template", TEMPLATES)
    system = keys.text("default_system")
    if system is None and keys.text("template") == "qwen":
        system = _QWEN_SYSTEM
        draft.assume("data.system is the one that LLaMA-Factory's template qwen brings")
    draft.put("data.system", system)
    thinking = keys.flag("enable_thinking")
    if thinking is not None:
        draft.put("data.template_variables", {"enable_thinking": thinking})


def _read_lengths(keys: Keys, draft: Draft, *, raw: bool) -> None:
    draft.put_or("data.max_length", keys.whole("cutoff_len"), 2048, "LLaMA-Factory")
    whole, last = keys.flag("train_on_prompt"), keys.flag("mask_history")
    draft.put("data.train_on", "all" if whole else "last_turn" if last else "assistant")
    if whole and last:
        keys.refuse("mask_history", "train_on_prompt says the opposite")
    packs, neat = keys.flag("packing"), keys.flag("neat_packing")
    if raw:
        draft.put("data.packing", "none" if packs is False else "concat")
    else:
        packed = None if packs is None and neat is None else bool(packs or neat)
        draft.put_or("data.packing", _PACKING[packed], "none", "LLaMA-Factory")
    if packs and not neat:
        keys.refuse("packing", "done, but packed examples never see each other here, as with neat_packing")
    cut = "keep_end" if last and not whole else "keep_start"
    draft.put("data.truncate", cut)
    draft.assume(f"data.truncate={cut}: LLaMA-Factory shortens long turns one by one; here the whole example is cut")
    if keys.flag("ignore_pad_token_for_loss") is False:
        keys.refuse("ignore_pad_token_for_loss", "padding is never learned")


def _read_vocabulary(keys: Keys, draft: Draft) -> None:
    plain = keys.names("add_tokens") or []
    special = [token for key in ("add_special_tokens", "new_special_tokens") for token in keys.names(key) or []]
    draft.put("vocabulary.add_tokens", list(dict.fromkeys([*plain, *special])) or None)
    if plain:
        keys.refuse("add_tokens", "added, but as special tokens, which are left out where an answer is shown as text")


def _read_method(keys: Keys, draft: Draft) -> None:
    kind = keys.text("finetuning_type") or "lora"
    if kind == "lora":
        read_lora(keys, draft, rank="lora_rank", targets="lora_target", rslora="use_rslora")
        draft.put_or("adapter.rank", keys.whole("lora_rank"), 8, "LLaMA-Factory")
        return
    draft.put("adapter.kind", "none")
    if kind != "full":
        keys.refuse("finetuning_type", "no counterpart, so everything is trained; train.trainable selects what is")
    refuse_lora(keys, "of adapters, which finetuning_type does not ask for")
