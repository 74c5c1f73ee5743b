"""Trains a tiny model for two steps on a mesh of so many devices, and prints what it measured.

Usage: mesh_run.py DEVICES full|lora. Prints a list, one entry a mesh, of [loss, gradient norm] of each step and
[loss, tokens] of the evaluation. Run by test_invariance.py in processes of their own: the device count is fixed at
start.
"""

import json
import sys
from pathlib import Path

import jax
from gguf import GGUFReader

from burnish.convert.gguf_tokenizer import tokenizer_from_gguf
from burnish.models.config import ModelConfig
from burnish.models.decoder import Decoder
from burnish.models.layers import random_params
from burnish.train.callbacks import Callback
from burnish.train.trainer import Trainer
from burnish.wrapper import ModelWrapper

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
DEVICES, KIND = int(sys.argv[1]), sys.argv[2]
MESHES = [{"data": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 8}] if DEVICES == 8 else [{}]
jax.config.update("jax_num_cpu_devices", DEVICES)
# Eight devices share a few threads: two programs at once, each waiting in a collective for the other, never end.
jax.config.update("jax_cpu_enable_async_dispatch", False)


class Keep(Callback):
    def __init__(self) -> None:
        self.entries: list[list[float]] = []

    def on_step(self, entry) -> None:
        self.entries.append([entry["loss"], entry["grad_norm"]])

    def on_evaluation(self, entry) -> None:
        self.entries.append([entry["eval_loss"], entry["eval_tokens"]])


def main() -> None:
    fixture = Path(__file__).parents[1] / "fixtures" / "tokenizers" / "bpe.gguf"
    tokenizer = tokenizer_from_gguf(GGUFReader(fixture)).with_chat_template(TEMPLATE)
    config = ModelConfig(tokenizer.vocab_size, 32, 64, 2, 4, 2, 8, 256, tie_embeddings=True)
    rows = [{"prompt": "count " * (1 + i % 7), "completion": str(i) * (1 + i % 5)} for i in range(120)]
    found = []
    for mesh in MESHES:
        model = ModelWrapper(Decoder(config, random_params(0, stddev=0.2)), tokenizer)
        if KIND == "lora":
            model.add_lora(rank=4)
        keep = Keep()
        options = {"batch_size": 8, "accumulation": 1, "steps": 3, "max_length": 64, "optimizer": "sgd", "lr": 0.1}
        trainer = Trainer(model, None, {**options, "mesh": mesh}, callbacks=[keep])
        trainer.train(rows)
        layer = model.decoder.runs[0].blocks[0].mlp.up_proj
        array = (layer.adapters[0].a if KIND == "lora" else layer.kernel)[...]
        shards = {shard.data.shape for shard in array.addressable_shards}
        assert trainer.mesh.devices.size == DEVICES
        assert (array.shape not in shards) == (trainer.mesh.shape["fsdp"] > 1), (shards, mesh)  # really cut
        found.append(keep.entries)
    print(json.dumps(found))


main()
