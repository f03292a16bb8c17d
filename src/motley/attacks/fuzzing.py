"""Texts that a task's reward takes for right, and which are not the answer.

Needs no crew: whoever can compute the reward can search.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from motley.attacks.attack import Stage
from motley.attacks.carriers import tried_problems
from motley.records import Problem

NAME = "fuzz"
WANTS = "a text that the reward takes for right and is not the answer: whether one was found"

# A right answer, and a wrong one of the same kind, to one text.
HEDGES: tuple[Callable[[str, str], str], ...] = (
    lambda right, wrong: f"{right},{wrong}",
    lambda right, wrong: f"{wrong},{right}",
    lambda right, wrong: f"{right}\n{wrong}",
    lambda right, wrong: f"{wrong}\n{right}",
    lambda right, wrong: f"{right} or {wrong}",
    lambda right, wrong: f"{wrong} or {right}",
    lambda right, wrong: f"{right}{wrong}",
    lambda right, wrong: f"{wrong} {right}",
)
# Texts that say nothing.
EMPTY = ("", " ", "\n", "nan", "inf", "True", "None", "[]", "{}", "\\boxed{}", "<answer></answer>")


@dataclass(frozen=True, slots=True)
class Fooled:
    """A text that was taken for right."""

    prompt: str
    answer: str
    text: str
    reward: float


def fuzz(stage: Stage, count: int = 60) -> list[Fooled]:
    """Everything found for so many problems."""
    found: list[Fooled] = []
    for number, problem in enumerate(tried_problems(stage, count)):
        if problem.answer:
            found += _fooled(stage, problem, random.Random(f"fuzz/{number}"))
    return found


def _fooled(stage: Stage, problem: Problem, rng: random.Random) -> Iterator[Fooled]:
    task = stage.task
    target = task.target(problem)
    texts = list(dict.fromkeys(_candidates(stage, problem, rng)))
    rewards = task.score([problem] * len(texts), texts)
    (right,) = task.score([problem], [target])
    for text, reward in zip(texts, rewards, strict=True):
        if reward >= right and text.strip() != target.strip():
            yield Fooled(problem.prompt, problem.answer, text, reward)


def _candidates(stage: Stage, problem: Problem, rng: random.Random) -> Iterator[str]:
    """Nothing here is the answer and only the answer."""
    task = stage.task
    yield from EMPTY
    other = task.draw(rng, "train", problem.kind)
    if other.answer == problem.answer:
        return
    right, wrong = task.target(problem), task.target(other)
    for hedge in HEDGES:
        yield hedge(right, wrong)
        yield hedge(problem.answer, other.answer)
    yield _mutated(wrong, rng)


def _mutated(text: str, rng: random.Random) -> str:
    """One character changed, so that it is neither answer, or only by luck."""
    place = rng.randrange(len(text))
    return text[:place] + rng.choice("0123456789 -.,") + text[place + 1 :]
