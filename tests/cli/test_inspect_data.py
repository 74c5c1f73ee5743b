"""`burnish inspect --data`: what is trained on can be seen, and what is wrong with it is said, never refused."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.errors import InputError
from burnish.loading import load_tokenizer


@pytest.fixture
def inspect(capsys, monkeypatch, model):
    """Runs `burnish inspect` on the model in this process: (exit status, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["burnish", "inspect", "--model", str(model), *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory, bpe_tokenizer) -> Path:
    """A model's folder without its weights: they are not needed to look at data."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    bpe_tokenizer.save(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": bpe_tokenizer.vocab_size, "max_position_embeddings": 256, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write(path: Path, *rows: object) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def row(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion}


GOOD = [row(f"What is {n}+{n}?", f"That is {2 * n}, of course.") for n in range(8)]


def test_what_is_trained_is_marked_and_counted(inspect, tmp_path, bpe_tokenizer) -> None:
    data = write(tmp_path / "t.jsonl", *GOOD)
    status, out, _ = inspect("--data", data, "--rows", 2)
    assert status == 0 and out.count("⟦") == 3  # two rows and the legend
    assert "What is 1+1?<|im_end|>\n<|im_start|>assistant\n⟦That is 2, of course.<|im_end|>⟧" in out
    assert "t.jsonl, line 2" in out and "8 of 8 rows" in out and "% full" in out and "█" in out
    found = json.loads(inspect("--data", data, "--rows", 2, "--json")[1])
    assert (found["rows"], found["kept"], found["examples"][1]["place"]) == (8, 8, f"{data}, line 2")
    for number, each in enumerate(found["examples"]):
        trained = [token for token, weight in zip(each["tokens"], each["weights"], strict=True) if weight]
        wanted = f"That is {2 * number}, of course.<|im_end|>"
        assert bpe_tokenizer.decode(trained, skip_special=False) == wanted
        assert "".join(each["pieces"]) == each["text"] and len(each["pieces"]) == len(each["tokens"])
    assert found["trained_share"] == pytest.approx(found["trained_tokens"] / found["tokens"])
    assert sum(each["count"] for each in found["histogram"]) == 8 and found["lengths"].keys() >= {"p0", "p50", "p100"}
    assert 0 < found["packing"]["efficiency"] <= 1 and found["packing"]["rows"] == 2 and found["max_length"] == 256


def test_every_token_is_shown_with_its_id(inspect, tmp_path, bpe_tokenizer) -> None:
    data = write(tmp_path / "t.jsonl", row("é?", "naïve 🎉"))
    status, out, _ = inspect("--data", data, "--ids")
    [each] = json.loads(inspect("--data", data, "--json")[1])["examples"]
    lines = re.findall(r"^([● ]) +(\d+) (.+)$", out, re.MULTILINE)
    assert status == 0 and [int(id) for _, id, _ in lines] == each["tokens"]
    assert "' 🎉'" in [name for _, _, name in lines]
    assert [mark == "●" for mark, _, _ in lines] == [weight > 0 for weight in each["weights"]]
    assert (each["text"].count("é"), each["text"].count("🎉"), each["text"].count("\ufffd")) == (1, 1, 0)


def test_loss_weights_are_said_where_they_are_not_all_one(inspect, tmp_path) -> None:
    turns = [("user", "a", {}), ("assistant", "four", {"weight": 2}), ("user", "b", {}), ("assistant", "five", {})]
    messages = [{"role": role, "content": text, **more} for role, text, more in turns]
    data = write(tmp_path / "t.jsonl", {"messages": messages})
    status, out, _ = inspect("--data", data)
    assert status == 0 and "⟦four<|im_end|>⟧×2" in out and "⟦five<|im_end|>⟧×1" in out
    [each] = json.loads(inspect("--data", data, "--json")[1])["examples"]
    assert sorted(set(each["weights"])) == [0, 1, 2]


def test_a_row_that_cannot_be_read_is_said_first_and_stops_nothing(inspect, tmp_path) -> None:
    data = write(tmp_path / "t.jsonl", *GOOD[:2], '{"prompt": "a", ', *GOOD[2:], {"prompt": "b"})
    status, out, err = inspect("--data", data)
    assert status == 0 and not err
    lines = out.splitlines()
    assert lines[0] == "rows that cannot be read: 2" and out.count("not valid JSON") == 1
    assert "t.jsonl, line 3: not valid JSON" in lines[1] and "line 10: no 'completion'" in lines[2]
    assert "data.bad_rows=drop" in lines[3] and "8 of 10 rows" in out
    found = json.loads(inspect("--data", data, "--json")[1])
    assert found["findings"]["unreadable"]["count"] == found["dropped_unreadable"] == 2
    assert "training stops" not in inspect("--data", data, "data.bad_rows=drop")[1]


def test_several_sources_are_shown_and_counted_each(inspect, tmp_path) -> None:
    one, two = write(tmp_path / "one.jsonl", *GOOD[:3]), write(tmp_path / "two.jsonl", *GOOD[3:], "{")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"data: {{sources: [{{path: {one}}}, {{path: {two}, name: other}}]}}\n")
    status, out, _ = inspect(recipe, "--rows", 1)
    assert status == 0 and "one: 3 of 3 rows" in out and "other: 5 of 6 rows" in out and "all: 8 of 9 rows" in out
    assert "two.jsonl, line 1, source other" in out
    found = json.loads(inspect(recipe, "--rows", 1, "--json")[1])
    assert [(each["name"], each["kept"]) for each in found["sources"]] == [("one", 3), ("other", 5)]
    assert [each["source"] for each in found["examples"]] == ["one", "other"]


def test_rows_are_cut_to_the_context_that_training_would_cut_to(inspect, tmp_path) -> None:
    data = write(tmp_path / "t.jsonl", row("word " * 400, "That is it."), *GOOD)
    found = json.loads(inspect("--data", data, "--json")[1])
    assert found["truncated"] == 1 and found["lengths"]["p100"] == found["max_length"] == 256
    [case] = found["findings"]["cut"]["cases"]
    assert case["place"] == f"{data}, line 1" and re.fullmatch(r"\d{4} tokens, 256 kept", case["what"])
    assert any("the model's context" in remark for remark in found["remarks"])
    status, _, err = inspect("--data", data, "data.max_length=512")
    assert_refused(status, err, "data.max_length: 512 is longer than the model's context")


def test_rows_that_are_all_dropped_are_still_shown(inspect, tmp_path) -> None:
    data = write(tmp_path / "t.jsonl", *GOOD)
    status, out, _ = inspect("--data", data, "data.max_length=4", "data.truncate=drop", "--html", tmp_path / "r.html")
    assert status == 0 and "0 of 8 rows" in out and "rows dropped as longer than data.max_length: 8" in out


def test_template_and_new_tokens_of_the_recipe_are_used(inspect, tmp_path, bpe_tokenizer) -> None:
    data = write(tmp_path / "t.jsonl", row("Weather?", "<call>get</call>"))
    words = ["data.chat_template=plain", "vocabulary.add_tokens=[<call>,</call>]", "--json"]
    [each] = json.loads(inspect("--data", data, *words)[1])["examples"]
    assert "User: Weather?" in each["text"] and "<|im_start|>user" not in each["text"]
    assert {bpe_tokenizer.vocab_size, bpe_tokenizer.vocab_size + 1} < set(each["tokens"])


def test_of_a_stream_only_the_beginning_is_read(inspect, tmp_path) -> None:
    data = write(tmp_path / "t.jsonl", *[row(f"{n}?", "That is a number.") for n in range(1005)], "{")
    status, out, _ = inspect("--data", data, "data.streaming=true", "--rows", 0)
    assert status == 0 and "the first 1000 rows alone" in out and "1000 of 1000 rows" in out


class Page(HTMLParser):
    """The texts of a page; raises where tags do not nest, or anything would be fetched or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.marked, self.text = "", ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "img", "iframe")
        assert not {"src", "href"} & {name for name, _ in attrs} and not any(name.startswith("on") for name, _ in attrs)
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        self.marked += data if "mark" in self.open else ""


