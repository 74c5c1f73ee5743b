"""`burnish.load` by name: the Hub's own cache, what is not there, what is no model."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

LLAMA = Path(__file__).parent / "fixtures" / "llama"

_LOAD = """
import sys
from burnish.errors import InputError
from burnish.loading import load
try:
    model = load(sys.argv[1])
except InputError as error:
    print("refused:", error)
else:
    print("loaded:", model.parameters, model.origin.source, model.tokenizer.vocab_size)
"""


def hub_cache(root: Path, name: str, revision: str = "0123456789abcdef0123456789abcdef01234567") -> None:
    """A model in the Hub's layout: blobs by hash, a snapshot of links to them, a ref to the snapshot."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    repo = root / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / revision
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    config = json.loads((LLAMA / "cases.json").read_text())["cases"]["biased"]["config"]
    backend = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    files = {file.name: file.read_bytes() for file in (LLAMA / "biased").iterdir()}
    files |= {"config.json": json.dumps(config).encode(), "tokenizer.json": backend.to_str().encode()}
    for number, (file, content) in enumerate(files.items()):
        (repo / "blobs" / f"{number:040x}").write_bytes(content)
        (snapshot / file).symlink_to(f"../../blobs/{number:040x}")


def load_elsewhere(name: str, **environment: str) -> str:
    """What a fresh process says of a name; the Hub's client reads its settings at import."""
    command = [sys.executable, "-c", _LOAD, name]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGINGFACE"))}
    done = subprocess.run(command, capture_output=True, text=True, env=kept | environment, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME"])
def test_a_model_in_the_hubs_cache_loads_without_a_network(tmp_path, variable):
    hub_cache(tmp_path if variable == "HF_HUB_CACHE" else tmp_path / "hub", "org/tiny.llama-2")
    said = load_elsewhere("org/tiny.llama-2", HF_HUB_OFFLINE="1", **{variable: str(tmp_path)})
    assert said.startswith("loaded: ") and said.split()[2:] == ["org/tiny.llama-2", "64"]


def test_a_model_that_is_not_in_the_cache_is_one_line(tmp_path):
    hub_cache(tmp_path, "org/tiny")
    said = load_elsewhere("org/other", HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path))
    assert said.startswith("refused: org/other: ") and said.count("\n") == 1


def test_a_hub_that_does_not_answer_is_given_up_soon(tmp_path):
    start = time.monotonic()
    said = load_elsewhere("org/other", HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_CACHE=str(tmp_path))
    assert said.startswith("refused: org/other: ") and said.count("\n") == 1
    assert time.monotonic() - start < 60


def test_a_cached_model_serves_while_the_hub_does_not_answer(tmp_path):
    hub_cache(tmp_path, "org/tiny")
    said = load_elsewhere("org/tiny", HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_CACHE=str(tmp_path))
    assert said.startswith("loaded: ")


@pytest.mark.parametrize("name", ["no-such-model", "a/b/c", "/nowhere", "./nowhere", "org/", "", "org/na me"])
def test_what_is_no_name_at_all(name):
    from burnish.errors import InputError
    from burnish.loading import load

    with pytest.raises(InputError) as error:
        load(name)
    assert "\n" not in str(error.value)
