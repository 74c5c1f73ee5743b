"""Train a model that Burnish has never seen: any NNX or Linen module from tokens to logits will do.

python examples/own_model.py TOKENIZER_FOLDER     (a folder with tokenizer.json and a chat template)
"""

import sys

import jax.numpy as jnp
from flax import linen

import burnish as bn
from burnish.data.tokenizer import Tokenizer


class Gru(linen.Module):
    """A recurrent language model in Linen."""

    vocab: int
    width: int = 64

    @linen.compact
    def __call__(self, tokens: jnp.ndarray) -> jnp.ndarray:
        x = linen.Embed(self.vocab, self.width)(tokens)
        return linen.Dense(self.vocab)(linen.RNN(linen.GRUCell(self.width))(x))


def main(folder: str) -> float:
    tokenizer = Tokenizer.from_folder(folder)
    model = bn.ModelWrapper(Gru(tokenizer.vocab_size), tokenizer)
    for sentence in model.features.missing():
        print("note:", sentence)
    rows = [{"prompt": f"{n}?", "completion": f"{n}!"} for n in range(20)]
    trainer = bn.Trainer(model, bn.SFT(), {"lr": 1e-2, "batch_size": 4, "max_length": 32, "steps": 60})
    print(f"loss {trainer.train(rows).metrics['loss']:.3f}")
    return trainer.evaluate(rows)["eval_loss"]


if __name__ == "__main__":
    main(sys.argv[1])
