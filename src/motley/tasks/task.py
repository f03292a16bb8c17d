"""Task: a source of problems and their score.

Owns who is given which problem; knows no model and no torch.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from motley.records import Problem

Split = Literal["train", "heldout", "ood"]
# what a mean of scores is: the share that is right, or a mean reward of any range
Measure = Literal["accuracy", "reward"]
Scoring = Literal["in turn", "beside", "groups", "each"]  # see tasks/scoring.py

# A score that this machine could not find out in time. It is no number, and never on the wire: who
# sampled the answer counts it as 0, who reads it takes the sender's word. So a slow or busy machine
# splits no crew.
UNDECIDED = math.nan

LONGEST = 16  # prompts that are measured of many

AS_IT_IS = "{prompt}{answer}"
QUESTION = "Question: {prompt}\nAnswer: {answer}"


@runtime_checkable
class Task(Protocol):
    @property
    def fingerprint(self) -> str:
        """Names what the task asks and how: equal for equal problems, under any file name."""
        ...

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that are trained on."""
        ...

    @property
    def splits(self) -> tuple[Split, ...]: ...

    @property
    def measure(self) -> Measure:
        """Whether scores are right or wrong, 1 or 0, or rewards of any size."""
        ...

    @property
    def template(self) -> str | None:
        """How a problem is put to a model in plain style.

        The crew file may say otherwise; None: it must say.
        """
        ...

    @property
    def instruction(self) -> str | None:
        """The form the scoring expects of an answer, in words for a system turn; empty where any
        will do; None: the crew file must say.
        """
        ...

    @property
    def scoring(self) -> Scoring:
        """What may be scored at once, and where: "in turn" is the safe word."""
        ...

    def kinds_of(self, split: Split) -> tuple[str, ...]:
        """The kinds a split has: those of "train" are `kinds`, "ood" may have others."""
        ...

    def draw(self, rng: random.Random, split: Split, kind: str) -> Problem:
        """One problem of a kind from a split; the same rng state gives the same problem."""
        ...

    def target(self, problem: Problem) -> str:
        """A perfect completion, to learn from or to show. Only for problems that have an answer."""
        ...

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        """The reward of each completion, which answers the problem at the same place; or UNDECIDED.

        The same on every machine.
        """
        ...


def decided(rewards: Iterable[float]) -> list[float]:
    """Rewards with 0 for what could not be found out."""
    return [0.0 if math.isnan(reward) else reward for reward in rewards]


def is_heldout(prompt: str, one_in: int) -> bool:
    """Whether a prompt is among the one in so many that are held out, which its hash decides."""
    return hashlib.sha256(prompt.encode()).digest()[0] % one_in == 0


def draw_problems(task: Task, seed: str, split: Split, count: int) -> list[Problem]:
    """`count` problems, the kinds in turn from a random start, so that every draw is balanced."""
    rng = random.Random(seed)
    kinds = task.kinds_of(split)
    start = rng.randrange(len(kinds))
    return [task.draw(rng, split, kinds[(start + i) % len(kinds)]) for i in range(count)]


def assign(
    task: Task, crew_seed: int, peer: str, round: int, count: int, met: int = 0
) -> list[Problem]:
    """The problems a peer must answer in a round.

    Anyone can recompute it, so nobody can pick favourites. The first `met` are the same for all
    peers.
    """
    shared = draw_problems(task, f"{crew_seed}//{round}", "train", met) if met else []
    if met >= count:
        return shared
    return [*shared, *draw_problems(task, f"{crew_seed}/{peer}/{round}", "train", count)[met:]]


def evaluation_set(task: Task, split: Split, per_kind: int) -> list[Problem]:
    """The fixed problems a split is measured on: the same in every run and for every peer."""
    rng = random.Random(f"evaluate/{split}")
    return [task.draw(rng, split, kind) for kind in task.kinds_of(split) for _ in range(per_kind)]


def ready_problems(task: Task, split: Split) -> list[Problem]:
    """All problems of a split where they lie ready, as rows do; none of what is made when drawn."""
    ready = getattr(task, "ready", None)
    return ready(split) if ready else []


def hardest_to_hold(problems: Sequence[Problem]) -> list[Problem]:
    """Few of many by which it shows whether a model holds and spells all: those with the longest
    prompts, and for each character one that has it.
    """
    longest = sorted(problems, key=lambda p: len(p.prompt), reverse=True)[:LONGEST]
    seen, others = set[str](), []
    for problem in problems:
        new = set(problem.prompt + problem.answer) - seen
        if new:
            seen |= new
            others.append(problem)
    return [*longest, *others]


