"""Two sources in one run: three rows of the one to each row of the other, their losses told apart.

python examples/mixture.py MODEL [OUT]

MODEL may be a base model without a chat template; a row's own flag keeps its wrong answer from being learned.
"""

import json
import sys
from pathlib import Path

import burnish as bn


def main(model_name: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    sums = [{"question": f"{n} + {n} =", "answer": str(2 * n)} for n in range(40)]
    talk = [
        {
            "messages": [
                {"role": "user", "content": f"{n} + {n} ="},
                {"role": "assistant", "content": "I do not know.", "train": False},
                {"role": "user", "content": "Try!"},
                {"role": "assistant", "content": f"It is {2 * n}."},
            ]
        }
        for n in range(20)
    ]
    for name, rows in (("sums", sums), ("talk", talk)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    model = bn.load(model_name)
    model.add_lora(rank=8)
    config = {
        "lr": 1e-3,
        "batch_size": 4,
        "max_length": 128,
        "chat_template": "plain",
        "epochs": 1,
        "tensorboard": False,
    }
    trainer = bn.Trainer(model, bn.SFT(), config, out=out / "run")
    result = trainer.train(
        [
            bn.SourceConfig(path=str(out / "sums.jsonl"), weight=3),
            bn.SourceConfig(path=str(out / "talk.jsonl"), weight=1),
        ]
    )
    for name, rows in result.source_rows.items():
        print(f"{name}: {rows.kept} rows, {rows.trained_tokens} tokens learned")
    print({name: round(value, 3) for name, value in result.evaluation.items() if "loss" in name})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else "runs/mixture-example"))
