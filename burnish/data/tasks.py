"""Problems that are made as needed and can be checked: `reasoning_gym:TASK`.

    config = TaskConfig(options={"max_terms": 2}, answer_template="The answer is {answer}.")
    task = Task("reasoning_gym:chain_sum", config)
    train, heldout = task.train_and_heldout()
    task.records(train)                                  # conversations to train on
    task.grade("The answer is 7.", heldout[0])           # Grade(strict=..., final=..., score=...)

reasoning-gym is imported when the first task is made: it takes two seconds, and is an optional dependency.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, get_type_hints

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    field_validator,
)

from burnish.data.answers import PLACEHOLDER, fill, final_answer_matches, is_number, read_answer, strict_match
from burnish.data.records import ChatRecord
from burnish.errors import InputError

SOURCE = "reasoning_gym:"
_DRAWS_PER_PROBLEM = 20  # give up looking for new questions when this many draws a question wanted found too few


class TaskConfig(BaseModel):
    """The `task` section of a recipe: what is asked, how many times, and in which words."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    options: dict[str, Any] = Field(default_factory=dict, description="The task's own options, as min_terms: 2.")
    train_size: int = Field(1000, ge=1, le=10**7, description="Problems to train on.")
    heldout_size: int = Field(100, ge=1, le=10**6, description="Problems to evaluate on; none of them is trained on.")
    seed: int = Field(0, ge=0, description="Fixes the problems.")
    prompt_template: str = Field("{question}", description="The user turn; {question} is the task's own text.")
    answer_template: str = Field(PLACEHOLDER, description="The assistant turn; {answer} is the right answer.")

    @field_validator("prompt_template", "answer_template")
    @classmethod
    def _one_placeholder(cls, value: str, info: Any) -> str:
        placeholder = "{question}" if info.field_name == "prompt_template" else PLACEHOLDER
        if value.count(placeholder) != 1:
            raise ValueError(f"must contain {placeholder} once")
        return value


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question and its answer; None where many answers are right and only the scorer can tell."""

    question: str
    answer: str | None
    metadata: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Grade:
    """How good a reply is.

    Attributes:
        strict: the whole reply is the filled answer template.
        final: the answer the reply comes to is right.
        score: the task's own score of that answer, with partial credit; None where the scorer gives none.
    """

    strict: bool
    final: bool
    score: float | None


def is_task(spec: str) -> bool:
    """Whether a data argument names a task and not a file."""
    return spec.startswith(SOURCE)


class Task:
    """A family of problems.

    Args:
        spec: "reasoning_gym:TASK".
        config: sizes, options and templates.

    Raises:
        InputError: reasoning-gym is not installed, or the task, an option or its value is not known to it.
    """

    def __init__(self, spec: str, config: TaskConfig) -> None:
        if not is_task(spec):
            raise InputError(f"{spec!r} is not a task; write {SOURCE}TASK, as {SOURCE}chain_sum")
        self.name, self.config = spec.removeprefix(SOURCE), config
        tasks = _reasoning_gym_tasks()
        if self.name not in tasks:
            raise InputError(f"{SOURCE}{self.name} is not a task; nearest: {_nearest(self.name, tasks)}")
        self._dataset_class, self._config_class = tasks[self.name]
        self._options = self._typed(config.options)
        self._scorer = self._make({})

    def problems(self, count: int, *, held_out: bool = False) -> list[Problem]:
        """`count` problems of one side with questions unlike each other, the same for the same seed.

        More of them begin with the same ones. Which side a question is on is read off a hash of its text alone, so no
        size, seed or option ever moves one from the held-out side to the other.

        Raises:
            InputError: the task has fewer questions with these options.
        """
        draws = _DRAWS_PER_PROBLEM * count
        # Problem i of seed s is problem i - 1 of seed s + 1 in reasoning-gym, so seeds are spread by a hash.
        spread = hashlib.sha256(f"{self.name} {self.config.seed}".encode()).digest()
        dataset = self._make({"seed": int.from_bytes(spread[:4], "big") >> 1, "size": draws})
        found: dict[str, Problem] = {}
        for index in range(draws):
            entry = dataset[index]
            if _is_held_out(entry["question"].strip()) is not held_out:
                continue
            found.setdefault(entry["question"].strip(), Problem(entry["question"], entry["answer"], entry["metadata"]))
            if len(found) == count:
                return list(found.values())
        raise InputError(
            f"{SOURCE}{self.name} gave only {len(found)} different questions in {draws} draws, {count} are "
            "wanted; lower task.train_size or task.heldout_size, or widen task.options"
        )

    def train_and_heldout(self) -> tuple[list[Problem], list[Problem]]:
        """Problems to train on and to evaluate on; no question is in both.

        Neither depends on the size of the other.
        """
        config = self.config
        return self.problems(config.train_size), self.problems(config.heldout_size, held_out=True)

    def prompt(self, problem: Problem) -> str:
        """The user turn."""
        return self.config.prompt_template.replace("{question}", problem.question)

    def target(self, problem: Problem) -> str:
        """The reply that is wanted.

        Raises:
            InputError: the problem has no single answer.
        """
        if problem.answer is None:
            raise InputError(
                f"{SOURCE}{self.name} gives no answers to learn from, it only scores them; take another task"
            )
        return fill(self.config.answer_template, problem.answer)

    def records(self, problems: Sequence[Problem]) -> list[ChatRecord]:
        """Each problem as a user turn and the reply that is wanted."""
        return [
            ChatRecord(
                index,
                f"{SOURCE}{self.name}, problem {index}",
                (
                    {"role": "user", "content": self.prompt(problem)},
                    {"role": "assistant", "content": self.target(problem)},
                ),
                first_trained=1,
            )
            for index, problem in enumerate(problems)
        ]

    def grade(self, reply: str, problem: Problem) -> Grade:
        """Grade a reply in all three ways."""
        template, answer = self.config.answer_template, problem.answer
        found = read_answer(reply, answer is not None and is_number(answer), template)
        score = self._scorer.score_answer(found, dataclasses.asdict(problem))
        if score is not None:
            score = float(score) if math.isfinite(score) else None
        if answer is None:
            return Grade(strict=False, final=score == 1.0, score=score)
        return Grade(
            strict=strict_match(reply, fill(template, answer)),
            final=final_answer_matches(reply, answer, template),
            score=score,
        )

    def _typed(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options with the types of the task's own config; words from a command line are read as YAML."""
        types = get_type_hints(self._config_class)
        known = [f.name for f in dataclasses.fields(self._config_class) if f.name not in ("seed", "size")]
        typed = {}
        for name, value in options.items():
            if name in ("seed", "size"):
                raise InputError(f"task.options.{name}: set task.seed, task.train_size or task.heldout_size instead")
            if name not in known:
                raise InputError(
                    f"task.options.{name}: {self.name} has no such option; nearest: {_nearest(name, known)}"
                )
            typed[name] = _convert(value, types[name], f"task.options.{name}")
        return typed

    def _make(self, extra: dict[str, int]) -> Any:
        """The reasoning-gym data set with our options; it checks their values itself, by assertions."""
        try:
            config = self._config_class(**self._options, **extra)
            return self._dataset_class(config=config)
        except (AssertionError, ValueError) as error:
            raise InputError(f"{SOURCE}{self.name} refuses its options: {error}; change task.options") from error


def _is_held_out(question: str) -> bool:
    """One question in five."""
    return hashlib.sha256(question.encode()).digest()[0] % 5 == 0


def _reasoning_gym_tasks() -> dict[str, tuple[Any, Any]]:
    try:
        import reasoning_gym  # noqa: F401 - registers the tasks
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise InputError(
            f"{SOURCE}TASK needs the reasoning-gym package ({error}); pip install 'burnish[rl]'"
        ) from error
    return DATASETS


def _convert(value: Any, kind: Any, place: str) -> Any:
    try:
        adapter = TypeAdapter(kind)
    except PydanticUserError as error:
        raise InputError(f"{place}: a value of type {kind} cannot be given in a recipe; leave it out") from error
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        if isinstance(value, str):
            try:
                return adapter.validate_python(yaml.safe_load(value))
            except (ValidationError, yaml.YAMLError):
                pass  # said below, in the words of the first attempt
        reason = error.errors()[0]["msg"]
        raise InputError(f"{place}={value!r}: {reason}; change the value") from error


def _nearest(name: str, known: Iterable[str]) -> str:
    return ", ".join(get_close_matches(name, list(known), n=3, cutoff=0.0))
