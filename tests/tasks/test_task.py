from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from motley.records import Problem
from motley.tasks import (
    Measure,
    Task,
    assign,
    best_constant,
    check_task,
    draw_problems,
    evaluation_set,
    examine_task,
    load_task,
)


class Good:
    """A hundred words to repeat per split; the broken tasks below differ in one thing each."""

    fingerprint = "echo"
    kinds = ("echo",)
    splits = ("train", "heldout")
    measure: Measure = "accuracy"
    template = "{prompt}{answer}"
    instruction = ""

    def kinds_of(self, split: str) -> tuple[str, ...]:
        return self.kinds

    def target(self, problem: Problem) -> str:
        return problem.answer

    def draw(self, rng: random.Random, split: str, kind: str) -> Problem:
        word = f"{split}{rng.randrange(100)}"
        return Problem(kind=kind, prompt=f"echo {word}", answer=word)

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        return [float(p.answer == c) for p, c in zip(problems, completions, strict=True)]


class Unsteady(Good):
    def __init__(self) -> None:
        self.counter = itertools.count()

    def draw(self, rng: random.Random, split: str, kind: str) -> Problem:
        return Problem(kind=kind, prompt=f"{split}{next(self.counter)}", answer="x")


class AnswersWrongly(Good):
    def draw(self, rng: random.Random, split: str, kind: str) -> Problem:
        return Problem(kind=kind, prompt=f"{split}{rng.randrange(100)}", answer="right")

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        return [float(c == "other") for c in completions]


class AlwaysPraises(Good):
    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        return [1.0] * len(completions)


class PraisesAnyAnswer(Good):
    """Looks at the form alone."""

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        return [float(" " not in c) for c in completions]


class TargetsWrongly(Good):
    def target(self, problem: Problem) -> str:
        return problem.answer + "!"


class OtherKinds(Good):
    """Out of distribution it asks something else, and there it praises everything."""

    splits = ("train", "heldout", "ood")

    def kinds_of(self, split: str) -> tuple[str, ...]:
        return ("shout",) if split == "ood" else self.kinds

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        return [
            float(p.kind == "shout" or p.answer == c)
            for p, c in zip(problems, completions, strict=True)
        ]


class SplitsMeet(Good):
    def draw(self, rng: random.Random, split: str, kind: str) -> Problem:
        return super().draw(rng, "train", kind)


def test_a_good_task_has_no_fault() -> None:
    assert check_task(Good()) == []


