"""Accuracy of a model on problems that can be scored, by greedy replies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.data.tasks import Grade, Problem, Task
from burnish.evaluate.intervals import Rate
from burnish.generate.config import SamplingConfig
from burnish.generate.engine import Sampler
from burnish.wrapper import ModelWrapper


@dataclass(frozen=True)
class Answered:
    """A problem, what the model replied, and its grade."""

    problem: Problem
    reply: str
    grade: Grade


@dataclass(frozen=True)
class Accuracy:
    """final: the answer a reply comes to is right; strict: the whole reply is the wanted one, format and all.

    score: mean of the task's own scores, with their partial credit; unscored: replies its scorer gave none for.
    """

    answered: list[Answered]

    @property
    def final(self) -> Rate:
        return Rate(sum(each.grade.final for each in self.answered), len(self.answered))

    @property
    def strict(self) -> Rate:
        return Rate(sum(each.grade.strict for each in self.answered), len(self.answered))

    @property
    def score(self) -> float | None:
        scores = [each.grade.score for each in self.answered if each.grade.score is not None]
        return sum(scores) / len(scores) if scores else None

    @property
    def unscored(self) -> int:
        return sum(each.grade.score is None for each in self.answered)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "accuracy": self.final.as_json(),
            "strict": self.strict.as_json(),
            "score": self.score,
            "unscored": self.unscored,
        }


def task_accuracy(
    model: ModelWrapper,
    task: Task,
    problems: Sequence[Problem],
    *,
    system: str | None = None,
    max_tokens: int = 64,
    batch_size: int = 32,
    on_progress: Callable[[int], None] | None = None,
) -> Accuracy:
    """Asks every problem once, greedily, and grades the replies. `on_progress` is told how many are answered.

    system: the message before each, as `data.system` puts one before what is trained on.
    """
    before = [] if system is None else [{"role": "system", "content": system}]
    prompts = [[*before, {"role": "user", "content": task.prompt(problem)}] for problem in problems]
    sampling = SamplingConfig(max_tokens=max_tokens, temperature=0.0)
    sampler = Sampler(model)
    answered: list[Answered] = []
    for start in range(0, len(prompts), batch_size):
        batch = slice(start, start + batch_size)
        for problem, completion in zip(
            problems[batch], sampler.generate(prompts[batch], sampling, batch_size=batch_size), strict=True
        ):
            answered.append(Answered(problem, completion.text, task.grade(completion.text, problem)))
        if on_progress:
            on_progress(len(answered))
    return Accuracy(answered)
