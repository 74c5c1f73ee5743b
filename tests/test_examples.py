"""Every example, and every command of the README, runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.convert.builtin import cached_model

ROOT = Path(__file__).parents[1]


def environment() -> dict[str, str]:
    """The caller's, with this interpreter's commands first and the suite's compiler flags left out."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"PATH": path}


def need_smollm2() -> None:
    if not cached_model("smollm2-135m").exists():
        pytest.skip("needs `burnish fetch smollm2-135m`")


def test_own_model(bpe_tokenizer, tmp_path) -> None:
    bpe_tokenizer.save(tmp_path)
    script = ROOT / "examples" / "own_model.py"
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=True)
    assert "note: it takes no segment_ids" in done.stdout
    assert float(done.stdout.split("loss ")[1].split()[0]) < 1.0


@pytest.mark.slow
def test_mixture(make_tiny, tmp_path) -> None:
    make_tiny().save(tmp_path / "model")
    command = [sys.executable, ROOT / "examples" / "mixture.py", tmp_path / "model", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "sums: 36 rows" in done.stdout and "talk: 18 rows" in done.stdout
    assert "eval_loss/talk" in done.stdout


@pytest.mark.slow
def test_lora(tmp_path) -> None:
    need_smollm2()
    command = [sys.executable, ROOT / "examples" / "lora.py", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    assert "lighthouse" in done.stdout
    assert (tmp_path / "out" / "hf" / "model.safetensors").exists()


@pytest.mark.slow
def test_data_benchmark(tmp_path) -> None:
    need_smollm2()
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.data", "--rows", "200", "--json", out]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment())
    found = json.loads(out.read_text())
    assert found["rows"] == 200 and found["tokens"] > 20_000 and 0.8 < found["full"] <= 1
    assert found["cached_rows_per_s"] > found["cold_rows_per_s"] > 0


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_readme(tmp_path) -> None:
    """The shell blocks in one folder, one after the other; `make` and `source` set up what is running already."""
    need_smollm2()
    shell = [block for block in blocks("sh") if "make demo" not in block]
    script = "\n".join(line for block in shell for line in block.splitlines() if not line.startswith("make install"))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for said in ("Paris", "⟦", "before:", "after:", "perplexity", "written to out/cat"):
        assert said in done.stdout, done.stdout
    [python] = blocks("python")
    command = [sys.executable, "-c", python]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "plus-one" / "config.json").exists()
