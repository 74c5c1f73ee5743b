"""Trains a tiny model and kills its own process, hard, in the middle of a step after a checkpoint.

Usage: run_killed.py MODEL DATA OUT STEP. Run by test_resume.py, which then resumes the run.
"""

import os
import signal
import sys
import time
from pathlib import Path

from burnish.loading import load
from burnish.train.callbacks import Callback
from burnish.train.trainer import Trainer

model_path, data, out, kill_at = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])


class Kill(Callback):
    def on_step(self, entry) -> None:
        if entry["step"] == kill_at:
            while not (Path(out) / "checkpoints" / "3").exists():  # written in the background
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


model = load(model_path)
if os.environ["KIND"] == "lora":
    model.add_lora(rank=4, dropout=0.1)
options = {"steps": 9, "save_every": 3, "eval_every": 2, "batch_size": 4, "max_length": 64, "lr": 1e-2, "keep": 5}
trainer = Trainer(model, None, options, out=out, callbacks=[Kill()])
trainer.train(data)
