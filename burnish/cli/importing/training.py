"""Keys of Hugging Face's trainer, which both tools hand on: batch, length, optimizer, schedule, precision."""

from dataclasses import dataclass

from burnish.cli.importing.keys import Draft, Keys

OUTPUT = "said on the command line: --out"
SPEED = "speed or memory alone; nothing to do"
TRACKING = "metrics.jsonl and TensorBoard are written anyway (train.tensorboard)"
LOADING = "Burnish loads no code with a model; only its weights, configuration and tokenizer"
RESUME = "a run goes on by `burnish resume RUN`"
WEIGHTS = "weights stay as train and dtype have it, unquantized: needs more memory"

_OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "paged_adamw"), "adamw"),
    **dict.fromkeys(("lion", "lion_32bit", "lion_pytorch", "paged_lion_32bit"), "lion"),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), "lion"),
    "adafactor": "adafactor",
    "sgd": "sgd",
}
_SCHEDULES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


@dataclass(frozen=True)
class Names:
    """What a tool calls these keys, and its defaults where Burnish's differ."""

    tool: str
    micro_batch: str
    micro_batch_size: int
    epochs: str
    num_epochs: float
    optimizer: str
    scheduler: str
    schedule: str
    warmup_ratio: float
    lr: float | None


def read_training(keys: Keys, draft: Draft, names: Names) -> None:
    """Translates everything here that has a counterpart in `train`, `optimizer` or `dtype`."""
    _read_length(keys, draft, names)
    _read_optimizer(keys, draft, names)
    _read_schedule(keys, draft, names)
    _read_dtype(keys, draft)


def _read_length(keys: Keys, draft: Draft, names: Names) -> None:
    rows, accumulation = keys.whole(names.micro_batch), keys.whole("gradient_accumulation_steps")
    draft.put("train.batch_size", (rows or names.micro_batch_size) * (accumulation or 1))
    draft.put("train.accumulation", accumulation or 1)
    draft.assume("one device: train.batch_size is for all devices together, so multiply it by their number")
    steps = keys.whole("max_steps")
    if steps is None or steps < 0:  # -1 is its word for none
        draft.put_or("train.epochs", keys.number(names.epochs), names.num_epochs, names.tool)
    else:
        draft.put("train.steps", steps)
        if keys.has(names.epochs):
            keys.refuse(names.epochs, "max_steps wins, there as here")
    for key, ours in {"eval_steps": "eval_every", "save_steps": "save_every", "logging_steps": "log_every"}.items():
        every = keys.number(key)
        if every is not None and (every < 1 or every % 1):
            keys.refuse(key, f"a share of the run; train.{ours} is a number of steps")
        else:
            draft.put(f"train.{ours}", None if every is None else int(every))
    for key in ("eval_strategy", "evaluation_strategy", "save_strategy"):
        if keys.text(key) not in (None, "steps"):
            ours = "save_every" if key == "save_strategy" else "eval_every"
            keys.refuse(key, f"Burnish counts steps; the end always counts, too: train.{ours}")
    draft.put("train.keep", keys.whole("save_total_limit"))
    if keys.get("gradient_checkpointing"):
        draft.put("train.remat", "block")
    draft.put("train.neftune_alpha", keys.number("neftune_noise_alpha"))
    draft.put("sft.label_smoothing", keys.number("label_smoothing_factor"))
    seed = keys.whole("seed")
    draft.put("train.seed", seed)
    draft.put("data.seed", seed)


