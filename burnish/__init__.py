"""Burnish: post-training of language models in JAX and Flax NNX.

import burnish as bn
model = bn.load("smollm2-135m")
model.add_lora(rank=16)
bn.Trainer(model, bn.SFT(), {"lr": 2e-4}, out="runs/a").train("train.jsonl", epochs=3)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from burnish.adapt.config import LoraConfig as LoraConfig
    from burnish.data.config import DataConfig as DataConfig
    from burnish.data.config import SourceConfig as SourceConfig
    from burnish.errors import InputError as InputError
    from burnish.generate.config import SamplingConfig as SamplingConfig
    from burnish.generate.engine import generate as generate
    from burnish.generate.engine import stream as stream
    from burnish.loading import load as load
    from burnish.models.config import ModelConfig as ModelConfig
    from burnish.models.decoder import Decoder as Decoder
    from burnish.objectives.sft import SFT as SFT
    from burnish.train.callbacks import Callback as Callback
    from burnish.train.config import TrainerConfig as TrainerConfig
    from burnish.train.trainer import Trainer as Trainer
    from burnish.train.trainer import TrainResult as TrainResult
    from burnish.wrapper import ModelWrapper as ModelWrapper
    from burnish.wrapper import Origin as Origin

__version__ = "0.1.0"

# Imported when first used: `burnish --help` must not wait for JAX.
_HOMES = {
    "Callback": "burnish.train.callbacks",
    "DataConfig": "burnish.data.config",
    "Decoder": "burnish.models.decoder",
    "InputError": "burnish.errors",
    "LoraConfig": "burnish.adapt.config",
    "ModelConfig": "burnish.models.config",
    "ModelWrapper": "burnish.wrapper",
    "Origin": "burnish.wrapper",
    "SFT": "burnish.objectives.sft",
    "SamplingConfig": "burnish.generate.config",
    "SourceConfig": "burnish.data.config",
    "TrainResult": "burnish.train.trainer",
    "Trainer": "burnish.train.trainer",
    "TrainerConfig": "burnish.train.config",
    "generate": "burnish.generate.engine",
    "load": "burnish.loading",
    "stream": "burnish.generate.engine",
}
__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'burnish' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
