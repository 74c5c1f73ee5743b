"""What a run will do, worked out before its first step."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.data.batches import TrainBatches
from burnish.data.stream import StreamBatches
from burnish.errors import InputError
from burnish.train.config import TrainConfig

ACCUMULATION = 4


def total_steps(batches: TrainBatches | StreamBatches, config: TrainConfig) -> int:
    """Steps of the run: the config's, or those of so many epochs (packing makes epochs differ by a step or so)."""
    if config.steps is not None:
        return config.steps
    if isinstance(batches, StreamBatches):
        raise InputError("train.steps: a stream does not know how long it is; say how many steps to make")
    whole, part = divmod(config.epochs or 1.0, 1)
    steps = sum(batches.steps_per_epoch(epoch) for epoch in range(int(whole)))
    return steps + math.ceil(part * batches.steps_per_epoch(int(whole))) if part else steps


def micro_batches(config: TrainConfig, shards: int) -> int:
    """Into how many micro-batches a batch is cut; each must have as many rows for every device."""
    rows = config.batch_size
    possible = [n for n in range(1, rows // shards + 1) if rows % (n * shards) == 0]
    if not possible:
        raise InputError(
            f"train.batch_size: {rows} rows cannot be shared by {shards} devices; use a multiple of {shards}"
        )
    if config.accumulation is None:
        return max(n for n in possible if n <= ACCUMULATION)
    if config.accumulation not in possible:
        raise InputError(
            f"train.accumulation: {config.accumulation} does not cut {rows} rows evenly over {shards} devices; "
            f"these do: {', '.join(map(str, possible))}"
        )
    return config.accumulation


# What may change between a run and its resumption: it moves no parameter.
_FREE = ("train.log_every", "train.eval_every", "train.save_every", "train.keep", "train.tensorboard", "data.cache")
_FREE_SECTIONS = ("mesh", "task")


def check_same(recorded: Mapping[str, Any], now: Mapping[str, Any], out: Path) -> None:
    """InputError for the first option that a resumed run would have otherwise than before."""
    before, after = _flat(recorded), _flat(now)
    for key in after:
        if (
            key not in before
            or key in _FREE
            or key.split(".")[0] in _FREE_SECTIONS
            or key in ("data.path", "data.eval_path")
        ):
            continue
        if _without_paths(before[key]) != _without_paths(after[key]):
            raise InputError(
                f"{out}: {key} is {after[key]!r}, and was {before[key]!r} before; resume with the same, or start anew"
            )


def _without_paths(value: Any) -> Any:
    """Sources may move; that they hold the same is for the data's own state to check."""
    if isinstance(value, list):
        return [{k: v for k, v in each.items() if k != "path"} if isinstance(each, Mapping) else each for each in value]
    return value


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found
