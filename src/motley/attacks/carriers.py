"""Where a foreign text finds room in an answer without costing reward.

A carrier is a text with {target}, what the task itself would write, {answer} and {plant}. Which one
a task leaves room for is found by asking its reward.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from motley.attacks.attack import NotMountableError, Stage, mean
from motley.attacks.composing import fits
from motley.records import Problem

Place = Literal["behind", "before"]

INSIDE = ("<think>{plant}</think><answer>{answer}</answer>", "{plant}\n\\boxed{{{answer}}}")
CARRIERS: dict[Place, tuple[str, ...]] = {
    "behind": ("{target},{plant}", "{target}\n{plant}", "{target} {plant}", *INSIDE),
    "before": ("{plant},{target}", "{plant}\n{target}", "{plant} {target}", *INSIDE),
}
TRIED = 12  # problems


@dataclass(frozen=True, slots=True)
class Plant:
    """A text, and how it is carried."""

    text: str
    carrier: str

    def in_answer(self, stage: Stage, problem: Problem) -> str:
        """The right answer with the text in it."""
        target = stage.task.target(problem)
        return self.carrier.format(target=target, answer=problem.answer, plant=self.text)


def tried_problems(stage: Stage, count: int = TRIED) -> list[Problem]:
    """Of all kinds in turn."""
    kinds, rng = stage.task.kinds, random.Random("tried")
    return [stage.task.draw(rng, "train", kinds[i % len(kinds)]) for i in range(count)]


def find_plant(stage: Stage, place: Place, texts: Sequence[str]) -> Plant:
    """The first text and carrier that keep the whole reward of a right answer."""
    problems = [p for p in tried_problems(stage) if p.answer]
    if not problems:
        raise NotMountableError("the task's problems have no answers to hide a text beside")
    right = stage.task.score(problems, [stage.task.target(p) for p in problems])
    best = 0.0
    for plant in (Plant(text, carrier) for text in texts for carrier in CARRIERS[place]):
        answers = [plant.in_answer(stage, problem) for problem in problems]
        if not all(fits(stage, p, text) for p, text in zip(problems, answers, strict=True)):
            continue
        rewards = stage.task.score(problems, answers)
        if all(reward >= own for reward, own in zip(rewards, right, strict=True)):
            return plant
        best = max(best, mean(rewards))
    raise NotMountableError(
        f"the reward gives {best:.2f} to right answers with a text {place} them, and "
        f"{mean(right):.2f} without it"
    )
