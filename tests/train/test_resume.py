"""Design 4.5: N + M steps in one go, and N steps, kill -9, resume, M steps, end in the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from burnish.adapt.config import LoraConfig
from burnish.errors import InputError
from burnish.loading import load
from burnish.train.run_folder import read_recipe
from burnish.train.trainer import Trainer

OPTIONS = {"steps": 9, "save_every": 3, "eval_every": 2, "batch_size": 4, "max_length": 64, "lr": 1e-2, "keep": 5}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    rows = [{"prompt": f"{i}+{i}?", "completion": "x" * (i % 9) + str(2 * i)} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def saved(make_tiny, tmp_path: Path) -> Path:
    make_tiny().save(tmp_path / "model")
    return tmp_path / "model"


def fresh(saved: Path, kind: str):
    model = load(saved)
    if kind == "lora":
        model.add_lora(rank=4, dropout=0.1)
    return model


def metrics(run: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl without what a clock measured."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "second" not in k} for line in lines]


def checkpoint_bits(run: Path, step: int) -> dict[str, bytes]:
    """Every array of a checkpoint, parameters and optimizer, and the data's state."""
    found = {}
    for item in ("params", "optimizer"):
        tree = ocp.StandardCheckpointer().restore((run / "checkpoints" / str(step) / item).absolute())
        flat = jax.tree_util.tree_flatten_with_path(tree)[0]
        found |= {f"{item}{path}": np.asarray(array).tobytes() for path, array in flat}
    found["data"] = (run / "checkpoints" / str(step) / "data" / "metadata").read_bytes()
    return found


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_killed_and_resumed_equals_uninterrupted(kind: str, saved: Path, data: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    Trainer(fresh(saved, kind), None, OPTIONS, out=whole).train(data)

    killed = tmp_path / "killed"
    script = Path(__file__).with_name("run_killed.py")
    command = [sys.executable, str(script), str(saved), str(data), str(killed), "5"]
    done = subprocess.run(command, env={**os.environ, "KIND": kind}, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr[-2000:]
    assert metrics(killed)[-1]["step"] > 3  # it had gone on after the checkpoint it will resume from
    assert not (killed / "checkpoints" / "6").exists()

    recipe = read_recipe(killed)
    model = load(recipe["model"])
    model.prepare(LoraConfig(**recipe["adapter"]))
    trainer = Trainer(model, None, OPTIONS, out=killed)
    trainer.train(data, resume=True)

    assert metrics(killed) == metrics(whole)
    assert checkpoint_bits(killed, 9) == checkpoint_bits(whole, 9)
    assert len({line["loss"] for line in metrics(whole) if "loss" in line}) > 5  # it did train


def test_resume_refuses_other_data(saved: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    Trainer(fresh(saved, "lora"), None, {**OPTIONS, "steps": 3}, out=out).train(data)
    data.write_text(data.read_text().replace("+", "-"))
    again = Trainer(fresh(saved, "lora"), None, {**OPTIONS, "steps": 3}, out=out)
    with pytest.raises(InputError, match=r"data was .* at the checkpoint"):
        again.train(data, resume=True)


def test_resume_without_a_checkpoint_says_so(saved: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.yaml").write_text(f"model: {saved}\n")
    with pytest.raises(InputError, match="no checkpoint to resume from"):
        Trainer(fresh(saved, "lora"), None, OPTIONS, out=out).train(data, resume=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": 0.5}, "optimizer.lr is 0.5, and was 0.01 before"),
        ({"steps": 20}, "train.steps is 20, and was 3 before"),
        ({"optimizer": "lion"}, "optimizer.* before"),
    ],
)
def test_resume_refuses_other_options(saved: Path, data: Path, tmp_path: Path, changes, said) -> None:
    out = tmp_path / "run"
    Trainer(fresh(saved, "lora"), None, {**OPTIONS, "steps": 3}, out=out).train(data)
    with pytest.raises(InputError, match=said):
        Trainer(fresh(saved, "lora"), None, {**OPTIONS, "steps": 3, **changes}, out=out).train(data, resume=True)
    other = load(saved)
    other.add_lora(rank=3, dropout=0.1)
    with pytest.raises(InputError, match=r"adapter.*before"):
        Trainer(other, None, {**OPTIONS, "steps": 3}, out=out).train(data, resume=True)


def test_a_finished_run_resumed_makes_no_step(saved: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    Trainer(fresh(saved, "lora"), None, {**OPTIONS, "steps": 3}, out=out).train(data)
    before = metrics(out)
    result = Trainer(fresh(saved, "lora"), None, {**OPTIONS, "steps": 3}, out=out).train(data, resume=True)
    assert result.steps == 3
    assert metrics(out) == before
