"""Task: a source of problems and their score. Owns who is given which problem; knows no model and no torch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Literal, Protocol

from motley.records import Problem

Split = Literal["train", "heldout", "ood"]


class Task(Protocol):
    @property
    def fingerprint(self) -> str:
        """Names what the task asks and how: equal for equal problems, whatever the file is called."""
        ...

    @property
    def kinds(self) -> tuple[str, ...]: ...

    @property
    def splits(self) -> tuple[Split, ...]: ...

    def draw(self, rng: random.Random, split: Split, kind: str) -> Problem:
        """One problem of a kind from a split; the same rng state gives the same problem."""
        ...

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        """The reward of each completion, which answers the problem at the same place."""
        ...


def draw_problems(task: Task, seed: str, split: Split, count: int) -> list[Problem]:
    """`count` problems, the kinds in turn from a random start, so that every draw is balanced."""
    rng = random.Random(seed)
    start = rng.randrange(len(task.kinds))
    return [task.draw(rng, split, task.kinds[(start + i) % len(task.kinds)]) for i in range(count)]


def assign(task: Task, crew_seed: int, peer: str, round: int, count: int) -> list[Problem]:
    """The problems a peer must answer in a round. Anyone can recompute it, so nobody can pick favourites.

    In a horizontal crew all peers answer the same problems: `peer` is then the empty string.
    """
    return draw_problems(task, f"{crew_seed}/{peer}/{round}", "train", count)


def evaluation_set(task: Task, split: Split, per_kind: int) -> list[Problem]:
    """The fixed problems a split is measured on: the same in every run and for every peer."""
    rng = random.Random(f"evaluate/{split}")
    return [task.draw(rng, split, kind) for kind in task.kinds for _ in range(per_kind)]


def best_constant(problems: Sequence[Problem]) -> float | None:
    """Accuracy of the one answer that is right most often: what an accuracy must beat to mean anything. None without answers."""
    answers = Counter(p.answer for p in problems if p.answer)
    return answers.most_common(1)[0][1] / len(problems) if answers else None


def check_task(task: Task, count: int = 20) -> list[str]:
    """What is wrong with a task, without a model: own answers must score full, other answers less, splits must not meet."""
    faults: list[str] = []
    seen: dict[str, set[str]] = {}
    for split in task.splits:
        for kind in task.kinds:
            problems = [task.draw(random.Random(f"check/{i}"), split, kind) for i in range(count)]
            again = [task.draw(random.Random(f"check/{i}"), split, kind) for i in range(count)]
            if problems != again:
                faults.append(f"{split}/{kind}: the same seed gives different problems")
            answered = [p for p in problems if p.answer]
            if answered:
                right = task.score(answered, [p.answer for p in answered])
                wrong = task.score(answered, [p.answer + "?" for p in answered])
                if min(right) <= max(wrong):
                    faults.append(f"{split}/{kind}: the own answer scores {min(right)}, a wrong one {max(wrong)}")
            seen.setdefault(split, set()).update(p.prompt for p in problems)
    for split in ("heldout", "ood"):
        shared = seen.get("train", set()) & seen.get(split, set())
        if shared:
            faults.append(f"train and {split} share {len(shared)} prompts, such as {min(shared)!r}")
    return faults
