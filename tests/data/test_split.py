import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.data.records import ChatRecord, TextRecord, TokensRecord
from burnish.data.split import split_holdout
from burnish.errors import InputError


def rows(*pairs: tuple[str, str]) -> list[TextRecord]:
    return [TextRecord(i, f"row {i}", prompt, completion) for i, (prompt, completion) in enumerate(pairs)]


def indices(records) -> list[int]:
    return [record.index for record in records]


@given(
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.text(max_size=2)), min_size=2, max_size=40),
    st.floats(0.01, 0.9),
    st.integers(0, 5),
)
def test_sides_are_disjoint_by_row_and_by_prompt_and_lose_nothing(pairs, fraction, seed):
    records = rows(*pairs)
    if len({prompt for prompt, _ in pairs}) < 2:
        with pytest.raises(InputError, match=r"have the same prompt; .* set data\.holdout=0"):
            split_holdout(records, fraction, seed)
        return
    train, held = split_holdout(records, fraction, seed)
    assert train and held
    assert sorted(indices(train) + indices(held)) == list(range(len(records)))
    assert indices(train) == sorted(indices(train)) and indices(held) == sorted(indices(held))
    assert not {record.prompt for record in train} & {record.prompt for record in held}
    assert split_holdout(records, fraction, seed) == (train, held)


def test_the_fraction_is_met_and_the_seed_chooses():
    records = rows(*((f"question {i}", "answer") for i in range(200)))
    splits = [indices(split_holdout(records, 0.1, seed)[1]) for seed in range(3)]
    assert [len(held) for held in splits] == [20, 20, 20]
    assert len({tuple(held) for held in splits}) == 3
    assert len(split_holdout(rows(("a", "x"), ("b", "x")), 0.1, 0)[1]) == 1
    assert len(split_holdout(rows(("a", "x"), ("b", "x")), 0.9, 0)[1]) == 1
    assert split_holdout(records, 0.0, 0) == (records, [])


def test_added_rows_move_few():
    records = rows(*((f"question {i}", "answer") for i in range(220)))
    before, after = (set(indices(split_holdout(records[:n], 0.1, 0)[1])) for n in (200, 220))
    assert len(before - after) <= 4, "a row's side depends on its own text"


def test_prompts_with_more_rows_than_the_target():
    records = rows(*[("a", str(i)) for i in range(30)], *[("b", str(i)) for i in range(20)])
    assert indices(split_holdout(records, 0.1, 0)[1]) == list(range(30, 50))


def test_both_spellings_of_a_row_are_one_question():
    text = TextRecord(0, "", "2+2?", "4")
    chat = ChatRecord(1, "", ({"content": "2+2?", "role": "user"}, {"role": "assistant", "content": "four"}))
    other = TextRecord(2, "", "3+3?", "6")
    for seed in range(5):
        train, held = split_holdout([text, chat, other], 0.4, seed)
        assert (text in train) == (chat in train)
        assert (text in held) == (chat in held)


def test_text_without_a_prompt_is_told_apart_by_its_completion():
    records = rows(*(("", f"story {i}") for i in range(10)), ("", "story 3"))
    train, held = split_holdout(records, 0.3, 0)
    assert held and not {r.completion for r in train} & {r.completion for r in held}


def test_tokens_are_told_apart_by_those_before_the_first_learned():
    records = [
        TokensRecord(0, "", (1, 2, 3, 4), (0, 0, 1, 1)),
        TokensRecord(1, "", (1, 2, 9), (0, 0, 1)),  # the same prompt
        TokensRecord(2, "", (1, 5, 3, 4), (0, 0, 1, 1)),
        TokensRecord(3, "", (1, 2, 3, 4), (1, 1, 1, 1)),  # none: the whole row counts
        TokensRecord(4, "", (1, 2, 3, 5), (1, 1, 1, 1)),
    ]
    sides = [{record.index for record in split_holdout(records, 0.4, seed)[1]} for seed in range(30)]
    assert all((0 in held) == (1 in held) for held in sides)
    for other in (2, 3, 4):
        assert any((0 in held) != (other in held) for held in sides)
    assert any((3 in held) != (4 in held) for held in sides)


def test_turns_that_are_given_belong_to_the_prompt():
    def chat(index, first_answer, second_answer, first_trained):
        contents = ("q", first_answer, "again", second_answer)
        roles = ("user", "assistant", "user", "assistant")
        turns = tuple({"role": role, "content": content} for role, content in zip(roles, contents, strict=True))
        return ChatRecord(index, "", turns, first_trained)

    records = [
        chat(0, "a", "x", 2),
        chat(1, "a", "y", 2),
        chat(2, "b", "x", 2),
        chat(3, "a", "x", 0),
        chat(4, "b", "z", 0),
    ]
    sides = [{record.index for record in split_holdout(records, 0.4, seed)[1]} for seed in range(30)]
    assert all((0 in held) == (1 in held) and (3 in held) == (4 in held) for held in sides)
    assert any((0 in held) != (2 in held) for held in sides) and any((0 in held) != (3 in held) for held in sides)


def test_errors_name_the_source():
    with pytest.raises(
        InputError, match=r"^train\.jsonl: data\.holdout=0\.1 cannot hold out rows: all 2 have the same"
    ):
        split_holdout(rows(("a", "x"), ("a", "y")), 0.1, 0, "train.jsonl")
