"""Reading the answer out of a reply.

An answer template says how a reply states its answer ("The answer is {answer}."). Three readings of a reply,
from hard to easy: all of it is the filled template (`strict_match`); the answer it comes to is right
(`final_answer_matches`); the task's own scorer likes what it comes to (`burnish.data.tasks`), perhaps in
part.
"""

import re
from decimal import Decimal

PLACEHOLDER = "{answer}"

# Thousands in groups of three, or plain digits; or a bare fraction. A sign counts unless it stands right
# behind a word, a digit or a bracket, where it is an operator or a dash ("3-1", "x-1", "pages 4–5").
_NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-+\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d+)?"
)


def extract_last_number(text: str) -> str | None:
    """The last number in a text, without thousands separators and plus sign, minus written "-"; or None.

    >>> extract_last_number("so 3 - 1,003 = −1,000.5.")
    '-1000.5'
    """
    numbers = _NUMBER.findall(text)
    return _plain(numbers[-1]) if numbers else None


def fill(template: str, answer: str) -> str:
    """A whole reply: the template with the answer in it."""
    return template.replace(PLACEHOLDER, answer)


def strict_match(reply: str, target: str) -> bool:
    """Whether a reply is the target and nothing else, white space around both aside."""
    return reply.strip() == target.strip()


def read_answer(reply: str, numeric: bool, template: str = PLACEHOLDER) -> str:
    """The answer a reply comes to; "" if it comes to none.

    A numeric answer is the last number of the reply, whoever wrote it and in whatever words. Any other is what follows
    the last occurrence of the template's words before the answer, or the whole reply where they do not occur.
    """
    if numeric:
        return extract_last_number(reply) or ""
    before, _, after = template.partition(PLACEHOLDER)
    lead = before.strip()
    stated = reply.rpartition(lead)[2] if lead and lead in reply else None
    return (reply if stated is None else stated).strip().removesuffix(after.strip()).strip()


def is_number(answer: str) -> bool:
    """Whether an answer is one number."""
    return _NUMBER.fullmatch(answer.strip()) is not None


def final_answer_matches(reply: str, answer: str, template: str = PLACEHOLDER) -> bool:
    """Whether a reply comes to `answer`: of equal value for numbers (42 = 42.0), else the same text."""
    numeric = is_number(answer)
    found = read_answer(reply, numeric, template)
    if numeric:
        return found != "" and Decimal(found) == Decimal(_plain(answer.strip()))
    return found == answer.strip()


def _plain(number: str) -> str:
    return number.replace(",", "").replace("\u2212", "-").removeprefix("+")
