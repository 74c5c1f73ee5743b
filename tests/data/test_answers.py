import pytest

from burnish.data.answers import extract_last_number, fill, final_answer_matches, read_answer, strict_match

SAYS = "The answer is {answer}."


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("The answer is 42.", "42"),
        ("3 + 4 = 7, so 7!", "7"),
        ("1,234,567.50 dollars", "1234567.50"),
        ("pick 1,2 or 3,45", "45"),
        ("1,2345", "2345"),
        ("it is -30", "-30"),
        ("it is \u221230.", "-30"),
        ("= \u22121,000.5.", "-1000.5"),
        ("+5", "5"),
        ("$-5", "-5"),
        ("**42**", "42"),
        ("\\boxed{-42}", "-42"),
        ("4-1", "1"),
        ("(4)-1", "1"),
        ("x-1", "1"),
        ("4 - 1", "1"),
        (".5", ".5"),
        ("-0.25", "-0.25"),
        ("1e5", "1e5"),
        ("2.5e-3", "2.5e-3"),
        ("50%", "50"),
        ("1. first\n2. second", "2"),
        ("none here", None),
        ("", None),
    ],
)
def test_the_last_number(text, number):
    assert extract_last_number(text) == number


@pytest.mark.parametrize(
    ("reply", "answer", "template", "right"),
    [
        ("so 3 + 4 = 7", "7", "{answer}", True),
        ("so 3 + 4 = 7", "3", "{answer}", False),
        ("42.0", "42", "{answer}", True),
        ("1,234", "1234", "{answer}", True),
        ("4.2", "42", "{answer}", False),
        ("\u221230", "-30", "{answer}", True),
        ("30", "-30", "{answer}", False),
        ("", "0", "{answer}", False),
        # Where the template's words are, they say which number; the last such place counts.
        ("The answer is 7. I checked it 3 times.", "7", SAYS, False),
        ("The answer is 7. I checked it 3 times.", "3", SAYS, True),
        ("The answer is 7. No! The answer is 8.", "8", SAYS, True),
        ("It is 7", "7", SAYS, True),
        ("The answer is 3.5.", "3.5", SAYS, True),
        ("The answer is seven. 7", "7", SAYS, True),
        # Text is compared as text.
        ("  True\n", "True", "{answer}", True),
        ("true", "True", "{answer}", False),
        ("I think True", "True", "{answer}", False),
        ("Hm. The answer is a b c.", "a b c", SAYS, True),
        ("The answer is a b.", "a b c", SAYS, False),
        ("The answer is a b c d.", "a b c", SAYS, False),
    ],
)
def test_the_final_answer(reply, answer, template, right):
    assert final_answer_matches(reply, answer, template) is right


def test_strict_is_the_whole_reply():
    target = fill(SAYS, "42")
    assert target == "The answer is 42."
    assert strict_match("  The answer is 42.\n", target)
    for reply in ("42", "The answer is 42", "The answer is 42. Yes.", "the answer is 42."):
        assert not strict_match(reply, target)


def test_an_answer_with_braces_is_left_alone():
    assert fill(SAYS, "{x}{0}") == "The answer is {x}{0}."


def test_what_a_reply_comes_to():
    assert read_answer("The answer is 1,000.", True, SAYS) == "1000"
    assert read_answer("nothing", True, SAYS) == ""
    assert read_answer("The answer is\n1 0\n0 1.", False, SAYS) == "1 0\n0 1"
