"""Burnish's perplexity beside that of transformers, on the same weights and the same tokens.

    python benchmarks/perplexity.py --model smollm2-135m --data gsm8k_test.jsonl --rows 200

The model is exported as a Hugging Face folder, transformers loads that, and reads each example alone. Rows have
`question` and `answer` (as GSM8K), `prompt` and `completion`, or `messages`. Needs the parity extra. Prints one JSON
object.
"""

import argparse
import json
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM

from burnish.data.config import DataConfig
from burnish.data.dataset import load_examples
from burnish.evaluate.perplexity import perplexity
from burnish.loading import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=int, default=200, help="the first so many rows")
    arguments = parser.parse_args()

    with open(arguments.data, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][: arguments.rows]

    model = load(arguments.model, dtype="float32")
    config = DataConfig(max_length=1024)
    began = time.perf_counter()
    ours = perplexity(model, rows, config)
    seconds = time.perf_counter() - began

    total, tokens = 0.0, 0
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save(folder)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for example in load_examples(rows, model.require_tokenizer(), config):
            ids = torch.tensor(example.tokens)[None].long()
            log_probs = theirs(ids).logits[0, :-1].double().log_softmax(-1)
            trained = torch.tensor(example.weights[1:] != 0)
            total -= log_probs.gather(-1, ids[0, 1:, None])[:, 0][trained].sum().item()
            tokens += int(trained.sum())
    reference = float(torch.exp(torch.tensor(total / tokens, dtype=torch.float64)))
    print(
        json.dumps(
            {
                "rows": len(rows),
                "tokens": ours.tokens,
                "same_tokens": ours.tokens == tokens,
                "burnish": ours.perplexity,
                "transformers": reference,
                "relative_difference": abs(ours.perplexity / reference - 1),
                "burnish_seconds": round(seconds, 1),
                "transformers_seconds": round(time.perf_counter() - began, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