@pytest.mark.parametrize(
    ("task", "fault"),
    [
        (Unsteady(), "train/echo: the same seed gives different problems"),
        (AnswersWrongly(), "train/echo: the own answer scores 0.0, a wrong one 0.0"),
        (AlwaysPraises(), "heldout/echo: the own answer scores 1.0, a wrong one 1.0"),
        (PraisesAnyAnswer(), "train/echo: the own answer scores 1.0, that of another problem 1.0"),
        (TargetsWrongly(), "train/echo: the own answer scores 0.0"),
        (OtherKinds(), "ood/shout: the own answer scores 1.0, a wrong one 1.0"),
        (SplitsMeet(), "train and heldout share"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_broken_task_is_found_out(task: Task, fault: str) -> None:
    assert any(found.startswith(fault) for found in check_task(task))


class Shaped(Good):
    """Rewards: `right` for the answer, `words` for anything else, and `odd` for one problem's."""

    measure: Measure = "reward"

    def __init__(self, right: float, words: float, odd: float | None = None) -> None:
        self.right, self.words, self.odd = right, words, odd

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[float]:
        def one(number: int, is_right: bool) -> float:
            if is_right and number == 0 and self.odd is not None:
                return self.odd
            return self.right if is_right else self.words

        pairs = enumerate(zip(problems, completions, strict=True))
        return [one(number, p.answer == c) for number, (p, c) in pairs]


@pytest.mark.parametrize(("right", "words"), [(3.0, -5000.0), (-0.1, -0.2), (0.4, 0.1)])
def test_shaped_rewards_of_any_range_have_no_fault(right: float, words: float) -> None:
    assert examine_task(Shaped(right, words)) == ([], [])


def test_partial_credit_for_words_is_odd_and_no_fault() -> None:
    faults, notes = examine_task(Shaped(1.0, 0.2, odd=0.1))
    assert faults == []
    assert notes[0] == (
        "train/echo: own answers have a mean reward of 0.955, mere words 0.2, but for 1 of 20 "
        "problems words do as well as the answer"
    )


def test_a_reward_that_prefers_words_or_is_always_the_same_is_a_fault() -> None:
    assert "lead away from the answers" in check_task(Shaped(-1.0, 1.0))[0]
    assert "does not tell them apart" in check_task(Shaped(1.0, 1.0))[0]


def digits(*kinds: str) -> Task:
    return load_task("digits", {"kinds": list(kinds), "levels": [4]})


def test_an_assignment_is_decided_by_seed_peer_and_round() -> None:
    task = digits("sort", "sum")
    first = assign(task, 1, "a", 5, 6)
    assert first == assign(digits("sort", "sum"), 1, "a", 5, 6)
    for other in (
        assign(task, 2, "a", 5, 6),
        assign(task, 1, "b", 5, 6),
        assign(task, 1, "a", 6, 6),
    ):
        assert other != first


def test_the_first_of_everyones_problems_may_be_the_same_for_all() -> None:
    task = digits("sort", "sum")
    own = {peer: assign(task, 1, peer, 5, 6) for peer in "ab"}
    shared = {peer: assign(task, 1, peer, 5, 6, met=2) for peer in "ab"}
    assert shared["a"][:2] == shared["b"][:2] == assign(task, 1, "", 5, 6)[:2]
    assert shared["a"][2:] == own["a"][2:] != shared["b"][2:] == own["b"][2:]
    assert assign(task, 1, "a", 6, 6, met=2)[:2] != shared["a"][:2]
    assert assign(task, 1, "a", 5, 6, met=6) == assign(task, 1, "b", 5, 6, met=6)


def test_assigned_problems_are_for_training() -> None:
    task = digits("sort")
    heldout = {p.prompt for p in evaluation_set(task, "heldout", 500)}
    assigned = {p.prompt for round in range(100) for p in assign(task, 0, "a", round, 10)}
    assert assigned & heldout == set()


@pytest.mark.parametrize("count", [3, 7, 12])
def test_kinds_are_balanced_in_every_draw(count: int) -> None:
    for seed in range(20):
        counts = Counter(
            p.kind for p in draw_problems(digits("sort", "sum", "chain"), str(seed), "train", count)
        )
        assert len(counts) == 3
        assert max(counts.values()) - min(counts.values()) <= 1


def test_no_kind_is_always_first() -> None:
    task = digits("sort", "sum", "chain")
    assert {assign(task, 0, "a", round, 1)[0].kind for round in range(30)} == {
        "sort",
        "sum",
        "chain",
    }


def test_every_kind_is_measured_on_the_same_fixed_number_of_problems() -> None:
    task = digits("sort", "sum")
    problems = evaluation_set(task, "heldout", 4)
    assert [p.kind for p in problems] == ["sort"] * 4 + ["sum"] * 4
    assert problems == evaluation_set(task, "heldout", 4)


def test_a_split_is_measured_on_its_own_kinds() -> None:
    assert [p.kind for p in evaluation_set(OtherKinds(), "ood", 2)] == ["shout", "shout"]
    assert [p.kind for p in evaluation_set(OtherKinds(), "heldout", 2)] == ["echo", "echo"]
    assert {p.kind for p in draw_problems(OtherKinds(), "0", "ood", 3)} == {"shout"}


def test_best_constant_is_the_share_of_the_most_frequent_answer() -> None:
    assert best_constant([Problem(prompt=str(i), answer=a) for i, a in enumerate("<<>=<")]) == 3 / 5
    assert best_constant([Problem(prompt="p", answer="a")]) == 1.0
