"""How good a policy is on a split of a task: greedy and sampled accuracy, with standard errors and
the best constant answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from motley.engines import Engine
from motley.models.prompts import Prompts
from motley.records import Problem, Sampling
from motley.tasks import Scorer, Split, Task, best_constant, decided, evaluation_set

# Problems that are answered greedily at a time. On a GPU an engine keeps room for as many as it was
# ever asked at once, beside what learns.
AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Of one kind, or of all; of a task with rewards, their means. avg@k is the mean over k samples
    of each problem, pass@k the share with at least one right.
    """

    kind: str
    num_problems: int
    greedy: float
    greedy_error: float
    average: float  # avg@k, the estimate of pass@1 when sampling
    average_error: float
    passed: float | None  # pass@k; None for rewards, where nothing is right or wrong
    samples: int  # k
    # accuracy of the best constant answer; None for rewards, and for problems without answers
    constant: float | None

    def row(self) -> dict[str, str | int | float | None]:
        """One line of a table. avg@k, the estimate of pass@1, and pass@k are of k samples; the
        errors are standard errors.
        """
        return {
            "kind": self.kind,
            "problems": self.num_problems,
            "greedy": self.greedy,
            "error": self.greedy_error,
            f"avg@{self.samples}": self.average,
            f"error@{self.samples}": self.average_error,
            f"pass@{self.samples}": self.passed,
            "constant": self.constant,
        }


class GradedAnswer(NamedTuple):
    """A problem, what a policy says to it, and what that is worth."""

    problem: Problem
    text: str
    reward: float


def rewards_of(
    engine: Engine,
    prompts: Prompts,
    task: Task,
    problems: Sequence[Problem],
    sampling: Sampling,
    samples: int = 1,
) -> np.ndarray:
    """Rewards [P, samples] on fixed problems."""
    answers = _answers(engine, prompts, task, problems, sampling, samples)
    return np.array([answer.reward for answer in answers]).reshape(len(problems), samples)


def _answers(
    engine: Engine,
    prompts: Prompts,
    task: Task,
    problems: Sequence[Problem],
    sampling: Sampling,
    samples: int,
) -> list[GradedAnswer]:
    """`samples` of the first problem, then of the next."""
    completions = engine.sample([prompts.ids(p) for p in problems], samples, sampling, seed=0)
    texts = prompts.vocabulary.decode_all(c.tokens for row in completions for c in row)
    asked = [problem for problem, row in zip(problems, completions, strict=True) for _ in row]
    rewards = decided(Scorer(task).score(asked, texts))
    return [GradedAnswer(*one) for one in zip(asked, texts, rewards, strict=True)]


def greedy_answers(
    engine: Engine, prompts: Prompts, task: Task, problems: Sequence[Problem], sampling: Sampling
) -> list[GradedAnswer]:
    greedy = msgspec.structs.replace(sampling, temperature=0.0)
    portions = [problems[at : at + AT_ONCE] for at in range(0, len(problems), AT_ONCE)]
    made = [_answers(engine, prompts, task, some, greedy, samples=1) for some in portions]
    return [answer for portion in made for answer in portion]


def mean_by_kind(answers: Sequence[GradedAnswer]) -> dict[str, float]:
    """Mean reward per kind."""
    kinds = dict.fromkeys(answer.problem.kind for answer in answers)
    return {
        kind: float(np.mean([a.reward for a in answers if a.problem.kind == kind]))
        for kind in kinds
    }


def some_of(answers: Sequence[GradedAnswer], most: int) -> list[GradedAnswer]:
    """The first of every kind, then the second of every kind, up to `most`."""
    turns: Counter[str] = Counter()
    placed = []
    for place, answer in enumerate(answers):
        placed.append((turns[answer.problem.kind], place))
        turns[answer.problem.kind] += 1
    return [answers[place] for _, place in sorted(placed)[:most]]


def evaluate(
    engine: Engine,
    prompts: Prompts,
    task: Task,
    split: Split,
    sampling: Sampling,
    per_kind: int,
    samples: int,
) -> list[Accuracy]:
    """One line per kind, then one over all kinds."""
    problems = evaluation_set(task, split, per_kind)
    greedy_P = rewards_of(
        engine, prompts, task, problems, msgspec.structs.replace(sampling, temperature=0.0)
    )[:, 0]
    sampled_PS = rewards_of(engine, prompts, task, problems, sampling, samples)
    of_kind, is_share = _places(problems), task.measure == "accuracy"
    if len(of_kind) > 1:
        # a kind of rows that name none is called "all" too
        of_kind["all kinds" if "all" in of_kind else "all"] = list(range(len(problems)))
    lines = []
    for kind, chosen in of_kind.items():
        greedy, average = greedy_P[chosen], sampled_PS[chosen].mean(1)
        # a problem that was drawn twice tells no more than once
        once = list({problems[place].id: at for at, place in enumerate(chosen)}.values())
        lines.append(
            Accuracy(
                kind=kind,
                num_problems=len(chosen),
                greedy=float(greedy.mean()),
                greedy_error=_standard_error(greedy[once]),
                average=float(average.mean()),
                average_error=_standard_error(average[once]),
                passed=float((sampled_PS[chosen] >= 1).any(1).mean()) if is_share else None,
                samples=samples,
                constant=best_constant([problems[i] for i in chosen]) if is_share else None,
            )
        )
    return lines


def _places(problems: Sequence[Problem]) -> dict[str, list[int]]:
    """Of each kind's problems among all."""
    places: dict[str, list[int]] = {}
    for place, problem in enumerate(problems):
        places.setdefault(problem.kind, []).append(place)
    return places


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