def _read_optimizer(keys: Keys, draft: Draft, names: Names) -> None:
    rate = keys.number("learning_rate")
    if names.lr is None:
        draft.put("optimizer.lr", rate)
    else:
        draft.put_or("optimizer.lr", rate, names.lr, names.tool)
    draft.put_or("optimizer.weight_decay", keys.number("weight_decay"), 0.0, names.tool)
    clip = keys.number("max_grad_norm")
    draft.put("optimizer.clip_norm", clip or None)
    if clip == 0:
        draft.recipe["optimizer"]["clip_norm"] = None
    theirs = keys.text(names.optimizer)
    ours = _OPTIMIZERS.get(theirs or "adamw_torch")
    if ours is None:
        keys.refuse(names.optimizer, "no exact counterpart, so adamw it is; see docs/recipe.md under optimizer")
    elif theirs and ("8bit" in theirs or theirs == "paged_adamw"):
        keys.refuse(names.optimizer, f"{ours} it is, but with its state in full precision: needs more memory")
    ours = ours or "adamw"
    draft.put("optimizer.name", ours)
    takes = {"adamw": ("b1", "b2", "eps"), "lion": ("b1", "b2")}.get(ours, ())
    for key, option in {"adam_beta1": "b1", "adam_beta2": "b2", "adam_epsilon": "eps"}.items():
        value = keys.number(key)
        if value is not None and option not in takes:
            keys.refuse(key, f"{ours} takes no such thing")
        elif value is not None:
            draft.put(f"optimizer.{option}", value)


def _read_schedule(keys: Keys, draft: Draft, names: Names) -> None:
    theirs = keys.text(names.scheduler)
    ours = _SCHEDULES.get(theirs or names.schedule)
    if theirs is None:
        draft.assume(f"optimizer.schedule.name={ours} ({names.tool}'s default)")
    if ours is None:
        keys.refuse(names.scheduler, "no counterpart, so cosine it is; see docs/recipe.md under optimizer.schedule")
        ours = "cosine"
    draft.put("optimizer.schedule.name", ours)
    if ours != "constant":
        draft.put("optimizer.schedule.end_lr", _end_lr(keys, draft, theirs))
    _read_warmup(keys, draft, names, warms=theirs != "constant")


def _end_lr(keys: Keys, draft: Draft, scheduler: str | None) -> float:
    """Theirs fall to zero, unless a key says otherwise; ours to a tenth."""
    peak = draft.recipe["optimizer"].get("lr")
    ratio = keys.number("cosine_min_lr_ratio")
    options = keys.section("lr_scheduler_kwargs") if scheduler == "cosine_with_min_lr" else None
    if options:
        least, ratio = options.number("min_lr"), options.number("min_lr_rate")
        if least is not None:
            return least
    if ratio is None:
        return 0.0
    if scheduler not in (None, "cosine", "cosine_with_min_lr"):
        keys.refuse("cosine_min_lr_ratio", "of the cosine schedule alone")
        return 0.0
    if peak is None:
        (options or keys).refuse("min_lr_rate" if options else "cosine_min_lr_ratio", "a share of an unknown rate")
        return 0.0
    return ratio * peak


def _read_warmup(keys: Keys, draft: Draft, names: Names, *, warms: bool) -> None:
    steps, ratio = keys.number("warmup_steps"), keys.number("warmup_ratio")
    if not warms:
        draft.put("optimizer.schedule.warmup_ratio", 0.0)
        for key in ("warmup_steps", "warmup_ratio"):
            if keys.has(key):
                keys.refuse(key, "a constant rate has no warmup there; constant_with_warmup has")
    elif steps and steps >= 1:
        draft.put("optimizer.schedule.warmup_steps", int(steps))
        if ratio:
            keys.refuse("warmup_ratio", "warmup_steps wins, there as here")
    else:
        share = steps or ratio  # below 1, steps are a share as well
        if share is None and steps == 0:
            share = 0.0
        draft.put_or("optimizer.schedule.warmup_ratio", share, names.warmup_ratio, names.tool)


def _read_dtype(keys: Keys, draft: Draft) -> None:
    half = [key for key in ("bf16", "bfloat16", "pure_bf16") if keys.has(key) and keys.get(key) != "auto"]
    if any(keys.flag(key) for key in half):
        draft.put("dtype", "bfloat16")
    elif half or keys.flag("float32"):
        draft.put("dtype", "float32")
    for key in ("bf16", "bfloat16", "pure_bf16", "float32"):
        keys.get(key)
    for key in ("fp16", "float16", "fp8"):
        if keys.flag(key):
            keys.refuse(key, "dtype is float32 or bfloat16")
