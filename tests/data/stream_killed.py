"""Goes through a stream as a run does, with a checkpoint of its state now and then; may be killed on the way.

    python stream_killed.py FOLDER UNTIL KILLED_AT

FOLDER holds large.jsonl and small.jsonl.gz. A line for each batch is written to FOLDER/batches.txt: its draws and a
digest of its arrays. Every fifth batch the state is put in FOLDER/state.json; if there is one at the start, the lines
after it are cut off and the stream goes on from there. At batch KILLED_AT the process kills itself.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import tokenizers

from burnish.data.config import DataConfig, SourceConfig
from burnish.data.parts import sources_of
from burnish.data.stream import StreamBatches
from burnish.data.tokenizer import Tokenizer


def main(folder: Path, until: int, killed_at: int) -> None:
    words = tokenizers.models.WordLevel({str(i): i for i in range(1000)}, unk_token="0")
    config = DataConfig(max_length=24, lookahead=9, shuffle_buffer=7, seed=5, streaming=True)
    sources = [
        SourceConfig(path=str(folder / "large.jsonl"), weight=3),
        SourceConfig(path=str(folder / "small.jsonl.gz"), weight=1),
    ]
    batches = StreamBatches(sources_of(sources, config), Tokenizer(tokenizers.Tokenizer(words)), 4, config)
    checkpoint, log = folder / "state.json", folder / "batches.txt"
    lines: list[str] = []
    if checkpoint.exists():
        state = json.loads(checkpoint.read_text())
        lines = log.read_text().splitlines(keepends=True)[: state["done"]]
        batches.set_state(state["batches"])
    with log.open("w") as file:
        file.writelines(lines)
        for done in range(len(lines), until):
            if done % 5 == 0:
                file.flush()
                new = folder / "state.new"
                new.write_text(json.dumps({"done": done, "batches": batches.get_state()}))
                new.replace(checkpoint)
            batch = next(batches)
            digest = hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest()
            draws = dict.fromkeys(batch["example_ids"][batch["segment_ids"] > 0].tolist())
            file.write(f"{' '.join(map(str, draws))} {digest}\n")
            file.flush()
            if done == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