def test_the_page_shows_all_and_runs_nothing(inspect, tmp_path) -> None:
    evil = '<script>alert("1")</script><img src=x onerror=alert(1)> & "\' \x1b[31m'
    data = write(tmp_path / "t.jsonl", row(evil, f"No: {evil}"), *GOOD, "{")
    html = tmp_path / "report.html"
    status, out, _ = inspect("--data", data, "--html", html)
    assert status == 0 and "\x1b" not in out and "⟨U+001B⟩[31m" in out and out.rstrip().endswith(f"written to {html}")
    text = html.read_text(encoding="utf-8")
    assert "http" not in text and "url(" not in text and "@import" not in text and "\x1b" not in text
    page = Page(text)
    assert 'No: <script>alert("1")</script><img src=x onerror=alert(1)> & "\' ⟨U+001B⟩[31m<|im_end|>' in page.marked
    assert "prompt" not in page.marked and "rows that cannot be read: 1" in page.text
    assert "rows with control characters: 1" in page.text and "9 of 10 rows" in page.text
    again = tmp_path / "again.html"
    status, out, _ = inspect("--data", data, "--html", again, "--json")
    assert status == 0 and json.loads(out)["kept"] == 9 and again.read_text(encoding="utf-8") == text


def assert_refused(status: int, err: str, said: str) -> None:
    lines = err.splitlines()
    assert status == 2 and len(lines) == 1, err
    assert lines[0].startswith("burnish: ") and re.search(said, lines[0]), lines[0]


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        (None, [], "t.jsonl.*no such file"),
        ([], [], "t.jsonl holds no records"),
        (["{", "[]"], [], "none of the 2 rows can be read; the first: .*t.jsonl, line 1"),
        (GOOD, ["data.max_lenth=3"], "data.max_lenth: unknown key; did you mean max_length"),
        (GOOD, ["--html", "HERE/taken.html"], "taken.html: is there already"),
        (GOOD, ["--html", "HERE/gone/r.html"], "no folder .*gone"),
        (GOOD, ["data.columns={prompt: '{'}"], "data.columns"),
        (GOOD, ["data.chat_template=chatmll"], "did you mean chatml"),
        (GOOD, ["--worst", "-1"], "worst"),
    ],
)
def test_wrong_input_is_one_line(inspect, tmp_path, rows, words, said) -> None:
    data = tmp_path / "t.jsonl"
    if rows is not None:
        write(data, *rows)
    (tmp_path / "taken.html").write_text("mine")
    status, out, err = inspect("--data", data, *[word.replace("HERE", str(tmp_path)) for word in words])
    assert_refused(status, err, said)
    assert out == "" and (tmp_path / "taken.html").read_text() == "mine" and not (tmp_path / "gone").exists()


