"""Each kind of suspicious row is found by its place, and sound rows are not."""

import pytest

from burnish.data.config import DataConfig
from burnish.data.findings import findings
from burnish.data.parts import sources_of
from burnish.data.survey import survey


def row(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion}


def found(rows, tokenizer, most=3, **options):
    config = DataConfig(**{"max_length": 256, "cache": False, **options})
    seen = survey(sources_of(rows, config), tokenizer, config, 4)
    return {finding.kind: finding for finding in findings(seen, tokenizer, most)}


def places(finding) -> list[str]:
    return [case.place for case in finding.cases]


SOUND = [row(f"What is {n} plus {n}?", f"The answer to that is {2 * n}.") for n in range(5)]
ALWAYS = {"longest", "least_trained"}


def test_sound_rows_have_only_a_longest_and_a_least_trained(bpe_tokenizer) -> None:
    kinds = found(SOUND, bpe_tokenizer)
    assert kinds.keys() == ALWAYS and all(finding.count == 0 for finding in kinds.values())
    assert all(len(finding.cases) == 3 for finding in kinds.values())


def test_the_longest_and_the_least_trained_come_first(bpe_tokenizer) -> None:
    rows = [*SOUND, row("word " * 200, "It is a word, many times."), row("hm " * 20, "That is only a hum.")]
    kinds = found(rows, bpe_tokenizer, most=2, max_length=4096)
    for name in ALWAYS:
        assert places(kinds[name]) == ["data[5]", "data[6]"]
        assert kinds[name].count == 1


def chat(*texts: str) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]}


TOKENS = {"input_ids": [40, 50, 60, 70, 80, 90], "labels": [-100, -100, 60, 70, 80, 90]}


@pytest.mark.parametrize(
    ("one", "same", "other_answer", "other_prompt"),
    [
        (
            row("Which one is it?", "The first one."),
            row("Which one is it?", "The first one."),
            row("Which one is it?", "The second one."),
            row("Which two are it?", "The first one."),
        ),
        (
            chat("Hi there?", "Hello to you.", "Which one?", "The first one."),
            chat("Hi there?", "Hello to you.", "Which one?", "The first one."),
            chat("Hi there?", "Hello to you.", "Which one?", "The second one."),
            chat("Hi there?", "Hello to me.", "Which one?", "The second one."),
        ),
        (
            TOKENS,
            {**TOKENS, "other": 1},
            {"input_ids": [40, 50, 61, 70, 80, 90], "labels": [-100, -100, 61, 70, 80, 90]},
            {"input_ids": [40, 51, 61, 70, 80, 90], "labels": [-100, -100, 61, 70, 80, 90]},
        ),
    ],
    ids=["text", "chat", "tokens"],
)
def test_repetition_and_contradiction(bpe_tokenizer, one, same, other_answer, other_prompt) -> None:
    kinds = found([*SOUND, one, other_prompt, same], bpe_tokenizer)
    assert kinds.keys() == ALWAYS | {"duplicates"} and places(kinds["duplicates"]) == ["data[7]"]
    assert "data[5]" in kinds["duplicates"].cases[0].what
    kinds = found([one, *SOUND, other_prompt, other_answer], bpe_tokenizer)
    assert kinds.keys() == ALWAYS | {"contradictions"} and places(kinds["contradictions"]) == ["data[0]", "data[7]"]


def test_raw_texts_have_no_prompt_to_contradict(bpe_tokenizer) -> None:
    rows = [{"text": f"Some text about number {n}."} for n in range(3)]
    assert found(rows, bpe_tokenizer).keys() == ALWAYS


def test_near_empty_answers_are_counted_turn_by_turn(bpe_tokenizer) -> None:
    rows = [*SOUND, row("a", "."), chat("Which one?", "?", "No, really?", "It is the first one of the two.")]
    kinds = found(rows, bpe_tokenizer)
    assert kinds.keys() == ALWAYS | {"near_empty"} and places(kinds["near_empty"]) == ["data[5]", "data[6]"]
    assert kinds["near_empty"].cases[0].excerpt == ".<|im_end|>" and kinds["near_empty"].cases[0].what.endswith(": 1")


def test_an_answer_that_was_cut_short_is_not_near_empty(bpe_tokenizer) -> None:
    # Of so many lengths, some leave a token or two for the last piece of a split.
    long = [row(f"a{n}", "word " * n) for n in range(100, 160)]
    for truncate in ("split", "keep_end", "keep_start"):
        kinds = found([*SOUND, *long], bpe_tokenizer, truncate=truncate, max_length=60)
        assert kinds.keys() == ALWAYS | {"cut"} and kinds["cut"].count == 60
        assert kinds["cut"].cases[0].what.endswith("pieces" if truncate == "split" else ", 60 kept")


def test_dropped_and_unreadable_rows_come_with_their_reason(bpe_tokenizer) -> None:
    pair = {"prompt": "Which?", "chosen": "This one.", "rejected": "This one."}
    muted = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}
    rows = [{"prompt": "a"}, *SOUND, pair, muted, row("word " * 90, "yes, it is so"), row("a", "b")]
    kinds = found(rows, bpe_tokenizer, truncate="drop", min_trained_tokens=3, max_length=80)
    expected = {
        "unreadable": "data[0]",
        "dropped_identical": "data[6]",
        "dropped_no_target": "data[7]",
        "dropped_too_long": "data[8]",
        "dropped_few_trained": "data[9]",
    }
    assert kinds.keys() == ALWAYS | expected.keys() and next(iter(kinds)) == "unreadable"
    for kind, place in expected.items():
        assert places(kinds[kind]) == [place] and kinds[kind].count == 1, kind
    assert "completion" in kinds["unreadable"].cases[0].what and kinds["unreadable"].cases[0].what.startswith("data[0]")


def test_odd_characters_anywhere_in_a_row_are_found_once(bpe_tokenizer) -> None:
    rows = [
        *SOUND,
        row("a\u200bb\u200b", "That is \u200b what it is."),
        chat("Cafe?", "Un cafÃ© noir, s'il vous plaît."),
    ]
    kinds = found(rows, bpe_tokenizer)
    assert kinds.keys() == ALWAYS | {"invisible", "mojibake"}
    assert places(kinds["invisible"]) == ["data[5]"] and kinds["invisible"].cases[0].what == "U+200B"
    assert places(kinds["mojibake"]) == ["data[6]"] and "cafÃ© noir" in kinds["mojibake"].cases[0].excerpt


def test_only_so_many_are_shown_and_all_are_counted(bpe_tokenizer) -> None:
    rows = [row(f"{n} a\x07?", "That is what it is.") for n in range(9)]
    assert found(rows, bpe_tokenizer, most=2)["control"].count == 9
    assert places(found(rows, bpe_tokenizer, most=2)["control"]) == ["data[0]", "data[1]"]
    assert found(rows, bpe_tokenizer, most=0)["control"].cases == ()
