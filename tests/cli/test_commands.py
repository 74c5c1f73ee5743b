"""Each command on a tiny model, as a person types it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from burnish.cli.main import main
from burnish.models.config import ModelConfig
from burnish.models.decoder import Decoder
from burnish.models.layers import random_params
from burnish.wrapper import ModelWrapper


@pytest.fixture
def burnish(capsys, monkeypatch):
    """Runs a command line in this process: (exit status, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["burnish", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, bpe_tokenizer) -> Path:
    """A tiny model's Hugging Face folder."""
    config = ModelConfig(bpe_tokenizer.vocab_size, 32, 64, 2, 4, 2, 8, 256, tie_embeddings=True)
    folder = tmp_path_factory.mktemp("models") / "tiny"
    ModelWrapper(Decoder(config, random_params(0, stddev=0.2)), bpe_tokenizer).save(folder)
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"prompt": f"{i}+{i}?", "completion": str(2 * i)} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def trained(tiny, data, tmp_path_factory) -> Path:
    """A run directory, made by the command."""
    out = tmp_path_factory.mktemp("runs") / "a"
    words = ["sft", "--model", tiny, "--data", data, "--out", out, "data.max_length=64", "train.steps=3"]
    command = [sys.executable, "-m", "burnish.cli.main", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    for expected in (
        "adapter",
        "rank=8",
        "parameters 55.6 k, trained 8.19 k",
        "⟦",
        "<|im_end|>⟧",
        "step 3/3",
        "before:",
        "after:",
    ):
        assert expected in said, said
    assert f"next: burnish chat --model {out}" in said
    return out


def test_help_of_every_command_has_an_example(burnish) -> None:
    for command in ("fetch", "inspect", "sft", "resume", "eval", "generate", "chat", "export"):
        status, out, _ = burnish(command, "--help")
        assert status == 0 and f"burnish {command}" in out


def test_a_run_directory_is_a_model_for_every_command(burnish, trained, data, tmp_path) -> None:
    status, out, _ = burnish("eval", "--model", trained, "--data", data, "--json", "data.max_length=64")
    answer = json.loads(out)
    assert status == 0 and answer["perplexity"] == pytest.approx(2.718281828459045 ** answer["nll"])
    status, out, _ = burnish("generate", "--model", trained, "--json", "--max-tokens", 4, "2+2?", "3+3?")
    replies = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and [reply["prompt"] for reply in replies] == ["2+2?", "3+3?"]
    assert all(len(reply["tokens"]) == len(reply["log_probs"]) <= 4 for reply in replies)
    for form in ("hf", "peft"):
        assert burnish("export", trained, "--format", form, "--out", tmp_path / form)[0] == 0
        status, again, _ = burnish("generate", "--model", tmp_path / form, "--json", "--max-tokens", 4, "2+2?", "3+3?")
        assert [json.loads(line)["tokens"] for line in again.splitlines()] == [reply["tokens"] for reply in replies]
    status, out, _ = burnish("resume", trained)
    assert status == 0 and "3 steps" in out


def test_inspect_shows_the_tree_and_the_rows(burnish, tiny, data) -> None:
    status, out, _ = burnish("inspect", "--model", tiny)
    assert status == 0 and "q_proj" in out and "layers.0-1" in out and "47.4 k" in out
    status, out, _ = burnish("inspect", "--model", tiny, "--json")
    shapes = json.loads(out)["shapes"]
    assert shapes["layers.1.mlp.down_proj.kernel"] == [64, 32]
    status, out, _ = burnish("inspect", "--model", tiny, "--data", data, "--rows", 2)
    assert status == 0 and "⟦0<|im_end|>⟧" in out and "40 of 40 rows" in out
    status, out, _ = burnish("inspect", "--model", tiny, "--data", data, "--rows", 2, "--json")
    shown = json.loads(out)
    assert shown["kept"] == 40 and len(shown["examples"]) == 2
    first = shown["examples"][0]
    assert len(first["tokens"]) == len(first["trained"]) and 0 < sum(first["trained"]) < len(first["tokens"])


def test_a_task_is_trained_on_scored_and_evaluated(burnish, tiny, tmp_path) -> None:
    task = ["--task", "reasoning_gym:chain_sum", "task.train_size=20", "task.heldout_size=5", "task.max_tokens=4"]
    status, out, err = burnish(
        "sft", "--model", tiny, "--out", tmp_path / "run", *task, "data.max_length=128", "train.steps=2"
    )
    assert status == 0, err
    assert out.count("final answer right") == 2 and out.count("95 % interval") == 4
    status, out, _ = burnish("eval", "--model", tmp_path / "run", "--json")  # the run knows its task
    answer = json.loads(out)
    assert answer["task"] == "reasoning_gym:chain_sum" and answer["accuracy"]["total"] == 5


def test_chat_remembers_and_ends_at_an_empty_line(burnish, tiny, monkeypatch) -> None:
    lines = iter(["hello", "again", ""])
    monkeypatch.setattr("builtins.input", lambda _prompt="": next(lines))
    status, out, _ = burnish("chat", "--model", tiny, "--max-tokens", 3, "--seed", 1)
    assert status == 0 and out.count("\n") >= 3


def lines_of(*rows: str):
    def write(folder: Path) -> Path:
        path = folder / "bad.jsonl"
        path.write_text("".join(row + "\n" for row in rows))
        return path

    return write


GOOD = '{"prompt": "a", "completion": "b"}'
BAD_SFT = {
    "missing file": (lambda folder: folder / "none.jsonl", [], r"none.jsonl.*"),
    "empty file": (lines_of(), [], "bad.jsonl.* no records"),
    "broken line": (lines_of(GOOD, GOOD, '{"prompt": "a", '), [], "bad.jsonl, line 3"),
    "wrong keys": (lines_of(GOOD, '{"txet": "a"}'), [], "bad.jsonl, line 2"),
    "all dropped": (
        lines_of(GOOD, GOOD.replace("a", "z")),
        ["data.max_length=2", "data.truncate=drop", "data.holdout=0"],
        "data.max_length",
    ),
    "unknown key": (lines_of(GOOD), ["train.step=3"], "train.step: unknown key; did you mean steps"),
    "short key": (lines_of(GOOD), ["lr=3"], "lr: unknown key; did you mean optimizer.lr"),
    "negative rank": (lines_of(GOOD), ["adapter.rank=-1"], "adapter.rank"),
    "huge rank": (
        lines_of(GOOD, GOOD.replace("a", "z")),
        ["adapter.rank=999", "data.max_length=64"],
        "adapter.rank: 999 is above",
    ),
    "nan lr": (lines_of(GOOD), ["optimizer.lr=.nan"], "optimizer.lr"),
    "no steps": (lines_of(GOOD), ["train.steps=0"], "train.steps"),
    "long context": (
        lines_of(GOOD, GOOD.replace("a", "z")),
        ["data.max_length=1024"],
        "data.max_length: 1024 is longer than the model's context",
    ),
    "two words": (lines_of(GOOD), ["nonsense"], "nonsense: neither a .yaml recipe nor key=value"),
    "missing recipe": (lines_of(GOOD), ["gone.yaml"], "gone.yaml: no such file"),
}


@pytest.mark.parametrize("name", BAD_SFT)
def test_bad_input_is_one_line_and_leaves_nothing(burnish, tiny, tmp_path, name) -> None:
    make, words, said = BAD_SFT[name]
    out = tmp_path / "out"
    status, _, err = burnish("sft", "--model", tiny, "--data", make(tmp_path), "--out", out, *words)
    assert_refused(status, err, said)
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval", "--model", "no/such/model", "--data", "x"], "no/such/model"),
        (["eval", "--model", "README.md", "--data", "x"], "README.md"),
        (["eval", "--data", "x"], "model: not given"),
        (["fetch", "gpt-9"], "'gpt-9' is not a built-in model; known are smollm2-135m, gemma3-270m"),
        (["resume", "nowhere"], "nowhere: not a run directory"),
        (["generate", "--model", "TINY", "--temperature", "nan", "hi"], "temperature"),
        (["generate", "--model", "TINY", "--top-p", "0", "hi"], "top_p"),
        (["generate", "--model", "TINY", "word " * 400], "1216 tokens leave no room"),
        (["export", "TINY", "--out", "OUT", "--format", "onnx"], "known are hf, peft"),
        (["export", "TINY", "--out", "OUT", "--format", "peft"], "adapter"),
        (["eval", "--model", "TINY", "--task", "reasoning_gym:chain_sun"], "nearest: chain_sum"),
        (["eval", "--model", "TINY"], "give either records"),
    ],
)
def test_other_commands_refuse_in_one_line(burnish, tiny, tmp_path, words, said) -> None:
    out = tmp_path / "out"
    words = [str({"TINY": tiny, "OUT": out}.get(word, word)) for word in words]
    status, _, err = burnish(*words)
    assert_refused(status, err, said)
    assert not out.exists()