def test_what_needs_data_says_so(inspect, tmp_path) -> None:
    for words in (["--ids"], ["--html", tmp_path / "r.html"], ["task.name=reasoning_gym:chain_sum"]):
        status, _, err = inspect(*words)
        assert_refused(status, err, "--data FILE")


# What `load_tokenizer` takes


def test_a_run_and_an_adapter_have_their_bases_tokenizer_and_what_they_added(model, tmp_path, bpe_tokenizer) -> None:
    assert load_tokenizer(model)[0].fingerprint == bpe_tokenizer.fingerprint and load_tokenizer(model)[1] == 256
    run, adapter = tmp_path / "run", tmp_path / "adapter"
    for folder in (run, adapter):
        folder.mkdir()
    (run / "config.yaml").write_text(
        f"model: {model}\nvocabulary: {{add_tokens: [<call>]}}\ndata: {{chat_template: plain}}\n"
    )
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(run)}))
    for folder in (run, adapter):
        tokenizer, context = load_tokenizer(folder)
        assert context == 256 and tokenizer.encode("<call>") == [bpe_tokenizer.vocab_size]
        assert tokenizer.render([{"role": "user", "content": "Hi"}]).endswith("User: Hi\n")
    bpe_tokenizer.save(adapter)
    assert load_tokenizer(adapter)[0].fingerprint == bpe_tokenizer.fingerprint


def test_a_gguf_file_has_a_tokenizer(bpe_tokenizer) -> None:
    path = Path(__file__).parents[1] / "fixtures" / "tokenizers" / "bpe.gguf"
    tokenizer, _ = load_tokenizer(path)
    assert tokenizer.encode("Some text, 2+2") == bpe_tokenizer.encode("Some text, 2+2")


@pytest.mark.parametrize("content", ["model: null\n", "model: HERE\n"])
def test_a_run_of_nothing_is_refused(tmp_path, content) -> None:
    (tmp_path / "config.yaml").write_text(content.replace("HERE", str(tmp_path.resolve())))
    with pytest.raises(InputError, match=r"config\.yaml: model is"):
        load_tokenizer(tmp_path)