def best_constant(problems: Sequence[Problem]) -> float | None:
    """Accuracy of the one answer that is right most often: what an accuracy must beat to mean
    anything. None without answers.
    """
    answers = Counter(p.answer for p in problems if p.answer)
    return answers.most_common(1)[0][1] / len(problems) if answers else None


class TaskReport(NamedTuple):
    """What was found out about a task without a model."""

    faults: list[str]
    notes: list[str]  # what is odd, and may be meant


def check_task(task: Task, count: int = 20) -> list[str]:
    """What is wrong with a task, without a model.

    Own answers must score full, other answers less; splits must not meet.
    """
    return examine_task(task, count).faults


def examine_task(task: Task, count: int = 20) -> TaskReport:
    """The same, with what is only odd.

    Where scores are rewards, own answers must only do better than mere words on the mean.
    """
    report = TaskReport([], [])
    seen: dict[str, set[str]] = {}
    for split in task.splits:
        for kind in task.kinds_of(split):
            problems = [task.draw(random.Random(f"check/{i}"), split, kind) for i in range(count)]
            again = [task.draw(random.Random(f"check/{i}"), split, kind) for i in range(count)]
            if problems != again:
                report.faults.append(f"{split}/{kind}: the same seed gives different problems")
            faults, notes = _scoring(task, [p for p in problems if p.answer])
            report.faults.extend(f"{split}/{kind}: {fault}" for fault in faults)
            report.notes.extend(f"{split}/{kind}: {note}" for note in notes)
            seen.setdefault(split, set()).update(p.prompt for p in problems)
    for split in ("heldout", "ood"):
        shared = seen.get("train", set()) & seen.get(split, set())
        if shared:
            report.faults.append(
                f"train and {split} share {len(shared)} prompts, such as {min(shared)!r}"
            )
    return report


_NO_ANSWER = "no answer, only words"


def unsteady(task: Task, count: int = 8) -> list[str]:
    """What is wrong with a task whose rewards every reader computes again: one that differs."""
    problems = draw_problems(task, "check", "train", count)
    texts = [task.target(p) if p.answer else _NO_ANSWER for p in problems]
    first, second = (decided(task.score(problems, texts)) for _ in range(2))
    for text, once, again in zip(texts, first, second, strict=True):
        if once != again:
            return [
                f"a reward differs when it is computed again: {once}, then {again}, for "
                f"{text[:80]!r}; where it must, as of a judge, set crew.check_rewards = "
                "false"
            ]
    return []


def _scoring(task: Task, answered: Sequence[Problem]) -> TaskReport:
    """Own targets must beat mere words always, and the targets of other problems mostly: answers
    that are spelt differently may still be equal, and a problem may have several right ones.
    """
    if not answered:
        return TaskReport([], [])
    own = task.score(answered, [task.target(p) for p in answered])
    words = task.score(answered, [_NO_ANSWER] * len(answered))
    if task.measure == "reward":
        return _reward_order(own, words)
    if min(own) <= max(words):
        return TaskReport([f"the own answer scores {min(own)}, a wrong one {max(words)}"], [])
    pairs = [
        (i, other)
        for i, p in enumerate(answered)
        if (other := _differing(p, answered[i:]) or _differing(p, answered[:i]))
    ]
    if not pairs:
        return TaskReport([], [])
    others = task.score([answered[i] for i, _ in pairs], [task.target(other) for _, other in pairs])
    as_good = [other for (i, _), other in zip(pairs, others, strict=True) if other >= own[i]]
    if 2 * len(as_good) > len(pairs):
        fault = f"the own answer scores {min(own)}, that of another problem {max(as_good)}"
        return TaskReport([fault], [])
    return TaskReport([], [])


def _reward_order(own: Sequence[float], words: Sequence[float]) -> TaskReport:
    """Rewards may have any range and give part of the credit for anything: only the mean counts."""
    right, wrong = sum(own) / len(own), sum(words) / len(words)
    means = f"own answers have a mean reward of {right:.4g}, mere words {wrong:.4g}"
    if right < wrong:
        return TaskReport(
            [f"{means}: learning would lead away from the answers; is a sign turned round?"], []
        )
    if right == wrong:
        return TaskReport(
            [f"{means}: the reward does not tell them apart; is it to look at the answer?"], []
        )
    odd = sum(a <= b for a, b in zip(own, words, strict=True))
    if odd:
        note = f"{means}, but for {odd} of {len(own)} problems words do as well as the answer"
        return TaskReport([], [note])
    return TaskReport([], [])


def _differing(problem: Problem, others: Sequence[Problem]) -> Problem | None:
    return next((other for other in others if other.answer != problem.answer), None)
