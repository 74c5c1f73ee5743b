"""Runs on several sources and on streams: their losses apart, their ends, and going on after a stop."""

import json

import numpy as np
import pytest

from burnish.data.config import SourceConfig
from burnish.data.dataset import load_dataset
from burnish.errors import InputError
from burnish.train.callbacks import Callback
from burnish.train.trainer import Trainer

OPTIONS = {"batch_size": 4, "max_length": 32, "lr": 1e-2, "tensorboard": False}


def write(path, rows: int, answer: str) -> str:
    lines = [{"prompt": f"{i}?", "completion": f"{answer} {i % 7}"} for i in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def sources(tmp_path) -> list[SourceConfig]:
    return [
        SourceConfig(path=write(tmp_path / "sums.jsonl", 40, "sum"), weight=3),
        SourceConfig(path=write(tmp_path / "chat.jsonl", 24, "well then"), weight=1),
    ]


def lines(run) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "second" not in key} for line in found]


class StopAfter(Callback):
    def __init__(self, step: int) -> None:
        self.step, self.trainer = step, None

    def on_step(self, entry) -> None:
        if entry["step"] == self.step:
            self.trainer.stop()


def test_each_source_has_its_loss_and_they_make_up_the_whole(make_tiny, sources, tmp_path) -> None:
    trainer = Trainer(make_tiny(), None, {**OPTIONS, "steps": 4, "holdout": 0.2}, out=tmp_path / "run")
    result = trainer.train(sources)
    *steps, evaluation = lines(tmp_path / "run")
    for line in steps:
        parts = [(line.get(f"loss/{n}", 0.0), line[f"trained_tokens/{n}"]) for n in ("sums", "chat")]
        assert sum(tokens for _, tokens in parts) == line["trained_tokens"]
        np.testing.assert_allclose(
            sum(loss * tokens for loss, tokens in parts) / line["trained_tokens"], line["loss"], rtol=1e-5
        )
        assert all(tokens == 0 or f"loss/{n}" in line for (_, tokens), n in zip(parts, ("sums", "chat"), strict=True))
    assert {"eval_loss/sums", "eval_loss/chat"} <= set(evaluation)
    assert result.rows.rows == result.rows.kept == 64 - 8 - 5


@pytest.mark.parametrize("streaming", [False, True])
def test_a_stopped_run_on_a_mixture_goes_on_exactly(make_tiny, sources, tmp_path, streaming) -> None:
    options = {**OPTIONS, "steps": 6, "holdout": 0.0, "streaming": streaming, "lookahead": 10, "shuffle_buffer": 7}
    whole = Trainer(make_tiny(), None, options, out=tmp_path / "whole")
    whole.train(sources)
    stop = StopAfter(3)
    stop.trainer = Trainer(make_tiny(), None, options, out=tmp_path / "parts", callbacks=[stop])
    stop.trainer.train(sources)
    first = len(lines(tmp_path / "parts"))
    assert 3 <= first < 6
    again = Trainer(make_tiny(), None, options, out=tmp_path / "parts")
    again.train(sources, resume=True)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")


def test_a_stream_that_ends_ends_the_run(make_tiny, tmp_path) -> None:
    path = write(tmp_path / "few.jsonl", 6, "few")
    options = {**OPTIONS, "steps": 50, "streaming": True, "repeat": False, "packing": "none", "holdout": 0.0}
    result = Trainer(make_tiny(), None, options, out=tmp_path / "run").train(path)
    assert result.steps == 2
    assert result.rows.kept == 6
    assert result.data_ended
    before = lines(tmp_path / "run")
    assert [line["step"] for line in before] == [1, 2]
    again = Trainer(make_tiny(), None, options, out=tmp_path / "run").train(path, resume=True)
    assert again.steps == 2 and lines(tmp_path / "run") == before


def test_a_dataset_brings_what_it_is_evaluated_on(make_tiny, sources) -> None:
    trainer = Trainer(make_tiny(), None, {**OPTIONS, "steps": 1})
    data = load_dataset(sources, None, trainer.model.tokenizer, trainer.config.data)
    with pytest.raises(InputError, match="eval_dataset"):
        trainer.train(data, eval_dataset="none.jsonl")


def test_a_stream_needs_steps_and_has_nothing_held_out_by_itself(make_tiny, sources, tmp_path) -> None:
    with pytest.raises(InputError, match=r"train\.steps"):
        Trainer(make_tiny(), None, {**OPTIONS, "streaming": True}).train(sources)
    with pytest.raises(InputError, match=r"data\.holdout.*eval_path"):
        Trainer(make_tiny(), None, {**OPTIONS, "streaming": True, "steps": 2, "holdout": 0.5}).train(sources)


def test_rows_without_packing_are_as_long_as_their_batch(make_tiny, tmp_path) -> None:
    rows = [{"prompt": "a" * (n % 9), "completion": "b"} for n in range(16)]
    rows[5]["completion"] = "c d e f g h i j k l m n"
    options = {**OPTIONS, "max_length": 40, "packing": "none", "epochs": 1, "holdout": 0.0}
    result = Trainer(make_tiny(), None, options).train(rows)
    packed = Trainer(make_tiny(), None, {**options, "packing": True, "batch_size": 16, "epochs": 1}).evaluate(rows)
    padded = Trainer(make_tiny(), None, options).evaluate(rows)
    assert result.steps == 4
    np.testing.assert_allclose(packed["eval_loss"], padded["eval_loss"], rtol=1e-5)
