from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from motley.engines import Completion
from motley.models.prompts import Prompts
from motley.models.tiny import tiny_vocabulary
from motley.records import Sampling
from motley.runs import evaluation
from motley.runs.evaluation import evaluate, greedy_answers, mean_by_kind
from motley.tasks import best_constant, evaluation_set, load_task

VOCABULARY = tiny_vocabulary()
PROMPTS = Prompts(VOCABULARY)
TASK = load_task("digits", {"kinds": ["reverse", "sort"], "levels": [3]})


class Scripted:
    """Greedy answers are right for `reverse` only; of the samples of problem p the first p % 3 are
    right.
    """

    def refresh(self) -> None:
        return None

    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        return [
            [self._answer(prompt, p, s, sampling) for s in range(num_samples)]
            for p, prompt in enumerate(prompts)
        ]

    def _answer(
        self, prompt: Sequence[int], place: int, sample: int, sampling: Sampling
    ) -> Completion:
        kind, text = VOCABULARY.decode(prompt).removesuffix("=").split()
        right = kind == "reverse" if sampling.temperature == 0 else sample < place % 3
        answer = {"reverse": text[::-1], "sort": "".join(sorted(text))}[kind] if right else ""
        tokens = (*VOCABULARY.encode(answer), VOCABULARY.end_id)
        return Completion(tokens, (-1.0,) * len(tokens), "stop")


def test_greedy_accuracy_is_per_kind() -> None:
    problems = evaluation_set(TASK, "heldout", 5)
    answers = greedy_answers(Scripted(), PROMPTS, TASK, problems, Sampling())
    assert mean_by_kind(answers) == {"reverse": 1.0, "sort": 0.0}


def test_greedy_answers_are_asked_for_some_at_a_time_and_come_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[int]()

    class Counted(Scripted):
        def sample(
            self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: Sampling, seed: int
        ) -> list[list[Completion]]:
            asked.append(len(prompts))
            return super().sample(prompts, num_samples, sampling, seed)

    problems, engine = evaluation_set(TASK, "heldout", 5), Counted()
    whole = greedy_answers(Scripted(), PROMPTS, TASK, problems, Sampling())
    monkeypatch.setattr(evaluation, "AT_ONCE", 4)
    assert greedy_answers(engine, PROMPTS, TASK, problems, Sampling()) == whole
    assert asked == [4, 4, 2]
    assert [answer.problem for answer in whole] == problems
    assert greedy_answers(engine, PROMPTS, TASK, [], Sampling()) == []


def test_averages_pass_rates_and_errors_of_known_answers() -> None:
    reverse, sort, every = evaluate(
        Scripted(), PROMPTS, TASK, "heldout", Sampling(), per_kind=6, samples=4
    )
    assert [line.kind for line in (reverse, sort, every)] == ["reverse", "sort", "all"]
    assert (reverse.greedy, sort.greedy, every.greedy) == (1.0, 0.0, 0.5)
    assert reverse.greedy_error == 0.0
    assert every.greedy_error == pytest.approx(np.std([1] * 6 + [0] * 6, ddof=1) / np.sqrt(12))
    # 0, 1 or 2 of 4 samples are right, in turn.
    assert reverse.average == pytest.approx(0.25)
    assert reverse.average_error == pytest.approx(np.std([0, 0.25, 0.5] * 2, ddof=1) / np.sqrt(6))
    assert reverse.passed == pytest.approx(2 / 3)
    assert (every.num_problems, every.samples) == (12, 4)
    assert every.constant == best_constant(evaluation_set(TASK, "heldout", 6))


def test_a_kind_that_is_called_all_has_its_own_figures() -> None:
    """As rows are that name none, beside rows that name one."""
    parts = {
        key: {"task": "digits", "kinds": [kind], "levels": [3]}
        for key, kind in (("all", "reverse"), ("x", "sort"))
    }
    lines = evaluate(
        Scripted(), PROMPTS, load_task("mixture", parts), "heldout", Sampling(), 6, samples=4
    )
    assert [(line.kind, line.num_problems, line.greedy) for line in lines] == [
        ("all", 6, 1.0),
        ("x", 6, 0.0),
        ("all kinds", 12, 0.5),
    ]


def test_a_problem_that_is_drawn_often_counts_once_in_an_error() -> None:
    task = load_task("digits", {"kinds": ["reverse", "sort"], "levels": [2]})
    *_, every = evaluate(Scripted(), PROMPTS, task, "heldout", Sampling(), per_kind=200, samples=1)
    kinds = [p.kind for p in {p.id: p for p in evaluation_set(task, "heldout", 200)}.values()]
    assert len(kinds) < 100
    right = [float(kind == "reverse") for kind in kinds]
    assert every.greedy_error == pytest.approx(np.std(right, ddof=1) / np.sqrt(len(right)))


def test_a_task_of_one_kind_has_one_line() -> None:
    (only,) = evaluate(
        Scripted(),
        PROMPTS,
        load_task("digits", {"kinds": ["sort"], "levels": [3]}),
        "ood",
        Sampling(),
        2,
        1,
    )
    assert (only.kind, only.num_problems) == ("sort", 2)
