import subprocess
import sys

import pytest
from pydantic import ValidationError

from burnish.data.tasks import Grade, Problem, Task, TaskConfig, is_task
from burnish.errors import InputError

TWO_TERMS = {"min_terms": 2, "max_terms": 2}
SPEC = "reasoning_gym:chain_sum"


@pytest.fixture(autouse=True, scope="module")
def _installed():
    pytest.importorskip("reasoning_gym")


def make(spec: str = SPEC, **options) -> Task:
    return Task(spec, TaskConfig(**{"options": TWO_TERMS, "train_size": 40, "heldout_size": 10, **options}))


def test_problems_are_right_and_follow_the_options():
    for problem in make().problems(30):
        expression = problem.question.rpartition(":")[2].rstrip(" =")
        assert len(expression.split()) == 3  # two terms and a sign
        assert eval(expression) == int(problem.answer)  # arithmetic the task itself wrote


def test_train_and_heldout_share_no_question_and_are_reproducible():
    # 162 sums of two digits: drawn at random, 130 of them would repeat.
    options = {**TWO_TERMS, "max_digits": 1}
    train, held = make(options=options, train_size=100, heldout_size=30).train_and_heldout()
    questions = [problem.question for problem in train + held]
    assert (len(train), len(held)) == (100, 30) and len(set(questions)) == 130
    again = make(options=options, train_size=100, heldout_size=30).train_and_heldout()
    assert again == (train, held)
    # Another size of training set leaves the held-out problems alone; another seed does not.
    assert make(options=options, train_size=5, heldout_size=30).train_and_heldout()[1] == held
    assert make(options=options, train_size=5, heldout_size=30, seed=1).train_and_heldout()[1] != held


def test_neighbouring_seeds_do_not_share_a_stream():
    wide = {**TWO_TERMS, "min_digits": 4}
    zero, one = ({p.question for p in make(options=wide, seed=seed).problems(50)} for seed in (0, 1))
    assert len(zero & one) < 3


def test_too_few_questions():
    options = {**TWO_TERMS, "max_digits": 1}
    with pytest.raises(InputError, match=r"gave only \d+ different questions .*lower task\.train_size"):
        make(options=options, train_size=1000).train_and_heldout()


def test_records_use_the_templates():
    task = make(prompt_template="Be brief. {question}", answer_template="The answer is {answer}.")
    (problem,) = task.problems(1)
    (record,) = task.records([problem])
    user, assistant = record.messages
    assert user == {"role": "user", "content": f"Be brief. {problem.question}"}
    assert assistant == {"role": "assistant", "content": f"The answer is {problem.answer}."}
    assert (record.index, record.first_trained, record.place) == (0, 1, "reasoning_gym:chain_sum, problem 0")


def test_grades():
    task = make(answer_template="The answer is {answer}.")
    problem = Problem("6 * 7", "42", {})
    assert task.grade("The answer is 42.", problem) == Grade(strict=True, final=True, score=1.0)
    assert task.grade("It is 42", problem) == Grade(strict=False, final=True, score=1.0)
    assert task.grade("The answer is 41.", problem) == Grade(strict=False, final=False, score=0.0)
    assert task.grade("no idea", problem) == Grade(strict=False, final=False, score=0.0)
    # The task's own scorer gives part of the credit: the right digits are 2 of 3 written.
    assert task.grade("The answer is 421.", problem).score == pytest.approx(2 / 3)


@pytest.mark.parametrize("given", [None, float("nan"), float("inf")])
def test_no_score_is_not_a_score_of_zero(given):
    task = make()
    task._scorer.score_answer = lambda answer, entry: given
    assert task.grade("42", Problem("6 * 7", "42", {})).score is None


def test_a_task_that_only_scores():
    task = Task("reasoning_gym:graph_color", TaskConfig())
    (problem,) = task.problems(1)
    assert problem.answer is None
    assert task.grade("nonsense", problem).final is False
    with pytest.raises(InputError, match=r"graph_color gives no answers to learn from"):
        task.target(problem)


def test_options_have_the_types_of_the_task():
    task = make(options={"min_terms": "2", "max_terms": "3", "allow_negation": "true"})
    assert task._options == {"min_terms": 2, "max_terms": 3, "allow_negation": True}
    assert make("reasoning_gym:basic_arithmetic", options={"operators": "['+', '-']"})._options == {
        "operators": ["+", "-"]
    }


@pytest.mark.parametrize(
    ("spec", "options", "said"),
    [
        ("chain_sum", {}, "'chain_sum' is not a task; write reasoning_gym:TASK"),
        ("reasoning_gym:chain_sun", {}, "nearest: chain_sum"),
        (SPEC, {"max_term": 3}, "task.options.max_term: chain_sum has no such option; nearest: max_terms"),
        (SPEC, {"max_terms": "many"}, "task.options.max_terms='many': Input should be a valid integer"),
        (SPEC, {"max_terms": 2.5}, "task.options.max_terms=2.5: Input should be a valid integer"),
        (SPEC, {"min_terms": 5, "max_terms": 2}, "chain_sum refuses its options: max_terms must be"),
        (SPEC, {"seed": 3}, "task.options.seed: set task.seed"),
        (SPEC, {"size": 3}, "task.options.size: set task.seed, task.train_size"),
    ],
)
def test_unusable_specs_get_one_line(spec, options, said):
    with pytest.raises(InputError) as caught:
        Task(spec, TaskConfig(options=options))
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"answer_template": "The answer"}, "answer_template"),
        ({"answer_template": "{answer}{answer}"}, "answer_template"),
        ({"prompt_template": "{answer}"}, "prompt_template"),
        ({"train_size": 0}, "train_size"),
        ({"heldout": 3}, "heldout"),
    ],
)
def test_unusable_settings(options, key):
    with pytest.raises(ValidationError, match=key):
        TaskConfig(**options)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InputError, match=r"pip install 'burnish\[rl\]'"):
        Task(SPEC, TaskConfig())


def test_reasoning_gym_is_imported_late():
    code = "import sys, burnish.data.tasks; sys.exit('reasoning_gym' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_is_task():
    assert is_task(SPEC) and not is_task("train.jsonl")


def test_no_size_moves_a_problem_from_one_side_to_the_other() -> None:
    """A run's held-out problems stay held out however many are asked for later."""

    def sides(**sizes):
        return Task("reasoning_gym:chain_sum", TaskConfig(options={"max_terms": 2, "max_digits": 2}, **sizes))

    small_train, small_held = sides(train_size=40, heldout_size=10).train_and_heldout()
    large_train, large_held = sides(train_size=90, heldout_size=60).train_and_heldout()
    assert large_train[:40] == small_train and large_held[:10] == small_held
    assert not {p.question for p in large_train} & {p.question for p in large_held}
    other_seed = sides(train_size=90, heldout_size=60, seed=5).train_and_heldout()[1]
    assert not {p.question for p in large_train} & {p.question for p in other_seed}