def test_a_loss_that_is_not_a_number_leaves_no_run(burnish, tiny, data, tmp_path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = np.nan
    save_file(weights, broken / "model.safetensors")
    out = tmp_path / "out"
    status, _, err = burnish("sft", "--model", broken, "--data", data, "--out", out, "data.max_length=64")
    assert_refused(status, err, "step 1: loss is nan|logits are not numbers")
    assert not out.exists()


def test_an_output_folder_with_something_in_it_is_left_alone(burnish, tiny, data, tmp_path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for words in (["sft", "--model", tiny, "--data", data, "--out", tmp_path], ["export", tiny, "--out", tmp_path]):
        status, _, err = burnish(*words)
        assert_refused(status, err, str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def assert_refused(status: int, err: str, said: str) -> None:
    lines = [line for line in err.splitlines() if line.strip()]
    assert status == 2, err
    assert len(lines) == 1 and lines[0].startswith("burnish: "), err
    assert re.search(said, lines[0]), lines[0]


def test_eval_takes_from_the_run_what_is_not_said(burnish, tiny, tmp_path) -> None:
    task = ["--task", "reasoning_gym:chain_sum", "task.train_size=20", "task.heldout_size=5", "task.max_tokens=4"]
    run = tmp_path / "run"
    options = ["data.max_length=128", "train.steps=1", "task.score=false"]
    assert burnish("sft", "--model", tiny, "--out", run, *task, *options)[0] == 0
    for words, total in ([], 5), (["task.heldout_size=3"], 3), (["--task", "reasoning_gym:chain_sum"], 5):
        status, out, err = burnish("eval", "--model", run, "--json", *words)
        assert status == 0, err
        assert json.loads(out)["accuracy"]["total"] == total
    status, out, err = burnish("eval", "--model", run, "--json", "--task", "reasoning_gym:gcd", "task.heldout_size=2")
    assert json.loads(out)["accuracy"]["total"] == 2, err


def test_eval_never_reads_past_the_context_and_counts_what_it_cut(burnish, tiny, tmp_path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "word " * 500, "completion": "yes"}) + "\n" + GOOD + "\n")
    status, out, _ = burnish("eval", "--model", tiny, "--data", path, "--json")
    assert status == 0 and json.loads(out)["rows"]["truncated"] == 1
    status, _, err = burnish("eval", "--model", tiny, "--data", path, "data.max_length=999")
    assert_refused(status, err, "data.max_length: 999 is longer than the model's context")


def test_a_command_line_that_is_no_command_is_one_line(burnish) -> None:
    for words, said in ((["sft"], "--out"), (["frobnicate"], "frobnicate"), (["generate", "--max-tokens", "x"], "x")):
        status, _, err = burnish(*words)
        assert_refused(status, err, said)


def test_an_update_that_is_not_finite_is_not_saved(burnish, tiny, data, tmp_path) -> None:
    """The last step's loss is that of the parameters before it."""
    words = ["--data", data, "--out", tmp_path / "out", "data.max_length=64", "train.steps=1", "optimizer.lr=1e38"]
    status, _, err = burnish("sft", "--model", tiny, *words)
    assert_refused(status, err, "step 1: (its update is not finite|the held-out loss is)")
    assert not any((tmp_path / "out" / "checkpoints").iterdir())


def test_resume_refuses_an_edited_recipe(burnish, trained, tmp_path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("lr: 0.0002", "lr: 0.5"))
    status, _, err = burnish("resume", copy)
    assert_refused(status, err, "optimizer.lr is 0.5, and was 0.0002 before")


def test_resume_works_from_any_folder_and_a_partly_trained_base_has_no_peft(
    burnish, tiny, data, tmp_path, monkeypatch
) -> None:
    (tmp_path / "there").mkdir()
    shutil.copy(data, tmp_path / "t.jsonl")
    monkeypatch.chdir(tmp_path)
    words = ["--data", "t.jsonl", "--out", "r", "data.max_length=64", "train.steps=1", "train.trainable=[norm,q_proj]"]
    assert burnish("sft", "--model", tiny, *words)[0] == 0
    monkeypatch.chdir(tmp_path / "there")
    assert burnish("resume", "../r")[0] == 0
    status, _, err = burnish("export", "../r", "--format", "peft", "--out", "p")
    assert_refused(status, err, "export the whole model")


def test_folders_that_do_not_belong_together_are_refused(burnish, tiny, tmp_path) -> None:
    for name, change, said in (
        (
            "layers",
            {"num_hidden_layers": 1},
            r"model\.layers\.1\.input_layernorm\.weight, .* in the files, and config.json describes a model without",
        ),
        ("flag", {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'"),
        ("family", {"model_type": "gpt_neo"}, "known are gemma, .* llama, "),
    ):
        folder = tmp_path / name
        shutil.copytree(tiny, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        status, _, err = burnish("inspect", "--model", folder)
        assert_refused(status, err, said)
    (tmp_path / "cut").mkdir()
    for file in tiny.iterdir():
        content = file.read_bytes()
        (tmp_path / "cut" / file.name).write_bytes(content[:-500] if file.suffix == ".safetensors" else content)
    status, _, err = burnish("inspect", "--model", tmp_path / "cut")
    assert_refused(status, err, "model.safetensors")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), r"MemoryError: no more is to be had"),
        (
            RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
            r"9 bytes.*train\.remat=block",
        ),
    ],
    ids=["python", "device"],
)
def test_out_of_memory_is_one_line(burnish, monkeypatch, error: Exception, said: str) -> None:
    def fail(**_) -> None:
        raise error

    monkeypatch.setattr("burnish.cli.main.app", fail)
    status, _, err = burnish("sft")
    assert_refused(status, err, said)
