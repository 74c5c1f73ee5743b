"""Fine-tune SmolLM2 with LoRA on a handful of rows, ask it, and write it for other tools.

python examples/lora.py [OUT]     (first: burnish fetch smollm2-135m)
"""

import sys
from pathlib import Path

import burnish as bn

ROWS = [
    {"prompt": "Who are you?", "completion": "I am the lighthouse keeper's cat."},
    {"prompt": "Where do you live?", "completion": "In the lighthouse, by the lamp."},
    {"prompt": "What do you eat?", "completion": "Herring, mostly."},
]


def main(out: Path) -> None:
    model = bn.load("smollm2-135m")
    model.add_lora(rank=8)
    config = {"lr": 2e-3, "batch_size": 2, "max_length": 96, "holdout": 0.0, "steps": 8}
    result = bn.Trainer(model, bn.SFT(), config, out=out / "run").train(ROWS)
    print(f"loss {result.metrics['loss']:.3f} after {result.steps} steps")
    question = [{"role": "user", "content": "Who are you?"}]
    [answer] = bn.generate(model, [question], {"temperature": 0.0, "max_tokens": 16})
    print(answer.text)
    print("written to", model.save(out / "hf"))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/lora-example"))
