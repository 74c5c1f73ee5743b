"""What a conversation has and a template has no place for is refused; what is spelt in a text is counted."""

import datetime

import numpy as np
import pytest

from burnish.data.config import DataConfig
from burnish.data.dataset import load_dataset, load_examples
from burnish.data.fit import fit_tokenizer, with_day
from burnish.data.records import TextRecord
from burnish.errors import InputError

ASKED, ANSWERED = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds", "parameters": {"type": "object"}}}
NO_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = {
    "tool calls": {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]},
    "tools": {"messages": [ASKED, ANSWERED], "tools": [TOOL]},
    "reasoning": {"messages": [ASKED, {**ANSWERED, "reasoning_content": "two and two"}]},
}


@pytest.mark.parametrize("what", ROWS)
def test_the_models_own_template_may_have_no_place(what, bpe_tokenizer) -> None:
    with pytest.raises(InputError, match=rf"data\[0\]: {what}, which the chat template leaves out"):
        load_examples([ROWS[what]], bpe_tokenizer, DataConfig())
    tokens = fit_tokenizer(bpe_tokenizer, DataConfig(chat_template="qwen3"))
    assert len(load_examples([ROWS[what]], tokens, DataConfig())) == 1


def test_what_is_there_and_empty_is_not_missed(bpe_tokenizer) -> None:
    tokenizer = bpe_tokenizer.with_chat_template(NO_SYSTEM)
    messages = [{"role": "system", "content": " "}, ASKED, {**ANSWERED, "reasoning_content": ""}]
    assert len(load_examples([{"messages": messages}], tokenizer, DataConfig())) == 1


@pytest.mark.parametrize("system", ["in the row", "in the recipe"])
def test_a_system_message_is_not_dropped(system, bpe_tokenizer) -> None:
    tokenizer = bpe_tokenizer.with_chat_template(NO_SYSTEM)
    messages = (
        [{"role": "system", "content": "Obey."}, ASKED, ANSWERED] if system == "in the row" else [ASKED, ANSWERED]
    )
    config = DataConfig(system="Obey." if system == "in the recipe" else None)
    with pytest.raises(InputError, match="a system message, which the chat template leaves out"):
        load_examples([{"messages": messages}], tokenizer, config)


def test_special_tokens_in_a_text_are_counted(bpe_tokenizer) -> None:
    rows = [
        {"prompt": "a", "completion": "b<|im_end|>"},
        {"messages": [{"role": "user", "content": "<|im_start|>system"}, ANSWERED]},
        {"prompt": "im_end", "completion": "<|im_|>"},
    ]
    assert load_examples(rows, bpe_tokenizer, DataConfig()).counts.special_in_text == 2


def test_variables_go_where_the_template_goes(bpe_tokenizer, tmp_path) -> None:
    source = "{{ mood }}{{ note is none }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    variables = {"mood": 'null "calm"', "note": None}
    tokenizer = fit_tokenizer(bpe_tokenizer.with_chat_template(source), DataConfig(template_variables=variables))
    assert tokenizer.render([ASKED]) == 'null "calm"True[2+2?]'
    assert tokenizer.render([ASKED], mood="wild") == "wildTrue[2+2?]"
    assert fit_tokenizer(tokenizer, DataConfig(template_variables=variables)).chat_template == tokenizer.chat_template
    tokenizer.save(tmp_path)
    again = type(tokenizer).from_folder(tmp_path)
    assert again.render([ASKED]) == tokenizer.render([ASKED])
    assert tokenizer.fingerprint != bpe_tokenizer.with_chat_template(source).fingerprint
    with pytest.raises(InputError, match=r"data\.template_variables: 'a b' is no name"):
        fit_tokenizer(bpe_tokenizer, DataConfig(template_variables={"a b": 1}))


def test_numpy_rows_and_wrong_sources(bpe_tokenizer) -> None:
    rows = [
        {"input_ids": np.arange(5), "loss_mask": np.array([0, 0, 1, 1, 1])},
        {"messages": [ASKED, {**ANSWERED, "weight": np.float32(0.5)}]},
    ]
    first, second = load_examples(rows, bpe_tokenizer, DataConfig())
    assert first.tokens.tolist() == [0, 1, 2, 3, 4] and first.weights.tolist() == [0, 0, 1, 1, 1]
    assert set(second.weights.tolist()) == {0.0, 0.5}
    for wrong, said in ((5, "a number"), ({"train": []}, "mapping of"), (["a.jsonl"], "SourceConfig")):
        with pytest.raises(InputError, match=said):
            load_examples(wrong, bpe_tokenizer, DataConfig())


def test_the_date_is_that_of_the_run(bpe_tokenizer) -> None:
    template = "{{ strftime_now('%d %b %Y') }}" + NO_SYSTEM
    tokenizer = bpe_tokenizer.with_chat_template(template)
    config = DataConfig(date="2024-07-26")
    (example,) = load_examples([{"messages": [ASKED, ANSWERED]}], tokenizer, config)
    assert tokenizer.decode(example.tokens.tolist()).startswith("26 Jul 2024")
    assert fit_tokenizer(tokenizer, config).fingerprint != tokenizer.fingerprint
    assert with_day(DataConfig(), tokenizer).date == datetime.date.today()
    assert with_day(config, tokenizer) == config and with_day(DataConfig(), bpe_tokenizer).date is None


def test_a_null_completion_does_not_hide_the_response(bpe_tokenizer) -> None:
    rows = [{"prompt": "a", "completion": None, "response": "b"}]
    assert len(load_examples(rows, bpe_tokenizer, DataConfig())) == 1


def test_held_out_rows_may_all_be_dropped(bpe_tokenizer) -> None:
    rows = [{"prompt": f"{n}", "completion": "b" if n else "long " * 90} for n in range(9)]
    for seed in range(40):
        config = DataConfig(seed=seed, truncate="drop", max_length=64, holdout=0.1)
        data = load_dataset(rows, None, bpe_tokenizer, config)
        if not len(data.held_out):
            assert data.held_out.counts.dropped_too_long == 1 and data.train.counts.kept == 8
            return
    raise AssertionError("the long row was never held out")


def test_records_are_streamed_as_rows_are(bpe_tokenizer) -> None:
    records = [TextRecord(n, f"made {n}", f"{n}?", "yes") for n in range(6)]
    config = DataConfig(streaming=True, repeat=False, max_length=64)
    batches = load_dataset(records, None, bpe_tokenizer, config).batches(bpe_tokenizer, 2, config)
    assert sum(len(np.unique(batch["example_ids"])) - 1 for batch in batches) == 6
    assert batches.counts.kept == 6
